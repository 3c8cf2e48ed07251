"""The residuals of released models: our connections against the models of transformers.

Tiny configurations and random parameters. The model runs once and records what its sublayers are called with; then its
sublayers run inside our stream, which has loaded the model's parameters. What every module of a sublayer is called
with, the output and all gradients must agree.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from residua import Lambdas, Residual, Stream
from residua.connections import PRESETS
from residua.connections.base import as_inputs
from residua.models import dialects
from support.variants import normal, perturbed

LAYERS, TOKENS = 3, 7
# In the names of parameters that belong to our connections.
OURS = ("hc", "hyper", "_input.query", "input_layernorm", "pre_feedforward_layernorm", "altup", "laurel", "_residual")


class WideIslands(TorchFunctionMode):
    """What a model casts to float32 stays float64 if it is: its islands of precision would cost nine digits here."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and not args[0].dtype.is_floating_point:  # positions, in older versions of transformers
            return args[0].double()
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()}
        return func(*args, **kwargs)


class Call(NamedTuple):
    """What a module was called with."""

    args: tuple
    kwargs: dict[str, Any]


@contextmanager
def recorded(modules: list[nn.Module]) -> Iterator[list[list[Call]]]:
    """Record the calls of every module inside this context."""
    calls: list[list[Call]] = [[] for _ in modules]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, made=made: made.append(Call(args, dict(kwargs))), with_kwargs=True
        )
        for module, made in zip(modules, calls)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


INPUTS = ("hidden_states", "key_hidden_states", "value_hidden_states")


def again(modules: list[nn.Module], calls: list[Call], where: str) -> Callable[..., Tensor]:
    """A sublayer: modules in a row, each called as it was recorded, but with our inputs; these must be the recorded."""

    def run(*inputs: Tensor) -> Tensor:
        for module, (args, kwargs) in zip(modules, calls, strict=True):
            theirs = [kwargs[name] for name in INPUTS if name in kwargs] or args[:1]
            for i, (ours, recorded) in enumerate(zip(inputs, theirs, strict=True)):
                assert_equal(ours, recorded, f"input {i} of {where}, {type(module).__name__}")
            if "hidden_states" in kwargs:
                out = module(*args, **kwargs | dict(zip(INPUTS, inputs)))
            else:
                out = module(*inputs, *args[1:], **kwargs)
            inputs = (out[0] if isinstance(out, tuple) else out,)
        return inputs[0]

    return run


class Case(NamedTuple):
    """A model of transformers: names of its module, configuration and trunk, and a tiny configuration."""

    model_type: str
    config: str
    trunk: str
    options: dict[str, Any]
    norm_in_head: bool = False  # the readout is normalised, and no norm follows


TINY = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SLIDING_HEADS = {f"swa_{name}": size for name, size in HEADS.items()}
RELATIVE = {"sliding_window_size": 4, "d_rel": 4, "rel_extent": 8}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4},
    **{"v_head_dim": 4, "index_head_dim": 4, "index_n_heads": 2, "intermediate_size": 24},
    **ROUTED_EXPERTS,
}
HYV4 = LATENT | {"index_topk": 8, "hc_mult": 3, "hc_magnitude": 1.7, "hc_eps": 1e-2}
# What schemes are built from, beside the options that a model does not have.
ANY = {
    **{"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "hc_magnitude": 2.0, "hc_count": 4, "hc_lowrank": 8},
    **{"altup_num_inputs": 4, "altup_active_idx": 0, "laurel_rank": 8, "initializer_range": 0.02},
    **{"layer_types": ["hybrid_sliding", "hybrid"], "n_layers_per_attn_res_block": 6},
}
CASES = {
    case.model_type: case
    for case in [
        Case(
            "deepseek_v4",
            "DeepseekV4Config",
            "DeepseekV4Model",
            {
                **HEADS,
                **ROUTED_EXPERTS,
                **{"q_lora_rank": 8, "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 4},
                **{"index_n_heads": 2, "index_head_dim": 8, "layer_types": ["sliding_attention"] * LAYERS},
                **{"mlp_layer_types": ["moe"] * LAYERS, "hc_mult": 3, "hc_sinkhorn_iters": 4, "hc_eps": 1e-3},
            },
        ),
        Case(
            "glm5_next",
            "Glm5NextTextConfig",
            "Glm5NextTextModel",
            {
                **LATENT,
                **{"qk_rope_head_dim": 0, "index_topk": 4, "index_kpool": 2, "linear_head_dim": 4},
                **{"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "linear_num_heads": 2},
                "mlp_layer_types": ["dense", "sparse", "sparse"],
            },
        ),
        Case("hy_v4", "HYV4Config", "HYV4Model", HYV4 | {"qk_rope_head_dim": 4}),
        Case("hy_v4_vl", "HYV4VLTextConfig", "HYV4VLTextModel", HYV4 | {"qk_rope_head_dim": 64, "index_head_dim": 64}),
        Case("doge", "DogeConfig", "DogeModel", {"num_attention_heads": 2, "intermediate_size": 24}),
        Case(
            "zaya",
            "ZayaConfig",
            "ZayaModel",
            HEADS | {"moe_intermediate_size": 8, "num_experts": 4, "router_hidden_size": 8},
        ),
        Case(
            "qwen4_exp",
            "Qwen4ExpTextConfig",
            "Qwen4ExpTextModel",
            {
                **HEADS,
                **EXPERTS,
                **{"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2},
                **{"linear_num_value_heads": 2, "shared_expert_intermediate_size": 8, "hc_count": 3, "hc_lowrank": 5},
                **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4},
                "indexer_compress_ratio": 2,
                "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            },
            norm_in_head=True,
        ),
        Case(
            "gemma3n",
            "Gemma3nTextConfig",
            "Gemma3nTextModel",
            {
                **HEADS,
                **{"intermediate_size": 24, "vocab_size_per_layer_input": 11, "hidden_size_per_layer_input": 4},
                **{"sliding_window": 4, "num_kv_shared_layers": 0, "altup_num_inputs": 3, "laurel_rank": 5},
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        Case(
            "inkling2",
            "Inkling2TextConfig",
            "Inkling2TextModel",
            {
                **HEADS,
                **SLIDING_HEADS,
                **RELATIVE,
                **ROUTED_EXPERTS,
                **{"num_hidden_layers": 5, "layer_types": ["hybrid_sliding", "hybrid"] * 2 + ["hybrid_sliding"]},
                "n_layers_per_attn_res_block": 2,
                "rms_norm_eps": 1e-6,  # its reads over depth have no other
            },
        ),
    ]
}


def tiny(case: Case) -> nn.Module:
    """The trunk with random parameters, in float64; skips where transformers does not have it."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, case.config):
        pytest.skip(f"transformers {transformers.__version__} has no model {case.model_type}")
    package = importlib.import_module(f"transformers.models.{case.model_type}")
    torch.manual_seed(0)
    try:
        config = getattr(package, case.config)(**(TINY | case.options))
    except Exception as error:
        if "layer" not in str(error) or Version(transformers.__version__) >= Version("5.23"):
            raise
        pytest.skip(f"transformers {transformers.__version__} has other kinds of layers for {case.model_type}")
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(package, case.trunk)(config).double()
    for module in model.modules():
        if hasattr(module, "use_eda"):  # a router of ZAYA1 hears from the one before it, beside the residual
            module.use_eda = False
    return perturbed(model, scale=0.2).eval()


def sublayers_of(layer: nn.Module) -> list[list[nn.Module]]:
    """The modules of attention and MLP, with what follows before the residual."""
    attention = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
    after = {
        "Inkling2": ("post_attention_convolution", "post_mlp_convolution"),
        **dict.fromkeys(("Gemma", "Beam", "MuseSpark"), ("post_attention_layernorm", "post_feedforward_layernorm")),
    }
    behind = next((names for start, names in after.items() if type(layer).__name__.startswith(start)), (None, None))
    return [
        [module] if name is None else [module, getattr(layer, name)]
        for module, name in zip((attention, layer.mlp), behind)
    ]


def embedded(model: nn.Module, x: Tensor) -> Tensor:
    """What enters the connections: ZAYA1 scales its embeddings and adds to them.

    Inkling normalises them: in transformers 5.17 also those that it is given, in 5.24 only those that it looks up.
    """
    if hasattr(model, "embed_norm"):
        return model.embed_norm(x)
    if not hasattr(model, "input_hidden_states_scale"):
        return x
    return (x + model.input_hidden_states_bias) * model.input_hidden_states_scale


def per_layer_inputs(model: nn.Module, x: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """What a layer adds to the streams behind its connections: Gemma 3n's embeddings of each layer, outside AltUp."""
    if not hasattr(model, "project_per_layer_inputs"):
        return []
    inputs = model.project_per_layer_inputs(x)

    def added(layer: nn.Module, embedding: Tensor) -> Callable[[Tensor], Tensor]:
        def change(streams: Tensor) -> Tensor:
            gate = layer.per_layer_input_gate(layer.altup(streams[..., 0, :]))
            more = layer.post_per_layer_input_norm(layer.per_layer_projection(layer.act_fn(gate) * embedding))
            return torch.cat([streams[..., :1, :], streams[..., 1:, :] + more.unsqueeze(-2)], -2)

        return change

    return [added(layer, inputs[:, :, i]) for i, layer in enumerate(model.layers)]


def run(stream: Stream, x: Tensor, sublayers: list, after_layers: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Our loop over read and write; `after_layers` change the state between two layers."""
    state = stream.expand(x)
    for index, (connection, sublayer) in enumerate(zip(stream.connections, sublayers, strict=True)):
        inputs, carry = connection.read(state)
        state = connection.write(sublayer(*as_inputs(inputs)), carry)
        if index % 2 and after_layers:
            state = after_layers[index // 2](state)
    return stream.collapse(state)


class Pass:
    """One pass of a model of transformers with gradients, and what the modules of its sublayers were called with."""

    def __init__(self, model: nn.Module, parts: list[list[nn.Module]], **inputs: Tensor):
        self.model, self.x = model, normal(2, TOKENS, model.config.hidden_size).requires_grad_()
        self.weights = normal(*self.x.shape, seed=3)
        with WideIslands(), recorded([module for part in parts for module in part]) as calls:
            self.out = model(inputs_embeds=self.x, use_cache=False, **inputs).last_hidden_state
            (self.out * self.weights).sum().backward()
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.gradient_of_x, self.x.grad = self.x.grad, None
        model.zero_grad()
        made = iter(calls)
        self.sublayers = [again(part, [next(made)[0] for _ in part], f"sublayer {i}") for i, part in enumerate(parts)]

    def expect(self, ours: Tensor) -> None:
        """The output, the gradient of the embeddings, and after it those of the parameters may be compared."""
        (ours * self.weights).sum().backward()
        assert_equal(ours, self.out, "output")
        assert_equal(self.x.grad, self.gradient_of_x, "gradient of the embeddings")

    def expect_gradients(self, names: Any) -> None:
        for name, parameter in self.model.named_parameters():
            if name in names and self.gradients[name] is not None:
                assert_equal(parameter.grad, self.gradients[name], name)


def assert_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal to 1e-12, relative to the largest number."""
    difference = (actual - expected).abs().max().item()
    assert difference <= 1e-12 * max(1.0, expected.abs().max().item()), f"{what}: {difference:.2g}"


@pytest.mark.parametrize("model_type", CASES)
def test_a_stream_equals_the_transformers_model(model_type):
    """The whole trunk: inputs of its modules, outputs, and the gradients of every parameter and of the embeddings."""
    case = CASES[model_type]
    model = tiny(case)
    config, dim = model.config, model.config.hidden_size
    theirs = Pass(model, [modules for layer in model.layers for modules in sublayers_of(layer)])
    stream = dialects.scheme(config).build(dim, 2 * config.num_hidden_layers, norm_eps=config.rms_norm_eps).double()
    dialects.load(stream, model.state_dict(), model_type)
    with WideIslands():
        ours = run(stream, embedded(model, theirs.x), theirs.sublayers, per_layer_inputs(model, theirs.x))
        theirs.expect(ours if case.norm_in_head else model.norm(ours))

    renamed = dialects.names(stream, model_type)
    for name, parameter in stream.named_parameters():
        expected = theirs.gradients[renamed[name]].reshape(parameter.shape)
        assert expected.abs().max() > 1e-9, f"{name} has no influence"
        assert_equal(parameter.grad, expected, name)
    others = theirs.gradients.keys() - renamed.values()
    theirs.expect_gradients(others)
    left = [name for name in others if any(key in name for key in OURS) and "correct_output_scale" not in name]
    assert not left, "all parameters of connections were compared"


def through_our_stream(model: nn.Module, stream: Stream, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """The trunk's output for the embeddings x, and that of our stream around its attentions and MLPs, from `start`."""
    parts = [[part] for layer in model.layers for part in (layer.self_attn, layer.mlp)]
    with torch.no_grad(), WideIslands(), recorded([part for (part,) in parts]) as calls:
        theirs = model(inputs_embeds=x, use_cache=False).last_hidden_state
    sublayers = [again(part, made, f"sublayer {i}") for i, (part, made) in enumerate(zip(parts, calls))]
    with torch.no_grad(), WideIslands():
        return theirs, run(stream, start, sublayers, [])


def test_minimax_is_deepnorm_with_the_norm_of_the_next_sublayer():
    """Its alpha is DeepNorm's: 3.5566 for the 160 sublayers of MiniMax-Text-01."""
    count = 2 * LAYERS
    factors = {f"{kind}_alpha_factor": count**0.25 for kind in ("full_attn", "linear_attn", "mlp")}
    options = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8, "num_local_experts": 4}
    layers = {"layer_types": ["full_attention"] * LAYERS}
    model = tiny(Case("minimax", "MiniMaxConfig", "MiniMaxModel", options | layers | factors))
    norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    stream = Lambdas(r=None, z=None, norm="post").build(16, count, norm=[*norms[1:], model.norm].__getitem__)
    x = normal(2, TOKENS, 16)
    with WideIslands():
        start = norms[0](x)
    theirs, ours = through_our_stream(model, stream, x, start)
    assert_equal(ours, theirs, "output")


def test_inkling_convolves_what_its_sublayers_write():
    options = {"intermediate_size": 24, "mlp_layer_types": ["dense"] * LAYERS}
    options |= HEADS | SLIDING_HEADS | RELATIVE | ROUTED_EXPERTS
    model = tiny(Case("inkling", "InklingTextConfig", "InklingTextModel", options))
    norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    stream = Residual(branch="conv").build(16, 2 * LAYERS, norm=norms.__getitem__).double()
    convolutions = [part for layer in model.layers for part in (layer.attn_sconv, layer.mlp_sconv)]
    with torch.no_grad():
        for connection, theirs in zip(stream.connections, convolutions):
            connection.convolution.taps.copy_(theirs.conv1d.weight.squeeze(1).T.flip(0).unsqueeze(1))
            connection.convolution.taps[0] += 1
    x = normal(2, TOKENS, 16)
    with WideIslands():
        start = embedded(model, x)
    theirs, ours = through_our_stream(model, stream, x, start)
    with WideIslands():
        assert_equal(model.norm(ours), theirs, "output")


def expect_scaled(
    model: nn.Module, scales: list[tuple[Tensor, Tensor]], more: Callable | None = None, **inputs: Tensor
) -> None:
    """The model is `lambdas` with these r and p of its sublayers, x <- r x + p h: the output and all gradients.

    scales: made from parameters of the model, whose gradients are compared too. more: for the embeddings, the third
    sublayer of every layer.
    """
    theirs = Pass(model, [part for layer in model.layers for part in sublayers_of(layer)], **inputs)
    sublayers = theirs.sublayers
    norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.pre_feedforward_layernorm)]
    if more is not None:
        with WideIslands():
            third = more(theirs.x)
        for i, sublayer in enumerate(third):
            sublayers.insert(3 * i + 2, sublayer)
            norms.insert(3 * i + 2, nn.Identity())
    per_feature = scales[0][0].numel() > 1
    scheme = Lambdas(r=1.0, r_every="sublayer", z=None, p=1.0, when="write", per_feature=per_feature)
    stream = scheme.build(16, len(sublayers), norm=norms.__getitem__).double()
    with torch.no_grad():
        for connection, pair in zip(stream.connections, scales, strict=True):
            for name, scale in zip("rp", pair):
                connection.scales[name].weight.copy_(scale)
    with WideIslands():
        theirs.expect(model.norm(run(stream, theirs.x, sublayers, [])))
    for connection, pair in zip(stream.connections, scales):
        for name, scale in zip("rp", pair):
            if scale.requires_grad:
                scale.backward(connection.scales[name].weight.grad, retain_graph=True)
    theirs.expect_gradients(theirs.gradients)


@pytest.mark.parametrize("width", [0, 4])
def test_gemma4_scales_the_state_behind_a_layer(width):
    """x <- s (x + h) behind the last sublayer of a layer: that of its own embeddings, if they have a width."""
    options = {
        **HEADS,
        **{"global_head_dim": 8, "intermediate_size": 24, "sliding_window": 4},
        **{"layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        **{"vocab_size_per_layer_input": 11, "hidden_size_per_layer_input": width},
    }
    model = tiny(Case("gemma4", "Gemma4TextConfig", "Gemma4TextModel", options))
    one, scales = torch.ones(1, dtype=torch.float64), []
    for i, layer in enumerate(model.layers):
        assert layer.layer_scalar == 1  # it starts as the plain residual, as `lambdas` with these options
        del layer.layer_scalar
        layer.layer_scalar = nn.Parameter(0.5 + i * one)
        scales += [(one, one)] * (2 if width else 1) + [(layer.layer_scalar, layer.layer_scalar)]
    embeddings = normal(2, TOKENS, LAYERS, width, seed=4)

    def more(x: Tensor) -> list[Callable[[Tensor], Tensor]]:
        inputs = model.project_per_layer_inputs(x, embeddings).unbind(2)

        def sublayer(layer: nn.Module, embedding: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda h: layer.post_per_layer_input_norm(
                layer.per_layer_projection(layer.act_fn(layer.per_layer_input_gate(h)) * embedding)
            )

        return [sublayer(layer, embedding) for layer, embedding in zip(model.layers, inputs)]

    expect_scaled(model, scales, more if width else None, per_layer_inputs=embeddings)


def test_beam_keeps_the_variance_of_a_sum():
    """x <- sqrt(1 - 1 / k) x + h / sqrt(k) with k = 2, 3, ...: the sum of the embedding and k - 1 outputs / sqrt(k)."""
    options = {"intermediate_size": 24, "n_group": 2, "topk_group": 1, "sliding_window": 4}
    options |= HEADS | EXPERTS | {"mlp_layer_types": ["dense", "sparse", "dense"]}
    model = tiny(Case("beam", "BeamConfig", "BeamModel", options))
    squares = [torch.tensor([1 / k], dtype=torch.float64) for k in range(2, 2 * LAYERS + 2)]
    expect_scaled(model, [((1 - p).sqrt(), p.sqrt()) for p in squares])


def test_muse_spark_gates_every_feature():
    """x <- a x + b h, where b = sigmoid(w / temperature) and a = sqrt(max(1 - b^2, 0.001)) for each feature."""
    options = {
        **HEADS,
        **{"intermediate_size": 24, "moe_hidden_size": 8, "moe_intermediate_size": 8, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "sliding_window": 4, "mlp_layer_types": ["dense", "sparse", "dense"]},
        "residual_gate_temperature": 0.3,
    }
    model = tiny(Case("muse_spark", "MuseSparkTextConfig", "MuseSparkTextModel", options))
    gates = [
        getattr(layer, f"post_{sublayer}_residual_gate").gate
        for layer in model.layers
        for sublayer in ("attention", "feedforward")
    ]
    with torch.no_grad():
        gates[0][0] = 5.0  # the bound of a
    shares = [torch.sigmoid(gate / 0.3) for gate in gates]
    expect_scaled(model, [((1 - b.square()).clamp(min=1e-3).sqrt(), b) for b in shares])


@pytest.mark.parametrize("model_type", CASES)
def test_parameters_are_converted_in_both_directions_without_change(model_type):
    """Every tensor of the model's connections returns with its name and shape, equal to the last bit."""
    model = tiny(CASES[model_type])
    scheme = dialects.scheme(model.config)
    stream = scheme.build(model.config.hidden_size, 2 * model.config.num_hidden_layers).double()
    whole = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dialects.load(stream, whole, model_type)
    back = dialects.export(stream, model_type)
    assert len(back) == len(stream.state_dict())
    for name, tensor in back.items():
        assert torch.equal(tensor, whole[name]), name
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.zero_()
    missing, unexpected = model.load_state_dict(dialects.export(stream, model_type, trunk=""), strict=False)
    assert not unexpected
    assert not [name for name in missing if any(key in name for key in OURS) and "correct_output_scale" not in name]


def test_the_page_lists_the_models_with_their_schemes():
    page = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text(encoding="utf-8")
    rows = page.split("| model | `model_type` | preset |")[1].split("\n\n")[0]
    listed = dict(re.findall(r"^\| [^|]* \| `(\w+)` \| `([\w-]+)` \|$", rows, flags=re.MULTILINE))
    assert listed.keys() == CASES.keys() == dialects.DIALECTS.keys() - {"deepseek_v41"}  # in no release yet
    for model_type, preset in listed.items():
        assert type(PRESETS[preset]) is type(dialects.scheme(SimpleNamespace(**ANY, model_type=model_type)))


def test_the_parameters_of_deepseek_v41_have_their_names_and_shapes():
    """Its layers are in no release of transformers yet. One site: tests/connections/schemes/test_mhc_deepseek.py."""
    scheme = dialects.scheme(SimpleNamespace(**ANY, model_type="deepseek_v41_text"))
    stream = perturbed(scheme.build(16, 4))
    expected = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for site in ("attn", "ffn")
        for name, shape in {
            f"hc_{site}_fn": (24, 64),
            f"hc_{site}_base": (24,),
            f"hc_{site}_scale": (3,),
            f"{site}_norm.weight": (16,),
        }.items()
    }
    exported = dialects.export(stream, "deepseek_v41")
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == expected
    other = scheme.build(16, 4)
    dialects.load(other, exported | {"model.embed.weight": torch.zeros(3, 16)}, "deepseek_v41")
    assert all(torch.equal(tensor, stream.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_inputs_that_do_not_fit_give_a_one_line_error():
    class Config:
        model_type = "llama"

    with pytest.raises(ValueError, match=r"model_type must be one of deepseek_v4, .*, got 'llama'"):
        dialects.scheme(Config())
    model = tiny(CASES["hy_v4"])
    state = model.state_dict()
    scheme = dialects.scheme(model.config)
    with pytest.raises(ValueError, match=r"hy_v4 must have .*layers\.3\.attn_hc\.fn.* in the state_dict, found none"):
        dialects.load(scheme.build(16, 2 * LAYERS + 2), state, "hy_v4")
    with pytest.raises(RuntimeError, match=r"^layers\.0\.attn_hc\..* must have the shape \(8,.*\), got \(6,"):
        dialects.load(dialects.IndependentHyperConnections().build(16, 2 * LAYERS), state, "hy_v4")
    turned = {name: x.mT.contiguous() if name.endswith("attn_hc.fn") else x for name, x in state.items()}
    with pytest.raises(RuntimeError, match=r"attn_hc\.fn must have the shape \(6, 48\), got \(48, 6\)$"):
        dialects.load(scheme.build(16, 2 * LAYERS), turned, "hy_v4")
    with pytest.raises(
        ValueError, match=r"must have one parameter 'layers\.0\.attn_hc\.scale' in the state_dict, got 0"
    ):
        dialects.load(scheme.build(16, 2 * LAYERS), {}, "hy_v4")
    with pytest.raises(ValueError, match=r"^stream must .* qwen4_exp"):
        dialects.names(scheme.build(16, 2 * LAYERS), "qwen4_exp")
