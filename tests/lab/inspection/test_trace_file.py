import pytest
import torch
from safetensors.torch import save_file

from residua.errors import InputError
from residua.lab.inspection import Trace, trace
from support.tiny_models import prompt, tiny_model
from support.variants import PRESETS

TEXT = ["</script><img onerror=alert(1)>", "ü", "\n", "", "\u2028", "\ufffd", '"', "end"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_trace_is_restored_from_its_file(name, tmp_path):
    found = trace(tiny_model(name), prompt(8), text=TEXT)
    path = found.save(tmp_path / "there" / "trace.safetensors")
    again = Trace.load(path)
    assert (again.facts, again.tokens) == (found.facts, TEXT)
    assert again.values.keys() == found.values.keys()
    for key, value in found.values.items():
        assert again.values[key].dtype == value.dtype
        assert torch.equal(again.values[key].nan_to_num(7), value.nan_to_num(7))
    assert [file.name for file in path.parent.iterdir()] == ["trace.safetensors"]


def test_a_trace_file_names_run_and_checkpoint_and_replaces_an_earlier_file(tmp_path):
    recorded = trace(tiny_model("ddl-cc"), prompt(8), text=TEXT, facts={"run": "mine", "checkpoint": 3})
    path = recorded.save(tmp_path / "analysis" / "trace-step-3.safetensors")
    assert (Trace.load(path).facts["run"], Trace.load(path).facts["checkpoint"]) == ("mine", 3)
    trace(tiny_model("residual"), [1, 2]).save(path)
    assert Trace.load(path).facts["preset"] == "residual"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"residua_trace": "2"}, "must be a trace of version 1, got version 2; residua explore RUN writes one"),
        (None, "must be a trace of version 1, got other tensors"),
    ],
)
def test_a_trace_file_of_another_version_or_with_other_tensors_is_refused_in_one_line(tmp_path, metadata, message):
    path = tmp_path / "trace.safetensors"
    save_file({"beta": torch.ones(2)}, path, metadata)
    with pytest.raises(InputError) as error:
        Trace.load(path)
    assert str(error.value).startswith(f"{path} must be")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_trace_file_is_refused(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(InputError, match=r"must be a trace, got .*; residua explore"):
            Trace.load(path)


FITTING = [("dim", 7), ("loss", 7)]


@pytest.mark.parametrize(
    "name", ["run", "gates", "sampled", "scheme", "sublayers", "left_out", "loss", "causal", "dim"]
)
@pytest.mark.parametrize("wrong", ["left out", 7, [None], {"": 1}])
def test_a_missing_or_wrong_fact_is_refused_by_name(name, wrong, tmp_path):
    recorded = trace(tiny_model("ddl"), prompt(8), text=TEXT)
    recorded.facts.pop(name)
    if wrong != "left out":
        recorded.facts[name] = wrong if (name, wrong) not in FITTING else "seven"
    with pytest.raises(InputError, match=rf"facts\.{name} must be"):
        Trace.load(recorded.save(tmp_path / "trace.safetensors"))


@pytest.mark.parametrize("metadata", [{"tokens": "[1]"}, {"facts": "{", "tokens": '["a"]'}, {}])
def test_a_trace_without_facts_or_tokens_is_refused(metadata, tmp_path):
    save_file({"beta": torch.ones(2)}, path := tmp_path / "trace.safetensors", {"residua_trace": "1", **metadata})
    with pytest.raises(InputError, match=r"(facts|tokens) must be"):
        Trace.load(path)


def without(name):
    return lambda recorded: recorded.values.pop(name)


def with_value(name, value):
    return lambda recorded: recorded.values.update({name: value})


def with_fact(name, value):
    return lambda recorded: recorded.facts.update({name: value})


@pytest.mark.parametrize(
    ("preset", "change", "words"),
    [
        ("ddl", without("beta"), "values must be those of beta too"),
        ("ddl", without("state_norm"), "values must be those of state_norm too"),
        ("ddl", with_value("beta", torch.ones(3)), "beta must be .*, T\\), got "),
        ("ddl", with_value("beta", torch.ones(4, 0)), "beta must be"),
        ("ddl", with_value("beta", torch.ones(4, 8, dtype=torch.int64)), "beta must be torch.float32"),
        ("ddl", with_value("alignment", torch.ones(2, 2)), "alignment must be"),
        ("ddl", with_value("alignment", torch.ones(())), "alignment must be"),
        ("hc", with_value("h_res", torch.ones(4, 8, 4, 7)), "h_res must be"),
        ("attnres", with_fact("sources", ["one"]), "depth_mean must be"),
        ("ddl", with_fact("sublayers", []), r"facts\.sublayers must be"),
        ("ddl", with_fact("sublayers", ["1", "2", "3"]), "must be"),
        ("ddl", with_fact("gates", {"beta": {"range": "ab", "start": None}}), r"facts\.gates must be"),
        ("ddl", with_fact("gates", {"beta": {"range": [1], "start": None}}), r"facts\.gates must be"),
        ("ddl", with_fact("gates", {"beta": {"range": None, "start": "x"}}), r"facts\.gates must be"),
        ("ddl", with_fact("left_out", {"beta": [99]}), r"facts\.left_out must be"),
        ("ddl", with_fact("left_out", {"beta": ["a"]}), r"facts\.left_out must be"),
        ("ddl", with_fact("read", ["a"]), r"facts\.read must be"),
    ],
)
def test_arrays_that_do_not_fit_the_facts_are_refused(preset, change, words, tmp_path):
    recorded = trace(tiny_model(preset), prompt(8), text=TEXT)
    change(recorded)
    with pytest.raises(InputError, match=words):
        Trace.load(recorded.save(tmp_path / "trace.safetensors"))
