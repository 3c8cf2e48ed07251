"""Map released transformers models to schemes. The configuration decides the scheme; parameters are mapped by name.

    scheme = dialects.scheme(model.config)
    stream = scheme.build(dim, 2 * num_layers, norm_eps=model.config.rms_norm_eps)
    dialects.load(stream, model.state_dict(), "hy_v4")
    model.load_state_dict(dialects.export(stream, "hy_v4"), strict=False)

transformers keeps the parameters of a connection in the layers of a model, under its own names. Here a `Stream` holds
them, and the norms before the sublayers. Only names and the layout of a few tensors differ, never values.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from residua.connections import (
    AlternatingUpdates,
    DeepSeekHyperConnections,
    GatedResidual,
    IndependentHyperConnections,
    InklingAttentionResiduals,
    Lambdas,
    Scheme,
    Stream,
)


class Dialect(NamedTuple):
    """The names of the parameters of connections, `collapse` and `expand` in a family of transformers models.

    attention, mlp: names below a layer, for connections of even and of odd index. separate: used in place of
    `attention` if queries, keys and values have a norm each.
    """

    scheme: Callable[[Any], Scheme]
    attention: Mapping[str, str]
    mlp: Mapping[str, str]
    collapse: Mapping[str, str] = {}
    expand: Mapping[str, str] = {}
    separate: Mapping[str, str] = {}


def _below(name: str, parameters: Mapping[str, str]) -> dict[str, str]:
    return {ours: f"{name}.{theirs}" for ours, theirs in parameters.items()}


_NORM_BEFORE_ATTENTION = {"norm.weight": "input_layernorm.weight"}
_NORM_BEFORE_MLP = {"norm.weight": "post_attention_layernorm.weight"}
_HYPER = {"logits.project.weight": "fn", "logits.bias": "base", "logits.scale": "scale"}
_SCALED = {
    "scales.r.weight": "residual_scale",
    "biases.r.weight": "residual_bias",
    "scales.p.weight": "hidden_states_scale",
    "biases.p.weight": "hidden_states_bias",
}
_GATED_READ = {
    "weight": "hc_norm.weight",
    "down.weight": "input_mix_weight_down.weight",
    "up.weight": "input_mix_weight_up.weight",
}
_GATED = {f"gated.{ours}": theirs for ours, theirs in _GATED_READ.items()} | {
    "inject.weight": "block_inject_weight.weight"
}


def _hyper(scheme: Callable[[Any], Scheme], *, head: bool) -> Dialect:
    """Return the dialect of a model with connections attn_hc and ffn_hc; head: whether it reads out with hc_head."""
    collapse = {ours: f"hc_head.hc_{theirs}" for ours, theirs in _HYPER.items()} if head else {}
    attention, mlp = _below("attn_hc", _HYPER), _below("ffn_hc", _HYPER)
    return Dialect(scheme, attention | _NORM_BEFORE_ATTENTION, mlp | _NORM_BEFORE_MLP, collapse)


def _deepseek(config: Any, **options: Any) -> Scheme:
    sizes = {"num_streams": config.hc_mult, "iterations": config.hc_sinkhorn_iters, "gate_eps": config.hc_eps}
    return DeepSeekHyperConnections(**sizes, **options)


def _inkling(config: Any) -> Scheme:
    """Return the scheme of Inkling-2, whose layers with full attention ("hybrid") read q, k and v separately."""
    full = [kind == "hybrid" for kind in config.layer_types]
    every = full.index(True) + 1 if any(full) else 0
    if full != [every > 0 and (layer + 1) % every == 0 for layer in range(len(full))]:
        raise ValueError(
            "layer_types must have full attention ('hybrid') in the last of every k layers, for some k, got "
            f"{config.layer_types}"
        )
    return InklingAttentionResiduals(block_size=2 * config.n_layers_per_attn_res_block, separate_every=every)


def _single_pass(site: str) -> dict[str, str]:
    """Return the names in DeepSeek-V4.1, where a connection's parameters belong directly to the layer."""
    return {ours: f"hc_{site}_{theirs}" for ours, theirs in _HYPER.items()} | {"norm.weight": f"{site}_norm.weight"}


_HY = _hyper(
    lambda config: IndependentHyperConnections(
        num_streams=config.hc_mult,
        magnitude=config.hc_magnitude,
        gate_eps=config.hc_eps,
        weight_std=config.initializer_range,
    ),
    head=True,
)

DIALECTS: dict[str, Dialect] = {
    "deepseek_v4": _hyper(lambda config: _deepseek(config, weight_std=config.initializer_range), head=True),
    "deepseek_v41": Dialect(
        lambda config: _deepseek(config, weight_std=config.initializer_range, pre="previous"),
        _single_pass("attn"),
        _single_pass("ffn"),
    ),
    "glm5_next": _hyper(lambda config: _deepseek(config, head="mean"), head=False),
    "hy_v4": _HY,
    "hy_v4_vl": _HY,
    "doge": Dialect(
        lambda config: Lambdas(r=1.0, r_every="sublayer", z=None, when="write", per_feature=True),
        {"scales.r.weight": "input_residual"} | _NORM_BEFORE_ATTENTION,
        {"scales.r.weight": "post_attention_residual"} | _NORM_BEFORE_MLP,
    ),
    "zaya": Dialect(
        lambda config: Lambdas(r=1.0, r_every="sublayer", z=None, when="write", p=1.0, per_feature=True, bias=True),
        _below("post_attention_residual_scale", _SCALED) | _NORM_BEFORE_ATTENTION,
        _below("post_mlp_residual_scale", _SCALED) | _NORM_BEFORE_MLP,
    ),
    "qwen4_exp": Dialect(
        lambda config: GatedResidual(
            num_streams=config.hc_count, gate_rank=config.hc_lowrank, weight_std=config.initializer_range
        ),
        _below("attn_hyper_connection", _GATED),
        _below("mlp_hyper_connection", _GATED),
        _below("hyper_connection_mixer", {f"read.{ours}": theirs for ours, theirs in _GATED_READ.items()}),
    ),
    "gemma3n": Dialect(
        lambda config: AlternatingUpdates(
            num_streams=config.altup_num_inputs,
            active=config.altup_active_idx,
            laurel_rank=config.laurel_rank,
            weight_std=config.initializer_range,
        ),
        {
            "router.norm.weight": "altup.router_norm.weight",
            "router.project.weight": "altup.modality_router.weight",
            "predict.weight": "altup.prediction_coefs.weight",
            "laurel.left.weight": "laurel.linear_left.weight",
            "laurel.right.weight": "laurel.linear_right.weight",
            "laurel.norm.weight": "laurel.post_laurel_norm.weight",
        }
        | _NORM_BEFORE_ATTENTION,
        {"correct.weight": "altup.correction_coefs.weight", "norm.weight": "pre_feedforward_layernorm.weight"},
        {f"read.project.{i}.weight": f"altup_unembed_projections.{i}.weight" for i in range(16)},
        {f"project.{i}.weight": f"altup_projections.{i}.weight" for i in range(16)},
    ),
    "inkling2": Dialect(
        _inkling,
        {"attend.query": "attention_input.query"} | _NORM_BEFORE_ATTENTION,
        {"attend.query": "mlp_input.query"} | _NORM_BEFORE_MLP,
        {"attend.query": "final_input.query"},
        separate={
            "attend.query": "attention_input.query",
            "norm.weight": "q_input_layernorm.weight",
            "key_norm.weight": "k_input_layernorm.weight",
            "value_norm.weight": "v_input_layernorm.weight",
        },
    ),
}


def scheme(config: Any) -> Scheme:
    """Return the scheme, with its options, for the configuration of a transformers model.

    Raises ValueError for a type of model without a dialect here.
    """
    config = getattr(config, "text_config", config)
    return _dialect(config.model_type).scheme(config)


def names(stream: Stream, model_type: str) -> dict[str, str]:
    """Map every parameter name of `stream` to its name below the trunk of the transformers model.

    stream: built by the scheme of this model, with the norms that the scheme creates by default. Raises ValueError for
    a parameter that the model lacks.
    """
    dialect, parameters, places = _dialect(model_type), stream.state_dict(), {}
    ends = {"expand": dialect.expand, "collapse": dialect.collapse}
    for name in parameters:
        part, _, rest = name.partition(".")
        trunk, theirs = "", ends.get(part, {})
        if part == "connections":
            index, _, rest = rest.partition(".")
            layer, odd = divmod(int(index), 2)
            attention = dialect.separate if f"connections.{index}.key_norm.weight" in parameters else dialect.attention
            trunk, theirs = f"layers.{layer}.", dialect.mlp if odd else attention
        if rest not in theirs:
            raise ValueError(
                f"stream must be built by dialects.scheme(config) of the {model_type} model, got a stream with the "
                f"parameter {name}, which that model lacks"
            )
        places[name] = trunk + theirs[rest]
    return places


def load(stream: Stream, state_dict: Mapping[str, Tensor], model_type: str) -> None:
    """Load the connections of a transformers model, and its norms before sublayers, into `stream`.

    state_dict: of the whole model, or of a part with the layers and the readout; other names are ignored. Raises
    ValueError if a parameter is missing or occurs below more than one trunk, RuntimeError if one has another shape.
    """
    places = names(stream, model_type)
    first = next(iter(places.values()))
    trunks = [name[: -len(first)] for name in state_dict if name == first or name.endswith(f".{first}")]
    if len(trunks) != 1:
        raise ValueError(f"{model_type} must have one parameter {first!r} in the state_dict, got {len(trunks)}")
    missing = [trunks[0] + theirs for theirs in places.values() if trunks[0] + theirs not in state_dict]
    if missing:
        raise ValueError(f"{model_type} must have {', '.join(missing)} in the state_dict, found none")
    parameters, tensors = stream.state_dict(), {}
    for ours, theirs in places.items():
        tensor, shape = state_dict[trunks[0] + theirs], parameters[ours].shape
        if tensor.dim() < len(shape) and tensor.numel() == shape.numel():
            tensor = tensor.reshape(shape)  # `export` flattens some
        if tensor.shape != shape:
            raise RuntimeError(f"{trunks[0]}{theirs} must have the shape {tuple(shape)}, got {tuple(tensor.shape)}")
        tensors[ours] = tensor
    stream.load_state_dict(tensors)


def export(stream: Stream, model_type: str, *, trunk: str = "model.") -> dict[str, Tensor]:
    """Return the parameters of `stream` with the names and in the layout of the transformers model.

    trunk: the prefix of all names, "" for the trunk itself. The tensors share memory with the parameters.
    """
    parameters, tensors = stream.state_dict(), {}
    for ours, theirs in names(stream, model_type).items():
        tensor = parameters[ours]
        # Shapes there and here: (streams * dim,) and (streams, dim); for a single query (dim,) and (1, dim).
        flat = theirs.endswith("hc_norm.weight") or (theirs.endswith("_input.query") and tensor.shape[0] == 1)
        tensors[trunk + theirs] = tensor.flatten() if flat else tensor
    return tensors


def _dialect(model_type: str) -> Dialect:
    dialect = DIALECTS.get(model_type.removesuffix("_text"))
    if dialect is None:
        raise ValueError(f"model_type must be one of {', '.join(DIALECTS)}, got {model_type!r}")
    return dialect
