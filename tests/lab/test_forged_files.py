"""Files that somebody sent: whatever they hold, nothing in them runs, nothing else changes, and one line says why.

Every file of every artefact that a command opens is forged: the files of a run, of its checkpoint and its data, of a
trace and of an exported model.
"""

import copy
import functools
import hashlib
import json
import os
import pickle
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import residua
from residua.commands.cli import main
from residua.errors import InputError
from residua.files.reading import read_json, read_yaml
from residua.lab.experiment import open_model
from residua.lab.training import load_checkpoint
from residua.lab.training.checkpoint import open_checkpoint
from residua.models import ResiduaConfig
from support.tiny_runs import options, write_texts

TINY = options(None, model={"connection": "ddl", "num_hidden_layers": 1}, steps=4, connections_every=1)
PROMPT = ("--prompt", "Text", "--tokens", "3")


class Executes:
    """What a pickle of it does when it is read: it writes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def zipped_pickle(marker):
    path = marker.with_name("zipped")
    torch.save({"model": Executes(marker)}, path)
    return path.read_bytes()


# What a file holds instead of what belongs into it, by its suffix: a function of the path that must not appear.
FORGERIES = {
    ".yaml": lambda marker: f'!!python/object/apply:os.system ["touch {marker}"]\n'.encode(),
    **dict.fromkeys((".json", ".jsonl"), lambda marker: b"[1]\n[2]\n"),
    **dict.fromkeys((".safetensors", ".bin"), lambda marker: pickle.dumps(Executes(marker))),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run stopped after step 2, with its own data and a trace, and its export; tests work on copies."""
    root = tmp_path_factory.mktemp("forged")
    data = [f"--data.source={write_texts(root / 'text')}", "--data.tokenizer=byte"]
    assert main(["train", "--config", "tiny", "--run", str(root / "run"), *TINY, *data]) == 0
    shutil.rmtree(root / "run" / "checkpoints" / "step-4")
    assert main(["explore", str(root / "run"), "--no-page"]) == 0
    assert main(["export", str(root / "run"), str(root / "model")]) == 0
    return root


@pytest.fixture
def place(home, tmp_path, monkeypatch):
    """A copy of the artefacts, next to a file that must not change, in a process without a network."""

    def refuse(*arguments):
        pytest.fail(f"reached out to the network: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    shutil.copytree(home, tmp_path / "copy", symlinks=True)
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "copy"


def execute(capsys, argv):
    """Run a command; returns its exit status and what it printed."""
    capsys.readouterr()
    status = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def assert_refused(capsys, argv, place):
    status, _, err = execute(capsys, argv)
    assert status == 2, err
    lines = [line for line in err.splitlines() if not line.startswith("skipping a damaged checkpoint: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("residua: ")
    assert len(lines[0]) < 1000
    assert_harmless(place)
    return lines[0]


def assert_harmless(place):
    assert not place.with_name("marker").exists(), "something ran"
    assert place.with_name("victim").read_text() == "precious"


def manifest_of(place):
    return place / "run" / "checkpoints" / "step-2" / "manifest.json"


def sign(place):
    """Let the manifest of the checkpoint vouch for its files as they are."""
    path = manifest_of(place)
    manifest = json.loads(path.read_text())
    for name, file in manifest["files"].items():
        content = (path.parent / name).read_bytes()
        file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


EVALUATE, RESUME, COMPARE = ("evaluate", "run"), ("train", "--resume", "--run", "run"), ("compare", "run", "other")
EXPORT, MODEL = ("export", "run", "out"), ("explore", "model", *PROMPT, "--no-page")
GENERATE = ("generate", "run", "--prompt", "a", "--max-new-tokens", "1")
STEP = "run/checkpoints/step-2"
# Which commands read a file; paths are those of `place`.
READERS = {
    "run/config.yaml": (EVALUATE,),
    "run/facts.json": (EXPORT,),
    "run/metrics.jsonl": (COMPARE,),
    "run/connections.jsonl": (RESUME,),
    f"{STEP}/manifest.json": (EVALUATE, RESUME),
    f"{STEP}/model.safetensors": (EVALUATE,),
    f"{STEP}/optimizer.safetensors": (RESUME,),
    "run/data/index.json": (EVALUATE,),
    "run/data/train-00000.bin": (EVALUATE,),
    "run/data/tokenizer/tokenizer.json": (EVALUATE,),
    "run/tokenizer/tokenizer.json": (GENERATE,),
    "run/tokenizer/tokenizer_config.json": (GENERATE,),
    "run/analysis/trace-step-2.safetensors": (("explore", "run", "--out", "page.html"),),
    "model/config.json": (MODEL,),
    "model/generation_config.json": (MODEL,),
    "model/model.safetensors": (MODEL,),
    "model/tokenizer.json": (MODEL,),
    "model/tokenizer_config.json": (MODEL,),
}
# Lines that end a file of rows may be torn, transformers leaves out a broken file of how to generate, and a run is
# measured again if its trace is damaged.
TRACE = "run/analysis/trace-step-2.safetensors"
LEFT_OUT = {"run/metrics.jsonl", "run/connections.jsonl", "model/generation_config.json", TRACE}


def arguments(command, place):
    known = {"run", "other", "model", "out", "page.html"}
    return [str(place / argument) if argument in known else argument for argument in command]


@pytest.mark.slow
@pytest.mark.parametrize("file", READERS)
def test_no_forged_file_is_executed_or_gives_a_traceback(file, place, capsys):
    shutil.copytree(place / "run", place / "other")
    (place / file).write_bytes(FORGERIES[(place / file).suffix](place.with_name("marker")))
    if file.startswith(STEP) and not file.endswith("manifest.json"):
        sign(place)
    for command in READERS[file]:
        if file in LEFT_OUT:
            status, _, err = execute(capsys, arguments(command, place))
            assert status in (0, 2), err
            assert "Traceback" not in err
            assert_harmless(place)
        else:
            assert_refused(capsys, arguments(command, place), place)


def leaves(value, place=()):
    """The places of all values in nested objects and lists, of a list only the first."""
    yield place
    for key in value if isinstance(value, dict) else range(min(1, len(value) if isinstance(value, list) else 0)):
        yield from leaves(value[key], (*place, key))


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", [-0.5, "", [[1]]], ids=str)
@pytest.mark.parametrize("file", [file for file in READERS if file.endswith((".json", ".yaml"))])
def test_no_value_of_another_type_gives_a_traceback(file, wrong, place, capsys):
    """Each value of a file in turn, but for those of vocabularies."""
    first = (read_yaml if file.endswith(".yaml") else read_json)(place / file)
    short = {key: value for key, value in first.items() if key != "model"} if "tokenizer.json" in file else first
    shutil.copytree(place / "run", place / "other")
    for *above, last in (where for where in leaves(short) if where):
        changed = copy.deepcopy(first)
        functools.reduce(lambda value, key: value[key], above, changed)[last] = wrong
        (place / file).write_text(json.dumps(changed))
        for command in READERS[file]:
            shutil.rmtree(place / "out", ignore_errors=True)
            status, _, err = execute(capsys, arguments(command, place))
            assert status in (0, 2), (above, last, err)
            assert len([line for line in err.splitlines() if line.startswith("residua: ")]) == (status == 2), err
            assert_harmless(place)


@pytest.mark.parametrize("gone", ["dtype", "splits", "facts", "eos_token_id", "deep"])
def test_a_data_index_that_lacks_a_key_or_is_too_deep_is_refused(gone, place, capsys):
    path = place / "run/data/index.json"
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key != gone}
    path.write_text("[" * 100_000 if gone == "deep" else json.dumps(kept))
    assert_refused(capsys, arguments(EVALUATE, place), place)


def test_a_fingerprint_of_the_wrong_type_counts_as_different_data(place, capsys):
    path = manifest_of(place)
    manifest = json.loads(path.read_text())
    edit(path, settings=manifest["settings"] | {"data.fingerprint": -1})
    assert_refused(capsys, arguments(EVALUATE, place), place)


@pytest.mark.slow
def test_intact_files_open(place, capsys):
    shutil.copytree(place / "run", place / "other")
    for command in dict.fromkeys(command for commands in READERS.values() for command in commands):
        status, _, err = execute(capsys, arguments(command, place))
        assert status == 0, err


def test_the_card_of_data_whose_name_is_not_utf_8_is_written(place, capsys):
    facts = place / "run" / "facts.json"
    edit(facts, data=json.loads(facts.read_text())["data"] | {"source": "te\udcffxt.txt"})
    status, _, err = execute(capsys, arguments(EXPORT, place))
    assert status == 0, err
    assert r"te\\udcffxt.txt" in (place / "out" / "README.md").read_text()


def test_an_exported_model_with_pickled_weights_is_refused(place, capsys):
    (place / "model" / "model.safetensors").unlink()
    (place / "model" / "pytorch_model.bin").write_bytes(zipped_pickle(place.with_name("marker")))
    assert_refused(capsys, arguments(MODEL, place), place)


@pytest.mark.parametrize("changes", [{"connection": {"preset": "mhc"}}, {"model_type": "llama"}], ids=str)
def test_an_exported_model_with_another_architecture_is_refused(changes, place, capsys):
    edit(place / "model" / "config.json", **changes)
    for command in (MODEL, ("evaluate", "model", "--tasks", "none")):
        assert_refused(capsys, arguments(command, place), place)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_an_exported_model_with_other_weights_is_refused(change, place, capsys):
    path = place / "model" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    if change == "missing":
        del tensors[name]
    else:
        tensors["more" if change == "unexpected" else name] = torch.ones(2, 2)
    save_file(tensors, path, {"format": "pt"})
    assert_refused(capsys, arguments(MODEL, place), place)


@pytest.mark.parametrize("size", ["vocab_size", "intermediate_size"])
def test_a_configuration_far_larger_than_the_weights_is_refused_before_it_fills_memory(size, place, capsys):
    edit(place / "model" / "config.json", **{size: 2 * 10**8})
    assert "must hold the weights of the model in config.json, which has " in assert_refused(
        capsys, arguments(MODEL, place), place
    )
    with pytest.raises(InputError, match=r"must hold the weights of the model in config.json, which has "):
        residua.load(place / "model")


PANICS = [
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "aaaa"},
    {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
]


@pytest.mark.parametrize("normalizer", PANICS)
def test_a_tokenizer_at_which_its_library_panics_is_refused(normalizer, place, capsys):
    """A panic of Rust is no Exception of Python."""
    path = place / "model" / "tokenizer.json"
    edit(path, normalizer=normalizer)
    (place / "texts").mkdir()
    (place / "texts" / "one.txt").write_text("a text\n" * 9)
    for command in (
        MODEL,
        ("prepare", "--source", str(place / "texts"), "--tokenizer", str(place / "model"), "--out", str(place / "new")),
    ):
        status, _, err = execute(capsys, arguments(command, place))
        assert status == 2
        assert "tokenizer" in err
        assert "Traceback" not in err


CODE = "import pathlib; pathlib.Path({!r}).write_text('ran')\nclass Forged: ...\n"


@pytest.mark.parametrize("model_type", ["residua", "unheard-of"])
def test_code_in_the_folder_of_an_exported_model_is_not_executed(model_type, place, capsys):
    """A known model type needs no code; an unknown one is refused."""
    model = place / "model"
    (model / "forged.py").write_text(CODE.format(str(place.with_name("marker"))))
    code = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), "forged.Forged")
    edit(model / "config.json", auto_map=code, trust_remote_code=True, model_type=model_type, custom_generate="forged")
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["forged.Forged", "forged.Forged"]})
    (model / "custom_generate").mkdir()
    shutil.copy(model / "forged.py", model / "custom_generate" / "generate.py")
    if model_type == "residua":
        assert execute(capsys, arguments(MODEL, place))[0] == 0
        assert_harmless(place)
    else:
        assert_refused(capsys, arguments(MODEL, place), place)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_attn_implementation", "owner/kernel@main:name"),
        ("attn_implementation", "flash_attention_2"),
        ("_attn_implementation_internal", {"": "owner/kernel"}),
        ("experts_implementation", "sonicmoe"),
    ],
)
def test_attention_that_would_be_downloaded_is_not_used(value, key, place):
    edit(place / "model" / "config.json", **{key: value})
    for opened in (
        lambda: open_model(place / "model", device="cpu").model.config,
        lambda: ResiduaConfig.from_pretrained(place / "model"),
    ):
        with pytest.warns(UserWarning, match=r"attention .*attn_implementation=") as caught:
            config = opened()
        assert config._attn_implementation in ("sdpa", None)
        assert getattr(config, "_experts_implementation", None) != "sonicmoe"
        assert len(caught) == 1


def test_a_foreign_model_that_names_flash_attention_runs_with_the_default(place):
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(place / "model")
    edit(place / "model" / "config.json", _attn_implementation="flash_attention_2")
    with pytest.warns(UserWarning, match=r"attention .*attn_implementation="):
        model = open_model(place / "model", device="cpu").model
    assert type(model) is LlamaForCausalLM
    assert model.config._attn_implementation == "sdpa"
    residua.convert(model, "hc").save_pretrained(place / "converted")
    edit(place / "converted" / "config.json", attn_implementation="flash_attention_2")
    with pytest.warns(UserWarning, match=r"attention .*attn_implementation="):
        again = AutoModelForCausalLM.from_pretrained(place / "converted")
    assert torch.equal(again(torch.arange(5)[None]).logits, model(torch.arange(5)[None]).logits)


def test_an_adapter_on_another_model_is_refused(place, capsys):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/model"}
    (place / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    assert "found an adapter" in assert_refused(capsys, arguments(MODEL, place), place)


def test_a_checkpoint_is_loaded_without_a_pickle(place, monkeypatch):
    """Not even a restricted one."""

    def fail(*arguments, **options):
        pytest.fail("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, fail)
    from residua.lab.experiment import open_run

    model = open_run(place / "run", device="cpu").model
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(open_checkpoint(place / STEP), model, optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))
