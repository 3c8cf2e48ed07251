"""An exported run: what transformers reads back, with this package and without it, and that it trains on."""

import json
from pathlib import Path

import pytest
import torch

from residua.commands.cli import main
from residua.errors import InputError
from residua.lab.experiment import open_run, run
from residua.lab.export import add_code, base_name, export, loading, model_code
from residua.lab.training.config import BaseModelConfig, DataConfig, RunConfig, TrainConfig
from support.converted_models import save_base
from support.full_disk import room
from support.processes import run_python
from support.tiny_runs import options, prepare_texts, run_config

BLOCKED = "import sys; sys.modules['residua'] = None\n"
"""Nobody can import residua from here on."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two layers that has learnt a little."""
    root = tmp_path_factory.mktemp("export")
    model = {"connection": "ddl-ec", "embedding_init_std": 0.2}
    run(run_config(options(prepare_texts(root), model=model, steps=4, lr=1e-2)), root / "run", progress=False)
    return root / "run"


@pytest.fixture(scope="module")
def exported(trained):
    return export(trained, trained.parent / "exported", remote_code=True)


def python(code: str, home: Path, *arguments: object) -> str:
    """What code prints in a process that has a cache of its own for loaded code and nobody at stdin."""
    return run_python(code, *arguments, cwd=home, HF_HOME=str(home), HF_HUB_OFFLINE="1")[0]


def test_the_folder_loads_with_transformers_and_computes_the_same(trained, exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened = open_run(trained, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "Text number 7 tells of ünicode."
    assert tokenizer.encode(text) == opened.tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, opened.model(ids).logits)
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1, "whoever may read one may read all"
    names = {path.name for path in exported.iterdir()}
    assert names >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"}


LOADS = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
folder = sys.argv[1]
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "residua"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = torch.arange(20).unsqueeze(0)
with torch.no_grad():
    logits = model(ids).logits
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
torch.save((logits, written), "found.pt")
assert sys.modules["residua"] is None
"""
TRAINS = """
from transformers import Trainer, TrainingArguments
rows = torch.tensor([tokenizer.encode("Text number 1 tells")] * 8)
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir="trained", max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=4,
    lr_scheduler_type="constant", save_steps=12, report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
again = AutoModelForCausalLM.from_pretrained("trained/checkpoint-12", trust_remote_code=True).eval()
with torch.no_grad():
    same = torch.equal(again(ids).logits, model.eval()(ids).logits)
assert sys.modules["residua"] is None
print(json.dumps({"losses": losses, "same": same}))
"""


@pytest.mark.processes
def test_an_exported_folder_loads_and_generates_without_the_package(trained, exported, tmp_path):
    opened = open_run(trained, device="cpu")
    ids = torch.arange(20).unsqueeze(0)
    python(BLOCKED + LOADS, tmp_path, exported)
    logits, tokens = torch.load(tmp_path / "found.pt")
    with torch.no_grad():
        assert torch.equal(logits, opened.model(ids).logits)
        assert torch.equal(tokens, opened.model.generate(ids, max_new_tokens=6, do_sample=False))


@pytest.mark.nightly
@pytest.mark.processes
def test_an_exported_folder_trains_and_saves_without_the_package(exported, tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    found = json.loads(python(BLOCKED + LOADS + TRAINS, tmp_path, exported).splitlines()[-1])
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0]
    assert found["same"]


def test_the_exported_code_is_that_of_the_package_without_imports_of_it():
    files = model_code()
    assert {"modeling_residua", "configuration_residua", "connections_schemes_deep_delta", "ops_delta"} <= files.keys()
    for name, text in files.items():
        compile(text, name, "exec")
        imports = [line.strip() for line in text.splitlines() if line.strip().startswith(("import ", "from "))]
        assert not any(line.split()[1].startswith("residua") for line in imports), name
        inner = {line.split()[1][1:] for line in imports if line.startswith("from .")}
        assert inner <= files.keys()
    assert not any("training" in name or "data" in name or "authors" in name for name in files)


def test_without_the_code_the_error_names_the_import(trained, tmp_path):
    folder = export(trained, tmp_path / "plain", checkpoint=2)
    assert not list(folder.glob("*.py"))
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert "residua.load(" in (folder / "README.md").read_text()


def test_the_card_agrees_with_the_records(trained, exported):
    card = (exported / "README.md").read_text()
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    facts = json.loads((trained / "facts.json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| validation loss | {last['val_loss']:.4f} nats per token |" in card
    assert "| connection | ddl-ec |" in card
    assert "| trained | 4 of 4 steps |" in card
    assert facts["data"]["fingerprint"] in card
    assert "trust_remote_code=True" in card
    assert "needs residua" not in card, "its code is in the folder"
    assert "[residua](" not in card, "the paper is of Deep Delta Learning, not of this package"
    assert "[Deep Delta Learning](https://arxiv.org/abs/2601.00417)" in card
    assert str(trained.parent) not in card, "no place on the machine that trained it"


def test_the_card_names_the_data_and_the_base_without_paths(tmp_path):
    base = save_base(tmp_path / "models" / "small")
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: []\n---\n# Small\n")
    data = prepare_texts(tmp_path, str(base))
    training = TrainConfig(steps=1, batch_size=1, sequence_length=16, device="cpu", tensorboard=False)
    model = BaseModelConfig(str(base), connection="ihc")
    run(RunConfig(model, DataConfig(path=str(data.folder)), training), tmp_path / "runs" / "ihc", progress=False)
    card = (export(tmp_path / "runs" / "ihc", tmp_path / "exported") / "README.md").read_text()
    source = data.facts["source"]
    front, _, rest = card.removeprefix("---\n").partition("\n---\n")
    assert {'base_model: "small"', "license: apache-2.0"} <= set(front.splitlines())
    assert f"| data: source | {source} |" in rest
    assert f"source: {source}\n" in rest
    assert "stdlib" not in card
    assert "place" not in card
    assert "This model needs residua:" in card
    assert str(tmp_path) not in card


def test_a_base_in_the_cache_of_the_hub_is_named_as_on_the_hub(tmp_path):
    folder = tmp_path / "models--owner--small-1.7B" / "snapshots" / "0123"
    assert base_name(folder) == "owner/small-1.7B"
    assert base_name(tmp_path / "small") == "small"


# Each of `blocks` runs in a process of its own, where transformers is imported and nothing of this package.
FORKS = """
import os, sys, transformers
transformers.AutoModelForCausalLM, transformers.PreTrainedTokenizerFast
for block in blocks:
    if not os.fork():
        exec(block, {})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, block
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_the_code_in_the_card_and_the_output_runs_unchanged_without_questions(trained, tmp_path, capsys):
    """transformers prints its questions; with no one at stdin it continues unanswered. Either line may run first."""
    blocks = []
    for option in ([], ["--remote-code"]):
        folder = tmp_path / f"model{len(blocks)}"
        assert main(["export", str(trained), str(folder), *option]) == 0
        command = capsys.readouterr().out.strip().removeprefix("load it with: ")
        block = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
        *first, model, tokenizer = block.splitlines()
        used = 'print(tokenizer.decode(tokenizer("Text")["input_ids"]), type(model).__name__)'
        call, _, comment = model.removeprefix("model = ").partition("  # ")
        assert comment == "the path of this folder"
        assert command.replace(str(folder), folder.name) == f"{first[0]}; {call}"
        for lines in ([*first, model, tokenizer, used], [*first, tokenizer, model, used]):
            blocks.append("\n".join([BLOCKED if option else "", *lines]))
    assert python(f"blocks = {blocks}\n{FORKS}", tmp_path) == "Text ResiduaForCausalLM\n" * 4


@pytest.mark.parametrize("name", ["ä 😀", "a\"b\\'c", "\udcff\x1b\x9b"], ids=ascii)
def test_the_code_that_loads_a_folder_has_its_name(name):
    _, call = loading(name, remote_code=False)
    assert eval(call.removeprefix("residua.load")) == name
    assert call.isprintable()


def test_a_model_can_be_exported_into_a_cloned_repository(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitattributes").write_text("*.safetensors filter=lfs")
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(trained), "."]) == 0
    assert (tmp_path / ".gitattributes").read_text() == "*.safetensors filter=lfs"
    assert {".git", "config.json", "model.safetensors"} < {path.name for path in tmp_path.iterdir()}
    assert main(["export", str(trained), "."]) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_refused_and_a_failure_leaves_no_folder(trained, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"must be .*, got .*used"):
        export(trained, tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"]
    with pytest.raises(InputError, match="step 3, found those of steps 2, 4"):
        export(trained, tmp_path / "new", checkpoint=3)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    assert export(trained, tmp_path / "empty") == tmp_path / "empty"
    assert not list(tmp_path.glob(".*"))


def test_the_code_of_another_packages_scheme_is_not_copied(tmp_path):
    """Its class belongs to the installed package and is not part of the copied code."""
    connection = {"scheme": "look", "package": "mine", "window": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "residua", "connection": connection}))
    with pytest.raises(InputError, match="got 'look' of the package 'mine'"):
        add_code(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("size", [100, 3000, 20_000])
def test_a_full_disk_gives_a_one_line_error_and_leaves_no_folder(size, trained, tmp_path, capsys):
    """A limit on the size of files fails as a full disk does: first a text, then the tokenizer, then the weights."""
    with room(size):
        assert main(["export", str(trained), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write the model: " in line
    assert "File too large" in line
    assert not list(tmp_path.iterdir())


def test_the_card_of_a_checkpoint_between_evaluations_says_of_which_step_its_losses_are(tmp_path):
    folder = tmp_path / "run"
    config = run_config(options(prepare_texts(tmp_path), steps=6, evaluate_every=4, checkpoint_every=5, log_every=4))
    run(config, folder, progress=False)
    rows = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").open())}
    for step, evaluated, when in ((5, 4, " after step 4"), (6, 6, "")):
        card = (export(folder, tmp_path / f"step-{step}", checkpoint=step) / "README.md").read_text()
        assert f"| tokens seen | {rows[6]['tokens'] * step // 6:,} |" in card
        assert f"| validation loss{when} | {rows[evaluated]['val_loss']:.4f} nats per token |" in card
