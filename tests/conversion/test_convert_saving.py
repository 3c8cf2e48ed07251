"""Converted models are saved, opened by the Auto classes, and refused by a transformers that does not know residua."""

import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    DiffLlamaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Mamba2Config,
    Olmo2Config,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.auto import modeling_auto

import residua
from residua.conversion.probe import outputs
from residua.errors import InputError
from residua.lab.opening import read_model
from support.converted_models import ENCODED, IDS, SOUND, STARTS, WINDOWED, converted, lively, llama, model_of, whisper
from support.tiny_models import tiny_model
from support.tolerances import assert_close

KINDS = ["hc", WINDOWED, "attnres-block"]


@pytest.mark.parametrize("connection", KINDS)
def test_a_saved_model_is_opened_by_the_auto_classes(connection, tmp_path):
    model = converted(connection)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(opened) is type(model)
    assert_close(opened(IDS).logits, model(IDS).logits)
    kept = opened.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert kept.keys() == model.state_dict().keys()
    trunk = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(trunk(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    opened.save_pretrained(tmp_path / "again")
    assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64)(IDS).logits, model(IDS).logits
    )


def test_connections_stay_in_float32_in_a_half_precision_model(tmp_path):
    converted("hc", torch.float32).save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = {name: parameter.dtype for name, parameter in opened.named_parameters()}
    assert {dtype for name, dtype in found.items() if ".stream." in name} == {torch.float32}
    assert {dtype for name, dtype in found.items() if ".stream." not in name} == {torch.bfloat16}


def test_the_configuration_reads_as_that_of_the_original_model(tmp_path):
    """Other engines ask it for the text configuration, and choose their class by the architecture."""
    converted("hc").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == "residua-converted"
    assert settings["architectures"] == ["ResiduaConvertedForCausalLM"]
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    assert isinstance(config, LlamaConfig)
    assert (config.hidden_size, config.vocab_size, config._attn_implementation) == (16, 48, "eager")
    assert config.get_text_config() is config
    assert config.architectures == ["ResiduaConvertedForCausalLM"]
    config.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["architectures"] == settings["architectures"]


def test_an_untrained_model_is_built_from_the_configuration(tmp_path):
    converted("hc").save_pretrained(tmp_path)
    for config in (AutoConfig.from_pretrained(tmp_path), converted("hc").config):
        fresh = AutoModelForCausalLM.from_config(config)
        assert any(".stream." in name for name in fresh.state_dict())
        assert fresh(IDS).logits.isfinite().all()
    assert llama().config.__class__ is LlamaConfig


def test_a_configuration_is_opened_by_its_class(tmp_path):
    """PEFT opens it in this way; it also saves the embedding if the number of rows differs."""
    model = converted("hc", torch.float32)
    kind = type(model.config)
    model.save_pretrained(tmp_path / "converted")
    llama(torch.float32).save_pretrained(tmp_path / "plain")
    for place, expected in (("converted", kind), ("plain", LlamaConfig)):
        config, unused = kind.from_pretrained(tmp_path / place, use_cache=False, other=1, return_unused_kwargs=True)
        assert type(config) is expected
        assert (config.vocab_size, config.use_cache, unused) == (48, False, {"other": 1})
    assert kind.from_pretrained(tmp_path / "converted").residua["connection"] == model.config.residua["connection"]


def test_a_configuration_that_two_models_share_is_changed_for_one():
    first = llama()
    second = type(first)(first.config)
    residua.convert(first, "residual")
    assert type(second.config) is LlamaConfig
    assert not hasattr(second.config, "residua")
    assert type(residua.unconvert(first).config) is LlamaConfig


ANOTHER_PROCESS = """
import pickle, sys
from transformers import AutoModel, AutoModelForCausalLM

try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
with open(sys.argv[2], "rb") as file:
    print(*AutoModel.from_config(pickle.load(file)).state_dict())
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_transformers_without_residua_does_not_open_a_converted_model_and_a_pickled_configuration_builds_one(tmp_path):
    model, config = converted("hc", torch.float32), tmp_path / "config"
    model.save_pretrained(tmp_path / "model")
    config.write_bytes(pickle.dumps(model.config))
    command = [sys.executable, "-c", ANOTHER_PROCESS, tmp_path / "model", config]
    done = subprocess.run(command, capture_output=True, text=True)
    refusal, _, names = done.stdout.rstrip().rpartition("\n")
    assert "residua-converted" in refusal, done.stderr
    assert ".stream." in names, done.stderr


def test_the_class_of_one_model_type_does_not_open_a_converted_model(tmp_path):
    """It would find a configuration of its own type inside, or use its defaults, and omit the connections."""
    model = converted("hc", torch.float32)
    model.save_pretrained(tmp_path)
    for _ in range(2):
        for single in (LlamaForCausalLM, LlamaForSequenceClassification):
            configs = LlamaConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path), model.config
            for options in ({}, {"dtype": torch.float32}, *({"config": config} for config in configs)):
                with pytest.raises(ValueError, match="converted by residua; open it with"):
                    single.from_pretrained(tmp_path, **options)
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)  # and again, written by what opened it


def test_the_class_of_a_single_model_builds_none_from_the_configuration():
    """It would leave the connections out, as in `type(model)(model.config)`."""
    model = converted("hc", torch.float32)
    for build in (type(model), type(model)._from_config, type(model.model)):
        with pytest.raises(ValueError, match=r"^config must .*from_config"):
            build(model.config)
    assert copy.deepcopy(model).name_or_path == model.config.name_or_path
    assert type(model)(residua.unconvert(model, lossy=True).config).config.__class__ is LlamaConfig


def test_further_options_of_load_are_passed_to_the_model(tmp_path):
    converted("hc", torch.float32).save_pretrained(tmp_path)
    options = {"attn_implementation": "eager", "use_cache": False, "attention_dropout": 0.5, "dtype": torch.bfloat16}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    config = opened.config
    assert (config._attn_implementation, config.use_cache, config.attention_dropout) == ("eager", False, 0.5)
    assert opened.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="nothing"):
        AutoModelForCausalLM.from_pretrained(tmp_path, nothing=1)


def test_only_converted_models_are_saved_differently_and_opened_by_the_auto_classes_of_their_family():
    assert PreTrainedModel.save_pretrained.__module__ == "transformers.modeling_utils"
    assert not hasattr(PreTrainedModel.save_pretrained, "__wrapped__")
    config = type(converted("hc").config)
    mappings = [(name, getattr(kind, "_model_mapping", None)) for name, kind in vars(modeling_auto).items()]
    classes = {name: models for name, models in mappings if models is not None and name.startswith("AutoModel")}
    opening, plain = ({name for name, models in classes.items() if c in models} for c in (config, LlamaConfig))
    assert opening == plain > {"AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}


@pytest.mark.slow
def test_a_model_for_another_task_can_load_the_connections(tmp_path):
    model = converted("hc", torch.float32)
    residua.save_connection(model, tmp_path / "connection")
    residua.unconvert(copy.deepcopy(model), lossy=True).save_pretrained(tmp_path / "plain")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain", num_labels=3)
    residua.load_connection(classifier, tmp_path / "connection")
    assert_close(classifier.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    model.save_pretrained(tmp_path / "whole")
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", num_labels=3)
    assert_close(other.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    assert other.score.weight.shape[0] == 3


@pytest.mark.parametrize("halves", [("mhc", None), (None, WINDOWED), ("hc", "attnres")])
def test_a_converted_encoder_and_decoder_are_saved_separately(halves, tmp_path):
    model = whisper()
    places = [(half, name) for half, name in zip(("get_encoder", "get_decoder"), halves) if name is not None]
    for half, connection in places:
        inputs = {"input_features": SOUND} if half == "get_encoder" else ENCODED
        lively(getattr(model, half)(), connection, inputs)
        residua.save_connection(getattr(model, half)(), tmp_path / half)
    plain = copy.deepcopy(model)
    for half, _ in places:
        residua.unconvert(getattr(plain, half)(), lossy=True)
    plain.save_pretrained(tmp_path / "plain")
    opened = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "plain", dtype=torch.float64)
    for half, _ in places:
        residua.load_connection(getattr(opened, half)(), tmp_path / half)
    inputs = {"input_features": SOUND, "decoder_input_ids": STARTS}
    assert torch.equal(opened(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("part", ["model", "encoder", "decoder"])
@pytest.mark.parametrize("given", [False, True])
def test_a_partly_converted_model_is_not_saved_as_a_whole(part, given, tmp_path):
    """Its configuration is a plain one: it would be opened as a plain model, with only a warning."""
    model = llama() if part == "model" else whisper()
    path = part if part == "model" else f"model.{part}"
    lively(model.get_submodule(path), "hc", {"encoder": {"input_features": SOUND}, "decoder": ENCODED}.get(part))
    weights = {"state_dict": model.state_dict()} if given else {}  # as trainers of sharded models do
    with pytest.raises(InputError, match=rf"converted part; .*save_connection\(model\.{path}, FOLDER\)"):
        model.save_pretrained(tmp_path, **weights)
    assert not list(tmp_path.iterdir())
    residua.save_connection(model.get_submodule(path), tmp_path / "connection")
    residua.unconvert(model.get_submodule(path), lossy=True)
    model.save_pretrained(tmp_path / "plain")


def test_the_connections_of_a_trunk_are_those_of_its_language_model(tmp_path):
    model = llama()
    lively(model.model, "hc")
    residua.save_connection(model.model, tmp_path / "connection")
    whole = residua.load_connection(llama(), tmp_path / "connection")
    assert torch.equal(whole(IDS).logits, model(IDS).logits)
    whole.save_pretrained(tmp_path / "whole")
    assert_close(residua.load(tmp_path / "whole", dtype=torch.float64)(IDS).logits, model(IDS).logits)


def test_connection_weights_with_the_configuration_of_a_plain_model_are_refused(tmp_path):
    model = converted("hc", torch.float32)
    model.save_pretrained(tmp_path)
    residua.unconvert(model, lossy=True).config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"unexpected_keys: .*\.stream\."):
        residua.load(tmp_path)


def test_a_model_with_one_converted_part_is_not_saved_as_a_whole(tmp_path):
    model = converted("hc")
    model.side = lively(llama().model, "mhc")
    with pytest.raises(InputError, match=r"save_connection\(model\.side, FOLDER\)"):
        model.save_pretrained(tmp_path)


def test_a_folder_without_the_head_does_not_open_as_a_language_model(tmp_path):
    lively(llama().model, "hc").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"missing_keys: .*lm_head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(("ours", "part"), [(False, ".stream."), (True, ".up_proj.")])
def test_missing_weights_are_an_error(ours, part, tmp_path):
    (tiny_model("hc").float() if ours else converted("hc", torch.float32)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if part in name)
    save_file({name: x.clone() for name, x in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    for opened in (residua.load,) if ours else (residua.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match=gone):
            opened(tmp_path)


@pytest.mark.parametrize("opened", [residua.load, read_model])
def test_the_error_for_damaged_weights_names_the_file(opened, tmp_path):
    converted("hc", torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    _, second = sorted(tmp_path.glob("*.safetensors"))
    whole = second.read_bytes()
    for content in (b"", b"version https://git-lfs.github.com/spec/v1", whole[:100], whole[:-1]):
        second.write_bytes(content)
        with pytest.raises(InputError) as error:
            opened(tmp_path)
        assert str(error.value).startswith(f"{second} must be weights in the format safetensors, got a damaged file (")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("opened", [residua.load, read_model])
def test_the_error_for_weights_of_another_shape_names_them(opened, tmp_path):
    converted("hc", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings["residua"]["base"]["vocab_size"] += 1
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"must hold the weights .*, mismatched_keys: .*lm_head"):
        opened(tmp_path)


LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": {"model_type": "nothing"}}, "model type of transformers"),
        ({"base": {**LLAMA, "quantization_config": {"quant_method": "awq"}}}, "quantization_config"),
        ({"connection": "nothing", "layers": []}, "no preset"),
        ({"layers": None}, "must say how a model was converted"),
    ],
)
def test_a_forged_configuration_is_refused(change, says, tmp_path):
    converted("hc", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings["residua"] |= change
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=says):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("connection", KINDS)
def test_only_the_connections_are_saved_and_loaded(connection, tmp_path):
    model = converted(connection)
    residua.save_connection(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["connection.json", "connection.safetensors"]
    names = load_file(tmp_path / "connection.safetensors").keys()
    assert {name for name in names if ".connections." not in name and "collapse" not in name} == {"base_weights"}
    assert torch.equal(residua.load_connection(llama(), tmp_path)(IDS).logits, model(IDS).logits)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".stream." in name:
                parameter.zero_()
    assert torch.equal(residua.load_connection(other, tmp_path)(IDS).logits, model(IDS).logits)


def test_a_failed_save_leaves_the_old_connections(tmp_path, monkeypatch):
    model = converted("hc")
    residua.save_connection(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with torch.no_grad():
        next(iter(model.model.layers[0].stream.parameters())).add_(1)
    with pytest.raises(OSError, match="no space"):
        residua.save_connection(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kill_between_the_two_files_leaves_no_mixed_folder_that_opens(tmp_path, monkeypatch):
    """The parameters of both have the same names and shapes."""
    residua.save_connection(converted("mhc"), tmp_path)

    def kill(source, target, replace=os.replace):
        if target == tmp_path / "connection.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        residua.save_connection(converted("mhc:iterations=3"), tmp_path)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"must be of one connection, got two; save"):
        residua.load_connection(llama(), tmp_path)


@pytest.mark.parametrize("change", ["whole numbers", "an escape in a name"])
def test_tensors_that_are_not_parameters_are_refused_by_name(change, tmp_path):
    residua.save_connection(converted("hc"), tmp_path)
    tensors = load_file(tmp_path / "connection.safetensors")
    name = min(name for name in tensors if ".connections." in name)
    tensors |= {name: tensors[name].long()} if change == "whole numbers" else {"\x1b[31m": torch.zeros(1)}
    save_file(tensors, tmp_path / "connection.safetensors")
    with pytest.raises(InputError, match=r"must have the parameters .* '[ -~]*' differs; "):
        residua.load_connection(llama(), tmp_path)


@pytest.mark.parametrize("name", ["", "none", "./none", "../none/there", "a/b/c", "none/", "/none/there"])
def test_the_error_for_a_missing_folder_says_that_it_is_missing(name):
    with pytest.raises(InputError, match=rf"^{re.escape(name)} must be a folder, or OWNER/NAME"):
        residua.load(name)


def test_connections_of_another_model_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"connection\.json"):
        residua.load_connection(llama(), tmp_path)
    with pytest.raises(InputError, match="must be converted, got"):
        residua.save_connection(llama(), tmp_path)
    residua.save_connection(converted("hc"), tmp_path)
    with pytest.raises(InputError, match="its connection differs"):
        residua.load_connection(converted("mhc"), tmp_path)
    deeper = llama(num_hidden_layers=4)
    with pytest.raises(InputError, match=r"its layers differ .* 3 layers, the model has 4"):
        residua.load_connection(deeper, tmp_path)
    with pytest.raises(InputError, match=r"its layers differ .*input_layernorm"):
        residua.load_connection(model_of(Olmo2Config, intermediate_size=24), tmp_path)
    wider = llama(hidden_size=32)
    with pytest.raises(InputError, match=r"the weights of .* differ"):
        residua.load_connection(wider, tmp_path)
    assert not any(".stream." in name for name in wider.state_dict())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # the same model in another precision
        residua.load_connection(llama(dtype), tmp_path)
    learnt = llama()
    with torch.no_grad():
        for weight in learnt.parameters():
            weight += 0.05 * weight.std(correction=0) * torch.randn_like(weight)
    with pytest.raises(InputError, match=r"the weights of .* differ"):
        residua.load_connection(learnt, tmp_path)
    file = tmp_path / "connection.safetensors"
    tensors = load_file(file)
    sample = tensors.pop("base_weights")
    for forged in ({}, {"base_weights": sample[:-1].clone()}):
        save_file(tensors | forged, file)
        with pytest.raises(InputError, match=r"the weights of .* differ"):
            residua.load_connection(llama(), tmp_path)


@pytest.mark.parametrize("place", [0, -1])
def test_a_change_of_one_weight_is_noticed(place, tmp_path):
    residua.save_connection(converted("hc"), tmp_path)
    other = llama()
    with torch.no_grad():
        list(other.model.parameters())[place].mul_(1.05)
    with pytest.raises(InputError, match=r"the weights of .* differ"):
        residua.load_connection(other, tmp_path)


@pytest.mark.parametrize("plain", [True, False])
def test_connections_without_a_parameter_are_refused(plain, tmp_path):
    residua.save_connection(converted("hc", torch.float32), tmp_path)
    file = tmp_path / "connection.safetensors"
    weights = load_file(file)
    name = min(name for name in weights if ".connections." in name)
    save_file({key: x for key, x in weights.items() if key != name}, file, {"format": "pt"})
    model = llama(torch.float32) if plain else converted("hc", torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.mul_(1.5 if ".stream." in key else 1)
    before = model(IDS).logits
    with pytest.raises(InputError, match=f"must have the parameters .*{name}"):
        residua.load_connection(model, tmp_path)
    assert torch.equal(model(IDS).logits, before)


def test_a_description_whose_flag_is_not_a_bool_is_refused(tmp_path):
    """The text "false" would otherwise silently count as true."""
    residua.save_connection(converted("hc"), tmp_path)
    file = tmp_path / "connection.json"
    description = json.loads(file.read_text())
    description["layers"][0][0]["normed"] = "false"
    file.write_text(json.dumps(description))
    with pytest.raises(InputError, match="normed must be true or false"):
        residua.load_connection(llama(), tmp_path)


def test_the_connections_of_a_model_with_adapters_are_not_saved(tmp_path):
    """No model could load them: adapters rename the weights that the connections belong to."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = converted("ihc")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", r=2))
    for other in (wrapped, wrapped.base_model.model):
        with pytest.raises(InputError, match="the model must be a transformers model without adapters, got"):
            residua.save_connection(other, tmp_path / "connections")
    assert not (tmp_path / "connections").exists()
    residua.save_connection(wrapped.merge_and_unload(), tmp_path / "connections")


def test_a_scheme_that_reads_in_float32_works_in_a_model_of_half_precision(tmp_path):
    model = residua.convert(llama(torch.bfloat16), "edelta:context=token", start="fresh")
    model(IDS, labels=IDS).loss.backward()
    single = residua.convert(llama(torch.float32), "edelta:context=token", start="fresh")
    single.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert opened(IDS).logits.dtype == torch.bfloat16


def test_a_width_that_a_scheme_cannot_divide_is_refused():
    model = llama()
    before = model(IDS).logits
    with pytest.raises(InputError, match="num_fractions"):
        residua.convert(model, "frac:num_fractions=3")
    assert torch.equal(model(IDS).logits, before)


PIXELS = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


def image_classifier():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))


@pytest.mark.parametrize(
    ("make", "inputs", "auto"),
    [
        (lambda: LlamaForSequenceClassification(llama(num_labels=5).config), None, AutoModelForSequenceClassification),
        (lambda: LlamaForTokenClassification(llama(num_labels=5).config), None, AutoModelForTokenClassification),
        (image_classifier, PIXELS, AutoModelForImageClassification),
        (lambda: ViTModel(image_classifier().config), PIXELS, AutoModel),
    ],
)
def test_a_model_is_opened_with_its_head(make, inputs, auto, tmp_path):
    torch.manual_seed(0)
    model = lively(make().double(), "hc", inputs).eval()
    inputs = inputs or {"input_ids": IDS}
    model.save_pretrained(tmp_path)
    assert model.config.architectures == [type(model).__name__]
    for opened in (residua.load(tmp_path, dtype=torch.float64), auto.from_pretrained(tmp_path, dtype=torch.float64)):
        assert type(opened) is type(model)
        for found, expected in zip(outputs(opened, inputs), outputs(model, inputs), strict=True):
            assert_close(found, expected)
        assert opened.state_dict().keys() == model.state_dict().keys()
    opened.save_pretrained(tmp_path / "again")
    assert type(residua.load(tmp_path / "again")) is type(model)


def test_a_folder_that_names_no_head_is_opened_with_its_head(tmp_path):
    """Earlier versions wrote folders that name no head."""
    torch.manual_seed(0)
    model = lively(LlamaForSequenceClassification(llama(num_labels=5).config), "hc").eval()
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == ["ResiduaConvertedForSequenceClassification"]
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({name: x.clone() for name, x in weights.items() if name != "score.weight"}, file, {"format": "pt"})
    for opened in (residua.load, AutoModelForSequenceClassification.from_pretrained):
        with pytest.raises(InputError, match=r"missing_keys: .*score\.weight"):
            opened(tmp_path)
    save_file(weights, file, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": ["ResiduaConvertedModel"]}))
    with pytest.raises(InputError, match=r"score\.weight.*AutoModelForSequenceClassification"):
        residua.load(tmp_path)
    assert_close(AutoModelForSequenceClassification.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_code_that_a_plain_configuration_names_is_left_out(tmp_path):
    """The folder of Phi names code although transformers has its model type."""
    model = llama()
    model.config.auto_map = {"AutoConfig": "other.Config", "AutoModelForCausalLM": "other.ForCausalLM"}
    lively(model, "hc").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    assert "auto_map" not in settings["residua"]["base"]
    settings["residua"]["base"]["auto_map"] = model.config.auto_map  # as an earlier version wrote
    file.write_text(json.dumps(settings))
    opened = residua.load(tmp_path, dtype=torch.float64)
    assert_close(opened(IDS).logits, model(IDS).logits)
    assert opened.config.auto_map == {}
    assert residua.unconvert(model, lossy=True).config.auto_map == {
        "AutoConfig": "other.Config",
        "AutoModelForCausalLM": "other.ForCausalLM",
    }


def pruned(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 2


def deepened(model):
    model.model.layers.insert(1, copy.deepcopy(model.model.layers[1]))


def shorter(model):
    model.config.num_hidden_layers = 2


def exchanged(model):
    first, second, third, *others = model.model.layers
    model.model.layers = torch.nn.ModuleList([first, third, second, *others])


def another_head(model):
    model.lm_head = torch.nn.Linear(16, 50, bias=False)


@pytest.mark.parametrize(
    ("change", "connection", "says"),
    [
        (pruned, "hc", "3 layers, the model has 2"),
        (deepened, "hc", "3 layers, the model has 4"),
        (shorter, "hc", "3 layers, the model has 2"),
        (exchanged, "denseformer", "average"),
        (another_head, "hc", r"lm_head\.weight"),
    ],
)
def test_a_model_that_would_not_open_is_not_saved(change, connection, says, tmp_path):
    model = converted(connection, torch.float32)
    change(model)
    generator = torch.get_rng_state()
    with pytest.raises(InputError, match=says):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.get_rng_state(), generator)


def test_layers_out_of_order_are_not_saved_if_their_depth_matters(tmp_path):
    """The scale of a layer of siamese depends on its depth and is not a weight."""
    model = converted("siamese", torch.float32, num_hidden_layers=4)
    exchanged(model)
    with pytest.raises(InputError, match=r"connections\.0\.scale"):
        model.save_pretrained(tmp_path)


def test_the_encoder_of_an_encoder_decoder_is_not_saved_as_a_model(tmp_path):
    half = lively(whisper().get_encoder(), "hc", {"input_features": SOUND})
    with pytest.raises(InputError, match=r"WhisperEncoder .* residua\.save_connection"):
        half.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_encoder_without_its_pooler_is_opened_as_it_was_made(tmp_path):
    model = lively(ViTModel(image_classifier().config, add_pooling_layer=False).double(), "hc", PIXELS).eval()
    model.save_pretrained(tmp_path)
    opened = residua.load(tmp_path, dtype=torch.float64, add_pooling_layer=False)
    assert_close(opened(**PIXELS).last_hidden_state, model(**PIXELS).last_hidden_state)


def test_a_subclass_of_a_model_is_opened_as_its_base_class(tmp_path):
    class Mine(LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    model = lively(Mine(llama().config).double(), "hc").eval()
    model.save_pretrained(tmp_path)
    assert_close(residua.load(tmp_path, dtype=torch.float64)(IDS).logits, model(IDS).logits)


def test_a_layer_that_makes_parameters_on_the_cpu_is_opened(tmp_path):
    model = lively(model_of(DiffLlamaConfig, num_key_value_heads=2, intermediate_size=24), "hc").eval()
    model.save_pretrained(tmp_path)
    assert_close(residua.load(tmp_path, dtype=torch.float64)(IDS).logits, model(IDS).logits)


def test_infinity_in_a_configuration_is_saved_and_restored(tmp_path):
    sizes = {"head_dim": 8, "num_heads": 4, "state_size": 4, "n_groups": 1, "chunk_size": 4}
    model = lively(model_of(Mamba2Config, num_attention_heads=None, **sizes), "hc")
    model.save_pretrained(tmp_path)
    config = type(model.config).from_dict(json.loads(model.config.to_json_string()))
    limits = [tuple(x.time_step_limit) for x in (model.config, config, residua.load(tmp_path).config)]
    assert limits == 3 * [(0.0, math.inf)]


def test_the_folder_of_a_scheme_with_several_inputs_is_refused(tmp_path):
    """torchtitan trains such schemes, and once wrote them for transformers."""
    converted("hc", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings["residua"]["connection"] = residua.connections.describe(residua.resolve("mudd"))
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match="several for a sublayer"):
        residua.load(tmp_path)
