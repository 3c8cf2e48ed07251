"""The schemes that the shared tests run on: every preset, found by itself, and variants that use every other option."""

from typing import Any

import pytest
import torch

from residua import (
    AlternatingUpdates,
    AttentionResiduals,
    DeepDelta,
    DeepSeekHyperConnections,
    DeltaAttentionResiduals,
    DenseFormer,
    EDelta,
    EDeltaStream,
    FracConnections,
    GatedDelta,
    GatedOrthogonal,
    GatedResidual,
    HyperConnections,
    IndependentHyperConnections,
    InklingAttentionResiduals,
    JacobianHyperConnections,
    KroneckerHyperConnections,
    Lambdas,
    ManifoldHyperConnections,
    MultiwayDynamicDense,
    PooledHouseholder,
    Residual,
    Scheme,
    SiameseNorm,
    WideResidual,
)
from residua.connections import PRESETS
from residua.connections.memory import window_of
from residua.testing import bare_sublayers, normal, perturbed

__all__ = [
    "ALL",
    "DEEP_DELTA",
    "KERNELS",
    "KINDS",
    "LOOKING_BACK",
    "NON_CAUSAL",
    "VARIANTS",
    "bare_sublayers",
    "every",
    "normal",
    "perturbed",
]

VARIANTS: dict[str, Scheme] = {
    # The plain residual behind DDL's embedding convolution, a control.
    "residual-ec4": Residual(expand="conv"),
    "residual-ec1": Residual(expand="conv", expand_kernel=1),
    # The same with a gate for each token on what is written.
    "residual-gated": Residual(gate="token"),
    "residual-gated-tc4-ec2": Residual(gate="token", compress="token", expand="conv", expand_kernel=2),
    # The same that reads through DDL's token compression.
    "residual-tc4": Residual(compress="token"),
    "residual-tc3-ec2": Residual(
        compress="token", compress_kernel=3, compress_sharing="separate", expand="conv", expand_kernel=2
    ),
    # The same that convolves what sublayers write, and other schemes of one row that do.
    "residual-branch4": Residual(branch="conv"),
    "residual-gated-branch2": Residual(gate="token", branch="conv", branch_kernel=2, expand="conv"),
    "lambdas-branch3": Lambdas(z=0.1, backout=0.1, gate="token", branch="conv", branch_kernel=3),
    "gated-orthogonal-branch1": GatedOrthogonal(branch="conv", branch_kernel=1),
    "gated-delta-branch2": GatedDelta(branch="conv", branch_kernel=2),
    "channel-dv3-branch3": DeepDelta(value_channels=3, compress="channel", branch="conv", branch_kernel=3),
    # The plain residual with scales: each public form, and scales everywhere.
    "lambdas-start": Lambdas(),
    "lambdas-written": Lambdas(r=1.0488, r_last=0.9, r_every="sublayer", z=0.0, p=1.0, when="write"),
    "lambdas-all": Lambdas(z=0.1, z_last=0.3, r_every="sublayer", z_every="sublayer", p=0.9, backout=0.1),
    "lambdas-gated": Lambdas(r=1.1, r_every="sublayer", z=0.1, p=0.9, backout=0.1, gate="token"),
    "lambdas-gated-ec3": Lambdas(z=0.1, backout=0.1, gate="token", expand="conv", expand_kernel=3),
    "lambdas-tc4": Lambdas(r=1.1, z=0.1, p=0.9, backout=0.1, compress="token"),
    "lambdas-gated-tc2": Lambdas(
        z=None, gate="token", compress="token", compress_kernel=2, compress_sharing="separate"
    ),
    "lambdas-channels": Lambdas(p=1.0, per_channel=True, backout=0.0),
    "lambdas-bias": Lambdas(r_every="sublayer", z=None, p=1.0, when="write", per_channel=True, bias=True),
    "rezero": Lambdas(r=None, z=None, p=0.0),
    "layer-scale": Lambdas(r=None, z=None, p=0.0001, per_channel=True),
    "deepnorm": Lambdas(r=None, z=None, norm="post"),
    # A bounded stream beside a plain one.
    "siamese-paper": SiameseNorm(depth_scaling="paper", normalised_input=False),
    "siamese-stream": SiameseNorm(depth_scaling="none", start="residual", head="stream"),
    # A gate on the share of the update along the state.
    "gated-orthogonal-static-heads2": GatedOrthogonal(gate="static", scale=2.0, heads=2, sublayers="attention"),
    "gated-orthogonal-mlp-ec3": GatedOrthogonal(heads=4, sublayers="mlp", eps=1e-3, expand="conv", expand_kernel=3),
    "gated-orthogonal-tc4": GatedOrthogonal(compress="token"),
    "gated-orthogonal-tc2": GatedOrthogonal(compress="token", compress_kernel=2, compress_sharing="separate"),
    # A delta write along the update, with a gate for what is erased and one for what is written.
    "gated-delta-positive-heads2": GatedDelta(erase="positive", scale=1.0, heads=2, k_eps=0.1),
    "gated-delta-write-heads4": GatedDelta(heads=4, write_gate=True),
    "gated-delta-write-only": GatedDelta(erase="none", write_gate=True),
    # The same with value channels and several directions, and with the value of Deep Delta Learning.
    "gated-delta-dv4-rank2": GatedDelta(
        value_channels=4, compress_kernel=2, write_gate=True, rank=2, recompute_every=2, compress_sharing="separate"
    ),
    "gated-delta-dv3-gates": GatedDelta(
        value_channels=3, compress="channel", compress_form="direct", channel_gates=True, heads=2, recompute="none"
    ),
    "gated-delta-coupled-dv2": GatedDelta(
        value_channels=2, compress="channel", compress_causal=True, erase="coupled", write="value", rank=3
    ),
    "gated-delta-value-only-ec2": GatedDelta(
        erase="none", write="value", v_activation="linear", expand="conv", expand_kernel=2
    ),
    # Compression over the tokens: every kernel, shared or not, also of a single channel.
    "token-dv2-k1": DeepDelta(value_channels=2, compress="token", compress_kernel=1, recompute_every=2),
    "token-dv3-k2-separate": DeepDelta(value_channels=3, compress_kernel=2, compress_sharing="separate"),
    "token-dv1-k3": DeepDelta(value_channels=1, compress="token", compress_kernel=3),
    # The embedding convolution, alone and beside each compression.
    "token-dv5-k3-ec2": DeepDelta(value_channels=5, compress_kernel=3, expand="conv", expand_kernel=2),
    "dv1-ec3": DeepDelta(expand="conv", expand_kernel=3),
    "channel-dv2-ec1": DeepDelta(value_channels=2, compress="channel", expand="conv", expand_kernel=1),
    # Compression over the channels: kernels shorter than d_v, centred and causal; the paper's form.
    "channel-dv3-k2": DeepDelta(value_channels=3, compress="channel", compress_kernel=2),
    "channel-dv5-k3-causal": DeepDelta(
        value_channels=5, compress="channel", compress_kernel=3, compress_causal=True, compress_sharing="separate"
    ),
    "channel-dv3-k1": DeepDelta(value_channels=3, compress="channel", compress_kernel=1, recompute="none"),
    "channel-dv3-direct": DeepDelta(value_channels=3, compress="channel", compress_form="direct"),
    # The direction.
    "guard-add": DeepDelta(k_norm="add", k_eps=0.1),
    "guard-clamp": DeepDelta(value_channels=2, compress="channel", k_norm="clamp", k_eps=0.5),
    "guard-rms_d": DeepDelta(k_norm="rms_d", k_eps=0.1),
    "v1-operator": DeepDelta(value_channels=2, compress="channel", operator="v1_eps", k_eps=0.1),
    "k-projected": DeepDelta(k_proj=True),
    # The gate.
    "beta-pool-mean": DeepDelta(value_channels=2, compress="channel", beta_input="pool_mean"),
    "beta-flatten": DeepDelta(value_channels=3, compress_kernel=2, beta_input="flatten"),
    "beta-conv-dv1": DeepDelta(beta_input="conv"),
    "beta-conv-channel": DeepDelta(value_channels=2, compress="channel", beta_input="conv"),
    "beta-conv-token-k6": DeepDelta(value_channels=2, compress_kernel=6, beta_input="conv", beta_init=1.9),
    "beta-sublayer-out": DeepDelta(value_channels=2, compress_kernel=2, beta_input="sublayer_out"),
    "beta-mlp": DeepDelta(beta_head="mlp", beta_hidden=5, beta_init=0.5),
    # The value.
    "v-linear": DeepDelta(
        value_channels=2, compress="channel", v_activation="linear", v_bias=False, implementation="auto"
    ),
    "v-constant": DeepDelta(value_channels=2, compress_kernel=2, v_activation="constant", v_constant=1.5),
    "v-context": DeepDelta(v_input="context", v_scale=1.0, beta_init=0.01),
    # The v-Map with every phi_k.
    "phi-linear": DeepDelta(value_channels=2, compress="channel", map="v", phi_k="linear"),
    "phi-mlp-stream": DeepDelta(map="v", phi_k="mlp", phi_k_input="x_in", phi_k_rank=3, v_activation="linear"),
    "phi-pool-mlp": DeepDelta(value_channels=2, compress="channel", map="v", phi_k="pool_mlp"),
    "phi-flatten-mlp": DeepDelta(value_channels=3, compress_kernel=2, map="v", phi_k="flatten_mlp", phi_k_rank=4),
    # Behind the embedding convolution, because channels that are all equal leave nothing to attend to.
    "phi-attention": DeepDelta(value_channels=3, compress="channel", expand="conv", map="v", phi_k="attention"),
    "phi-attention-dv1": DeepDelta(map="v", phi_k="attention", operator="v1_eps", beta_input="sublayer_out"),
    # Drawn as the authors draw.
    "authors-token": DeepDelta(value_channels=4, expand="conv", init="authors"),
    "authors-channel": DeepDelta(value_channels=4, compress="channel", beta_head="mlp", beta_hidden=6, init="authors"),
    # Hyper-connections.
    "hc-n1-linear": HyperConnections(num_streams=1, tanh=False, scale_init=0.1, head="mean", recompute_every=3),
    "hc-mirrored": HyperConnections(start="mirrored", head="mean"),
    "hc-static-n3": HyperConnections(num_streams=3, dynamic=False, implementation="auto", recompute="none"),
    # The same among the fractions of a state of the model's width.
    "frac-m1-linear": FracConnections(num_fractions=1, tanh=False, scale_init=0.1, recompute_every=3),
    "frac-static-m2": FracConnections(num_fractions=2, dynamic=False, implementation="auto", recompute="none"),
    # Mixing that is doubly stochastic, for copies of the embedding and for pieces of it.
    "mhc-n2": ManifoldHyperConnections(
        num_streams=2, iterations=5, alpha_init=0.1, implementation="auto", recompute_every=2
    ),
    "mhc-residual": ManifoldHyperConnections(start="residual"),
    "mhc-lite-n3": ManifoldHyperConnections(num_streams=3, mixing="permutations", recompute="none"),
    "mhc-split": ManifoldHyperConnections(layout="split"),
    "mhc-split-lite-n2": ManifoldHyperConnections(num_streams=2, layout="split", mixing="permutations"),
    "mhc-lss": ManifoldHyperConnections(num_streams=2, expand="lss"),
    "mhc-deepseek-n2": DeepSeekHyperConnections(
        recompute="none",
        num_streams=2,
        iterations=1,
        gate_eps=0.01,
        scale_init=0.5,
        weight_std=0.3,
        implementation="auto",
    ),
    "mhc-deepseek-residual": DeepSeekHyperConnections(num_streams=3, start="residual", recompute_every=2),
    "mhc-deepseek-previous": DeepSeekHyperConnections(pre="previous"),
    "mhc-deepseek-previous-n3": DeepSeekHyperConnections(
        num_streams=3, pre="previous", iterations=3, expand="lss", recompute_every=2, implementation="auto"
    ),
    "krom-n2": KroneckerHyperConnections(
        num_streams=2, scale_init=0.5, head="mean", implementation="auto", recompute="none"
    ),
    "krom-n8-residual": KroneckerHyperConnections(num_streams=8, start="residual", recompute_every=2),
    # Streams that are never mixed.
    "ihc-n2-mean": IndependentHyperConnections(
        recompute="none",
        num_streams=2,
        magnitude=3.0,
        gate_eps=0.01,
        scale_init=0.5,
        weight_std=0.3,
        head="mean",
        implementation="auto",
    ),
    "ihc-mirrored-n3": IndependentHyperConnections(num_streams=3, start="mirrored", head="mean"),
    "ihc-residual": IndependentHyperConnections(start="residual", recompute_every=2),
    # Streams that are read and written by constants, and forget.
    "wide-n3-retention": WideResidual(num_streams=3, retention=0.95, spread=0.5, recompute_every=2),
    "wide-n2-gains": WideResidual(num_streams=2, retention=0.9, max_forget=0.3, expand="gains", implementation="auto"),
    "gated-residual-n2": GatedResidual(num_streams=2, rank=3, weight_std=0.3, implementation="auto", recompute="none"),
    "gated-residual-start": GatedResidual(num_streams=3, rank=5, head="mean", start="residual", recompute_every=2),
    # Mixing that is orthogonal.
    "jpmhc-n2-exact": JacobianHyperConnections(num_streams=2, cayley="exact", alpha=1.0, recompute="none"),
    "jpmhc-n3-s1": JacobianHyperConnections(num_streams=3, steps=1, implementation="auto", recompute_every=2),
    "jpmhc-gains": JacobianHyperConnections(num_streams=2, expand="gains"),
    # The hybrid of rotation and reflection.
    "edelta-n2": EDelta(num_streams=2, gamma_init=0.3, penalty=0.0),
    "edelta-cumulative": EDelta(context="cumulative", hidden=5, beta_init=0.7),
    "edelta-bare": EDelta(projections=False, gamma_init=0.5, penalty=0.3),
    "edelta-stream-n2": EDeltaStream(num_streams=2, hidden=5, gamma_init=0.3, penalty=0.0, recompute="none"),
    "edelta-stream-cumulative": EDeltaStream(num_streams=3, context="cumulative", beta_init=0.7),
    "edelta-stream-residual": EDeltaStream(num_streams=3, start="residual", recompute_every=2),
    "edelta-stream-lss": EDeltaStream(num_streams=3, expand="lss"),
    # Attention over depth: blocks that end inside a stack and at its end.
    "attnres-block-s2": AttentionResiduals(block_size=2),
    "attnres-sum": AttentionResiduals(scale="sum"),
    "attnres-block-s3": AttentionResiduals(block_size=3),
    "altup-n3": AlternatingUpdates(num_streams=3, active=1, laurel_rank=2, weight_std=0.3),
    "altup-copies": AlternatingUpdates(laurel_rank=0, ends="copies", recompute="none"),
    "altup-n3-copies": AlternatingUpdates(num_streams=3, laurel_rank=0, ends="copies", recompute_every=2),
    "attnres-inkling-s2-e2": InklingAttentionResiduals(block_size=2, separate_every=2),
    "attnres-inkling-s3-e1": InklingAttentionResiduals(block_size=3, separate_every=1),
    "attnres-inkling-e0": InklingAttentionResiduals(separate_every=0),
    "mhar-h2-s2": AttentionResiduals(heads=2, block_size=2),
    # The same beside a plain stream, over what sublayers or blocks added to it.
    "delta-attnres-scalar-s2": DeltaAttentionResiduals(gate="scalar", block_size=2),
    "delta-attnres-null-s3": DeltaAttentionResiduals(gate="sigmoid", null_source=True, block_size=3),
    "delta-attnres-h2": DeltaAttentionResiduals(heads=2),
    # Averages over depth: every second output, after every second block.
    "denseformer-k2": DenseFormer(dilation=2),
    "denseformer-p2": DenseFormer(period=2),
    "mudd-r": MultiwayDynamicDense(ways="r", hidden_multiple=1, expand_last=1),
    "mudd-trimmed": MultiwayDynamicDense(ways="vr", layers=2, sources=(0, 1), write_gates=True),
    "mudd-last-r": MultiwayDynamicDense(ways="r", layers=1, write_gates=True, hidden_multiple=1),
    "mudd-prepost": MultiwayDynamicDense(prepost_norm=True),
    # The pooled shortcut without a delta write.
    "pooled-householder-token": PooledHouseholder(context="token", beta_init=0.4),
}

# Schemes that see later tokens: no language model takes them.
NON_CAUSAL: dict[str, Scheme] = {
    "edelta-sequence": EDelta(context="sequence"),
    "edelta-stream-sequence": EDeltaStream(context="sequence"),
    "pooled-householder-sequence": PooledHouseholder(context="sequence"),
}

# Run by kernels, for which triton must be there.
KERNELS: dict[str, Scheme] = {
    "channel": DeepDelta(value_channels=4, compress="channel", implementation="triton"),
    "channel-context": DeepDelta(
        value_channels=3,
        compress="channel",
        v_input="context",
        v_activation="linear",
        v_bias=False,
        k_norm="add",
        k_eps=0.1,
        implementation="triton",
    ),
    "token": DeepDelta(value_channels=4, expand="conv", implementation="triton"),
    "token-k2-projected": DeepDelta(value_channels=2, compress_kernel=2, k_proj=True, implementation="triton"),
    "one-channel": DeepDelta(implementation="triton"),
    "v-map": DeepDelta(value_channels=2, compress="channel", map="v", implementation="triton"),
    "hc": HyperConnections(num_streams=3, implementation="triton"),
    "hc-static": HyperConnections(num_streams=2, dynamic=False, implementation="triton"),
    "frac": FracConnections(num_fractions=2, implementation="triton"),
    "mhc": ManifoldHyperConnections(implementation="triton"),
    "mhc-split": ManifoldHyperConnections(num_streams=2, layout="split", iterations=3, implementation="triton"),
    "mhc-deepseek": DeepSeekHyperConnections(iterations=3, implementation="triton"),
    "krom": KroneckerHyperConnections(implementation="triton"),
    "ihc": IndependentHyperConnections(implementation="triton"),
    "gated-residual": GatedResidual(rank=3, implementation="triton"),
    "wide": WideResidual(retention=0.999, implementation="triton"),
    "jpmhc": JacobianHyperConnections(num_streams=2, implementation="triton"),
}

ALL: dict[str, Scheme] = PRESETS | VARIANTS

# Deep Delta Learning, whose parts tests look at: those that are not inside a convolution of their sublayer's output.
DEEP_DELTA = {name: scheme for name, scheme in ALL.items() if isinstance(scheme, DeepDelta) and scheme.branch is None}

# The presets that `make check` tries on whole models, one of each kind of state and of memory: one row, several rows,
# a growing tuple, several inputs, a penalty, sums over tokens, convolutions of the state and of the embedding.
KINDS = {"residual", "ddl-tc", "ddl-cc-ec", "mhc", "edelta", "attnres-block", "mudd"}


def every(kind: type[Scheme], **options: Any) -> pytest.MarkDecorator:
    """Run a test on every scheme of `ALL` that is of a class and has these options."""
    chosen = {
        name: scheme
        for name, scheme in ALL.items()
        if isinstance(scheme, kind) and all(getattr(scheme, option) == value for option, value in options.items())
    }
    return pytest.mark.parametrize("scheme", chosen.values(), ids=chosen)


def looks_back(scheme: Scheme) -> bool:
    with torch.device("meta"):
        return any(map(window_of, scheme.build(8, 2).parts))


# Schemes whose stream looks back on earlier tokens: what generation could get wrong.
LOOKING_BACK: dict[str, Scheme] = {name: scheme for name, scheme in ALL.items() if looks_back(scheme)}
