"""`model.base`: a transformers model is trained further with another residual, and needs it only at its start."""

import json
import shutil
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

import residua
from residua import Residual
from residua.commands.cli import main
from residua.connections import registry
from residua.connections.schemes.residual import ResidualConnection
from residua.conversion.configuration import conversion_of
from residua.errors import InputError
from residua.lab import experiment
from residua.lab.cost.estimate import estimate
from residua.lab.data import prepare
from residua.lab.data.tokenizer import byte_tokenizer
from residua.lab.evaluation.runs import Run
from residua.lab.experiment import build_model, evaluate, model_config, open_run, resolved, run
from residua.lab.export import export
from residua.lab.records.folder import flatten
from residua.lab.training import BaseModelConfig, DataConfig, ModelConfig, RunConfig, load_config
from residua.lab.training import base_model as base_model
from residua.lab.training.base_model import base_sha256, rebuild_base
from support.converted_models import data_of_base, save_base
from support.ranks import assert_same_run, run_ranks
from support.tiny_runs import TRAIN, options, prepare_texts, run_config, write_texts

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def prepared(base, tmp_path_factory):
    return data_of_base(base, tmp_path_factory.mktemp("data"))


@pytest.fixture
def config(base, prepared):
    train = run_config(options(None, steps=STEPS, evaluate_every=2, clip=1)).train
    return RunConfig(BaseModelConfig(str(base), connection="hc"), DataConfig(path=str(prepared.folder)), train)


def changed(config, **model):
    return replace(config, model=replace(config.model, **model))


@pytest.mark.slow
def test_a_run_needs_its_base_only_at_its_start(config, base, tmp_path, rows):
    elsewhere = shutil.copytree(base, tmp_path / "base")
    config = changed(config, base=str(elsewhere))
    whole = run(config, tmp_path / "run", progress=False)
    config = load_config(str(tmp_path / "run" / "config.yaml"))
    assert list(asdict(config.model)) == ["base", "base_sha256", "connection", "start", "freeze_base"]
    logged = rows(tmp_path / "run")
    shutil.rmtree(elsewhere)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS}")
    assert run(config, tmp_path / "run", resume=True, progress=False)["val_loss"] == whole["val_loss"]
    assert rows(tmp_path / "run")[-1] == logged[-1]
    opened = open_run(tmp_path / "run", device="cpu")
    assert evaluate(opened)["val_loss"] == whole["val_loss"]
    assert opened.model.config.use_cache
    start = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(opened.model.lm_head.weight, start.lm_head.weight)


def test_a_frozen_base_needs_a_connection_that_learns(config, tmp_path):
    plain = replace(config, model=replace(config.model, connection="residual", freeze_base=True))
    with pytest.raises(InputError, match=r"model\.freeze_base must be false"):
        run(plain, tmp_path / "run", progress=False)


def test_the_first_step_has_the_loss_of_the_base(config, base, prepared, tmp_path, rows):
    model = build_model(resolved(config), prepared.tokenizer())
    ids = torch.arange(12)[None]
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5)
    low = changed(config, connection=None)
    assert resolved(low).model.connection == "residual"
    assert torch.equal(build_model(resolved(low), prepared.tokenizer())(ids).logits, plain(ids).logits)


@pytest.mark.slow
def test_with_a_frozen_base_the_checkpoints_hold_only_the_connections(config, base, prepared, tmp_path):
    config = changed(config, freeze_base=True)
    whole = run(config, tmp_path / "run", progress=False)
    newest = tmp_path / "run" / "checkpoints" / f"step-{STEPS}"
    assert all(".stream." in name for name in load_file(newest / "model.safetensors"))
    opened = open_run(tmp_path / "run", device="cpu")
    assert evaluate(opened)["val_loss"] == whole["val_loss"]
    fresh, trained = build_model(resolved(config), prepared.tokenizer()).state_dict(), opened.model.state_dict()
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, fresh[name])}
    assert moved
    assert all(".stream." in name for name in moved)
    assert all(torch.equal(x, trained[name]) for name, x in load_file(base / "model.safetensors").items())
    shutil.rmtree(newest)
    assert run(config, tmp_path / "run", resume=True, progress=False)["val_loss"] == whole["val_loss"]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_weights_of_a_base_are_read_once_for_their_digest(frozen, config, tmp_path, monkeypatch):
    """A resumed run that no longer needs its base does not read them."""
    digests = []

    def counted(folder):
        digests.append(base_sha256(folder))
        return digests[-1]

    for module in (experiment, base_model):
        monkeypatch.setattr(module, "base_sha256", counted)
    config = changed(config, freeze_base=frozen)
    begun = replace(config, train=replace(config.train, steps=1))
    run(begun, tmp_path / "run", progress=False)
    assert len(digests) == 1
    digests.clear()
    kept = load_config(str(tmp_path / "run" / "config.yaml"))
    run(kept, tmp_path / "run", resume=True, progress=False)
    assert len(digests) == frozen


@pytest.mark.slow
def test_weights_that_differ_from_the_frozen_base_are_refused(config, base, tmp_path):
    elsewhere = shutil.copytree(base, tmp_path / "base")
    run(changed(config, base=str(elsewhere), freeze_base=True), tmp_path / "run", progress=False)
    file = elsewhere / "model.safetensors"
    tensors = load_file(file)
    save_file({name: x + (name == "lm_head.weight") for name, x in tensors.items()}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.base must be the base .* got other weights"):
        open_run(tmp_path / "run", device="cpu")
    shutil.rmtree(elsewhere)
    with pytest.raises(InputError, match=r"model\.base: .*base cannot be read"):
        open_run(tmp_path / "run", device="cpu")


def test_a_converted_base_is_trained_as_it_is(config, base, prepared, tmp_path):
    model = residua.convert(AutoModelForCausalLM.from_pretrained(base), "ihc")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = resolved(changed(config, base=str(tmp_path), connection=None))
    assert config.model.connection["scheme"] == "ihc"
    built = build_model(config, prepared.tokenizer())
    assert conversion_of(built) == conversion_of(model)
    assert all(torch.equal(tensor, built.state_dict()[name]) for name, tensor in model.state_dict().items())
    build_model(changed(config, connection="ihc"), prepared.tokenizer())
    with pytest.raises(InputError, match=r"model\.connection must be null"):
        build_model(changed(config, connection="hc"), prepared.tokenizer())


class PenalConnection(ResidualConnection):
    def penalty(self, coefficients):
        return self.norm.weight.square().mean()


@dataclass(frozen=True)
class Penal(Residual):
    def assemble(self, dim, num_sublayers, norm, norm_eps):
        return self.stream(dim, num_sublayers, lambda i, compress: PenalConnection(norm(i), compress))


def test_a_penalty_of_a_registered_scheme_is_refused(config, prepared, monkeypatch):
    """It is no option: only a connection can say that it has one."""
    for table in ("SCHEMES", "PRESETS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    residua.register("penal", Penal)
    with pytest.raises(InputError, match=r"model\.connection must be .*penalty"):
        build_model(resolved(changed(config, connection="penal", start="fresh")), prepared.tokenizer())


def test_a_convolution_of_outputs_counts_as_no_penalty(config, prepared):
    """The connection that convolves has the method of a penalty, for the connection inside."""
    build_model(resolved(changed(config, connection="residual:branch=conv")), prepared.tokenizer())


def test_unsupported_settings_for_a_base_are_refused_with_a_reason(config, base, prepared, tmp_path):
    def refused(match, data=prepared, **model):
        with pytest.raises(InputError, match=match):
            build_model(resolved(changed(config, **model)), data.tokenizer())

    refused("start='fresh'", connection="ddl")
    refused("its option penalty", connection="edelta", start="fresh")
    refused("found no config.json|No such file", base=str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"at most .*64\), got 65"):
        build_model(resolved(replace(config, train=replace(config.train, sequence_length=65))), prepared.tokenizer())
    other = prepare(write_texts(tmp_path / "text"), tmp_path / "data", vocab_size=257, progress=False)
    refused(r"must be tokens of the tokenizer in model\.base.*residua prepare --tokenizer", data=other)


@pytest.mark.parametrize(
    "forged",
    [
        [],
        {"model_type": "residua-converted", "attn_implementation": "somebody/kernel"},
        {"model_type": "residua-converted", "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
    ],
)
def test_a_forged_configuration_in_a_run_is_refused(forged, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(forged))
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(InputError, match=r"config\.json must hold "):
        rebuild_base(tmp_path)


def test_the_section_of_a_base_has_its_own_keys(base):
    given = [f"--model.base={base}", "--model.connection=hc", "--train.lr=1e-4"]
    config = load_config(None, given)
    assert config.model == BaseModelConfig(str(base), connection="hc")
    assert config.data.tokenizer == str(base)
    assert load_config("retrofit", given).train.connection_lr_factor == 100
    with pytest.raises(InputError, match=r"model\.\w+ must not be set with model\.base"):
        load_config(None, [*given, "--model.hidden_size=64"])
    tiny = load_config("tiny", given)  # its model gives way to the base
    assert (tiny.model, tiny.data.tokenizer) == (config.model, str(base))
    assert tiny.train.warmup_steps == load_config("tiny").train.warmup_steps
    with pytest.raises(InputError, match=r"model\.freeze_base must not be set without model\.base"):
        load_config(None, ["--model.freeze_base=true"])
    with pytest.raises(InputError, match=r"model\.start must be one of preserve, fresh, got 'warm'"):
        load_config(None, [*given, "--model.start=warm"])
    with pytest.raises(InputError, match=r"model\.connection: no preset is called 'nothing'"):
        load_config(None, [*given, "--model.connection=nothing"])
    with pytest.raises(InputError, match=r"data\.tokenizer must be .*model\.base"):
        load_config(None, [*given, "--data.tokenizer=bpe"])
    with pytest.raises(InputError, match=r"model\.base must be .*from scratch"):
        _ = config.from_scratch
    with pytest.raises(InputError, match=r"model\.base must be a run "):
        estimate(config, model_config(config))
    assert isinstance(load_config(None, ["--model.hidden_size=96"]).from_scratch, ModelConfig)


@pytest.mark.slow
def test_every_command_accepts_a_run_with_a_base(config, base, tmp_path, capsys):
    runs = [tmp_path / "hc", tmp_path / "residual"]
    for place, connection in zip(runs, ("hc", "residual")):
        run(changed(config, connection=connection), place, progress=False)
    capsys.readouterr()
    out = tmp_path / "out"
    for command in (
        ["evaluate", "RUN", "--json"],
        ["explore", "RUN", "--json"],
        ["generate", "RUN", "--prompt", "Text", "--max-new-tokens", "4", "--greedy"],
        ["compare", *map(str, runs), "--json"],
        ["explore", *map(str, runs), "--out", str(tmp_path / "page.html")],
        ["export", "RUN", str(out)],
        ["generate", str(out), "--prompt", "Text", "--max-new-tokens", "4", "--greedy"],
    ):
        assert main([str(runs[0]) if part == "RUN" else part for part in command]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert printed.count("Text") == 2
    card = (out / "README.md").read_text()
    assert "residua.load(" in card
    assert str(base.parent) not in card
    assert '"name": "residual"' in printed
    ids = torch.arange(12)[None]
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(exported(ids).logits, open_run(runs[0], device="cpu").model(ids).logits)


@pytest.mark.slow
def test_runs_on_copies_of_the_same_base_form_one_group(config, base, tmp_path):
    for name in ("a", "b"):
        place = shutil.copytree(base, tmp_path / f"base-{name}")
        few = replace(config, train=replace(config.train, steps=1, seed=ord(name)))
        run(changed(few, base=str(place)), tmp_path / name, progress=False)
    first, second = (Run.read(tmp_path / name) for name in ("a", "b"))
    assert first.connection == "hc"
    assert first.settings == second.settings


@pytest.mark.processes
@pytest.mark.parametrize("frozen", [False, True])
def test_two_ranks_train_a_base_as_one_process_does(frozen, config, start, tmp_path, rows):
    config = changed(config, freeze_base=frozen)
    run(config, tmp_path / "alone", progress=False)
    arguments = [f"--{key}={value}" for key, value in flatten(asdict(config)).items() if value is not None]
    job = run_ranks(start, 2, tmp_path / "run", arguments)
    assert job.statuses == [0, 0], job.out
    assert_same_run(tmp_path / "run", tmp_path / "alone", rows, exact=False)


def test_a_run_can_start_from_the_weights_of_a_run_or_its_export(tmp_path, rows, capsys):
    data = prepare_texts(tmp_path)
    run(run_config(options(data, steps=2)), tmp_path / "first", progress=False)
    export(tmp_path / "first", tmp_path / "export")
    start = open_run(tmp_path / "first", device="cpu")
    other = prepare(write_texts(tmp_path / "other"), tmp_path / "more", tokenizer=str(tmp_path / "first" / "tokenizer"))
    for name in ("first", "export"):
        train = {f"train.{key}": value for key, value in {**TRAIN, "steps": 2, "lr": 1e-4}.items()}
        keys = {"model.base": str(tmp_path / name), "data.path": str(other.folder), **train, "train.tensorboard": False}
        again = load_config("nano", keys)
        assert torch.equal(
            build_model(resolved(again), other.tokenizer()).lm_head.weight.cpu(), start.model.lm_head.weight.cpu()
        )
        run(again, tmp_path / f"from-{name}", progress=False)
        facts = json.loads((tmp_path / f"from-{name}" / "facts.json").read_text())
        assert facts["parent"]["folder"] == name
        assert facts["parent"]["step"] == (2 if name == "first" else None)
        opened = open_run(tmp_path / f"from-{name}", device="cpu")
        assert opened.config.model.connection == start.config.model.connection == "ddl-tc"
        assert evaluate(opened)["val_loss"] == rows(tmp_path / f"from-{name}")[-1]["val_loss"]
    keys = [f"--data.path={other.folder}", f"--train.sequence_length={TRAIN['sequence_length']}"]
    counted = []
    for name in ("first", "export"):  # a run with one of ours as its base can be counted too
        capsys.readouterr()
        base = f"--model.base={tmp_path / name}"
        assert main(["cost", "count", "--config", "nano", *keys, base, "--json"]) == 0
        counted.append(json.loads(capsys.readouterr().out))
    assert counted[0]["parameters"] == counted[1]["parameters"]
    assert counted[0]["parameters"]["total"] == sum(p.numel() for p in start.model.parameters())
    with pytest.raises(InputError, match=r"model\.connection must be null"):
        build_model(resolved(replace(again, model=replace(again.model, connection="hc"))), other.tokenizer())


@pytest.mark.slow
def test_a_base_must_leave_out_the_loss_of_its_router(config, prepared, tmp_path):
    """It would be part of a loss in nats per token."""
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    mixtral = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, output_router_logits=True)
    AutoModelForCausalLM.from_config(mixtral).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = changed(config, base=str(tmp_path))
    with pytest.raises(InputError, match=r"got .*; set output_router_logits to false in config\.json"):
        build_model(resolved(config), prepared.tokenizer())
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"output_router_logits": False}))
    assert build_model(resolved(config), prepared.tokenizer()).config.model_type == "mixtral"


def test_a_run_is_evaluated_on_other_texts_with_its_own_tokenizer(tmp_path, capsys):
    data = prepare_texts(tmp_path)
    run(run_config(options(data, steps=2)), tmp_path / "run", progress=False)
    export(tmp_path / "run", tmp_path / "export")
    texts = write_texts(tmp_path / "other", "Other {0} has {1}.")
    prepare(texts, tmp_path / "more", tokenizer=str(tmp_path / "run" / "tokenizer"), validation_fraction=0.5)
    capsys.readouterr()
    own = "the run's own text"
    for model, place, line in [
        ("run", data.folder, f"{own}: "),
        ("run", tmp_path / "text", f"{own}, training part included: all of"),
        ("run", tmp_path / "more", f"not {own}: the held-out part of"),
        ("run", texts, f"not {own}: all of"),
        ("export", texts, "not known whether"),
    ]:
        assert main(["evaluate", str(tmp_path / model), "--data", str(place), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["text"].startswith(line)
        assert result["val_loss"] == pytest.approx(
            result["repeated_share"] * result["repeated_loss"] + (1 - result["repeated_share"]) * result["other_loss"]
        )
    for wrong in (["--text-column", "a"], ["--text-column", "a", "--data", str(data.folder)]):
        assert main(["evaluate", str(tmp_path / "run"), *wrong]) == 2
        assert "--text-column must be left out" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--tasks", "paper", "--data", str(texts)]) == 2
    assert "--data must be left out with --tasks" in capsys.readouterr().err
    prepare(texts, tmp_path / "wrong", vocab_size=300)
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "wrong")]) == 2
    assert "--data must be tokens of the tokenizer" in capsys.readouterr().err
