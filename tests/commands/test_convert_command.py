"""`residua convert`: from a folder of transformers to a folder with another residual connection."""

import csv
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from residua.commands.cli import main
from residua.commands.convert import FAMILIES
from residua.lab.opening import read_model
from residua.lab.records.provenance import repository
from support.converted_models import IDS, llama, save_base
from support.family_table import rows
from support.processes import run_python
from support.tolerances import assert_close


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with a tokenizer."""
    return save_base(tmp_path_factory.mktemp("llama"))


def test_a_converted_folder_computes_the_same_logits(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(folder), "--connection", "ihc", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "LlamaForCausalLM with ihc" in printed.out
    assert not printed.err, "no bars of transformers"
    card = (out / "README.md").read_text()
    assert f'base_model: "{folder.name}"' in card
    assert 'residua.load("out")  # the path of this folder' in card
    assert str(tmp_path) not in card
    assert f"pip install 'residua[lab] @ git+{repository()}'" in card
    assert "if you import residua after Transformers" in card
    model, tokenizer = read_model(out)
    assert any(".stream." in name for name in model.state_dict())
    assert tokenizer.decode(tokenizer.encode("text")) == "text"
    assert_close(model(IDS).logits, AutoModelForCausalLM.from_pretrained(folder)(IDS).logits)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--connection", "nothing"], "no preset is called 'nothing'"),
        (["--connection", "mudd"], "several for a sublayer"),
        (["--connection", "ihc", "--start", "warm"], "warm"),
    ],
)
def test_inputs_that_do_not_fit_give_a_one_line_error(arguments, says, folder, tmp_path, capsys):
    assert main(["convert", str(folder), *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_run_must_be_exported_first(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    assert main(["convert", str(tmp_path), "--connection", "ihc", "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} must be a Hugging Face folder, got a run" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_gives_a_one_line_error_with_advice(tmp_path, capsys):
    llama(torch.float32, vocab_size=257).save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "llama"), "--connection", "ihc", "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must have the model's tokenizer, found none that opens (Couldn't instantiate" in line
    assert line.endswith("; copy the files of the tokenizer, such as tokenizer.json, into the folder")


def test_the_weights_can_be_read_by_all_users_who_can_read_the_settings(folder, tmp_path):
    """This also holds if the tokenizer writes a folder for its chat templates."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(folder, source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    assert main(["convert", str(source), "--connection", "ihc", "--out", str(out)]) == 0
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_the_other_commands_accept_a_converted_folder(folder, tmp_path, capsys):
    """The folder generates text and can be explored. A command that needs a text names the missing option."""
    out = tmp_path / "out"
    assert main(["convert", str(folder), "--connection", "hc", "--out", str(out)]) == 0
    capsys.readouterr()
    greedy = ["--prompt", "Text", "--max-new-tokens", "4", "--greedy"]
    for place in (folder, out):
        assert main(["generate", str(place), *greedy]) == 0
    plain, same = capsys.readouterr().out.split("Text")[1:]
    assert plain == same
    page = tmp_path / "page.html"
    assert main(["explore", str(out), "--out", str(page)]) == 2
    assert "give --prompt TEXT" in capsys.readouterr().err
    assert main(["explore", str(out), "--prompt", "Text", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["sublayers"][0]["sublayer"] == "1 input_layernorm"
    assert found["shortcut"] == "mixing"
    before = sorted(out.rglob("*"))
    assert main(["explore", str(out), "--prompt", "Text", "--out", str(page)]) == 0
    assert "input_layernorm" in page.read_text()
    assert sorted(out.rglob("*")) == before
    capsys.readouterr()
    for command in (
        ["evaluate", str(out)],
        ["explore", str(folder), "--prompt", "Text"],
        ["explore", str(out), "--tokens", "3"],
    ):
        assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "residua convert gives it one" in lines[1]


# The first process finds no residua, and the other one comes after it.
OPEN = """
import importlib.abc, os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "residua":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
assert "residua" not in sys.modules
if os.fork():
    assert os.wait()[1] != 0
    assert not os.path.exists(sys.argv[2])
else:
    sys.meta_path.insert(0, Blocked())
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model(torch.arange(9)[None]).logits, sys.argv[2])
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_remote_code_opens_a_converted_model_and_names_residua_if_it_is_missing(folder, tmp_path):
    """In fresh processes. Without residua no model is opened, certainly no plain one."""
    out, found = tmp_path / "out", tmp_path / "logits.pt"
    assert main(["convert", str(folder), "--connection", "hc", "--remote-code", "--out", str(out)]) == 0
    code = next(out.glob("*.py"))
    assert len(code.read_text().splitlines()) < 10, "residua's code is not carried along"
    assert "This model needs residua:" in (out / "README.md").read_text()
    _, said = run_python(OPEN, out, found, cwd=tmp_path, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert "pip install residua" in said
    with torch.no_grad():
        assert torch.equal(torch.load(found), read_model(out)[0](torch.arange(9)[None]).logits)
    read_model(out)[0].save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_an_unusable_tokenizer_is_refused_before_the_model_is_loaded(folder, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": "long"}))
    assert main(["convert", str(base), "--connection", "ihc", "--out", str(tmp_path / "out")]) == 2
    assert "must have the model's tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "status", "says"),
    [
        ("llama", 0, ["llama: converts with equal outputs"]),
        ("bert", 1, ["bert: does not convert: layer 0 (BertLayer) normalises its residual"]),
        ("t5", 0, ["t5: decoder: converts", "t5: encoder: converts"]),
        ("siglip", 0, ["siglip_vision_model: converts"]),
        ("gpt-neox", 0, ["gpt_neox: converts"]),
        ("Qwen3", 0, ["qwen3: converts"]),
        ("musicgen", 2, ["musicgen: was not tried"]),
    ],
)
def test_check_reports_in_one_line_and_by_exit_status_whether_a_model_type_converts(model, status, says, capsys):
    assert main(["convert", "--check", model]) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(says)
    assert all(line.startswith(begin) for line, begin in zip(lines, says))


@pytest.mark.parametrize(
    ("config", "status", "says"),
    [
        ({"model_type": "qwen3"}, 0, "(qwen3): converts with equal outputs"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, 1, "quantised (awq)"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}, 2, "mine has code of its own"),
        ({"model_type": "residua"}, 1, "has its connections already"),
    ],
)
def test_check_reads_the_configuration_of_a_folder(config, status, says, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(tmp_path), "--check"]) == status
    (line,) = capsys.readouterr().out.splitlines()
    assert says in line
    assert line.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--check", "lama"], "did you mean llama?"),
        (
            ["--check", "models/nothing"],
            "models/nothing must be a folder with a model, or a transformers model type",
        ),
        (
            ["--check", "gpt5"],
            "gpt5 must be a folder with a model, or a model type that was tried (see docs/families.md)\n",
        ),
        (
            ["--check", "smollm2"],
            "smollm2 must be a folder with a model, or a model type that was tried (see docs/families.md)\n",
        ),
        (["llama"], "--connection must be given, or --check"),
        (["llama", "--connection", "ihc"], "--out must be given, or --check"),
    ],
)
def test_missing_or_unknown_options_give_a_one_line_error(arguments, says, capsys):
    assert main(["convert", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_record_of_check_matches_the_page():
    with FAMILIES.open(newline="", encoding="utf-8") as file:
        found = {row["family"]: (row["result"], row["reads"]) for row in csv.DictReader(file)}
    page = {family: line.strip("| ").replace("`", "").split(" | ") for family, line in rows().items()}
    assert found == {family: (cells[1], cells[3]) for family, cells in page.items()}
