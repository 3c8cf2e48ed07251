"""Saved and loaded, copied and pickled: the same model to the last bit; what a checkpoint lacks starts as declared."""

import copy
import json
import pickle
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from residua.models import ResiduaConfig, ResiduaForCausalLM, ResiduaModel
from support.tiny_models import prompt, tiny_config, tiny_model
from support.variants import PRESETS

# One for every module that owns parameters of a kind of its own.
KINDS = [*PRESETS, "beta-mlp", "beta-conv-channel", "phi-attention", "phi-flatten-mlp", "k-projected", "authors-token"]


def saved_without(folder, wanted):
    """Keep those parameters of a saved model whose names are wanted; return them, and the names of the others."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    kept = {key: tensor for key, tensor in stored.items() if wanted(key)}
    save_file(kept, file, metadata={"format": "pt"})
    assert len(kept) < len(stored)
    return kept, stored.keys() - kept.keys()


def same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key]), key


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_model_loads_with_the_same_logits(name, tmp_path):
    """The whole model and only its trunk, in evaluation mode."""
    model, ids = tiny_model(name, torch.float32), prompt(2, 5)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        expected = model(ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is ResiduaForCausalLM
        assert not loaded.training
        same(loaded, model)
        # A copy, because the last bit of a product depends on where in memory a mapped file put its numbers.
        assert torch.equal(copy.deepcopy(loaded)(ids).logits, expected)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert type(trunk) is ResiduaModel
    same(trunk, model.model)


def test_tied_weights_are_stored_once(tmp_path):
    model = tiny_model("ddl-ec", torch.float32)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored.keys() == {key for key, _ in model.named_parameters()}
    loaded = ResiduaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    separate = tiny_model("ddl-ec", torch.float32, tie_word_embeddings=False)
    separate.save_pretrained(tmp_path / "separate")
    assert "lm_head.weight" in load_file(tmp_path / "separate" / "model.safetensors")
    same(ResiduaForCausalLM.from_pretrained(tmp_path / "separate"), separate)


def test_a_whole_model_loads_from_a_checkpoint_of_the_trunk(tmp_path):
    """With a tied head no parameter is missing."""
    model = tiny_model("ddl-tc", torch.float32)
    model.model.save_pretrained(tmp_path)
    same(ResiduaForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("name", KINDS)
def test_missing_parameters_start_as_declared(name, tmp_path):
    """If a checkpoint lacks the stream, as that of a plain model, the stream starts as in a new model. All stored
    parameters are loaded unchanged."""
    torch.manual_seed(0)
    fresh = ResiduaForCausalLM(tiny_config(name))
    model = tiny_model(name, torch.float32)
    model.save_pretrained(tmp_path)
    kept, missing = saved_without(tmp_path, lambda key: ".stream." not in key)
    loaded, report = ResiduaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == missing
    expected = dict(fresh.named_parameters())
    for key, parameter in loaded.named_parameters():
        if key in kept:
            assert torch.equal(parameter, kept[key]), f"{key} was stored, and overwritten"
        elif expected[key].unique().numel() <= 2:
            assert torch.equal(parameter, expected[key]), f"{key} does not start as declared"
        else:
            assert parameter.isfinite().all()
            assert 0.3 < parameter.std() / expected[key].std() < 3, key


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in [*PRESETS, "phi-attention"]), ("ddl-ec", torch.float64)],
)
def test_a_model_loads_in_another_dtype(name, dtype, tmp_path):
    model, ids = tiny_model(name, torch.float32), prompt(2, 5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wide = {f"model.stream.{key}" for key in loaded.model.stream.float32_parameters()} if dtype.itemsize < 4 else set()
    for key, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if key in wide else dtype), key
        assert torch.equal(parameter, model.get_parameter(key).to(parameter.dtype)), key
    assert loaded(ids).logits.dtype == dtype
    assert loaded(ids).logits.isfinite().all()
    loaded.save_pretrained(tmp_path / "again")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto"), loaded)


@pytest.mark.parametrize("name", ["ddl-ec", "token-dv3-k2-separate", "phi-attention"])
def test_copies_and_pickles_are_independent_models(name):
    """In each of them, two sublayers still share one compressor."""
    model, ids = tiny_model(name), prompt(2, 5)
    expected = model(ids).logits.detach()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(twin, model)
        assert torch.equal(twin(ids).logits, expected)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
        assert twin.lm_head.weight is twin.model.embed_tokens.weight
        twin(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.sub_(parameter.grad)
        assert torch.equal(model(ids).logits, expected), "training the copy changed the original"
        assert not torch.equal(twin(ids).logits, expected)


def test_a_shared_compressor_stays_shared_after_every_move(tmp_path):
    """The second sublayer of a block must see the compressor that is trained, not a stale one."""
    model = tiny_model("ddl-tc", torch.float32)
    model.save_pretrained(tmp_path)
    moved = {
        "to a dtype": copy.deepcopy(model).double(),
        "loaded": ResiduaForCausalLM.from_pretrained(tmp_path),
        "copied": copy.deepcopy(model),
    }
    assigned = ResiduaForCausalLM(model.config)
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    moved["assigned"] = assigned
    for how, other in moved.items():
        first, second = other.model.stream.connections[:2]
        state = torch.randn(1, 4, 4, 16, dtype=first.norm.weight.dtype)
        with torch.no_grad():
            first.compress.read.zero_()
            first.norm.weight.fill_(1.0)
            second.norm.weight.fill_(1.0)
            assert torch.equal(first.read(state)[0], second.read(state)[0]), how
            assert (second.read(state)[0] == 0).all(), how


@pytest.mark.parametrize("name", ["ddl-cc-ec", "mhc"])
def test_the_configuration_is_saved_and_restored(name, tmp_path):
    """Every option of the scheme is in the file; loading and saving again changes nothing."""
    config = tiny_config(name, qk_norm="pre_rope", rope_ratio=0.5, mup=True)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["connection"] == config.connection
    assert written["connection"].keys() == {"scheme", *(field.name for field in fields(PRESETS[name]))}
    for loaded in (ResiduaConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is ResiduaConfig
        assert loaded.scheme == PRESETS[name]
        assert loaded.to_dict() == config.to_dict() | {"_name_or_path": loaded.to_dict().get("_name_or_path")}
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == written


def test_a_checkpoint_of_another_scheme_is_reported(tmp_path):
    """It is neither silently dropped nor silently used in part."""
    tiny_model("ddl-cc-ec", torch.float32).save_pretrained(tmp_path)
    _, report = ResiduaForCausalLM.from_pretrained(tmp_path, config=tiny_config("ddl-cc"), output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"model.stream.expand.taps"}
    for other in ("ddl", "ddl-ec"):
        with pytest.raises(RuntimeError, match="mismatch"):
            ResiduaForCausalLM.from_pretrained(tmp_path, config=tiny_config(other))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("hc", ".scales"),
        ("mhc", ".alpha"),
        ("ddl-tc", "compress.read"),
        ("ddl-cc", "compress.read"),
        ("ddl-tc", "connections.0.beta.out.weight"),
        ("beta-mlp", "connections.0.beta.out.weight"),
    ],
)
def test_a_module_with_one_missing_parameter_keeps_the_others(name, missing, tmp_path):
    """This also holds for parameters that are initialised element by element."""
    model = tiny_model(name, torch.float32)
    model.save_pretrained(tmp_path)
    kept, names = saved_without(tmp_path, lambda key: not key.endswith(missing))
    loaded, report = ResiduaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == names
    for key, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key)) == (key in kept), key


def test_parameters_that_another_option_adds_leave_those_that_were_stored(tmp_path):
    tiny_model("hc-static-n3", torch.float32).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.connection = "hc:num_streams=3"
    model, report = ResiduaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert any(key.endswith(".scales") for key in report["missing_keys"])
    parameters = dict(model.named_parameters())
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(parameters[key], tensor), key
