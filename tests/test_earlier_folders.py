"""Folders that were written before options were renamed still open, and records keep their keys.

`earlier` was made by commit 666e4dbe with `ddl:init=authors` (a run of six steps and its export), and with
`edelta-stream:start=random,expand=copies,...` and `mudd:expand_last=1,...` (converted models and their connections).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import residua
from residua.commands import cli
from residua.connections import names
from residua.lab.experiment import open_run
from residua.lab.study.definition import Entry
from residua.lab.study.plan import PlannedRun
from residua.lab.training.config import load_config

EARLIER = Path(__file__).with_name("earlier")
LOGITS = json.loads((EARLIER / "logits.json").read_text(encoding="utf-8"))
TOKENS = torch.arange(12).reshape(1, 12)


@pytest.mark.parametrize("name", LOGITS)
def test_a_model_of_an_earlier_version_computes_the_same_logits(name):
    logits = residua.load(EARLIER / name)(TOKENS).logits.flatten()
    torch.testing.assert_close(logits[-8:], torch.tensor(LOGITS[name]))


@pytest.mark.parametrize("name", ["edelta-stream", "mudd"])
def test_a_connection_of_an_earlier_version_opens_on_its_model(name):
    expected = residua.load(EARLIER / name)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=32, **sizes))
    base.load_state_dict(expected.state_dict(), strict=False)
    logits = residua.load_connection(base.eval(), EARLIER / f"{name}-connection")(TOKENS).logits
    torch.testing.assert_close(logits, expected(TOKENS).logits)


def test_a_run_of_an_earlier_version_opens_and_resumes(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(EARLIER / "run", run)
    assert open_run(run).config.model.connection == "ddl:start=authors"
    assert cli.main(["train", "--run", str(run), "--resume", "--train.steps", "8"]) == 0
    assert "ddl:start=authors" in (run / "config.yaml").read_text(encoding="utf-8")
    assert cli.main(["compare", str(run), "--json"]) == 0
    assert "init=" not in capsys.readouterr().out


def test_a_run_has_the_key_that_earlier_versions_gave_its_record():
    for connection in ("ddl:init=authors", "ddl:start=authors"):
        config = load_config("tiny", {"model.connection": connection, "train.steps": 100})
        assert (
            PlannedRun("report", "size", "ddl", {}, config).key == "size ddl report seed=0 steps=100 518765e7326b03c8"
        )
        assert Entry("ddl", connection).connection == config.model.connection


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("ddl:init=rewrite,beta_init=0.5", "ddl:start=rewrite,beta_init=0.5"),
        ("edelta-stream:start=random", "edelta-stream:start=published"),
        ("mhc:expand=copies,order=columns", "mhc:expand=repeat,order=columns"),
        ("mudd:expand_last=2", "mudd:readout_multiple=2"),
        ("residual:gate=token", "residual:write_gate=true"),
        ("residual+tc:gate=none", "residual+tc:write_gate=false"),
        ("mudd:write_gates=true,layers=2", "mudd:write_gate=true,layers=2"),
        ("delta-attnres:gate=scalar,heads=2", "delta-attnres:read_gate=scalar,heads=2"),
        ("attnres:scale=sum", "attnres:reduction=sum"),
        ("mhar:scale=sum", "mhar:reduction=sum"),
        ("mhc:alpha_init=0.10,order=columns", "mhc:scale_init=0.10,order=columns"),
        ("jpmhc:steps=3", "jpmhc:iterations=3"),
        ("gated-residual:rank=16", "gated-residual:gate_rank=16"),
        ("lambdas:per_channel=true,p=0.1", "lambdas:per_feature=true,p=0.1"),
        ("edelta:beta_init=0.7", "edelta:cayley_init=0.7"),
        ("ddl:beta_init=0.7", "ddl:beta_init=0.7"),
        ("altup:ends=copies", "altup:expand=repeat"),
        ("ddl-v:phi_k_rank=3", "ddl-v:phi_k_hidden=3"),
        ("hc:expand=lss", "hc:expand=lss"),
        ("lambdas+tc", "lambdas+tc"),
    ],
)
def test_old_and_new_spellings_are_equivalent(before, now):
    assert residua.resolve(before) == residua.resolve(now)
    assert names.today(before) == now
    assert names.recorded(now) == names.recorded(before) == before


def test_an_option_under_both_of_its_names_is_refused(capsys):
    connection = "ddl:init=authors,start=rewrite"
    assert cli.main(["train", "--config", "tiny", "--model.connection", connection, "--print-config"]) == 2
    assert "init is called start now" in capsys.readouterr().err
    with pytest.raises(ValueError, match="init is called start now"):
        residua.resolve(connection)
