"""The kit names planted copies of public bugs, and passes every correct module.

The modules here are written as people write them: one projection for all mappings, their own names, their own layout.
"""

import math
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.test_operators  # once: a run of pytester forgets its imports, torch does not
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import residua
from residua import (
    AttentionResiduals,
    DeepDelta,
    HyperConnections,
    ManifoldHyperConnections,
    PooledHouseholder,
    Residual,
)
from residua.connections import PRESETS, resolve
from residua.testing import SPECIFICATION, CheckFailed, ConnectionAdapter, StreamAdapter, check_module, diagnosis
from residua.testing.adapter import holding, named_once, named_parameters
from residua.testing.checks import run
from residua.testing.diagnosis import _reordered
from residua.testing.inputs import normal
from residua.testing.module import checks
from residua.testing.starts import different_draws
from support.lanes import some
from support.processes import run_python

pytest_plugins = ["pytester"]
N = 4


class HyperBlock(nn.Module):
    """mHC around one sublayer, state (batch, seq, n * dim), with one bug if asked."""

    def __init__(self, dim: int, bug: str | None = None):
        super().__init__()
        self.bug = bug
        self.proj = nn.Parameter(torch.zeros(N * dim, N * N + 2 * N))
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        start = torch.zeros(N * N + 2 * N)
        if bug != "reads start at 0":
            start[:N] = torch.tensor([-2.0, -2.0, 2.0, -2.0])  # of the third connection
        start[2 * N :] = 6 * torch.eye(N).flatten()
        if bug == "frozen by a buffer":
            self.register_buffer("base", start)
        else:
            self.base = nn.Parameter(start)
        self.ln = nn.Parameter(torch.ones(dim))

    def mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        narrow = {"bf16 mapping": torch.bfloat16, "float16 mapping": torch.float16}.get(self.bug)
        x = x.detach() if self.bug == "detached streams" else x
        wide = x.to(narrow) if narrow else x if x.dtype == torch.float64 else x.float()
        weight = self.proj.to(wide.dtype) if narrow else self.proj
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bug == "autocast mapping" and x.dtype != torch.float64):
            z = (wide @ weight).to(self.scale.dtype)
        square = x.to(z.dtype).square().mean(-1, keepdim=True)
        if self.bug != "no norm of the streams":
            z = z / (square.sqrt() + 1e-2) if self.bug == "eps outside the root" else z * torch.rsqrt(square + 1e-5)
        a, b = self.scale, self.base
        if self.bug == "constant mappings":
            z = 0 * z
        if self.bug == "alphas swapped":
            a = a[[1, 0, 2]]
        if self.bug == "slices swapped":
            z, b = (torch.cat([x[..., N : 2 * N], x[..., :N], x[..., 2 * N :]], -1) for x in (z, b))
        pre = torch.sigmoid(a[0] * z[..., :N] + b[:N])
        if self.bug == "softmax reads":
            pre = (a[0] * z[..., :N] + b[:N]).softmax(-1)
        post = a[1] * z[..., N : 2 * N] + b[N : 2 * N]
        if self.bug == "1 + tanh":
            post = 1 + post.tanh()
        else:
            post = (1 if self.bug == "factor 2 missing" else 2) * post.sigmoid()
        logits = (a[2] * z[..., 2 * N :] + b[2 * N :]).unflatten(-1, (N, N))
        mix = self.sinkhorn(logits.mT if self.bug == "logits transposed" else logits)
        return pre, mix / mix.sum(-1, keepdim=True) if self.bug == "rows once more" else mix, post

    def sinkhorn(self, logits: Tensor) -> Tensor:
        if self.bug == "softmax only":
            return logits.softmax(-1)
        first, second = (-2, -1) if self.bug == "Sinkhorn columns first" else (-1, -2)
        if self.bug in ("overflows", "eps in Sinkhorn", "largest of the matrix"):
            largest = logits.amax((-2, -1), keepdim=True) if self.bug == "largest of the matrix" else 0
            m, eps = (logits - largest).exp(), 1e-2 if self.bug == "eps in Sinkhorn" else 0
            for _ in range(20):
                m = m / (m.sum(-1, keepdim=True) + eps)
                m = m / (m.sum(-2, keepdim=True) + eps)
            return m
        for _ in range({"Sinkhorn stops early": 7, "21 iterations": 21}.get(self.bug, 20)):
            logits = logits - logits.logsumexp(first, keepdim=True)
            logits = logits - logits.logsumexp(second, keepdim=True)
        return logits.exp()

    def forward(self, x: Tensor, layer) -> Tensor:
        pre, mix, post = self.mappings(x)
        streams = x.unflatten(-1, (N, -1))
        wide = streams.to(mix.dtype)
        if self.bug == "frozen H_res":
            mix = mix.detach()
        if self.bug == "transposed":
            mix = mix.mT
        read = (pre.unsqueeze(-1) * wide).sum(-2)
        if self.bug == "H_pre ignored":
            read = wide.mean(-2)
        eps = 1e-3 if self.bug == "another eps" else 1e-5
        read = F.rms_norm(read, read.shape[-1:], None if self.bug == "norm gain missing" else self.ln, eps)
        if self.bug == "norm weight without gradient":
            read = F.rms_norm((pre.unsqueeze(-1) * wide).sum(-2), read.shape[-1:], self.ln.detach(), 1e-5)
        y = layer(read.to(x.dtype)).to(mix.dtype)
        if self.bug == "detached output":
            y = y.detach()
        if self.bug == "writes its input":
            y = read
        if self.bug == "dropout":
            y = F.dropout(y, 0.1)
        with torch.autocast("cpu", enabled=False):
            mixed = wide if self.bug == "thrown away" else mix @ wide
        out = mixed + post.unsqueeze(-1) * y.unsqueeze(-2)
        if self.bug == "collapsed in every block":
            out = out.mean(-2, keepdim=True).expand_as(out)
        if self.bug == "keeps its input":
            out = out + read.unsqueeze(-2)
        if self.bug == "mean over the batch":
            out = out + 1e-3 * out.mean(0, keepdim=True)
        if self.bug == "looks ahead":
            out = out + 1e-3 * out.flip(1)
        if self.bug == "in place":
            x.mul_(1.5)
        if self.bug == "updates the streams in place":
            x.copy_(out.flatten(-2))
        if self.bug == "remembers":
            self.calls = getattr(self, "calls", 0) + 1
            out = out * self.calls
        return out.to(x.dtype).flatten(-2)


def in_mine(ours, prefix: str = "") -> dict[str, Tensor]:
    return {
        "proj": ours[prefix + "mappings.phi.weight"].T,
        "scale": ours[prefix + "mappings.alpha"],
        "base": ours[prefix + "mappings.bias"],
        "ln": ours[prefix + "norm.weight"],
    }


class Planted(ConnectionAdapter):
    """A module of the kind `module`, with one bug if asked."""

    module: type[nn.Module]

    def __init__(self, bug: str | None = None):
        self.bug = bug

    def build(self, dim):
        return self.module(dim, self.bug)

    def connect(self, module, state, sublayer):
        return module(state, sublayer)


class Block(Planted):
    scheme = ManifoldHyperConnections(num_streams=N)
    module = HyperBlock

    def parameters(self, ours):
        return in_mine(ours)

    def connect(self, module, state, sublayer):
        return module(state.flatten(-2), sublayer).unflatten(-1, (N, -1))


NAMED = {
    "transposed": ("forward", r"the mixer is transposed: agrees with H_res\^T$"),
    "thrown away": ("forward", "the mixer is dropped: agrees with H_res = I, computed and thrown away"),
    "collapsed in every block": ("forward", "all streams leave the connection equal: they are collapsed and expanded"),
    "Sinkhorn stops early": ("forward", "Sinkhorn makes 7 iterations, expected 20"),
    "softmax only": ("forward", "the mixer is not doubly stochastic"),
    "H_pre ignored": ("forward", "H_pre is dropped: it reads the mean of the streams"),
    "norm gain missing": ("forward", "norm.weight has no influence: agrees with norm.weight = 1"),
    "factor 2 missing": ("forward", "the write is 0.5 times H_post y"),
    "frozen H_res": ("gradients", r"h_res is frozen: agrees with h_res.detach\(\)"),
    "frozen by a buffer": ("parameters", "base is a buffer: it stays frozen at its initial value"),
    "norm weight without gradient": ("gradients", "no gradient reaches norm.weight, though the output depends on it"),
    "bf16 mapping": ("float32_mappings", "the mapping, the mixing or the result is rounded to 16 bits, whatever"),
    "float16 mapping": ("float32_mappings", "the mapping, the mixing or the result is rounded to 16 bits, whatever"),
    "autocast mapping": ("float32_mappings", "the mapping or the mixing is computed in bfloat16 under autocast"),
    "overflows": ("large_logits", "an exp overflows, or a sum underflows to 0 and divides; normalise in logarithms"),
    "largest of the matrix": ("large_logits", "a sum underflows to 0 and divides; normalise in logarithms"),
    "21 iterations": ("forward", "Sinkhorn makes 21 iterations, expected 20"),
    "logits transposed": ("forward", "^the logits of H_res are transposed, before Sinkhorn$"),
    "constant mappings": ("forward", "^mappings.alpha has no influence: agrees with mappings.alpha = 0$"),
    "mean over the batch": ("forward", "^the result for a sequence depends on the other sequences of the batch$"),
    "alphas swapped": ("forward", "entries 0 and 1 of mappings.alpha are swapped$"),
    "slices swapped": ("forward", "the rows of H_pre and H_post in mappings.bias and mappings.phi.weight are swapped$"),
    "no norm of the streams": (
        "forward",
        "^a norm is left out: agrees with mappings of an input that is not",
    ),
    "detached streams": (
        "gradients",
        "^the input of mappings is detached: no gradient passes through it",
    ),
    "detached output": ("gradients", "^no gradient passes through the sublayer: its input or its output is detached"),
    "reads start at 0": (
        "initial_values",
        r"^base starts at 0; the scheme starts it at \[-2, -2, 2, -2\] in connection 2 \(4 of 24 entries differ\)$",
    ),
    "softmax reads": ("forward", "H_pre is a softmax over the streams, not a sigmoid"),
    "1 + tanh": ("forward", r"H_post is 1 \+ tanh\(z\), which is 2 sigmoid\(2 z\)$"),
    "writes its input": ("forward", "^the output of the sublayer is not written: the state is the same whatever"),
    "dropout": ("second_call", "a second call gives other numbers"),
    "updates the streams in place": ("second_call", "the state is changed in place"),
    "looks ahead": ("causal", "a later token changes the results of earlier ones"),
    "in place": ("second_call", "the state is changed in place"),
    "remembers": ("second_call", "a second call gives other numbers"),
}


def failures(adapter) -> str:
    """What a report says of a module that is wrong."""
    with pytest.raises(CheckFailed) as raised:
        check_module(adapter)
    return str(raised.value)


# One or two of each check.
FEW = {
    *("transposed", "Sinkhorn stops early", "slices swapped", "frozen H_res", "frozen by a buffer"),
    *("bf16 mapping", "overflows", "detached streams", "reads start at 0", "dropout", "looks ahead"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", some(NAMED, FEW.__contains__))
def test_a_public_bug_is_named(bug):
    check, words = NAMED[bug]
    report, start = failures(Block(bug)), "" if words.startswith("^") else ".*"
    assert re.search(r"^Block, compared with ManifoldHyperConnections\(order='(rows|columns)'\): ", report)
    assert "bfloat16" not in report or bug == "autocast mapping", "it is blamed for nothing else"
    assert re.search(rf"(?m)^  (\w+, )*{check}(, \w+)*: {start}{words.removeprefix('^')}", report), report


@pytest.mark.slow
def test_a_known_mistake_is_diagnosed_once(monkeypatch):
    of = Mock(side_effect=diagnosis.of)
    monkeypatch.setattr(diagnosis, "of", of)
    assert "the mixer is transposed" in failures(Block("transposed"))
    assert of.call_count == 1


FIRST = "^not one of the known mistakes; the first difference is in "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "words"),
    some(
        [
            (
                "eps outside the root",
                r"the read \(largest difference 0.02\d*, .*, also differs: the mixer \(.*, the write \(",
            ),
            ("another eps", r"the read \(largest difference [^()]*\)$"),
            ("eps in Sinkhorn", r"the mixer \(by up to 0.01 in an entry of H_res\)$"),
            ("rows once more", r"the mixer \(by up to 0.016 in an entry of H_res\)$"),
            ("keeps its input", r"the mixing of the streams \("),
            ("looks ahead", r"the mixing of the streams \(.*, also differs: the write \("),
        ],
        lambda case: case[0] == "eps outside the root",
    ),
)
def test_an_unknown_mistake_gets_no_name(bug, words):
    with pytest.raises(CheckFailed, match=FIRST + words):
        checks()["forward"](Block(bug))


@pytest.mark.parametrize("eps", some([0.0, 1e-6], bool))
def test_the_error_for_a_wrong_eps_of_an_adapter_names_the_right_one(eps):
    block = Block()
    block.norm_eps = eps
    with pytest.raises(CheckFailed, match=rf"^agrees with norm_eps=1e-05, the adapter says {eps:.3g}$"):
        checks()["forward"](block)


class HyperConnectionsBlock(nn.Module):
    """HC around one sublayer as in algorithm 2 of the paper, with one bug if asked."""

    def __init__(self, dim: int, bug: str | None = None):
        super().__init__()
        self.bug = bug
        self.alpha, self.beta = nn.Parameter(torch.eye(N, N + 1).roll(1, 1)), nn.Parameter(torch.ones(N))
        with torch.no_grad():
            self.alpha[:, 0] = torch.eye(N)[2]
        self.w, self.scales = nn.Parameter(torch.zeros(dim, N + 2)), nn.Parameter(torch.full((2,), 0.01))
        self.gain, self.ln = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, layer) -> Tensor:
        wide = x.to(self.w.dtype)
        last = wide.square().mean((-2, -1) if self.bug == "norm over all streams" else -1, keepdim=True)
        with torch.autocast("cpu", enabled=False):
            share = (wide * torch.rsqrt(last + 1e-5) * self.gain) @ self.w
        share = share if self.bug == "no tanh" else share.tanh()
        alpha = self.alpha + self.scales[0] * share[..., :-1]
        beta = self.beta + self.scales[1] * share[..., -1]
        with torch.autocast("cpu", enabled=False):
            mixed = alpha.mT @ wide
        y = layer(F.rms_norm(mixed[..., 0, :], x.shape[-1:], self.ln, 1e-5).to(x.dtype)).to(mixed.dtype)
        return (mixed[..., 1:, :] + beta.unsqueeze(-1) * y.unsqueeze(-2)).to(x.dtype)


class Hyper(Planted):
    scheme = HyperConnections()
    module = HyperConnectionsBlock

    def parameters(self, ours):
        names = {"alpha": "alpha", "beta": "beta", "scales": "scales", "gain": "stream_norm.weight"}
        mine = {name: ours[our] for name, our in names.items()}
        return {**mine, "w": ours["project.weight"].T, "ln": ours["norm.weight"]}


class DeltaBlock(nn.Module):
    """DDL with one value channel around one sublayer, with one bug if asked."""

    def __init__(self, dim: int, bug: str | None = None):
        super().__init__()
        self.bug = bug
        self.ln = nn.Parameter(torch.ones(dim))
        self.gate, self.gate_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(1))
        self.value, self.value_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.value, std=0.5 / dim**0.5)

    def forward(self, x: Tensor, layer) -> Tensor:
        wide = x.to(self.value.dtype)
        context = F.rms_norm(wide, wide.shape[-1:], self.ln, 1e-5)
        k = y = layer(context.to(x.dtype)).to(wide.dtype)
        source = {"beta of the raw state": wide, "beta of the output": y}.get(self.bug, context)
        z = (source * self.gate).sum(-1, keepdim=True) + self.gate_bias
        beta = 1 + z.tanh() if self.bug == "beta is 1 + tanh" else 2 * torch.sigmoid(z)
        source = {"v of the context": context, "v of the output": y}.get(self.bug, wide)
        v = (source * self.value).sum(-1, keepdim=True)
        v = (1 if self.bug == "v lacks its 4" else 4) * torch.sigmoid(v + self.value_bias)
        length = k.square().sum(-1, keepdim=True)
        if self.bug == "k is centred":
            k = k - k.mean(-1, keepdim=True)
            length = k.square().sum(-1, keepdim=True)
        if self.bug == "|k| + eps":
            k = k / (length.sqrt() + 1e-5)
        elif self.bug == "L1 norm":
            k = k / k.abs().sum(-1, keepdim=True)
        elif self.bug == "norm over the tokens":
            k = k / k.norm(dim=1, keepdim=True)
        elif self.bug == "k in bfloat16":
            k = (k * torch.rsqrt(length + 1e-10)).bfloat16().to(k.dtype)
        elif self.bug != "raw k":
            k = k * torch.rsqrt(length + 1e-10)
        k = k * {"1/sqrt(d) twice": k.shape[-1] ** -0.5, "1/sqrt(d) forgotten": k.shape[-1] ** 0.5}.get(self.bug, 1)
        held = (k * wide).sum(-1, keepdim=True)
        if self.bug == "erases without the gate":
            return (wide + (beta * v - held) * k).to(x.dtype)
        update = beta * ((3 if self.bug == "v is tripled" else 1) * v - (0 if self.bug == "no erasure" else held)) * k
        if self.bug == "product":
            return (wide * update).to(x.dtype)
        if self.bug == "y is added too":
            update = update + y
        return (wide + update).to(x.dtype)


class Delta(Planted):
    scheme = DeepDelta()
    module = DeltaBlock

    def parameters(self, ours):
        return {
            "ln": ours["norm.weight"],
            "gate": ours["beta.out.weight"][0],
            "gate_bias": ours["beta.out.bias"],
            "value": ours["value.project.weight"][0],
            "value_bias": ours["value.project.bias"],
        }


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Delta("v lacks its 4"), r"forward: agrees with our DeepDelta\(v_scale=1.0\)"),
        (Delta("v of the context"), r"forward: agrees with our DeepDelta\(v_input='context'\)"),
        (Delta("|k| + eps"), r"forward: agrees with our DeepDelta\(k_norm='add'\)"),
        (Delta("raw k"), "forward: k is not normalised"),
        (Delta("no erasure"), r"forward: nothing is erased: agrees with X \+ beta k v\^T$"),
        (Delta("v is tripled"), r"forward: writes 3 beta v and erases 1 beta k\^T X: v is 3 times ours$"),
        (Delta("1/sqrt(d) twice"), r"erases 0.0625 beta k\^T X: \|k\| is 0.25 = 1/sqrt\(d\) and must be 1$"),
        (Delta("1/sqrt(d) forgotten"), r"erases 16 beta k\^T X: \|k\| is 4 = sqrt\(d\) and must be 1$"),
        (Delta("L1 norm"), "forward: k is divided by its L1 norm$"),
        (Delta("norm over the tokens"), "forward: k is normalised over the tokens, not over the features\n"),
        (Delta("k is centred"), "forward: k is centred before it is normalised, as by a LayerNorm$"),
        (Delta("product"), "forward: the state is multiplied by the update, not added to it$"),
        (Delta("y is added too"), "forward: the sublayer's output is added as well: agrees with "),
        (Delta("beta is 1 + tanh"), r"forward: beta is 1 \+ tanh\(z\), which is 2 sigmoid\(2 z\)$"),
        (Delta("beta of the raw state"), r"forward: agrees with our DeepDelta\(beta_input='pool_mean'\)$"),
        (Delta("beta of the output"), "forward: beta is computed from the sublayer's output$"),
        (Delta("v of the output"), "forward: v is computed from the sublayer's output$"),
        (Delta("erases without the gate"), r"forward: beta gates only what is written: agrees with X - k k\^T X"),
        (Hyper("no tanh"), r"forward: agrees with our HyperConnections\(tanh=False\)"),
    ],
    ids=lambda value: getattr(value, "bug", ""),
)
def test_a_likely_mistake_is_named(adapter, words):
    report = failures(adapter)
    assert re.search(words, report), report
    assert "bfloat16" not in report


class DeltaStack(StreamAdapter):
    """A stack of `DeltaBlock`."""

    scheme = DeepDelta()

    def __init__(self, bug: str | None = None):
        self.bug = bug

    def build(self, dim, num_sublayers):
        return nn.ModuleList(DeltaBlock(dim, self.bug) for _ in range(num_sublayers))

    def parameters(self, ours):
        mine = {}
        for i in range(self.num_sublayers):
            prefix = f"connections.{i}."
            own = {name.removeprefix(prefix): value for name, value in ours.items() if name.startswith(prefix)}
            mine |= {f"{i}.{name}": value for name, value in Delta().parameters(own).items()}
        return mine

    def forward(self, module, x, sublayers):
        for block, sublayer in zip(module, sublayers):
            x = block(x, sublayer)
        return x


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("1/sqrt(d) twice", r"\|k\| is 0.25 = 1/sqrt\(d\) and must be 1$"),
        ("product", "^the state is multiplied by the update, not added to it$"),
        ("v of the output", "^v is computed from the sublayer's output$"),
    ],
)
def test_a_mistake_in_every_delta_write_of_a_stack_is_named(bug, words):
    with pytest.raises(CheckFailed, match=words):
        checks()["forward"](DeltaStack(bug))


def test_a_direction_that_is_rounded_is_found_although_the_state_is_not():
    with pytest.raises(CheckFailed, match="rounded to 16 bits"):
        checks()["float32_mappings"](Delta("k in bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    some(
        [Block("eps outside the root"), Block("eps in Sinkhorn"), Hyper("norm over all streams")],
        lambda adapter: isinstance(adapter, Hyper),
    ),
)
def test_an_unknown_mistake_is_not_attributed_to_bfloat16(adapter):
    assert "bfloat16" not in failures(adapter)


class Narrow(StreamAdapter):
    """Our own stack in bfloat16: computed in float32 between the sublayers, or one connection moves too far."""

    dtype = torch.bfloat16

    def __init__(self, scheme, too_far: int | None = None):
        self.scheme, self.too_far = scheme, too_far

    def build(self, dim, num_sublayers):
        return self.scheme.build(dim, num_sublayers)

    def parameters(self, ours):
        return ours

    def forward(self, module, x, sublayers):
        if self.too_far is None:
            rounded = [lambda *x, f=f: f(*(x.bfloat16() for x in x)).float() for f in sublayers]
            with holding(module, {name: x.float() for name, x in named_parameters(module).items()}):
                return module(x.float(), rounded).bfloat16()
        state = module.expand(x)
        for i, (connection, sublayer) in enumerate(zip(module.connections, sublayers)):
            after = connection(state, sublayer)
            state = state + 1.3 * (after - state) if i == self.too_far else after
        return module.collapse(state)


@pytest.mark.parametrize("name", PRESETS)
def test_a_stack_that_rounds_less_than_the_reference_passes_in_bfloat16(name):
    checks()["forward"](Narrow(PRESETS[name]))


@pytest.mark.parametrize("too_far", range(4))
@pytest.mark.parametrize(
    "name", some(["residual", "ddl", "ddl-tc", "hc", "mhc", "edelta"], ("residual", "ddl").__contains__)
)
def test_a_write_that_is_a_third_too_large_fails_in_bfloat16(name, too_far):
    with pytest.raises(CheckFailed, match="largest difference"):
        checks()["forward"](Narrow(PRESETS[name], too_far))


@pytest.mark.filterwarnings("ignore:the .* parameters of gates and mappings")
def test_float32_mappings_are_found_with_an_adapter_in_16_bits():
    ours, *blocks = OurConnection(Block.scheme), Block("bf16 mapping"), Block("autocast mapping")
    for adapter in (ours, *blocks):
        adapter.dtype = torch.bfloat16
    check = checks()["float32_mappings"]
    check(ours)
    for block in blocks:
        with pytest.raises(CheckFailed, match="rounded to 16 bits"):
            check(block)


class Steep(Narrow):
    """Our own stack with a gradient of the embedding that is a fifth too large."""

    def forward(self, module, x, sublayers):
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda grad: 1.2 * grad)
        return super().forward(module, x, sublayers)


COARSE = {"hc", "edelta", "edelta-stream"}
"""Presets whose own gradients can be so far from the exact ones in bfloat16 that a fifth more is within rounding."""


@pytest.mark.parametrize(
    "name", some([name for name in PRESETS if name not in COARSE], ("residual", "ddl", "mhc").__contains__)
)
def test_a_gradient_that_is_a_fifth_too_large_fails_in_bfloat16(name):
    checks()["gradients"](Narrow(PRESETS[name]))
    with pytest.raises(CheckFailed, match=r"the gradient of the state, leaf 0 is 1\.[12]\d* times ours$"):
        checks()["gradients"](Steep(PRESETS[name]))


@pytest.mark.nightly
def test_no_second_mistake_is_reported():
    said = failures(Block("writes its input"))
    assert "doubly stochastic" not in said
    assert "look for a factor" not in said
    assert "subtract the largest" not in failures(Block("largest of the matrix"))
    assert "another order" not in failures(Block("rows once more"))
    assert "doubly stochastic" not in failures(Block("keeps its input"))


@pytest.mark.parametrize("bug", some(["dropout", "remembers"], lambda bug: bug != "dropout"))
def test_different_results_of_a_second_call_explain_every_failure(bug):
    report = run(checks(), Block(bug))
    assert set(report.failed.values()) == {"a second call gives other numbers"}


def test_a_state_changed_in_place_does_not_fail_the_check_of_streaming():
    assert "streaming" in run(checks(), Block("updates the streams in place")).passed


class DepthStack(nn.Module):
    """AttnRes as people write it: a list of all outputs, one query and one key norm for each read."""

    def __init__(self, dim: int, layers: int, bug: str | None = None):
        super().__init__()
        self.bug = bug
        self.query = nn.Parameter(torch.zeros(layers - 1, dim))
        self.key_gain = nn.Parameter(torch.ones(layers - 1, dim))
        self.norm_gain = nn.Parameter(torch.ones(layers, dim))
        self.head_query = nn.Parameter(torch.empty(dim) if bug == "uninitialised head" else torch.zeros(dim))
        self.head_gain = nn.Parameter(torch.ones(dim))
        if bug == "queries at 0.02":
            nn.init.normal_(self.query, std=0.02)

    def attend(self, values: list[Tensor], query: Tensor, gain: Tensor) -> Tensor:
        v = torch.stack(values, 2)
        if self.bug == "last source missing" and v.shape[2] > 1:
            v = v[:, :, :-1]
        keys = v * gain if self.bug == "key norm missing" else F.rms_norm(v, v.shape[-1:], gain, 1e-5)
        keys = v if self.bug == "key norm and gain missing" else keys
        if self.bug == "values normalised":
            v = F.rms_norm(v, v.shape[-1:], None, 1e-5)
        scores = keys.to(query.dtype) @ query if self.bug == "autocast scores" else (keys * query).sum(-1)
        if self.bug == "scaled":
            scores = scores / query.shape[-1] ** 0.5
        return (scores.softmax(-1).unsqueeze(-1) * v).sum(2).to(v.dtype)

    def forward(self, x: Tensor, layers) -> Tensor:
        values = [x]
        for i, layer in enumerate(layers):
            h = x if i == 0 else self.attend(values, self.query[i - 1], self.key_gain[i - 1])
            values.append(layer(F.rms_norm(h, h.shape[-1:], self.norm_gain[i], 1e-5)))
        if self.bug == "last write doubled":
            values[-1] = 2 * values[-1]
        if self.bug == "head sums":
            return sum(values)
        return self.attend(values, self.head_query, self.head_gain)


class Depth(StreamAdapter):
    scheme = AttentionResiduals()

    def __init__(self, bug: str | None = None):
        self.bug = bug

    def build(self, dim, num_sublayers):
        return DepthStack(dim, num_sublayers, self.bug)

    def parameters(self, ours):
        layers = range(self.num_sublayers)
        return {
            "query": torch.stack([ours[f"connections.{i}.attend.query"] for i in layers[1:]]),
            "key_gain": torch.stack([ours[f"connections.{i}.attend.gain"] for i in layers[1:]]),
            "norm_gain": torch.stack([ours[f"connections.{i}.norm.weight"] for i in layers]),
            "head_query": ours["collapse.attend.query"],
            "head_gain": ours["collapse.attend.gain"],
        }

    def forward(self, module, x, sublayers):
        return module(x, sublayers)


STACKS = {
    "queries at 0.02": ("initial_values", r"query starts with mean .* deviation 0.0.*; the scheme starts it at 0"),
    "uninitialised head": ("initial_values", r"never initialised: head_query \(torch.empty"),
    "values normalised": ("forward", "the read of connection 1 differs: the values are normalised"),
    "scaled": ("forward", "the read of connection 1 differs: the logits are divided by sqrt"),
    "key norm missing": ("forward", "the read of connection 1 differs: the keys are not normalised"),
    "key norm and gain missing": ("forward", "the read of connection 1 differs: the keys have no norm and no gain"),
    "last source missing": ("forward", "the read of connection 1 differs: the last source is missing"),
    "head sums": ("forward", "the head reads the sum of the sources"),
    "last write doubled": ("forward", f"{FIRST}the last write or the head"),
}


@pytest.mark.parametrize("adapter", [Block, Hyper, Delta, Depth])
def test_a_correct_module_passes_every_check(adapter):
    assert list(check_module(adapter()).passed) == list(checks())


@pytest.mark.parametrize("bug", STACKS)
def test_a_bug_of_a_stack_is_named(bug):
    check, words = STACKS[bug]
    with pytest.raises(CheckFailed, match=words):
        checks()[check](Depth(bug))


def test_the_mappings_of_a_stack_under_autocast_are_told_from_its_sublayers():
    with pytest.raises(CheckFailed, match="computed in bfloat16 under autocast"):
        checks()["float32_mappings"](Depth("autocast scores"))


class Streams(StreamAdapter):
    """A stack of `HyperBlock`, without the mappings that our first and last connection leave out."""

    scheme = ManifoldHyperConnections(num_streams=N)

    def __init__(self, bug: str | None = None, every: int | None = None):
        self.bug, self.every = bug, every

    def build(self, dim, num_sublayers):
        return nn.ModuleList(HyperBlock(dim, self.bug) for _ in range(num_sublayers))

    def parameters(self, ours):
        mine = {}
        for i in range(self.num_sublayers):
            prefix = f"connections.{i}."
            alpha, bias, phi = (ours[prefix + f"mappings.{name}"] for name in ("alpha", "bias", "phi.weight"))
            pre, res = alpha.new_full((N,), -math.log(N - 1)), 6 * torch.eye(N).flatten().to(alpha)
            if i in (0, self.num_sublayers - 1):  # H_pre has no influence on equal streams, nor H_res before a mean
                parts, rest = (bias.split([N, N]) if i else [pre, bias]), phi.new_zeros(N * N, phi.shape[1])
                phi = torch.cat([phi.new_zeros(0 if i else N, phi.shape[1]), phi, rest])
                alpha = torch.cat([alpha.new_zeros(0 if i else 1), alpha, alpha.new_zeros(1)])
                bias = torch.cat([*parts, res])
            mine |= {f"{i}.proj": phi.T, f"{i}.scale": alpha, f"{i}.base": bias}
            mine[f"{i}.ln"] = ours[prefix + "norm.weight"]
        return mine

    def forward(self, module, x, sublayers):
        streams = x.repeat(1, 1, N)
        for i, (block, sublayer) in enumerate(zip(module, sublayers), start=1):
            streams = block(streams, sublayer)
            if self.every and i % self.every == 0:
                streams = streams.unflatten(-1, (N, -1)).mean(-2).repeat(1, 1, N)
        return streams.unflatten(-1, (N, -1)).mean(-2)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (Streams("transposed"), "the mixer is transposed"),
        (Streams("thrown away"), "the mixer is dropped"),
        (Streams(every=1), "expanded again after every sublayer"),
        (Streams(every=2), "expanded again after every block"),
    ],
    ids=lambda value: "",
)
def test_a_bug_of_a_stack_of_streams_is_named(adapter, words):
    with pytest.raises(CheckFailed, match=words):
        checks()["forward"](adapter)


def test_a_correct_stack_of_streams_passes():
    for name in ("parameters", "forward", "gradients", "causal", "streaming"):
        checks()[name](Streams())


class OurStream(StreamAdapter):
    """A scheme of ours behind an adapter: nothing is wrong with it."""

    dim = 8

    def __init__(self, scheme):
        self.scheme = scheme

    def build(self, dim, num_sublayers):
        return self.scheme.build(dim, num_sublayers)

    def parameters(self, ours):
        return dict(ours)

    def forward(self, module, x, sublayers):
        return module(x, sublayers)


class OurConnection(ConnectionAdapter):
    dim = 8

    def __init__(self, scheme):
        self.scheme = scheme

    def build(self, dim):
        return self.scheme.build(dim, self.num_sublayers).connections[self.index]

    def parameters(self, ours):
        return dict(ours)

    def connect(self, module, state, sublayer):
        return module(state, sublayer)


@pytest.mark.parametrize("adapter", [OurStream, OurConnection])
@pytest.mark.parametrize("name", residua.connections.PRESETS)
def test_every_built_in_scheme_passes(name, adapter):
    check_module(adapter(resolve(name)))


@pytest.mark.parametrize("name", ["ddl-tc", "ddl-cc", "ddl-ec", "ddl-tc-v", "altup", "residual:compress=token"])
def test_a_borrowed_part_has_the_values_of_its_owner(name):
    """The second connection of a block, whose compressor or router belongs to the first."""
    adapter = OurConnection(resolve(name))
    adapter.index = 1
    report = check_module(adapter)
    assert {"parameters", "initial_values", "forward", "gradients"} <= {*report.passed}


def test_a_users_module_may_own_the_part_that_the_reference_borrows():
    class Owner(nn.Module):
        def __init__(self, connection):
            super().__init__()
            self.connection, self.reader = connection, connection.compressor

    class Mine(OurConnection):
        index = 1

        def build(self, dim):
            return Owner(super().build(dim))

        def parameters(self, ours):
            return {
                name.replace("compress.", "reader.") if "compress." in name else f"connection.{name}": value
                for name, value in ours.items()
            }

        def connect(self, module, state, sublayer):
            return module.connection(state, sublayer)

    check_module(Mine(resolve("ddl-cc")))


class SharedReaders(nn.Module):
    """A stack whose two sublayers of a block have the same compressor, registered in both."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream
        self.readers = nn.ModuleList(stream.connections[i - i % 2].compress for i in range(4))


class Shared(OurStream):
    def build(self, dim, num_sublayers):
        return SharedReaders(super().build(dim, num_sublayers))

    def parameters(self, ours):
        return {f"stream.{name}": value for name, value in ours.items()}

    def forward(self, module, x, sublayers):
        return module.stream(x, sublayers)


def test_a_module_with_two_names_keeps_its_parameters():
    check_module(Shared(resolve("ddl-tc")))


def test_a_parameter_with_two_names_has_one_value():
    class Twice(Shared):
        def parameters(self, ours):
            mine = super().parameters(ours)
            return mine | {"readers.1.taps": 2 * mine["stream.connections.0.compress.taps"]}

    with pytest.raises(CheckFailed, match=r"compress.taps and readers.1.taps"):
        checks()["parameters"](Twice(resolve("ddl-tc")))


@pytest.mark.parametrize(("name", "count"), [("edelta-stream", 4), ("jpmhc", 12), ("edelta", 12)])
def test_steep_functions_are_not_reported_as_rounded(name, count):
    adapter = OurStream(resolve(name))
    adapter.dim, adapter.num_sublayers = 16, count
    checks()["float32_mappings"](adapter)


def test_steep_functions_are_compared_with_their_own_rounding():
    """The same numbers but for the last digit of the embedding, which 12 sublayers make larger than 1e-10."""

    class Rounded(OurStream):
        dim, num_sublayers = 16, 12

        def forward(self, module, x, sublayers):
            return super().forward(module, x * (1 + 2**-52), sublayers)

    for name in ("forward", "gradients"):
        checks()[name](Rounded(resolve("edelta-stream")))


class Returning(OurConnection):
    """The plain residual, with another result."""

    def __init__(self, result):
        super().__init__(resolve("residual"))
        self.result_of = result

    def connect(self, module, state, sublayer):
        return self.result_of(super().connect(module, state, sublayer))


def test_a_tuple_of_a_state_and_another_object_is_not_a_state():
    with pytest.raises(CheckFailed, match=r"must be \[\(2, 6, 8\)\], got \[\(2, 6, 8\), 'NoneType'\]"):
        checks()["forward"](Returning(lambda state: (state, None)))


def test_a_list_of_one_state_counts_as_a_state():
    checks()["forward"](Returning(lambda state: [state]))


def test_a_difference_in_any_tensor_of_a_state_is_described():
    class Wrong(OurConnection):
        def connect(self, module, state, sublayer):
            first, *rest = super().connect(module, state, sublayer)
            return (first + 1, *rest)

    with pytest.raises(CheckFailed, match=r"the write \(largest difference 1, "):
        checks()["forward"](Wrong(AttentionResiduals()))


class Kronecker(OurConnection):
    """KromHC with the rows of its factors in another order."""

    def __init__(self, order):
        super().__init__(resolve("krom"))
        self.order = order

    def connect(self, module, state, sublayer):
        for value in (module.logits.bias, module.logits.project.weight):
            value[4:8] = value[self.order]
        return super().connect(module, state, sublayer)

    def parameters(self, ours):
        return {name: value.clone() for name, value in super().parameters(ours).items()}


@pytest.mark.parametrize(
    ("order", "words"),
    [([6, 7, 4, 5], "product are in the opposite order$"), ([5, 4, 7, 6], "identity and the swap of each factor")],
)
def test_the_factors_of_a_kronecker_product_in_another_order_are_named(order, words):
    with pytest.raises(CheckFailed, match=words):
        checks()["forward"](Kronecker(order))


class Columns(Block):
    scheme = ManifoldHyperConnections(num_streams=N, order="columns")


class ByColumns(Block):
    """A block that divides by columns first, with a mistake: `wrong` changes its result."""

    def __init__(self, wrong=lambda state: state):
        super().__init__("Sinkhorn columns first")
        self.wrong = wrong

    def connect(self, module, state, sublayer):
        return self.wrong(super().connect(module, state, sublayer))


@pytest.mark.parametrize(("adapter", "order"), [(Block(), "rows"), (ByColumns(), "columns")])
def test_every_published_version_is_accepted_and_named(adapter, order):
    assert f"compared with ManifoldHyperConnections(order={order!r})\n" in str(check_module(adapter))


SMALLER, MIXED = (lambda state: 0.99 * state), (lambda state: state + 1e-3 * state.roll(1, 1))


@pytest.mark.parametrize("wrong", some([SMALLER, MIXED], lambda wrong: wrong is MIXED))
def test_a_wrong_module_is_judged_against_the_nearest_published_version(wrong):
    report = failures(ByColumns(wrong))
    assert report.startswith("ByColumns, compared with ManifoldHyperConnections(order='columns'): "), report
    assert "forward: " in report
    assert "agrees with our" not in report


def test_an_option_that_an_adapter_sets_names_one_published_version():
    check_module(Columns("Sinkhorn columns first"))
    with pytest.raises(CheckFailed, match=r"agrees with our ManifoldHyperConnections\(order='rows'\)$"):
        checks()["forward"](Columns())


@pytest.mark.parametrize("name", ["mhc", "ddl-cc", "attnres-block"])
def test_an_option_that_changes_no_number_is_not_named(name):
    class Halved(OurStream):
        def forward(self, module, x, sublayers):
            return module(x, sublayers) / 2

    with pytest.raises(CheckFailed) as failure:
        checks()["forward"](Halved(resolve(name)))
    assert "recompute" not in str(failure.value)


def owned(scheme, count: int, dim: int = 8) -> list[int]:
    """Return the first and the last index of each kind of connection: those that own or borrow the same shapes."""
    kinds: dict[tuple, list[int]] = {}
    for i, connection in enumerate(scheme.build(dim, count).connections):
        shapes = tuple((name, tuple(value.shape)) for name, value in named_once(connection).items())
        kinds.setdefault(shapes, []).append(i)
    return sorted({i for indices in kinds.values() for i in (indices[0], indices[-1])})


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "dim"), [(4, 16), (8, 8), (12, 16)])
@pytest.mark.parametrize("name", residua.connections.PRESETS)
def test_every_kind_of_connection_passes(name, count, dim):
    scheme = resolve(name)
    stream = OurStream(scheme)
    stream.dim, stream.num_sublayers = dim, count
    check_module(stream)
    for index in owned(scheme, count):
        connection = OurConnection(scheme)
        connection.dim, connection.num_sublayers, connection.index = dim, count, index
        check_module(connection)


@pytest.mark.parametrize("adapter", [OurStream, OurConnection])
def test_a_scheme_of_the_whole_sequence_passes(adapter):
    report = check_module(adapter(PooledHouseholder(context="sequence")))
    assert report.not_checked["streaming"] == "the scheme is not causal"


def test_a_scheme_without_parameters_passes():
    class Bare(OurConnection):
        owns_norm = False

        def build(self, dim):
            return self.scheme.build(dim, self.num_sublayers, norm=lambda i: nn.Identity()).connections[self.index]

    check_module(Bare(Residual()))


def test_a_mistake_in_a_scheme_with_a_state_of_two_shapes_is_reported_without_a_crash():
    class Doubled(OurStream):
        def forward(self, module, x, sublayers):
            return 2 * module(x, sublayers)

    with pytest.raises(CheckFailed) as failure:
        check_module(Doubled(resolve("altup")))
    assert "Error" not in str(failure.value)


def test_parameters_without_rows_have_no_order():
    pair = Mock(ours={"scale": torch.tensor(1.0), "bias": torch.arange(2.0)})
    assert [*_reordered(pair, [1, 0])] == ["bias"]


def test_an_unknown_mistake_is_described_if_no_weights_read_the_streams():
    class Halved(OurStream):
        def forward(self, module, x, sublayers):
            return module(x, sublayers) / 2

    with pytest.raises(CheckFailed, match=f"{FIRST}the last write or the head .*; it is 0.5 times ours"):
        checks()["forward"](Halved(resolve("gated-residual:gate_rank=4")))


def without(name: str):
    return lambda self, ours: {key: value for key, value in in_mine(ours).items() if key != name}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (without("scale"), "no value for scale, which would keep the initial values"),
        (lambda self, ours: in_mine(ours) | {"alpha": ours["mappings.alpha"]}, "your module has no 'alpha'; it has"),
        (lambda self, ours: in_mine(ours) | {"proj": ours["mappings.phi.weight"]}, r"proj is \(24, 64\), your module"),
        (lambda self, ours: in_mine(ours) | {"ln": torch.ones(16)}, "our norm.weight is not used"),
        (
            lambda self, ours: {"ln": ours["nrm.weight"]},
            r"the reference has no 'nrm.weight'; did you mean norm.weight\?; it has",
        ),
    ],
    ids=["missing", "unknown", "shape", "unused", "ours"],
)
def test_a_wrong_adapter_is_distinguished_from_a_wrong_module(parameters, words):
    with pytest.raises(CheckFailed, match=words):
        checks()["parameters"](type("Wrong", (Block,), {"parameters": parameters})())


def test_a_wrong_shape_is_one_reason_for_all_checks():
    wrong = {"parameters": lambda self, ours: in_mine(ours) | {"proj": ours["mappings.phi.weight"]}}
    with pytest.raises(CheckFailed) as failed:
        check_module(type("Wrong", (Block,), wrong)())
    assert str(failed.value).count("\n") == 1
    assert "initial_values" in str(failed.value)


def test_an_object_that_is_not_an_adapter_gives_a_one_line_error():
    with pytest.raises(TypeError, match=r"ConnectionAdapter .*StreamAdapter, got HyperBlock"):
        check_module(HyperBlock(4))
    block = Block()
    block.scheme = "mhc"
    with pytest.raises(TypeError, match=r"must be a residua.Scheme, such as residua.resolve\('mhc'\), got 'mhc'"):
        check_module(block)
    with pytest.raises(TypeError, match=r"must be a residua.Scheme, such as .*, got None"):
        check_module(type("Without", (Block,), {"scheme": None})())
    block = Block()
    block.index = 4
    with pytest.raises(ValueError, match="index must be 0 to 3, a sublayer, got 4"):
        check_module(block)


def test_a_reason_shared_by_several_checks_is_printed_once():
    class Wrong(Block):
        def parameters(self, ours):
            return {"ln": ours["nrm.weight"]}

    with pytest.raises(CheckFailed) as failure:
        check_module(Wrong())
    title, reason = str(failure.value).splitlines()
    assert "10 of 10 checks failed" in title
    assert reason.startswith("  parameters, initial_values, forward,")


def test_a_module_that_computes_in_float32_gets_advice_on_dtype():
    class Inside(Block):
        def parameters(self, ours):
            return {name: value.float() for name, value in super().parameters(ours).items()}

        def connect(self, module, state, sublayer):
            return super().connect(module, state.float(), lambda x: sublayer(x).float()).to(state.dtype)

    with pytest.raises(CheckFailed, match=r"set dtype = torch.float32"):
        checks()["forward"](Inside())
    Inside.dtype = torch.float32
    checks()["forward"](Inside())


class Unnormed(HyperBlock):
    """Leaves the norm to its caller, as most kernels do."""

    def __init__(self, dim: int, bug: None):
        super().__init__(dim)
        del self.ln

    def forward(self, x, layer):
        pre, mix, post = self.mappings(x)
        streams = x.unflatten(-1, (N, -1)).to(mix.dtype)
        with torch.autocast("cpu", enabled=False):
            y = layer((pre.unsqueeze(-1) * streams).sum(-2).to(x.dtype)).to(mix.dtype)
            return (mix @ streams + post.unsqueeze(-1) * y.unsqueeze(-2)).to(x.dtype).flatten(-2)


def test_a_module_without_a_norm_is_compared_before_the_norm():
    class Bare(Block):
        owns_norm = False
        module = Unnormed

        def parameters(self, ours):
            return {name: value for name, value in in_mine({**ours, "norm.weight": None}).items() if name != "ln"}

    assert list(check_module(Bare()).passed) == list(checks())


def test_an_expected_failure_is_not_an_error():
    reason = "no maximum is subtracted"
    report = check_module(Block("overflows"), expected_failures={"large_logits": reason, "compiles": "not run here"})
    assert "an exp overflows" in report.failed_as_expected["large_logits"]
    assert str(report).startswith(f"residua.testing, specification {SPECIFICATION}\n")
    assert "large_logits: failed as expected, not finite" in str(report)


def test_an_expected_failure_that_passes_is_an_error():
    with pytest.raises(CheckFailed, match=r"causal: it passes: .*\(no mask\)"):
        check_module(Block(), expected_failures={"causal": "no mask"})


def test_an_expected_failure_of_a_check_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"expected_failures must name checks, parameters, .*, got 'casual'"):
        check_module(Block(), expected_failures={"casual": "no mask"})
    with pytest.raises(TypeError, match=r"expected_failures must map names of checks to reasons, got \['causal'\]"):
        check_module(Block(), expected_failures=["causal"])


WITHOUT_PACKAGES = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import requires
import torch
required = {re.match(r"[\\w-]+", line)[0].replace("-", "_") for line in requires("torch")}
torch_alone = {name.partition(".")[0] for name in sys.modules} | required | {"mpmath", "residua"}
torch_alone = (torch_alone | set(sys.stdlib_module_names)) - {"numpy", "triton"}

class TorchAlone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        visible = name.partition(".")[0] in torch_alone or name.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if visible else None

sys.meta_path[sys.meta_path.index(PathFinder)] = TorchAlone
from residua import ManifoldHyperConnections
from residua.testing import ConnectionAdapter, check_module, check_scheme

class Same(ConnectionAdapter):
    scheme = ManifoldHyperConnections()
    def build(self, dim):
        return self.scheme.build(dim, 4).connections[2]
    def parameters(self, ours):
        return ours
    def connect(self, module, state, sublayer):
        return module(state, sublayer)

print(check_module(Same()))
print(check_scheme(ManifoldHyperConnections()))
print(*sorted({"numpy", "transformers", "safetensors", "scipy"} & sys.modules.keys()))
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_the_kit_needs_only_torch(tmp_path):
    """numpy is hidden from torch too, which can do without; all else that torch does not require is hidden."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('hidden', name='numpy')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(residua.__file__).parents[1])])
    printed, _ = run_python(WITHOUT_PACKAGES, PYTHONPATH=path, PYTHONWARNINGS="ignore")
    assert printed.endswith("\n\n")
    assert "FAILED" not in printed


@pytest.mark.nightly
@pytest.mark.compiler
def test_compile_is_checked_on_request():
    checks(compiled=True)["compiles"](OurConnection(resolve("residual")))


def run_plugin(pytester, result, mark):
    """Run the checks on a module of the plain residual that returns `result`, an expression of what is right."""
    pytester.makepyfile(
        f"""
        import pytest
        from residua import Residual
        from residua.testing import ConnectionAdapter

        class Mine(ConnectionAdapter):
            scheme = Residual()

            def build(self, dim):
                return Residual().build(dim, 4).connections[2]

            def parameters(self, ours):
                return ours

            def connect(self, module, state, sublayer):
                return {result}

        @pytest.mark.residua_module({mark})
        def test_mine(residua_check):
            residua_check()
        """
    )
    return pytester.runpytest_inprocess("-p", "residua.testing.plugin", "--strict-markers", "-v")


def test_the_plugin_makes_a_test_for_each_check_of_a_module(pytester):
    result = run_plugin(pytester, "module(state, sublayer)", "Mine()")
    result.assert_outcomes(passed=len(checks()))
    result.stdout.fnmatch_lines(["*::test_mine?Mine-float32_mappings? PASSED*"])


def test_expected_failures_in_the_plugin_are_strict(pytester):
    failures = {"forward": "a factor", "causal": "nothing"}
    result = run_plugin(pytester, "2 * module(state, sublayer)", f"Mine(), expected_failures={failures}")
    assert result.parseoutcomes().items() >= {"xfailed": 1, "failed": 1}.items()
    result.stdout.fnmatch_lines(["*Mine-forward? XFAIL*", "?XPASS(strict)? nothing"])


class Offset(torch.autograd.Function):
    """Wrong forward and right backward, as a kernel may be."""

    @staticmethod
    def forward(ctx, x):
        return x + 0.1

    @staticmethod
    def backward(ctx, grad):
        return grad


class Steeper(torch.autograd.Function):
    """Right forward and wrong backward, as a kernel may be."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


class Views(torch.autograd.Function):
    """A backward pass that takes no gradient with other strides."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 0 * ctx.saved_tensors[0].view(-1)[0]


class PlainBlock(nn.Module):
    """x + layer(norm(x)), right in most calls."""

    def __init__(self, dim: int, bug: str = ""):
        super().__init__()
        self.bug, self.gain, self.seen = bug, nn.Parameter(torch.ones(dim)), {}

    def forward(self, x: Tensor, layer) -> Tensor:
        gain = self.gain
        if self.bug == "stale parameters" and not self.training and not torch.is_grad_enabled():
            gain = self.seen.setdefault("gain", gain.detach().clone())
        if self.bug == "clamps":
            gain = gain.clamp(-5, 5)
        y = layer(F.rms_norm(x, x.shape[-1:], gain, 1e-6 if self.bug == "another eps" else 1e-5))
        if self.bug == "squeezes":
            return (x.squeeze(0) + y.squeeze(0)).view(-1, *x.shape[-2:]).expand(2, -1, -1)[: max(len(x), 2)]
        wrong = {
            "evaluation": not self.training,
            "one token": x.shape[:2] == (1, 1),
            "a block of 32": x.shape[1] > 32,
            "three sequences": len(x) > 2,
            "zeros": (x == 0).all(-1).any(),
            "strides": not x.is_contiguous(),
        }
        if self.bug == "a cache in evaluation" and not self.training:
            y = self.seen.setdefault(x.shape, y.detach())
        if self.bug == "a buffer on demand" and not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(()))
        if self.bug == "a kernel" and torch.is_grad_enabled():
            y = Offset.apply(y)
        if self.bug.startswith("the gradient of ") and wrong[self.bug.removeprefix("the gradient of ")]:
            y = Steeper.apply(y)
        if self.bug == "a view of the gradient":
            x = Views.apply(x)
        if self.bug == "no gradient in evaluation" and not self.training:
            x, y = x.detach(), y.detach()
        if self.bug == "divides by the norm":
            x = x / x.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)
        if self.bug == "a root":
            y = y + 0 * x.square().sum(-1, keepdim=True).sqrt()
        return x + (1.1 * y if wrong.get(self.bug) else y)


class PlainMine(ConnectionAdapter):
    scheme = residua.Residual()

    def __init__(self, bug: str = ""):
        self.bug = bug

    def build(self, dim):
        return PlainBlock(dim, self.bug)

    def parameters(self, ours):
        return {"gain": ours["norm.weight"]}

    def connect(self, module, state, sublayer):
        return module(state, sublayer)


@pytest.mark.parametrize(
    ("bug", "check", "words"),
    [
        ("evaluation", "forward", "^in evaluation mode the result differs"),
        ("a cache in evaluation", "forward", "^in evaluation mode, for a second state, the result differs"),
        ("a kernel", "forward", "^with gradients the result differs"),
        ("strides", "forward", "^for a state that is not contiguous the result differs"),
        ("divides by the norm", "forward", "^for a token of zeros the result differs.* not finite"),
        ("a root", "gradients", "^for a token of zeros the gradient of the state, leaf 0 is not finite"),
        ("one token", "forward", "^for one sequence of one token the result differs"),
        ("squeezes", "forward", r"^for one sequence of one token the result is \[\(2, 1, 16\)\]"),
        ("a block of 32", "forward", "^for three sequences of 36 tokens the result differs"),
        ("the gradient of evaluation", "gradients", "^in evaluation mode the gradient of .*, right otherwise, differs"),
        ("the gradient of strides", "gradients", "^for a state that is not contiguous the gradient of .* differs"),
        ("the gradient of one token", "gradients", "^for one sequence of one token the gradient of .* differs"),
        ("the gradient of a block of 32", "gradients", "^for three sequences of 36 tokens the gradient of"),
        ("the gradient of three sequences", "gradients", "^for three sequences of 36 tokens the gradient of"),
        ("the gradient of zeros", "gradients", "^for a token of zeros the gradient of .* differs"),
        ("a view of the gradient", "gradients", "^for a state that is not contiguous the backward pass fails"),
        ("stale parameters", "forward", "^in evaluation mode, with other parameters, the result differs"),
        ("clamps", "large_logits", "^with logits of about 100 the result differs"),
        ("a buffer on demand", "second_call", "^forward adds or removes late in state_dict"),
    ],
)
def test_a_module_that_is_wrong_in_other_calls_is_found(bug, check, words):
    with pytest.raises(CheckFailed, match=words):
        checks()[check](PlainMine(bug))


def test_another_eps_is_found_in_float32_too():
    adapter = PlainMine("another eps")
    adapter.dtype = torch.float32
    with pytest.raises(CheckFailed, match=r"^for a small state the result differs"):
        checks()["forward"](adapter)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (lambda x: x, None),
        (lambda x: torch.zeros_like(x), "starts with 4 of 4 rows constant"),
        (lambda x: torch.cat([x[:3], torch.full_like(x[3:], 0.1)]), "starts with 1 of 4 rows constant"),
        (lambda x: x + 100, "starts with a mean of 1e+02"),
        (lambda x: 10 * (x - x.mean()), "starts with a standard deviation"),
    ],
)
def test_draws_of_another_kind_are_described(start, words):
    ours, theirs = ([normal(4, 8, seed=4 * i + seed) for seed in range(4)] for i in range(2))
    for draws in ([start(x) for x in ours], [start(ours[0])] * 4):  # drawn anew by each seed, and by a seed of its own
        assert (different_draws(draws, theirs) or "none").startswith(words or "none")


def test_a_module_may_have_no_backward_in_evaluation():
    assert "gradients" in check_module(PlainMine("no gradient in evaluation")).passed


class Recomputed(PlainBlock):
    """It saves memory by itself."""

    def forward(self, x: Tensor, layer) -> Tensor:
        return checkpoint(super().forward, x, layer, use_reentrant=False)


def test_a_module_that_recomputes_itself_is_right():
    adapter = PlainMine()
    adapter.build = Recomputed
    assert "gradients" in check_module(adapter).passed


class Viewed(PlainBlock):
    def forward(self, x: Tensor, layer) -> Tensor:
        return super().forward(x.view(-1, x.shape[-1]).view(x.shape), layer)


def test_a_module_may_refuse_a_state_that_is_not_contiguous():
    adapter = PlainMine()
    adapter.build = Viewed
    assert not check_module(adapter).failed


@pytest.mark.parametrize("mode", [torch.no_grad(), torch.inference_mode(), torch.device("meta")])
def test_the_caller_may_be_without_gradients_or_on_another_device(mode):
    with mode:
        assert not check_module(PlainMine()).failed


class OnlyBfloat16(PlainBlock):
    """A kernel for one dtype."""

    def forward(self, x: Tensor, layer) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise RuntimeError(f"no kernel for {x.dtype}")
        return super().forward(x, layer)


def test_a_module_for_16_bits_alone_has_no_float32_to_compare_with():
    adapter = PlainMine()
    adapter.build, adapter.dtype = OnlyBfloat16, torch.bfloat16
    report = run({"float32_mappings": checks()["float32_mappings"]}, adapter)
    words = "the module computes only in torch.bfloat16: no kernel for torch.float32"
    assert report.not_checked == {"float32_mappings": words}


class AddsInPlace(PlainBlock):
    """Adds the residual to the output of the sublayer."""

    def forward(self, x: Tensor, layer) -> Tensor:
        y = layer(F.rms_norm(x, x.shape[-1:], self.gain, 1e-5))
        return y.add_(x)


class AddsToItsCopy(PlainBlock):
    """Gives the sublayer a copy of the state, to which it adds the output."""

    def __init__(self, dim: int):
        super().__init__(dim)
        del self.gain

    def forward(self, x: Tensor, layer) -> Tensor:
        x = x.clone()
        y = layer(x)
        return x + y if torch.is_grad_enabled() else x.add_(y)


def test_a_module_may_add_in_place_to_what_is_its_own():
    adapter = PlainMine()
    adapter.build = AddsInPlace
    assert not check_module(adapter).failed
    adapter.build, adapter.owns_norm, adapter.parameters = AddsToItsCopy, False, lambda ours: {}
    assert not check_module(adapter).failed


def test_a_mistake_of_a_module_that_adds_in_place_is_named():
    class Mixes(HyperBlock):
        def forward(self, x, layer):
            return super().forward(x, lambda read: layer(read).mul_(1.0))

    block = Block("factor 2 missing")
    block.module = Mixes
    with pytest.raises(CheckFailed, match=r"^the write is 0.5 times H_post y"):
        checks()["forward"](block)


class Multiplies(PlainBlock):
    """Multiplies the state by a matrix that is always zero."""

    def __init__(self, dim: int, way):
        super().__init__(dim)
        self.way = way

    def forward(self, x: Tensor, layer) -> Tensor:
        zero = x.new_zeros(x.shape[-1], x.shape[-1]).to(self.gain.dtype)
        return (super().forward(x, layer) + self.way(x, zero)).to(x.dtype)


WAYS = {
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("bsi,ij->bsj", x, w),
    "linear": lambda x, w: F.linear(x, w),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_takes_no_mixed_dtypes_is_not_judged_with_a_bfloat16_state(way):
    adapter = PlainMine()
    adapter.build = lambda dim: Multiplies(dim, WAYS[way])
    report = run({"float32_mappings": checks()["float32_mappings"]}, adapter)
    assert "the module takes no bfloat16 state with float32 parameters" in report.not_checked["float32_mappings"]


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_casts_to_float32_beside_float64_weights_gets_advice_on_dtype(way):
    adapter = PlainMine()
    adapter.build = lambda dim: Multiplies(dim, lambda x, w: WAYS[way](x.float(), w))
    with pytest.raises(RuntimeError, match=r"if your module casts to float32 inside, set dtype = torch\.float32$"):
        checks()["forward"](adapter)
    adapter.dtype = torch.float32
    checks()["forward"](adapter)


def test_a_module_on_another_device_computes_with_values_there():
    module = PlainBlock(8).to("meta")
    with holding(module, {"gain": torch.ones(8)}):
        assert module.gain.is_meta


class ExtraState(PlainBlock):
    """A module with state that is no tensor, as those of Transformer Engine."""

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        pass


def test_a_module_may_have_state_that_is_no_tensor():
    adapter = PlainMine()
    adapter.build = ExtraState
    checks()["second_call"](adapter)


def test_a_sublayer_that_is_called_in_another_layout_is_named():
    class SequenceFirst(PlainMine):
        def connect(self, module, state, sublayer):
            return module(state.transpose(0, 1), sublayer).transpose(0, 1)

    with pytest.raises(CheckFailed, match=r"^the sublayer got \(6, 2, 16\), expected \(2, 6, 16\)$"):
        checks()["forward"](SequenceFirst())


class Drops(PlainBlock):
    """Right, and random in training."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, layer) -> Tensor:
        return super().forward(x, lambda read: self.drop(layer(read)))


@pytest.mark.parametrize("training", some([True, False], bool))
def test_a_module_with_dropout_is_checked_in_evaluation_mode(training):
    adapter = PlainMine()
    adapter.build = lambda dim: Drops(dim).train(training)
    report = check_module(adapter)
    assert list(report.passed) == list(checks())
    assert "compared with Residual, in evaluation mode only: in training mode every call" in report.subject
    checks()["forward"](adapter)  # as the plugin does


class NarrowMixing(OurConnection):
    """Our connection in 16 bits, with other coefficients in its write."""

    dim = 16

    def __init__(self, name: str, dtype: torch.dtype, change):
        super().__init__(resolve(name))
        self.dtype, self.change = dtype, change

    def connect(self, module, state, sublayer):
        x, (residual, coefficients) = module.read(state)
        return module.write(sublayer(x), residua.Carry(residual, coefficients._replace(**self.change(coefficients))))


TURNED = ("the mixer is transposed: agrees with", lambda c: {"h_res": c.h_res.mT})
UNMIXED = ("the mixer is dropped: agrees with", lambda c: {"h_res": torch.eye(4).expand_as(c.h_res)})
HALVED = (r"the write is 0\.(5|499\d*) times H_post y", lambda c: {"h_post": c.h_post / 2})
CONSTANT = (
    "the mixer is not doubly stochastic|the first difference is in the mixer",
    lambda c: {"h_res": torch.full_like(c.h_res, 0.25).tril() + 0.1},
)


@pytest.mark.filterwarnings("ignore:the .* parameters of gates and mappings")
@pytest.mark.parametrize(
    ("name", "dtype", "mistake"),
    some(
        [
            (name, dtype, mistake)
            for name in ("mhc", "hc")
            for dtype in (torch.bfloat16, torch.float16)
            for mistake in (TURNED, UNMIXED, HALVED, CONSTANT)
            if mistake is not HALVED
            or dtype == torch.bfloat16  # rounding the state hides the ratio from float16's tolerance
        ],
        lambda case: case[:2] == ("mhc", torch.bfloat16),
    ),
)
def test_a_wrong_mixing_is_diagnosed_in_16_bits(name, dtype, mistake):
    words, change = mistake
    with pytest.raises(CheckFailed, match=words):
        checks()["forward"](NarrowMixing(name, dtype, change))
