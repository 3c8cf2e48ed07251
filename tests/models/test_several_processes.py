"""Tensor parallelism and pipelines on two processes compute what one process does."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from transformers import AutoModelForCausalLM

import residua.conversion.configuration  # noqa: F401  # AutoModel opens converted models in the other processes too
from residua.models.pipeline import Stage
from residua.models.transformer import causal_lm_loss
from support.converted_models import IDS, converted
from support.processes import together
from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close
from support.variants import PRESETS

RATE, MICRO_BATCHES, STEPS = 0.1, 2, 3


def gradients(model, ids):
    """Logits, and the gradients by name, whole."""
    model.train()
    out = model(ids, labels=ids)
    out.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in found.items()}


def cut_into_heads(rank, cases):
    """On each rank: logits and gradients of every saved model under its own plan."""
    found = {}
    for path, ids in cases.items():
        model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float64)
        spread = {type(m.weight).__name__ for m in model.modules() if type(m) is nn.Linear}
        alone = {type(p).__name__ for n, p in model.named_parameters() if ".stream." in n}
        found[path] = spread, alone, *gradients(model, ids)
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_plan_for_tensor_parallelism(start, tmp_path):
    """Each of two ranks computes some heads and rows, and has all connections: same logits, same gradients."""
    models = {
        "ours": (tiny_model("ddl-tc", num_hidden_layers=1, attention_output_gate=True), prompt(2, 7)),
        "converted": (converted("hc"), IDS),
    }
    for name, (model, _) in models.items():
        model.save_pretrained(tmp_path / name)
    cases = {str(tmp_path / name): ids for name, (_, ids) in models.items()}
    (tmp_path / "out").mkdir()
    for found in together(start, tmp_path / "out", 2, cut_into_heads, cases):
        for (model, ids), (spread, alone, logits, grads) in zip(models.values(), found.values(), strict=True):
            assert (spread, alone) == ({"DTensor"}, {"Parameter"})
            model.zero_grad()
            expected, wanted = gradients(model, ids)
            assert_close(logits, expected)
            assert grads.keys() == wanted.keys()
            for name in grads:
                assert_close(grads[name], wanted[name])


def batches(step):
    ids = prompt(2 * MICRO_BATCHES, 9, seed=step)
    return ids[:, :-1], ids[:, 1:]


def pipelined(rank, names):
    """Three steps of every scheme in two stages: the losses on the last rank, and this stage's weights."""
    found = {}
    for name in names:
        part = Stage(tiny_model(name, tie_word_embeddings=False, num_hidden_layers=3), rank, 2)
        schedule = ScheduleGPipe(
            PipelineStage(part, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=causal_lm_loss
        )
        optimizer, losses = torch.optim.SGD(part.parameters(), RATE), []
        for ids, targets in map(batches, range(STEPS)):
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=targets, losses=(step := []))
                losses.append(torch.stack(step).detach().mean().item())
            optimizer.step()
            optimizer.zero_grad()
        found[name] = losses, part.state_dict()
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_of_two_stages_trains_as_one_process(start, tmp_path):
    """The state is the payload, one tensor or as many as the depth. At the border, gradients of the state add up
    in another order.
    """
    names = ["ddl-cc", "mhc", "attnres-block", "ddl-tc"]
    first, last = together(start, tmp_path, 2, pipelined, names)
    for name in names:
        model = tiny_model(name, tie_word_embeddings=False, num_hidden_layers=3)
        optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
        for ids, targets in map(batches, range(STEPS)):
            parts = [
                causal_lm_loss(model(x).logits, y)
                for x, y in zip(ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES))
            ]
            for part in parts:
                (part / MICRO_BATCHES).backward()
            losses.append(torch.stack(parts).detach().mean().item())
            optimizer.step()
            optimizer.zero_grad()
        assert_close(torch.tensor(last[name][0], dtype=torch.float64), torch.tensor(losses, dtype=torch.float64))
        stages = first[name][1] | last[name][1]
        assert stages.keys() == model.state_dict().keys()
        for key, weight in model.state_dict().items():
            assert_close(stages[key], weight, what=key)


@torch.no_grad()
@pytest.mark.parametrize("name", PRESETS)
def test_stages_one_after_the_other_are_the_model(name):
    """At every border: whole sequences to the last bit, and tokens that arrive in pieces with one cache per stage."""
    options = {"tie_word_embeddings": False, "num_hidden_layers": 3, "key_value_kernel": 2}
    model, ids = tiny_model(name, **options), prompt(2, 6)
    expected = model(ids, use_cache=False).logits
    stages = [Stage(model, index, 3) for index in range(3)]

    def logits(tokens, caches=(None,) * 3):
        payload = (tokens,)
        for stage, cache in zip(stages, caches):
            payload = stage(*payload, cache=cache)
            payload = payload if isinstance(payload, tuple) else (payload,)
        return payload[0]

    assert torch.equal(logits(ids), expected)
    caches = [stage.cache() for stage in stages]
    assert_close(torch.cat([logits(piece, caches) for piece in ids.split((3, 1, 2), 1)], 1), expected)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="tie_word_embeddings must be false for a model that is cut into stages"):
        Stage(tiny_model(), 0, 2)
    model = tiny_model("edelta", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="count must be 1 to 2 stages, as there are layers, got 3"):
        Stage(model, 0, 3)
    with pytest.raises(ValueError, match="index must be 0 to 1, got 2"):
        Stage(model, 2, 2)
    with pytest.raises(ValueError, match="must be a scheme without a penalty in a pipeline; set penalty to 0"):
        Stage(model, 0, 2).train()(prompt(1, 4))
