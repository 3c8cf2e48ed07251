"""The schemes that the shared tests run on: every preset, found by itself, and variants that use every other option.

Variants of a class that has none here are derived from its options.
"""

from contextlib import suppress
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch

from residua import DeepDelta, MultiwayDynamicDense, Scheme
from residua.connections import PRESETS, SCHEMES, resolve
from residua.connections.parts.memory import window_of
from residua.errors import types_of
from residua.testing import bare_sublayers, normal, perturbed

__all__ = [
    "ALL",
    "ASSEMBLED",
    "CONTRACT",
    "DEEP_DELTA",
    "KERNELS",
    "KINDS",
    "LOOKING_BACK",
    "NON_CAUSAL",
    "VARIANTS",
    "bare_sublayers",
    "choices",
    "derived",
    "every",
    "normal",
    "perturbed",
]

_VARIANTS = {
    # The plain residual behind DDL's embedding convolution, a control.
    "residual-ec4": "residual:expand=conv",
    "residual-ec1": "residual:expand=conv,expand_kernel=1",
    # The same behind nanochat's look back by one token.
    "residual-smear": "residual:expand=smear",
    "lambdas-smear-tc3": "lambdas:compress=token,compress_kernel=3,expand=smear,r=1.1,z=0.1,backout=0.1",
    # The same with a gate for each token on what is written.
    "residual-gated": "residual:write_gate=true",
    "residual-gated-tc4-ec2": "residual:compress=token,expand=conv,expand_kernel=2,write_gate=true",
    # The same that reads through DDL's token compression.
    "residual-tc4": "residual:compress=token",
    "residual-tc3-ec2": (
        "residual:compress=token,compress_kernel=3,compress_sharing=separate,expand=conv,expand_kernel=2"
    ),
    # The same that convolves what sublayers write, and other schemes of one row that do.
    "residual-branch4": "residual:branch=conv",
    "residual-gated-branch2": "residual:branch=conv,branch_kernel=2,expand=conv,write_gate=true",
    "residual-branch-attention": "residual:branch=conv,branch_sublayers=attention",
    "lambdas-branch-mlp": "lambdas:branch=conv,branch_sublayers=mlp,r=1.0,z=0.1,backout=0.1",
    "lambdas-branch3": "lambdas:branch=conv,branch_kernel=3,r=1.0,z=0.1,backout=0.1,gate=token",
    "gated-orthogonal-branch1": "gated-orthogonal:branch=conv,branch_kernel=1",
    "gated-delta-branch2": "gated-delta:branch=conv,branch_kernel=2",
    "channel-dv3-branch3": "ddl-cc:branch=conv,branch_kernel=3,value_channels=3",
    # The plain residual with scales: each public form, and scales everywhere.
    "lambdas-start": "lambdas:r=1.0,z=0.0,backout=null",
    "lambdas-written": "lambdas:r=1.0488,r_last=0.9,r_every=sublayer,z=0.0,when=write,p=1.0,backout=null",
    "lambdas-all": "lambdas:r=1.0,r_every=sublayer,z=0.1,z_last=0.3,z_every=sublayer,p=0.9,backout=0.1",
    "lambdas-gated": "lambdas:r=1.1,r_every=sublayer,z=0.1,p=0.9,backout=0.1,gate=token",
    "lambdas-gated-ec3": "lambdas:expand=conv,expand_kernel=3,r=1.0,z=0.1,backout=0.1,gate=token",
    "lambdas-tc4": "lambdas:compress=token,r=1.1,z=0.1,p=0.9,backout=0.1",
    "lambdas-gated-tc2": (
        "lambdas:compress=token,compress_kernel=2,compress_sharing=separate,r=1.0,z=null,backout=null,gate=token"
    ),
    "lambdas-channels": "lambdas:r=1.0,z=0.0,p=1.0,per_feature=true,backout=0.0",
    "lambdas-bias": "lambdas:r=1.0,r_every=sublayer,z=null,when=write,p=1.0,per_feature=true,bias=true,backout=null",
    "rezero": "lambdas:r=null,z=null,p=0.0,backout=null",
    "layer-scale": "lambdas:r=null,z=null,p=0.0001,per_feature=true,backout=null",
    "deepnorm": "lambdas:r=null,z=null,backout=null,norm=post",
    # A bounded stream beside a plain one.
    "siamese-paper": "siamese:depth_scaling=paper,normalised_input=false",
    "siamese-stream": "siamese:depth_scaling=none,start=residual,head=stream",
    # A gate on the share of the update along the state.
    "gated-orthogonal-static-heads2": "gated-orthogonal:gate=static,scale=2.0,heads=2,sublayers=attention",
    "gated-orthogonal-mlp-ec3": "gated-orthogonal:expand=conv,expand_kernel=3,heads=4,sublayers=mlp,eps=0.001",
    "gated-orthogonal-tc4": "gated-orthogonal:compress=token",
    "gated-orthogonal-tc2": "gated-orthogonal:compress=token,compress_kernel=2,compress_sharing=separate",
    # A delta write along the update, with a gate for what is erased and one for what is written.
    "gated-delta-positive-heads2": "gated-delta:erase=positive,scale=1.0,heads=2,k_eps=0.1",
    "gated-delta-write-heads4": "gated-delta:write_gate=true,heads=4",
    "gated-delta-write-only": "gated-delta:erase=none,write_gate=true",
    # The same with value channels and several directions, and with the value of Deep Delta Learning.
    "gated-delta-dv4-rank2": (
        "gated-delta:recompute_every=2,value_channels=4,compress_kernel=2,compress_sharing=separate,"
        "write_gate=true,rank=2"
    ),
    "gated-delta-dv2-smear": "gated-delta:value_channels=2,compress_kernel=3,write_gate=true,expand=smear",
    "gated-delta-dv3-gates": (
        "gated-delta:recompute=none,value_channels=3,compress=channel,compress_form=direct,channel_gates=true,heads=2"
    ),
    "gated-delta-coupled-dv2": (
        "gated-delta:value_channels=2,compress=channel,compress_causal=true,erase=coupled,write=value,rank=3"
    ),
    "gated-delta-value-only-ec2": "gated-delta:expand=conv,expand_kernel=2,erase=none,write=value,v_activation=linear",
    # Compression over the tokens: every kernel, shared or not, also of a single channel.
    "token-dv2-k1": "ddl:recompute_every=2,value_channels=2,compress_kernel=1",
    "token-dv3-k2-separate": "ddl:value_channels=3,compress_kernel=2,compress_sharing=separate",
    "token-dv1-k3": "ddl:compress=token,compress_kernel=3",
    # The embedding convolution, alone and beside each compression.
    "token-dv5-k3-ec2": "ddl-ec:value_channels=5,compress_kernel=3,expand_kernel=2",
    "dv1-ec3": "ddl:expand=conv,expand_kernel=3",
    "channel-dv2-ec1": "ddl-cc-ec:value_channels=2,expand_kernel=1",
    # Compression over the channels: kernels shorter than d_v, centred and causal; the paper's form.
    "channel-dv3-k2": "ddl-cc:value_channels=3,compress_kernel=2",
    "channel-dv5-k3-causal": "ddl-cc:value_channels=5,compress_kernel=3,compress_causal=true,compress_sharing=separate",
    "channel-dv3-k1": "ddl-cc:recompute=none,value_channels=3,compress_kernel=1",
    "channel-dv3-direct": "ddl-cc:value_channels=3,compress_form=direct",
    # The direction.
    "guard-add": "ddl:k_norm=add,k_eps=0.1",
    "guard-clamp": "ddl-cc:value_channels=2,k_norm=clamp,k_eps=0.5",
    "guard-rms_d": "ddl:k_norm=rms_d,k_eps=0.1",
    "v1-operator": "ddl-cc:value_channels=2,k_eps=0.1,operator=v1_eps",
    "k-projected": "ddl:k_proj=true",
    # The gate.
    "beta-pool-mean": "ddl-cc:value_channels=2,beta_input=pool_mean",
    "beta-flatten": "ddl:value_channels=3,compress_kernel=2,beta_input=flatten",
    "beta-conv-dv1": "ddl:beta_input=conv",
    "beta-conv-channel": "ddl-cc:value_channels=2,beta_input=conv",
    "beta-conv-token-k6": "ddl:value_channels=2,compress_kernel=6,beta_init=1.9,beta_input=conv",
    "beta-sublayer-out": "ddl:value_channels=2,compress_kernel=2,beta_input=sublayer_out",
    "beta-mlp": "ddl:beta_init=0.5,beta_head=mlp,beta_hidden=5",
    # The value.
    "v-linear": "ddl-cc:value_channels=2,v_activation=linear,v_bias=false",
    "v-constant": "ddl:value_channels=2,compress_kernel=2,v_activation=constant,v_constant=1.5",
    "v-context": "ddl:beta_init=0.01,v_scale=1.0,v_input=context",
    # The v-Map with every phi_k.
    "phi-linear": "ddl-cc:value_channels=2,map=v,phi_k=linear",
    "phi-mlp-stream": "ddl-v:v_activation=linear,phi_k_input=x_in,phi_k_hidden=3",
    "phi-pool-mlp": "ddl-cc:value_channels=2,map=v,phi_k=pool_mlp",
    "phi-flatten-mlp": "ddl-v:value_channels=3,compress_kernel=2,phi_k=flatten_mlp,phi_k_hidden=4",
    # Behind the embedding convolution, because channels that are all equal leave nothing to attend to.
    "phi-attention": "ddl-cc-ec:value_channels=3,map=v,phi_k=attention",
    "phi-attention-dv1": "ddl-v:operator=v1_eps,beta_input=sublayer_out,phi_k=attention",
    # Drawn as the authors draw.
    "authors-token": "ddl-ec:start=authors",
    "authors-rewrite": "ddl-ec:start=rewrite",
    "authors-channel": "ddl-cc:beta_head=mlp,beta_hidden=6,start=authors",
    # Hyper-connections.
    "hc-n1-linear": "hc:recompute_every=3,tanh=false,scale_init=0.1,num_streams=1,head=mean",
    "hc-mirrored": "hc:head=mean,start=mirrored",
    "hc-static-n3": "hc:recompute=none,implementation=auto,dynamic=false,num_streams=3",
    # The same among the fractions of a state of the model's width.
    "frac-m1-linear": "frac:recompute_every=3,tanh=false,scale_init=0.1,num_fractions=1",
    "frac-static-m2": "frac:recompute=none,implementation=auto,dynamic=false,num_fractions=2",
    # Mixing that is doubly stochastic, for copies of the embedding and for pieces of it.
    "mhc-n2": "mhc:recompute_every=2,implementation=auto,num_streams=2,iterations=5,scale_init=0.1",
    "mhc-residual": "mhc:start=residual",
    "mhc-columns": "mhc:num_streams=3,iterations=3,order=columns",
    "mhc-lite-n3": "mhc:recompute=none,num_streams=3,mixing=permutations",
    "mhc-split": "mhc:layout=split",
    "mhc-split-lite-n2": "mhc:num_streams=2,layout=split,mixing=permutations",
    "mhc-lss": "mhc:num_streams=2,expand=lss",
    "mhc-deepseek-n2": (
        "mhc-deepseek:recompute=none,implementation=auto,num_streams=2,gate_eps=0.01,scale_init=0.5,"
        "weight_std=0.3,iterations=1"
    ),
    "mhc-deepseek-residual": "mhc-deepseek:recompute_every=2,num_streams=3,start=residual",
    "mhc-deepseek-previous": "mhc-deepseek:pre=previous",
    "mhc-deepseek-previous-n3": (
        "mhc-deepseek:recompute_every=2,implementation=auto,num_streams=3,expand=lss,iterations=3,pre=previous"
    ),
    "krom-n2": "krom:recompute=none,implementation=auto,num_streams=2,scale_init=0.5,head=mean",
    "krom-n8-residual": "krom:recompute_every=2,num_streams=8,start=residual",
    # Streams that are never mixed.
    "ihc-n2-mean": (
        "ihc:recompute=none,implementation=auto,num_streams=2,gate_eps=0.01,scale_init=0.5,weight_std=0.3,"
        "head=mean,magnitude=3.0"
    ),
    "ihc-mirrored-n3": "ihc:num_streams=3,head=mean,start=mirrored",
    "ihc-residual": "ihc:recompute_every=2,start=residual",
    # Streams that are read and written by constants, and forget.
    "wide-n3-retention": "wide:recompute_every=2,num_streams=3,spread=0.5,retention=0.95",
    "wide-n2-gains": "wide:implementation=auto,num_streams=2,expand=gains,retention=0.9,max_forget=0.3",
    "gated-residual-n2": "gated-residual:recompute=none,implementation=auto,num_streams=2,gate_rank=3,weight_std=0.3",
    "gated-residual-start": "gated-residual:recompute_every=2,num_streams=3,gate_rank=5,head=mean,start=residual",
    # Mixing that is orthogonal.
    "jpmhc-n2-exact": "jpmhc:recompute=none,num_streams=2,alpha=1.0,cayley=exact",
    "jpmhc-n3-s1": "jpmhc:recompute_every=2,implementation=auto,num_streams=3,iterations=1",
    "jpmhc-gains": "jpmhc:num_streams=2,expand=gains",
    # The hybrid of rotation and reflection.
    "edelta-n2": "edelta:num_streams=2,gamma_init=0.3,penalty=0.0",
    "edelta-cumulative": "edelta:context=cumulative,hidden=5,cayley_init=0.7",
    "edelta-bare": "edelta:gamma_init=0.5,penalty=0.3,projections=false",
    "edelta-stream-n2": "edelta-stream:num_streams=2,hidden=5,gamma_init=0.3,penalty=0.0,recompute=none",
    "edelta-stream-cumulative": "edelta-stream:num_streams=3,context=cumulative,cayley_init=0.7",
    "edelta-stream-residual": "edelta-stream:num_streams=3,recompute_every=2,start=residual",
    "edelta-stream-lss": "edelta-stream:num_streams=3,expand=lss",
    # Attention over depth: blocks that end inside a stack and at its end.
    "attnres-block-s2": "attnres:block_size=2",
    "attnres-sum": "attnres:reduction=sum",
    "attnres-block-s3": "attnres:block_size=3",
    "altup-n3": "altup:num_streams=3,active=1,laurel_rank=2,weight_std=0.3",
    "altup-copies": "altup:recompute=none,laurel_rank=0,expand=repeat",
    "altup-n3-copies": "altup:recompute_every=2,num_streams=3,laurel_rank=0,expand=repeat",
    "attnres-inkling-s2-e2": "attnres-inkling:block_size=2,separate_every=2",
    "attnres-inkling-s3-e1": "attnres-inkling:block_size=3,separate_every=1",
    "attnres-inkling-e0": "attnres-inkling:separate_every=0",
    "mhar-h2-s2": "mhar:block_size=2,heads=2",
    # The same beside a plain stream, over what sublayers or blocks added to it.
    "delta-attnres-scalar-s2": "delta-attnres:block_size=2,read_gate=scalar",
    "delta-attnres-null-s3": "delta-attnres:block_size=3,read_gate=sigmoid,null_source=true",
    "delta-attnres-h2": "delta-attnres:heads=2",
    # Averages over depth: every second output, after every second block.
    "denseformer-k2": "denseformer:dilation=2",
    "denseformer-p2": "denseformer:period=2",
    "mudd-r": "mudd:ways=r,hidden_multiple=1,readout_multiple=1",
    "mudd-trimmed": MultiwayDynamicDense(ways="vr", layers=2, sources=(0, 1), write_gate=True),
    "mudd-last-r": "mudd:ways=r,layers=1,write_gate=true,hidden_multiple=1",
    "mudd-prepost": "mudd:prepost_norm=true",
    # The pooled shortcut without a delta write.
    "pooled-householder-token": "pooled-householder:context=token,beta_init=0.4",
}

# Schemes that see later tokens: no language model takes them.
_NON_CAUSAL = {
    "edelta-sequence": "edelta:context=sequence",
    "edelta-stream-sequence": "edelta-stream:context=sequence",
    "pooled-householder-sequence": "pooled-householder:context=sequence",
}

# Run by kernels, for which triton must be there.
_KERNELS = {
    "hc": "hc:implementation=triton,num_streams=3",
    "hc-static": "hc:implementation=triton,dynamic=false,num_streams=2",
    "frac": "frac:implementation=triton,num_fractions=2",
    "mhc": "mhc:implementation=triton",
    "mhc-split": "mhc:implementation=triton,num_streams=2,layout=split,iterations=3",
    "mhc-deepseek": "mhc-deepseek:implementation=triton,iterations=3",
    "krom": "krom:implementation=triton",
    "ihc": "ihc:implementation=triton",
    "gated-residual": "gated-residual:implementation=triton,gate_rank=3",
    "wide": "wide:implementation=triton,retention=0.999",
    "jpmhc": "jpmhc:implementation=triton,num_streams=2",
}


def choices(declared: Any) -> list[Any]:
    """Return the values of a declared type: those of a Literal and of bool, two numbers for int, none for others."""
    if get_origin(declared) in (Union, UnionType):
        return [choice for part in get_args(declared) for choice in choices(part)]
    if get_origin(declared) is Literal:
        return list(get_args(declared))
    return {bool: [False, True], NoneType: [None], int: [2, 3]}.get(declared, [])


def derived(name: str, kind: type[Scheme]) -> dict[str, Scheme]:
    """Return one scheme for each other choice of each option of the class, with a second option if it needs one."""
    own = [field for field in fields(kind) if field.name in kind.__annotations__]
    single = [(one.name, value) for one in own for value in choices(types_of(kind)[one.name]) if value != one.default]
    found = {}
    for option, value in single:
        for also in ({}, *({other: choice} for other, choice in single if other != option)):
            with suppress(ValueError):
                found[f"{name}-{option}-{value}"] = kind(**also, **{option: value})
                break
    return found


VARIANTS, NON_CAUSAL, KERNELS = (
    {name: resolve(scheme) for name, scheme in schemes.items()} for schemes in (_VARIANTS, _NON_CAUSAL, _KERNELS)
)
for _name, _kind in SCHEMES.items():
    if not any(type(scheme) is _kind for scheme in VARIANTS.values()):
        VARIANTS |= derived(_name, _kind)
ALL: dict[str, Scheme] = PRESETS | VARIANTS

# Deep Delta Learning, whose parts tests look at: those that are not inside a convolution of their sublayer's output.
DEEP_DELTA = {name: scheme for name, scheme in ALL.items() if isinstance(scheme, DeepDelta) and scheme.branch is None}

# Presets whose parts other presets have too, put together in another way.
ASSEMBLED = {"ddl-ec", "ddl-cc", "ddl-tc-v", "attnres-block", "mhc-glm", "orthogonal"}

# The presets that `make check` tries shared tests on, one of each kind of state and of memory: one row, several rows,
# a growing tuple, several inputs, a penalty, sums over tokens, convolutions of the state and of the embedding.
KINDS = {"residual", "ddl-tc", "ddl-cc-ec", "mhc", "edelta", "attnres-block", "mudd"}

# Those that it tries the contract of schemes on.
CONTRACT = {"residual", "ddl", "ddl-tc", "mhc", "attnres", "denseformer"}


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
