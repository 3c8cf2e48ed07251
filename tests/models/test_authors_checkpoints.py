"""Checkpoints made here in the names and layouts of both of the authors' codes: every option, and clear errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from residua.models import ResiduaForCausalLM, load_authors_checkpoint
from residua.models.cache import CACHE
from support.authors_reference import authors_logits
from support.tolerances import assert_close
from support.variants import normal

VOCAB, DIM, LAYERS, HEADS, WIDTH = 32, 12, 2, 2, 6


def made(
    *,
    channels: int = 1,
    compress: str | None = None,
    kernel: int = 4,
    embed_kernel: int | None = None,
    two_layer: int | None = None,
    delta: bool = True,
    current: bool = False,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A configuration and a checkpoint with random parameters, shaped as the classes of their first or current code."""
    out = "o_proj" if current else "c_proj"
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCAB, DIM), "ln_f.weight": (DIM,)}
    inner = HEADS * WIDTH
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        for name in ("c_q", "c_k", "c_v"):
            shapes[f"{h}.attn.{name}.weight"] = (inner, DIM)
        shapes[f"{h}.attn.{out}.weight"] = (DIM, inner)
        if config.get("use_qk_rmsnorm", True):
            shapes |= {f"{h}.attn.q_rms.weight": (WIDTH,), f"{h}.attn.k_rms.weight": (WIDTH,)}
        if config.get("use_output_gate", False):
            shapes |= {f"{h}.attn.g_proj.weight": (inner, DIM), f"{h}.attn.o_norm.weight": (WIDTH,)}
        shapes |= {f"{h}.mlp.c_fc1.weight": (32, DIM), f"{h}.mlp.c_fc2.weight": (32, DIM)}
        shapes[f"{h}.mlp.{out}.weight"] = (DIM, 32)
        shapes |= {f"{h}.ln_1.weight": (DIM,), f"{h}.ln_2.weight": (DIM,)}
        for at in (f"{h}.ddl_attn", f"{h}.ddl_mlp") if delta else ():
            shapes |= {f"{at}.v_proj.weight": (channels, DIM), f"{at}.v_proj.bias": (channels,)}
            if two_layer:
                shapes |= {f"{at}.beta_in.weight": (two_layer, DIM), f"{at}.beta_out.weight": (1, two_layer)}
                shapes[f"{at}.beta_out.bias"] = (1,)
            else:
                shapes |= {f"{at}.beta.weight": (1, DIM), f"{at}.beta.bias": (1,)}
    for at in (*(f"transformer.h.{i}.compress" for i in range(LAYERS)), "readout") if compress else ():
        shapes[f"{at}.read"] = (channels,)
        if compress == "token":
            name, axes = ("weight", (DIM, channels)) if current else ("shortconv.weight", (DIM * channels,))
            shapes[f"{at}.{name}"] = (*axes, kernel)
        else:
            shapes[f"{at}.weight"] = (DIM, kernel)
    if embed_kernel and current:
        shapes["input_embed.weight"] = (DIM, channels, embed_kernel)
    elif embed_kernel:
        shapes["input_embed.conv.weight"] = (DIM * channels, 1, embed_kernel)
    state = {name: 0.5 * normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    for name in state:
        if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight", "_rms.weight", "o_norm.weight")):
            state[name] += 1
    given = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "head_dim": WIDTH,
        "block_size": 32,
    }
    if channels > 1:
        given["ddl_value_channels"] = channels
    return given | config, state


CASES: dict[str, dict[str, Any]] = {
    "baseline": {"delta": False},
    "baseline gate": {"delta": False, "use_output_gate": True, "use_qk_rmsnorm": False},
    "baseline mup": {"delta": False, "mup": True, "hidden_size_base": 48},
    "d_v=1": {},
    "d_v=1 linear": {"ddl_v_sigmoid": False, "rope_ratio": 0.7},
    # Numbers for what is not used: a scale without a sigmoid, a constant that is off, a scale beside a constant.
    "d_v=1 numbers without effect": {"ddl_v_sigmoid": False, "ddl_v_sigmoid_scale": 2.5, "ddl_v_constant_value": 0.7},
    "channel d_v=4 numbers without effect": {
        "channels": 4, "compress": "channel", "ddl_v_constant": True, "ddl_v_sigmoid_scale": 2.5,
    },
    # A whole configuration as their class writes it, with what is off or without effect.
    "d_v=1 whole": {
        "use_k_shift": False, "use_v_shift": False, "using_groupnorm": False, "q_activation": None, "bias": False,
        "dropout": 0.0, "scale_attn_by_inverse_layer_idx": False, "embedding_init_std": 0.02, "ddl_v_sigmoid": True,
        "hidden_init_std_factor": 0.5, "ddl_beta_hidden_size": 128, "ddl_beta_single_linear": True,
        "ddl_v_dim1_constant": False, "ddl_v_dim1_constant_value": 2.0, "kv_cache_slot_size": 128,
        "intermediate_size": 32, "rms_norm_eps": 1e-5, "model_type": "nanogpt",
    },
    "d_v=1 constant": {"ddl_v_dim1_constant": True, "ddl_v_dim1_constant_value": 1.5},
    "d_v=1 two-layer": {"two_layer": 5, "ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5},
    "d_v=1 scale and eps": {"ddl_v_sigmoid_scale": 2.0, "ddl_k_eps": 0.3, "mup": True},
    "d_v=1 gate": {"use_output_gate": True, "use_qk_rmsnorm": False, "rope_ratio": 0.4, "rope_base": 50.0},
    "token d_v=2 k=1": {"channels": 2, "compress": "token", "kernel": 1},
    "token d_v=2 k=3 two-layer": {"channels": 2, "compress": "token", "kernel": 3, "two_layer": 4},
    "token d_v=3 k=2 linear": {"channels": 3, "compress": "token", "kernel": 2, "ddl_v_sigmoid": False},
    "token d_v=5 k=4": {"channels": 5, "compress": "token", "kernel": 4, "ddl_state_read_init": 0.3},
    "token d_v=4 constant": {
        "channels": 4, "compress": "token", "ddl_v_constant": True, "ddl_v_constant_value": 0.7, "two_layer": 3,
    },
    "ec d_v=3 k=2 e=3": {"channels": 3, "compress": "token", "kernel": 2, "embed_kernel": 3},
    "ec d_v=2 k=1 e=4": {"channels": 2, "compress": "token", "kernel": 1, "embed_kernel": 4},
    "ec d_v=5 k=3 e=1": {"channels": 5, "compress": "token", "kernel": 3, "embed_kernel": 1, "mup": True},
    "channel d_v=2": {"channels": 2, "compress": "channel", "kernel": 2},
    "channel d_v=3 linear": {"channels": 3, "compress": "channel", "kernel": 3, "ddl_v_sigmoid": False},
    "channel d_v=5": {"channels": 5, "compress": "channel", "kernel": 5, "two_layer": 6},
    "channel d_v=4 constant": {"channels": 4, "compress": "channel", "ddl_v_constant": True},
    "channel d_v=5 k=2": {"channels": 5, "compress": "channel", "kernel": 2},  # crashes in their code
    "channel ec d_v=2 e=1": {"channels": 2, "compress": "channel", "kernel": 2, "embed_kernel": 1},
    "channel ec d_v=4 e=2 mup": {
        "channels": 4, "compress": "channel", "embed_kernel": 2, "mup": True, "hidden_size_base": 24,
        "ddl_v_sigmoid": False, "ddl_state_dv_shortconv_causal": False,
    },
    "channel ec d_v=3 e=4 gate": {
        "channels": 3, "compress": "channel", "kernel": 3, "embed_kernel": 4,
        "use_output_gate": True, "rope_ratio": 0.0,
    },
    # Read by no file of theirs but those with channel compression.
    "token d_v=2 causal": {"channels": 2, "compress": "token", "ddl_state_dv_shortconv_causal": True},
}  # fmt: skip
CASES |= {f"current {name}": case | {"current": True} for name, case in CASES.items() if "mup" not in case}
CASES |= {
    f"current channel d_v={d_v} k={k} causal": {
        "channels": d_v, "compress": "channel", "kernel": k, "ddl_state_dv_shortconv_causal": True, "current": True,
    }
    for d_v, k in ((2, 1), (2, 2), (3, 2), (5, 3))
}  # fmt: skip
CASES |= {
    "current channel ec causal": CASES["current channel d_v=5 k=3 causal"] | {"embed_kernel": 2, "two_layer": 3},
    "current width": {"parameterization": "widthmuP", "current": True},
    "current width by depth": {
        "channels": 2, "compress": "token", "parameterization": "completeP", "hidden_size_base": 48,
        "num_hidden_layers_base": LAYERS, "current": True,
    },
    "current depth undone": {
        "parameterization": "spectralP", "num_hidden_layers_base": 1, "residual_branch_mult": 1.0, "current": True,
    },
}  # fmt: skip
ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_checkpoint_computes_the_authors_function(case):
    config, state = made(**CASES[case])
    model = load_authors_checkpoint(config, state)
    assert_close(model(ids).logits, authors_logits(config, state, ids))


@torch.no_grad()
@pytest.mark.parametrize("case", ["d_v=1", "ec d_v=3 k=2 e=3", "channel ec d_v=2 e=1", "token d_v=4 constant"])
def test_a_loaded_checkpoint_is_a_model_like_any_other(case, tmp_path):
    """It saves, loads, generates from its cache and trains, and it shares no memory with the given tensors."""
    config, state = made(**CASES[case])
    kept = {name: tensor.clone() for name, tensor in state.items()}
    model = load_authors_checkpoint(config, state)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert_close(ResiduaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)(ids).logits, expected)
    cache, pieces = None, []
    for token in ids.split(1, 1):
        out = model(token, cache=cache, use_cache=True)
        cache = out[CACHE]
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, 1), expected)
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "the unused projections are gone"
    for parameter in model.parameters():
        parameter.sub_(parameter.grad)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype):
    config, state = made(channels=2, compress="token")
    model = load_authors_checkpoint(config, {name: tensor.to(dtype) for name, tensor in state.items()})
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(ids).logits.dtype == dtype


def test_the_head_may_be_listed_if_it_is_tied():
    config, state = made()
    tied = state | {"lm_head.weight": state["transformer.wte.weight"]}
    model = load_authors_checkpoint(config, tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"lm_head\.weight must be tied"):
        load_authors_checkpoint(config, state | {"lm_head.weight": state["transformer.wte.weight"] + 1})


@pytest.mark.parametrize(("current", "starts"), [(False, ("authors", "sqrt_depth")), (True, ("rewrite", "depth"))])
def test_new_parameters_start_as_in_the_code_of_the_checkpoint(current, starts):
    config = load_authors_checkpoint(*made(current=current)).config
    assert (config.scheme.start, config.output_init) == starts


def test_beta_init_of_the_configuration_is_kept_for_new_parameters():
    config, state = made(ddl_beta_init=0.5)
    assert load_authors_checkpoint(config, state).config.scheme.beta_init == 0.5
    config, state = made(ddl_beta_init=-3.0)  # theirs clamps
    assert load_authors_checkpoint(config, state).config.scheme.beta_init == 0.0


def refused(config: dict[str, Any], state: dict[str, Tensor]) -> str:
    with pytest.raises(ValueError) as raised:
        load_authors_checkpoint(config, state)
    message = str(raised.value)
    assert "\n" not in message
    return message


EVERYTHING = {"channels": 3, "compress": "token", "embed_kernel": 2, "two_layer": 4, "use_output_gate": True}


@pytest.mark.parametrize(
    ("name", "current"),
    [
        (name, current)
        for current in (False, True)
        for name in made(**EVERYTHING, current=current)[1]
        if ".h.1." not in name
    ],
)
def test_a_missing_parameter_is_named(name, current):
    """Every parameter is named as in the authors' checkpoint."""
    config, state = made(**EVERYTHING, current=current)
    del state[name]
    if name.startswith("input_embed."):  # this name alone tells the variant
        assert load_authors_checkpoint(config, state).config.scheme.expand == "repeat"
    elif name == "transformer.wte.weight":
        assert name in refused(config, state)
    else:
        assert f"missing: {name}" in refused(config, state)


def test_all_mistakes_are_listed_at_once():
    config, state = made()
    del state["transformer.h.0.ln_1.weight"], state["transformer.h.1.attn.c_v.weight"]
    state["transformer.h.1.ln_3.weight"] = torch.ones(DIM)
    message = refused(config, state)
    for name in ("transformer.h.0.ln_1.weight", "transformer.h.1.attn.c_v.weight", "transformer.h.1.ln_3.weight"):
        assert name in message
    assert message.index("missing") < message.index("unknown")


def test_other_checkpoints_are_refused():
    config, _ = made()
    assert "authors' names" in refused(config, {})
    assert "authors' names" in refused(config, {"model.embed_tokens.weight": torch.ones(4, 4)})
    assert "authors' names" in refused(config, {"transformer.wte.weight": torch.ones(4, 4)})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"use_k_shift": True}, ["use_k_shift", "not supported"]),
        ({"use_v_shift": True}, ["use_v_shift", "not supported"]),
        ({"using_groupnorm": True}, ["using_groupnorm", "not supported"]),
        ({"residual_branch_mult": 0.5}, ["residual_branch_mult", "0.5"]),
        ({"q_activation": "relu"}, ["q_activation", "not supported"]),
        ({"num_hidden_layers": 3}, ["num_hidden_layers", "2", "3"]),
        ({"hidden_size": 16}, ["hidden_size", "12", "16"]),
        ({"vocab_size": 64}, ["vocab_size", "32", "64"]),
        ({"ddl_value_channels": 4}, ["ddl_value_channels", "4"]),
        ({"num_attention_heads": None}, ["num_attention_heads"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "5"]),
        ({"head_dim": 8}, ["c_q.weight"]),
        ({"num_heads": 2}, ["num_heads"]),
        ({"ddl_v_sigmoid_scael": 2.0}, ["ddl_v_sigmoid_scael"]),
        ({"rms_norm_eps": 1e-6}, ["rms_norm_eps", "1e-05"]),
    ],
)
def test_options_that_do_not_fit_are_refused(option, words):
    config, state = made()
    message = refused(config | option, state)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("parameterization", "muP"),
        ("mup", True),
        ("residual_branch_mult", 0.5),
        ("residual_branch_mult", 0.0),
        ("ddl_sequence_reduction_version", 2),
        ("ddl_sequence_reduction_version", True),
        ("v_activation", "silu"),
        ("use_k_shift", True),
        ("using_groupnorm", True),
    ],
)
def test_options_of_the_current_code_that_change_the_function_are_refused(option, value):
    for case in ({"delta": False}, {}, {"channels": 2, "compress": "channel", "kernel": 2}):
        config, state = made(**case, current=True)
        message = refused(config | {option: value}, state)
        assert option in message
        assert str(value) in message


def test_updates_scaled_by_the_depth_are_refused():
    config, state = made(current=True)
    for kind in ("completeP", "spectralp"):
        message = refused(config | {"parameterization": kind, "num_hidden_layers_base": 1}, state)
        assert "num_hidden_layers_base=1" in message
        assert kind in message


def test_attention_in_another_precision_is_refused_if_it_has_an_effect():
    """Only the blocks of the authors' baseline read the option."""
    for delta in (True, False):
        config, state = made(delta=delta, current=True)
        if delta:
            load_authors_checkpoint(config | {"attention_dtype": "bfloat16"}, state)
        else:
            assert "attention_dtype" in refused(config | {"attention_dtype": "bfloat16"}, state)


@pytest.mark.parametrize("embed_kernel", [None, 2])
def test_the_causal_option_of_the_first_code_is_refused_as_ambiguous(embed_kernel):
    config, state = made(channels=4, compress="channel", embed_kernel=embed_kernel)
    assert "ddl_state_dv_shortconv_causal" in refused(config | {"ddl_state_dv_shortconv_causal": True}, state)


def test_the_first_code_has_no_parameterization():
    config, state = made()
    assert "parameterization" in refused(config | {"parameterization": "widthmuP"}, state)
    load_authors_checkpoint(config | {"parameterization": None}, state)


def test_the_number_of_heads_must_be_given():
    config, state = made()
    del config["num_attention_heads"]
    assert "num_attention_heads" in refused(config, state)
