"""A study of a transformers model that is converted: it tunes, trains, times, reports and verifies like any other."""

import copy
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig

from residua.commands.cli import main
from residua.conversion import convert
from residua.errors import InputError
from residua.files.reading import write_yaml
from residua.lab.cost import counts, steps
from residua.lab.cost.counts import elementwise, parameters, products_per_token, step_on_meta
from residua.lab.cost.steps import measure
from residua.lab.opening import fill_no_cache, new_model
from residua.lab.records import jsonlines
from residua.lab.study.definition import load_study
from residua.lab.study.plan import Plan
from residua.lab.training.base_model import freeze_base
from residua.models.cache import CACHE
from support.converted_models import data_of_base, save_base
from support.families import tiny
from support.planted_study import studies_of_the_page
from support.tiny_models import tiny_config


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(base, tmp_path_factory):
    return data_of_base(base, tmp_path_factory.mktemp("data")).folder


def written(folder, base, **changes):
    document = {
        "title": "Retrofit",
        "config": "retrofit",
        "set": {
            "model.base": str(base),
            "train.batch_size": 2,
            "train.sequence_length": 16,
            "train.device": "cpu",
        },
        "tokens_per_parameter": 0.01,
        "sizes": {"small": {}},
        "schemes": {"residual": {}, "hc": {}, "new": {"connection": "ddl", "model.start": "fresh"}},
        "tuning": {
            "over": {"train.lr": [0.001], "train.connection_lr_factor": [10]},
            "runs": 1,
            "baseline_runs": 1,
            "length": 0.5,
        },
        "seeds": [1, 2],
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(write_yaml(document))
    return path


@pytest.mark.nightly
def test_a_converted_model_is_studied_like_one_from_scratch(data, tmp_path, capsys):
    out, base = tmp_path / "out", save_base(tmp_path / "base")
    argv = ["study", "run", str(written(tmp_path, base)), "--out", str(out), "--data", str(data), "--no-costs"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "| `hc` |" in said
    assert "| `new` |" in said
    rows = jsonlines.read(out / "records.jsonl")
    assert len(rows) == 3 * 3
    assert len({row["val_loss"] for row in rows}) == len(rows)
    assert all(str(tmp_path) not in json.dumps(row) for row in rows)
    assert main(["study", "verify", str(out), "--data", str(data)]) == 0
    assert "1 of 1 runs are equal to the last bit" in capsys.readouterr().out
    # Another model in the same place is another study.
    save_base(base, num_hidden_layers=1)
    assert main(argv) == 2
    assert "set was {" in capsys.readouterr().err


@pytest.mark.slow
def test_the_steps_of_converted_models_are_timed_and_counted(base, data, tmp_path):
    plan = Plan(load_study(str(written(tmp_path, base))), data)
    configs = {name: plan.config("small", name) for name in plan.study.schemes}
    rows = measure(
        {name: (config, plan.model(config)) for name, config in configs.items()}, "residual", rounds=1, peak=False
    )
    plain, hc, _ = rows
    assert [row["parameters"] for row in rows] == [
        parameters(plan.model(config))["total"] for config in configs.values()
    ]
    for part in ("products", "elementwise"):
        assert hc["flops_per_token"][part] > plain["flops_per_token"][part] > 0
    assert hc["kept_bytes"] > plain["kept_bytes"]
    assert str(base) not in json.dumps(rows)


def test_products_of_a_converted_model_are_those_of_its_layers(base, data, tmp_path):
    """A Llama without a connection of its own: 6 FLOPs for each weight that multiplies, and 7 T d for attention."""
    plan = Plan(load_study(str(written(tmp_path, base))), data)
    model = plan.model(plan.config("small", "residual"))
    text = model.get_text_config()
    shapes = [text.hidden_size * text.num_attention_heads * text.head_dim] * 2
    shapes += [text.hidden_size * text.num_key_value_heads * text.head_dim] * 2
    shapes += [text.hidden_size * text.intermediate_size] * 3
    weights = text.num_hidden_layers * sum(shapes) + text.hidden_size * text.vocab_size
    attention = 7 * 16 * text.num_attention_heads * text.head_dim * text.num_hidden_layers
    assert products_per_token(model, sequence_length=16) == pytest.approx(6 * weights + attention, rel=1e-3)


@pytest.mark.slow
def test_counting_leaves_the_attention_of_the_model_that_is_timed_after_it(base, data, tmp_path):
    """A plan keeps the configuration of a converted model for all sizes that train it."""
    plan = Plan(load_study(str(written(tmp_path, base))), data)
    model = plan.model(plan.config("small", "residual"))
    before = copy.deepcopy(model)
    products_per_token(model, sequence_length=16)
    elementwise(model, 16)
    assert model._attn_implementation == before._attn_implementation
    assert model.to_dict() == before.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "heads"), [("gpt2", 3 * 32), ("deepseek_v3", 3 * 4 * 12), ("recurrent_gemma", 32)])
def test_attention_is_counted_in_the_layers_that_have_it_with_the_widths_of_its_heads(family, heads):
    """Four heads in three layers. RecurrentGemma has attention in one; DeepSeek has keys of 16 numbers, values of 8."""
    config = tiny(family).config
    short, long = (products_per_token(config, sequence_length=length) for length in (64, 128))
    assert long - short == pytest.approx(7 * 64 * heads, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["hc", "lambdas+tc"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "gemma4"])
def test_products_are_counted_without_values_as_a_real_step_has_them(family, scheme):
    """Experts, linear attention, convolutions that look for documents, and ids in which padding is looked for."""
    model = convert(tiny(family), scheme).train()
    counted, real = FlopCounterMode(display=False), FlopCounterMode(display=False)
    counted.mod_tracker = real.mod_tracker = counts._NoModules()
    step_on_meta(model.config, 16, counted)
    model.set_attn_implementation("eager")
    fill_no_cache(model.config)
    if family in ("mixtral", "gpt_oss", "qwen3_5_moe_text"):
        model.set_experts_implementation("eager")
    ids = torch.randint(5, 60, (1, 16), generator=torch.Generator().manual_seed(0))
    with real:
        model(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
    assert counted.get_total_flops() == real.get_total_flops()


@pytest.mark.parametrize("scheme", ["residual", "ddl-tc"])
def test_all_other_arithmetic_is_counted_without_values_as_a_real_step_has_it(scheme):
    config = tiny_config(scheme)
    model = new_model(copy.deepcopy(config), attn_implementation="eager").train()
    ids = torch.zeros(1, 16, dtype=torch.long)
    with counts._Elements() as real:
        model(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
    assert elementwise(config, 16) == real.total / 16


@pytest.mark.slow
def test_weights_of_experts_are_no_elements_of_other_arithmetic():
    """More experts are more numbers in the router, of which every token has one for each expert."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    few, many = (elementwise(MixtralConfig(**sizes, num_local_experts=experts), 64) for experts in (8, 64))
    assert 0 < many - few < 2 * 56 * 10


def test_a_model_with_operations_that_need_values_is_refused_before_it_is_timed(base, data, tmp_path, monkeypatch):
    class Experts(torch.nn.Module):
        def forward(self, **inputs):
            return inputs["input_ids"].max().item()

    plan = Plan(load_study(str(written(tmp_path, base))), data)
    config = plan.config("small", "hc")
    monkeypatch.setattr(counts, "on_meta", lambda *_, **__: Experts())
    monkeypatch.setattr(steps, "MeasuredStep", lambda *_: pytest.fail("timed"))
    with pytest.raises(InputError, match=r"the FLOPs of Experts cannot be counted: .*--no-costs"):
        measure({"hc": (config, plan.model(config))}, "hc", peak=False)


def test_a_timed_step_fills_no_cache_as_in_a_run(base, data, tmp_path):
    plan = Plan(load_study(str(written(tmp_path, base))), data)
    config = plan.config("small", "hc")
    timed, caches = steps.MeasuredStep(config, plan.model(config)), []
    timed.model.register_forward_hook(lambda _, given, output: caches.append(output.get(CACHE)))
    timed()
    assert caches == [None]


@pytest.mark.slow
def test_a_frozen_base_has_no_products_for_gradients_of_its_weights(base, data, tmp_path):
    plan = Plan(load_study(str(written(tmp_path, base))), data)
    model = plan.model(plan.config("small", "hc"))
    whole, frozen = (products_per_token(model, sequence_length=16, frozen=frozen) for frozen in (False, True))
    built = new_model(model)
    freeze_base(built)
    weights = [part.weight for part in built.modules() if isinstance(part, torch.nn.Linear)]
    least = 2 * sum(x.numel() for x in weights if not x.requires_grad)
    assert least <= whole - frozen < 1.1 * least, "also none for gradients of the embedding, before the first layer"


def test_the_study_that_the_page_shows_can_be_planned(base, data, tmp_path):
    *_, block = studies_of_the_page()
    for there, here in (("models/smollm2", str(base)), ("sequence_length: 256", "sequence_length: 16")):
        assert there in block
        block = block.replace(there, here)
    path = tmp_path / "study.yaml"
    path.write_text(block)
    runs = list(Plan(load_study(str(path)), data).runs({}))
    assert {run.scheme for run in runs} == {"residual", "hc", "attnres-block", "ddl"}
    assert {run.config.model.start for run in runs if run.scheme == "ddl"} == {"fresh"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schemes": {"residual": {}, "hc": {"parameters_of": "residual"}}}, "schemes.hc.parameters_of must be null"),
        ({"schemes": {"residual": {}, "ddl-cc": {}}}, r"schemes\.ddl-cc: model\.base: .* no start preserves"),
        ({"sizes": {"small": {"model.hidden_size": 8}}}, "model.hidden_size must not be set with model.base"),
        (
            {"tuning": {"over": {"train.connection_lr_factor": [10]}, "runs": 1, "baseline_runs": 1}},
            "tuning.over must be .*residual",
        ),
        ({"sizes": {"small": {"model.base": 5}}}, "model.base must be text, got 5"),
        ({"set": {"model.base": "nowhere"}}, "model.base: .*nowhere cannot be read"),
    ],
)
def test_an_unusable_base_gives_a_one_line_error_before_training(base, data, tmp_path, changes, said):
    with pytest.raises(InputError, match=said) as error:
        Plan(load_study(str(written(tmp_path, base, **changes))), data)
    assert "\n" not in str(error.value)
