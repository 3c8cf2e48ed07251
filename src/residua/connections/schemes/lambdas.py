"""The scaled plain residual: learned scales on the state, on the sublayer's output, and on the embedding.

    x <- r x + z x0,   x <- x + p F(norm(x)),   at the end x <- x - b x_mid

x0 is the embedding, or its expansion by `expand`; x_mid is the state in the middle of the stack (backout). The options
give the residual of nanochat and of modded-nanogpt, ReZero (arXiv 2003.04887), LayerScale (2103.17239) and DeepNorm
(2203.00555): the cheap baseline that every other scheme has to beat. With `gate`, the output of a sublayer is written
by the gated orthogonal update (gated_orthogonal.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.convolved import CompressingConnection, SingleStreamScheme
from residua.connections.parts.ends import Collapse
from residua.connections.parts.facts import GateFacts, Mixing
from residua.connections.parts.gates import Scale, TokenGate
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import OnlyIf, require_option
from residua.connections.parts.spec import TensorSpec
from residua.errors import Finite
from residua.ops import at_least_float32, orthogonal_update, residual_scale, scaled_sum

HAS_R = OnlyIf("r is a number", lambda scheme: scheme.r is not None)
HAS_Z = OnlyIf("z is a number", lambda scheme: scheme.z is not None)
HAS_R_OR_Z = OnlyIf("r or z is a number", lambda scheme: (scheme.r, scheme.z) != (None, None))
HAS_SCALE = OnlyIf("there is a scale", lambda scheme: (scheme.r, scheme.z, scheme.p) != (None, None, None))
MAY_SHIFT = OnlyIf(
    "r and p are numbers, r_every='sublayer' and when='write'",
    lambda scheme: None not in (scheme.r, scheme.p) and (scheme.r_every, scheme.when) == ("sublayer", "write"),
)


class ScaleCoefficients(NamedTuple):
    """r, z, p: the scales of the state, the embedding and the output, () or (dim,) each, in at least float32.

    None: this connection has no such scale. gate: e of the gated orthogonal update, (batch, seq, 1), or None.
    """

    r: Tensor | None
    z: Tensor | None
    p: Tensor | None
    gate: Tensor | None


@dataclass(frozen=True)
class Lambdas(SingleStreamScheme):
    """The scaled plain residual. It starts as exactly the plain residual; the preset `lambdas` starts as nanochat does.

    nanochat: r from 1.15 to 1.05 and z from 0.20 to 0.05 for each block, backout 0.2: the preset `lambdas`.
    modded-nanogpt: `r=1.0488, r_every="sublayer", z=0.0, p=1.0, when="write"`. ReZero: `r=None, z=None, p=0.0`.
    LayerScale: `r=None, z=None, p=0.0001, per_feature=True`. DeepNorm: `r=None, z=None, norm="post"`.

    r, r_last      initial scale of the state at the first and the last place, linear in between; r=None: no such
                   scale; r_last=None: as r
    r_every        places of r: before the first sublayer of each "block" of two, or at each "sublayer"
    z, z_last      initial scale of the embedding at the first and the last place, linear in between; z=None: the
                   embedding is not kept; z_last=None: as z
    z_every        places of z, as `r_every`
    when           "read": a sublayer reads r x + z x0; "write": it reads x, and r x + z x0 + p h is written
    p              initial scale of a sublayer's output; None: no such scale
    per_feature    whether a scale is a vector with a number for each feature, in place of a single number
    bias           True: r (x + s) + p (h + t) is written, as in ZAYA1, with vectors s and t that are learned for each
                   sublayer and start at 0; needs when="write", r_every="sublayer" and p
    backout        initial b; x_mid is the state after block L // 2 of L, counted from 0, or before the last sublayer
                   if that comes first; None: no backout
    norm           "pre": before a sublayer; "post": DeepNorm, x <- norm(alpha x + p h) with the constant alpha =
                   num_sublayers^(1/4), without r, z and backout; the smaller initialisation that DeepNorm gives to
                   sublayers is left to the model
    gate           "token": the share e of the component of p h along r x + z x0 is not written; e = tanh(w . c + b)
                   of the normalised context c, 0 at the start; needs when="read". "none": all of p h is written
    """

    title = "Scaled plain residual"
    equation = "r x + z x0 + p F(norm(r x + z x0))"
    users = (
        "nanochat, modded-nanogpt with gates for each token beside the scalars, and ZAYA1 with vectors that are "
        "added. LayerScale is common in vision transformers."
    )
    paper = "github.com/karpathy/nanochat"
    derived = {"r_last": ("r",), "z_last": ("z",)}

    r: Finite | None = 1.0
    r_last: Annotated[Finite | None, HAS_R] = None
    r_every: Annotated[Literal["block", "sublayer"], HAS_R] = "block"
    z: Finite | None = 0.0
    z_last: Annotated[Finite | None, HAS_Z] = None
    z_every: Annotated[Literal["block", "sublayer"], HAS_Z] = "block"
    when: Annotated[Literal["read", "write"], HAS_R_OR_Z] = "read"
    p: Finite | None = None
    per_feature: Annotated[bool, HAS_SCALE] = False
    bias: Annotated[bool, MAY_SHIFT] = False
    backout: Finite | None = None
    norm: Literal["pre", "post"] = "pre"
    gate: Literal["none", "token"] = "none"

    def __post_init__(self):
        super().__post_init__()
        for name in ("r", "z", "backout"):
            require_option(self, name, self.norm == "pre" or getattr(self, name) is None, "None with norm='post'")
        ungated = self.norm == "post" or self.when == "write"
        require_option(self, "gate", self.gate == "none" or not ungated, "'none' with norm='post' or when='write'")

    @property
    def kept(self) -> int:
        """The number of tensors in the state: x, the embedding if z scales it, and x_mid if there is a backout."""
        return 1 + (self.z is not None) + (self.backout is not None)

    def state_spec(self, boundary: int, dim: int) -> Any:
        return TensorSpec((dim,)) if self.kept == 1 else (TensorSpec((dim,)),) * self.kept

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        return {"gate": GateFacts((-1.0, 1.0), 0.0)}

    @property
    def residual_start(self) -> Mapping[str, float | None] | str:
        if self.norm == "post":
            return "norm='post' normalises the state itself, which the pre-norm residual never does"
        neutral = {"r": 1.0, "z": 0.0, "p": 1.0, "backout": 0.0}
        present = {name: value for name, value in neutral.items() if getattr(self, name) is not None}
        return {**present, "r_last": None, "z_last": None}

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        def connection(i: int, compress: nn.Module) -> ScaledConnection:
            return ScaledConnection(self, dim, i, num_sublayers, norm(i), compress)

        return self.stream(dim, num_sublayers, connection, copies=self.kept, readout=partial(Backout, self))

    def starts(self, dim: int, index: int, num_sublayers: int) -> dict[str, float | None]:
        """Return the initial r, z and p of sublayer `index`; None for a missing scale."""
        blocks = -(-num_sublayers // 2)

        def ramp(first: float | None, last: float | None, every: str) -> float | None:
            if first is None or (every == "block" and index % 2):
                return None
            place, places = (index, num_sublayers) if every == "sublayer" else (index // 2, blocks)
            return first + ((first if last is None else last) - first) * place / max(places - 1, 1)

        return {"r": ramp(self.r, self.r_last, self.r_every), "z": ramp(self.z, self.z_last, self.z_every), "p": self.p}


class Backout(Collapse):
    """The readout: x - b x_mid, or x without backout, through `compress`. (batch, seq, dim)."""

    def __init__(self, scheme: Lambdas, compress: nn.Module):
        super().__init__(compress)
        self.single = scheme.kept == 1
        self.backout = None if scheme.backout is None else Scale(scheme.backout)

    def forward(self, state: State, memory: Memory | None = None) -> Tensor:
        x = state if self.single else state[0]
        if self.backout is not None:
            x = scaled_sum((x, state[-1]), (None, -self.backout()))
        return super().forward(x, memory)


class ScaledConnection(CompressingConnection):
    """One scaled residual connection around sublayer `index`; x is the state or its first tensor."""

    def __init__(self, scheme: Lambdas, dim: int, index: int, num_sublayers: int, norm: nn.Module, compress: nn.Module):
        super().__init__(compress)
        self.scheme = scheme
        self.norm = norm
        middle = min(2 * (num_sublayers // 4) + 2, num_sublayers - 1)
        self.copies = index < middle and scheme.backout is not None  # x_mid is not in the state yet
        self.alpha = num_sublayers**0.25 if scheme.norm == "post" else None
        width = dim if scheme.per_feature else None
        self.scales = nn.ModuleDict(
            {
                name: Scale(start, width)
                for name, start in scheme.starts(dim, index, num_sublayers).items()
                if start is not None
            }
        )
        self.biases = nn.ModuleDict({name: Scale(0.0, dim) for name in "rp"}) if scheme.bias else None
        self.gate = TokenGate(dim, 1, scale=1.0) if scheme.gate == "token" else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        r, z, p = (self.scales[name]() if name in self.scales else None for name in ("r", "z", "p"))
        x, *others = (state,) if self.scheme.kept == 1 else state
        if self.scheme.when == "read":
            x = self._scaled(x, others, r, z)
        context = self.compress(x, memory)
        if not self.alpha:
            context = self.norm(context)
        gate = None if self.gate is None else self.gate(context)
        return context, Carry((x, *others), ScaleCoefficients(r, z, p, gate))

    def write(self, y: Tensor, carry: Carry) -> State:
        (x, *others), (r, z, p, gate) = carry
        if self.scheme.when == "write":
            x = self._scaled(x, others, r, z)
        if gate is None:
            alpha = at_least_float32(x).new_full((), self.alpha) if self.alpha else None
            if self.biases is None:
                x = scaled_sum((x, y), (alpha, p))
            else:
                shift = scaled(self.biases["r"](), r) + scaled(self.biases["p"](), p)
                x = scaled_sum((x, y, shift.expand_as(x)), (alpha, p, None))
        else:
            x = orthogonal_update(x, scaled(y, p), gate)
        if self.alpha:
            x = self.norm(x)
        if self.copies:
            others = [*others[:-1], x]
        return x if self.scheme.kept == 1 else (x, *others)

    def _scaled(self, x: Tensor, others: list[Tensor], r: Tensor | None, z: Tensor | None) -> Tensor:
        """Return r x + z x0, or x itself if this connection has neither scale."""
        return scaled(x, r) if z is None else scaled_sum((x, others[0]), (r, z))

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing | None:
        """Return the scales as a matrix on the rows x and x0.

        The result is None with scales for each feature, with biases, and with norm="post". x_mid is not a row, because
        it is only a copy of the state for the readout.
        """
        scheme = self.scheme
        if scheme.per_feature or scheme.bias or scheme.norm == "post":
            return None
        *scales, gate = carry.coefficients
        r, z, p = (neutral if scale is None else scale for scale, neutral in zip(scales, (1.0, 0.0, 1.0)))
        n = 1 if scheme.z is None else 2
        h_res = torch.eye(n, dtype=at_least_float32(y).dtype, device=y.device)
        x_alone, x0_alone = h_res[0], h_res[-1]
        row = r * x_alone if n == 1 else r * x_alone + z * x0_alone
        h_pre: Tensor | None = row if scheme.when == "read" else x_alone
        if scheme.compress is not None:  # the read is not a weighted sum of the rows of one token
            h_pre = None
        omitted = ("h_res",) if scales[:2] == [None, None] and gate is None else ()
        h_res = torch.stack([row, *h_res[1:]])
        if gate is None:
            return Mixing(h_res, h_pre, p * x_alone, left_out=omitted)
        h_res = h_res.expand(*gate.shape[:-1], n, n).clone()
        h_res[..., 0, :] *= residual_scale(carry.residual[0], scaled(y, carry.coefficients.p), gate)
        return Mixing(h_res, h_pre, p * x_alone, gates={"gate": gate[..., 0]})


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return s x, or x itself without a scale. x: (..., dim), scale: () or (dim,)."""
    return x if scale is None else scaled_sum((x,), (scale,))
