import json
import math
import shutil
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoTokenizer

from residua import Carry, Connection, Residual, Scheme, Stream
from residua.commands.cli import main
from residua.connections import PRESETS, SCHEMES, RMSNorm
from residua.connections.parts.ends import Same
from residua.errors import InputError
from residua.files.durable import remove
from residua.lab.data import PreparedData, byte_tokenizer, prepare
from residua.lab.data.model_text import open_text
from residua.lab.evaluation.runs import Run
from residua.lab.experiment import build_model, evaluate, evaluate_on, open_model, open_run, resolved, run, trace_model
from residua.lab.export import export
from residua.lab.opening import prompt_tokens
from residua.lab.training import DataConfig, load_config
from support.converted_models import save_base
from support.tiny_runs import beginning, options, prepare_texts, run_config, write_texts

STEPS = 6


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def text(prepared):
    return prepared.folder.parent / "text"


@pytest.fixture
def config(prepared):
    model = {"connection": "ddl-ec", "num_hidden_layers": 1}
    return run_config(options(prepared, model=model, gradient_accumulation=1, checkpoint_every=3))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_scheme_trains_and_resumes(name, config, tmp_path):
    """The loss of the log is that of the language model; a penalty has a number of its own."""
    train = replace(config.train, steps=2, evaluate_every=1, checkpoint_every=1)
    config = replace(config, model=replace(config.model, connection=name), train=train)
    whole = run(config, tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    assert run(config, tmp_path / "run", resume=True, progress=False)["val_loss"] == whole["val_loss"]
    last = rows(tmp_path / "run")[-1]
    assert ("penalty" in last) == bool(getattr(PRESETS[name], "penalty", 0))
    assert math.isfinite(last["loss"] + last["val_loss"])
    assert last["loss"] > 0


class ScaledCoefficients(NamedTuple):
    """beta: (batch, seq, dim), which is no gate of any scheme that the analysis knows."""

    beta: Tensor


class ScaledConnection(Connection):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.beta = RMSNorm(dim), torch.nn.Parameter(torch.ones(dim))

    def read(self, state, memory=None):
        return self.norm(state), Carry(state, ScaledCoefficients(self.beta.expand(state.shape)))

    def write(self, y, carry):
        return carry.residual + carry.coefficients.beta * y


@dataclass(frozen=True)
class Scaled(Scheme):
    equation: ClassVar[str] = "x + beta * F(norm(x))"
    paper: ClassVar[str] = "none"

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        return Stream(Same(), [ScaledConnection(dim) for _ in range(num_sublayers)], Same())


def test_a_new_scheme_needs_its_class_and_a_line_in_schemes(config, tmp_path, monkeypatch):
    """It trains, is opened again and analysed, without defining anything else about itself."""
    monkeypatch.setitem(SCHEMES, "scaled", Scaled)
    config = replace(config, model=replace(config.model, connection={"scheme": "scaled"}))
    assert math.isfinite(run(config, tmp_path / "run", progress=False)["val_loss"])
    found = trace_model(open_run(tmp_path / "run", device="cpu"))
    assert (found.facts["shortcut"], found.facts["scheme"]["scheme"]) == (None, "scaled")
    norms = {"state_norm", "input_norm", "output_norm", "change_norm"}
    assert found.values.keys() == norms | {"token_ids", "token_loss", "lens_loss"}
    assert not (tmp_path / "run" / "connections.jsonl").exists()


@dataclass(frozen=True)
class Counted(Residual):
    """Each instance is a description that was turned into a scheme."""

    __module__ = "residua.connections.counted"
    instances: ClassVar[list[Scheme]] = []

    def __post_init__(self) -> None:
        self.instances.append(self)


def test_a_connection_is_resolved_to_an_object_once(prepared, monkeypatch):
    """This happens at the boundary, where it is also described and that description is tested. The model reads its own
    configuration."""
    monkeypatch.setitem(SCHEMES, "counted", Counted)
    Counted.instances.clear()
    given = load_config("tiny", [f"--data.path={prepared.folder}", '--model.connection={"scheme": "counted"}'])
    build_model(resolved(given), prepared.tokenizer())
    assert len(Counted.instances) == 3


def test_a_callback_gets_the_steps_and_nothing_is_printed(config, text, tmp_path, monkeypatch, capsys):
    """Not even the progress of preparing the data is printed."""
    monkeypatch.setattr("residua.lab.data.writer.UPDATE_SECONDS", 0)
    data, seen = DataConfig(source=str(text), tokenizer="byte"), []
    run(replace(config, data=data), tmp_path / "run", progress=seen.append)
    assert seen[-1] == STEPS
    assert "prepare: " not in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_held_out_text_is_evaluated_and_changes_no_step(config, text, prepared, tmp_path):
    texts = write_texts(tmp_path / "texts", "Another text, with {0} words in it.")
    own = {"tokenizer": str(prepared.folder / "tokenizer"), "validation_fraction": 0.9, "progress": False}
    further = prepare(texts, tmp_path / "further", **own)
    both = replace(config, data=replace(config.data, further_validation=str(further.folder)))
    run(config, tmp_path / "alone", progress=False)
    run(both, tmp_path / "both", progress=False)
    varying = {"seconds", "tokens_per_second"}
    alone, rest = [
        [{key: value for key, value in row.items() if key not in varying} for row in rows(tmp_path / name)]
        for name in ("alone", "both")
    ]
    assert [{key: value for key, value in row.items() if not key.startswith("further_")} for row in rest] == alone
    assert rest[-1]["further_tokens"] == len(further.validation) - 1
    assert rest[-1]["further_val_loss"] != rest[-1]["val_loss"]
    assert {"further_repeated_loss", "further_other_loss", "repeated_loss", "other_loss"} <= rest[-1].keys()
    facts = json.loads((tmp_path / "both" / "facts.json").read_text())
    assert facts["data"]["further_validation"]["fingerprint"] == further.fingerprint
    shutil.rmtree(further.folder)
    assert evaluate(open_run(tmp_path / "both"))["val_loss"] == pytest.approx(alone[-1]["val_loss"], rel=1e-6)


def test_a_second_held_out_text_with_another_tokenizer_is_refused(config, text, tmp_path):
    other = prepare(text, tmp_path / "other", vocab_size=300, progress=False)
    both = replace(config, data=replace(config.data, further_validation=str(other.folder)))
    with pytest.raises(InputError, match=r"data\.further_validation must be tokenized"):
        run(both, tmp_path / "run", progress=False)


def test_a_run_can_be_opened_at_each_of_its_checkpoints_and_evaluated(config, prepared, tmp_path):
    result = run(config, tmp_path / "run", progress=False)
    assert (result["step"], result["interrupted"]) == (STEPS, False)
    losses = {row["step"]: row["val_loss"] for row in rows(tmp_path / "run") if "val_loss" in row}
    assert losses == {3: losses[3], STEPS: result["val_loss"]}

    random_state = torch.random.get_rng_state()
    opened = open_run(tmp_path / "run", device="cpu")
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert (opened.step, opened.config) == (STEPS, config)
    assert not opened.model.training
    again = evaluate(opened)
    for name in ("val_loss", "bits_per_byte"):
        assert again[name] == pytest.approx(result[name], rel=1e-6)
    assert again["tokens"] == len(opened.data.validation) - 1
    vars(opened)["data"] = replace(opened.data, facts=opened.data.facts | {"lost_share": 0.1})
    assert "bits_per_byte" not in evaluate(opened), "the bytes that were lost have no loss"

    earlier = open_run(tmp_path / "run", checkpoint=3, device="cpu")
    assert earlier.step == 3
    assert evaluate(earlier)["val_loss"] == pytest.approx(losses[3], rel=1e-6)
    with pytest.raises(InputError, match="step 4, found those of steps 3, 6"):
        open_run(tmp_path / "run", checkpoint=4, device="cpu")

    assert opened.tokenizer.encode("é") == prepared.tokenizer().encode("é")
    assert opened.tokenizer.decode(opened.tokenizer.encode("Text")) == "Text"


def test_a_run_reads_text_as_it_was_trained_whatever_its_tokenizer_adds(config, text, tmp_path):
    beginning(byte_tokenizer()).save_pretrained(tmp_path / "theirs")
    data = DataConfig(source=str(text), tokenizer=str(tmp_path / "theirs"))
    run(replace(config, data=data), tmp_path / "run", progress=False)
    opened = open_run(tmp_path / "run", device="cpu")
    assert opened.tokenizer("Text").input_ids == list(b"Text")
    export(tmp_path / "run", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("Text").input_ids == list(b"Text")


def test_without_prepared_data_the_run_prepares_its_own_and_a_fresh_start_prepares_anew(config, text, tmp_path):
    folder = tmp_path / "run"
    config = replace(config, data=DataConfig(source=str(text), tokenizer="byte"))
    long = replace(config.model, max_position_embeddings=10**6), replace(config.train, sequence_length=10**6)
    too_long = replace(config, model=long[0], train=long[1])
    with pytest.raises(InputError, match="sequence_length"):
        run(too_long, folder, progress=False)
    assert not folder.exists()
    before = prepare(text, folder / "data", tokenizer="byte", progress=False).fingerprint
    (folder / ".lock").touch()
    (folder / "config.yaml").touch()
    # Nothing was trained, so the folder is begun anew, with the new settings and not with the data that lie there.
    run(replace(config, data=replace(config.data, validation_fraction=0.3)), folder, progress=False)
    assert PreparedData.open(folder / "data").fingerprint != before
    assert evaluate(open_run(folder, device="cpu"))["tokens"] > 0


def test_a_relative_data_path_is_found_from_every_working_directory(config, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(prepared.folder.parent)
    run(replace(config, data=DataConfig(path=prepared.folder.name)), tmp_path / "run", progress=False)
    monkeypatch.chdir(tmp_path)
    assert open_run(tmp_path / "run", device="cpu").data.fingerprint == prepared.fingerprint


def test_the_vocabulary_is_that_of_the_data_rounded_up(config, prepared):
    assert build_model(config, prepared.tokenizer()).config.vocab_size == 320
    exact = replace(config, model=replace(config.model, vocab_size=257))
    assert build_model(exact, prepared.tokenizer()).config.vocab_size == 257
    with pytest.raises(InputError, match="at least the 257 tokens"):
        build_model(replace(config, model=replace(config.model, vocab_size=256)), prepared.tokenizer())


def test_an_untrained_model_depends_only_on_the_seed(config, prepared):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = build_model(config, prepared.tokenizer())
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(7)
    same = build_model(config, prepared.tokenizer())
    other = build_model(replace(config, train=replace(config.train, seed=1)), prepared.tokenizer())
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_an_untrained_model_guesses_about_uniformly(config, prepared, tmp_path):
    """A loss far from log(vocabulary) at the start would indicate labels that are misaligned or already seen."""
    run(replace(config, train=replace(config.train, steps=1, lr=1e-9)), tmp_path / "run", progress=False)
    assert rows(tmp_path / "run")[0]["val_loss"] == pytest.approx(math.log(320), abs=0.1)


def test_a_bfloat16_run_is_evaluated_afterwards_as_during_training(config, tmp_path):
    low = replace(config, train=replace(config.train, precision="bfloat16"))
    result = run(low, tmp_path / "run", progress=False)
    assert evaluate(open_run(tmp_path / "run", device="cpu"))["val_loss"] == pytest.approx(result["val_loss"], rel=1e-6)


def test_a_missing_run_checkpoint_or_data_set_is_named(config, tmp_path):
    with pytest.raises(InputError, match=r"no config\.yaml"):
        open_run(tmp_path, device="cpu")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    with pytest.raises(InputError, match="must hold a checkpoint"):
        open_run(tmp_path, device="cpu")
    with pytest.raises(InputError, match="step 3, found none"):
        open_run(tmp_path, checkpoint=3, device="cpu")
    with pytest.raises(InputError, match=r"data\.path"):
        run(replace(config, data=DataConfig(source=None)), tmp_path / "run", progress=False)


@pytest.fixture
def replaced(config, text, tmp_path):
    """A trained run whose folder of data was then prepared again: another text, another tokenizer."""
    data = prepare(text, tmp_path / "data", tokenizer="byte", progress=False)
    run(replace(config, data=DataConfig(path=str(data.folder))), tmp_path / "run", progress=False)
    shutil.rmtree(data.folder)
    other = write_texts(tmp_path / "other", "Other words stand in {0}, again and again.")
    prepare(other, data.folder, vocab_size=264, validation_fraction=0.5, progress=False)
    return tmp_path / "run"


def test_commands_that_read_the_data_of_a_run_refuse_other_data(replaced, config, tmp_path):
    for read in (evaluate, trace_model, lambda opened: opened.data):
        with pytest.raises(InputError, match="must be the data "):
            read(open_run(replaced, device="cpu"))
    again = replace(config, data=DataConfig(path=str(tmp_path / "data")))
    with pytest.raises(InputError, match=r"data\.fingerprint was"):
        run(again, replaced, resume=True, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("evaluate",), ("explore", "--no-page", "--tokens", "3")], ids=lambda c: c[0])
def test_a_copied_run_is_read_with_its_data_at_their_new_place(command, config, prepared, tmp_path, capsys):
    """The data are found next to the run as before, or where --data names them; the data of another run are refused."""
    shutil.copytree(prepared.folder, tmp_path / "before" / "data")
    config = replace(config, data=DataConfig(path=str(tmp_path / "before" / "data")))
    run(config, tmp_path / "before" / "run", progress=False)
    (tmp_path / "before").rename(tmp_path / "after")
    copy = tmp_path / "after" / "run"
    assert main([*command, str(copy)]) == 0
    assert run(config, copy, resume=True, progress=False)["step"] == STEPS
    (tmp_path / "after" / "data").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main([*command, str(copy)]) == 2
    assert "have moved, give their folder with --data DIR" in capsys.readouterr().err
    assert main([*command, str(copy), "--data", str(tmp_path / "elsewhere")]) == 0


def test_a_run_that_was_trained_further_is_compared_as_another_run(config, tmp_path):
    run(config, tmp_path / "run", progress=False)
    longer = replace(config, train=replace(config.train, steps=2 * STEPS))
    assert run(longer, tmp_path / "run", resume=True, progress=False)["step"] == 2 * STEPS
    assert Run.read(tmp_path / "run").settings["train.steps"] == f"{STEPS}, then {2 * STEPS}"


def test_a_run_keeps_the_tokenizer_that_made_its_tokens(replaced, prepared, tmp_path):
    """So it can generate and be exported even if its data were prepared again or removed."""
    for _ in range(2):
        opened = open_run(replaced, device="cpu")
        assert opened.tokenizer.encode("Text é") == prepared.tokenizer().encode("Text é")
        assert opened.model.config.eos_token_id == prepared.eos_token_id == opened.tokenizer.eos_token_id
        assert trace_model(opened, "Text").num_tokens == 4
        shutil.rmtree(tmp_path / "data", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no end of text", "missing"])
def test_a_run_without_its_tokenizer_is_refused(damage, replaced):
    tokenizer = replaced / "tokenizer"
    if damage == "missing":
        shutil.rmtree(tokenizer)
    else:
        text = (tokenizer / "tokenizer_config.json").read_text()
        (tokenizer / "tokenizer_config.json").write_text(text.replace("<|endoftext|>", "nowhere"))
    with pytest.raises(InputError, match="not a readable tokenizer"):
        open_run(replaced, device="cpu")


def test_a_kernel_that_cannot_run_here_is_refused_in_one_line(config, tmp_path, capsys, monkeypatch):
    launch = pytest.importorskip("residua.ops.kernels.launch", exc_type=ModuleNotFoundError)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    triton = replace(config, model=replace(config.model, connection="mhc:implementation=triton"))
    path = tmp_path / "config.yaml"
    path.write_text(triton.to_yaml())
    assert main(["train", "--config", str(path), "--run", str(tmp_path / "run")]) == 2
    assert "residua: implementation must be 'auto' or 'reference'" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "said"), [(3, False), (9, True)])
def test_a_run_that_repeats_its_text_gives_a_note(steps, said, config, prepared, tmp_path, capsys):
    tokens = 64 * config.train.sequence_length * steps
    assert (tokens > len(prepared.train)) is said
    train = replace(config.train, steps=steps, batch_size=64, evaluate_every=steps, checkpoint_every=steps)
    run(replace(config, train=train), tmp_path / "run", progress=True)
    line = f"reads its text {tokens / len(prepared.train):.1f} times: {tokens:,} of {len(prepared.train):,} tokens"
    assert (line in capsys.readouterr().err) is said


def test_a_run_with_a_different_rule_for_weight_decay_does_not_resume(prepared, tmp_path):
    """In earlier versions, muP's decay was the same at every width, and no checkpoint records which rule was used."""
    config = run_config(options(prepared, model={"mup": "true", "mup_base_width": 8, "connection": "ddl"}, steps=4))
    run(replace(config, train=replace(config.train, checkpoint_every=2)), tmp_path / "run", progress=False)
    remove(tmp_path / "run" / "checkpoints" / "step-4")
    manifest = tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["settings"].pop("optimizer.weight_decay") == [pytest.approx(2 * config.train.weight_decay)]
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    run(config, tmp_path / "run", resume=True, progress=False)
    manifest = tmp_path / "moved" / "checkpoints" / "step-2" / "manifest.json"
    manifest.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"optimizer\.weight_decay was absent, is \[0\.2\]"):
        run(config, tmp_path / "moved", resume=True, progress=False)


def test_a_model_reads_a_text_after_the_tokens_that_its_tokenizer_puts_first(tmp_path):
    """As in its training: without the token for the beginning, the numbers of some models mean nothing."""
    save_base(tmp_path / "model", max_position_embeddings=40)
    tokenizer = beginning(byte_tokenizer())
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("One text of a few words, and another one; then the end comes.")
    opened = open_model(tmp_path / "model", device="cpu")
    text = open_text(tmp_path / "text.txt", opened.tokenizer, tmp_path / "model")
    ids = torch.tensor(text.tokens.window(0, len(text.tokens)))
    total = 0.0
    for start in range(0, len(ids) - 1, 39):
        window = torch.cat([torch.tensor([tokenizer.eos_token_id]), ids[start : start + 40]])
        with torch.no_grad():
            logits = opened.model(input_ids=window[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits[1:].float(), window[2:], reduction="sum").item()
    found = evaluate_on(opened, text)
    assert found["val_loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found["tokens"] == len(ids) - 1
    assert prompt_tokens(tokenizer, "Text") == [tokenizer.eos_token_id, *b"Text"] == tokenizer("Text").input_ids
    assert prompt_tokens(byte_tokenizer(), "Text") == [*b"Text"]
    ending = beginning(byte_tokenizer())
    added = [(ending.eos_token, ending.eos_token_id)]
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {ending.eos_token}", special_tokens=added)
    assert prompt_tokens(ending, "Text") == [*b"Text"], "an end would end the continuation"
