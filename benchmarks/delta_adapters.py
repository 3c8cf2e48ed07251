"""How the compliance table calls public implementations of Deep Delta Learning.

Their connections take the normalised state from the block around them, so each adapter puts a norm before them. Of a
file only the connection is executed (`definitions` of an implementation); `STAND_INS` has what that needs from packages
and from other modules.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.adapters import PeerAdapter
from residua.connections import DeepDelta
from residua.ops import delta_write
from residua.testing import StreamAdapter, agree, normal
from residua.testing.adapter import Pair

CHANNELS = 4


def causal_conv1d_fn(x: Tensor, *, weight: Tensor) -> Tensor:
    """Convolve (batch, features, tokens) with a filter (features, taps) for each feature, as causal-conv1d does."""
    return F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight.unsqueeze(1), groups=len(weight))


def linear_fp32(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear map in float32, also under autocast."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), linear.weight.float(), linear.bias.float())


def rearrange(x: Tensor, pattern: str, c: int = CHANNELS) -> Tensor:
    """Do as `einops.rearrange` for the three patterns of the Dragon files."""
    return {
        "l b (m c) -> b l m c": lambda: x.transpose(0, 1).unflatten(-1, (-1, c)),
        "l b (m c) -> l b m c": lambda: x.unflatten(-1, (-1, c)),
        "b l m c -> l b (m c)": lambda: x.transpose(0, 1).flatten(-2),
    }[pattern]()


class TELinear(nn.Linear):
    """A linear map that returns its bias apart, as Transformer Engine's does with `skip_bias_add`."""

    def __init__(self, inputs: int, outputs: int, *, alpha_fwd: float, **_: Any):
        super().__init__(inputs, outputs)
        self.factor = alpha_fwd

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.factor * F.linear(x, self.weight), self.bias


STAND_INS = {
    "Any": Any,
    "BaseModel": SimpleNamespace,  # pydantic's, whose checks of a configuration are left out
    "ConfigDict": dict,
    "causal_conv1d_fn": causal_conv1d_fn,
    "linear_fp32": linear_fp32,
    "rearrange": rearrange,
    "TELinear": TELinear,
    "resolve_residual_branch_mult": lambda config: 1.0,  # of the default configuration
    "apply_residual_branch_update": lambda before, after, mult: after,
}


class _Delta(PeerAdapter):
    """A connection of Deep Delta Learning, with the norm of its block."""

    scheme = DeepDelta()
    owns_norm, dtype = True, torch.float32

    def connection(self, dim: int) -> Any:
        """Return the module that writes."""
        raise NotImplementedError

    def update(self, module: nn.Module, state: Tensor, y: Tensor, context: Tensor) -> Tensor:
        """Return the state after it, from the sublayer's output y and the normalised state."""
        raise NotImplementedError

    def module(self, dim: int) -> nn.Module:
        return nn.ModuleDict({"norm": nn.RMSNorm(dim, eps=self.norm_eps), "delta": self.connection(dim)})

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"norm.weight": ours["norm.weight"]} | {f"delta.{name}": x for name, x in self.maps(ours).items()}

    def maps(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the values of the parameters of the module that writes."""
        return {
            "beta.weight": ours["beta.out.weight"],
            "beta.bias": ours["beta.out.bias"],
            "v_proj.weight": ours["value.project.weight"],
            "v_proj.bias": ours["value.project.bias"],
        }

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        context = module["norm"](state)  # type: ignore[index]
        return self.update(module["delta"], state, sublayer(context), context)  # type: ignore[index]

    def drawn(self) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Return a connection with random parameters, and a random state, output and context for it."""
        module = self.connection(self.dim)
        with torch.no_grad():
            for i, weight in enumerate(module.parameters()):
                weight.copy_(normal(weight.numel(), seed=i).view_as(weight))
        return module, *(normal(2, 3, self.dim, seed=seed).float() for seed in (7, 8, 9))


def written_by_us(state: Tensor, y: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return our delta write of a value v: (batch, seq, 1) along y, with the gate beta: (batch, seq, 1)."""
    return delta_write(state.unsqueeze(-2), y, v, beta.squeeze(-1), k_norm="clamp", eps=1e-6).squeeze(-2)


def config_of(dim: int) -> SimpleNamespace:
    """Return the authors' default configuration, as far as a connection reads it."""
    return SimpleNamespace(hidden_size=dim, ddl_beta_init=1.0, ddl_value_channels=CHANNELS, init_method=None)


class AuthorsScalar(_Delta):
    """`DeepDeltaResidualVdim1` of the authors' first code."""

    def connection(self, dim: int) -> Any:
        return self.imported.DeepDeltaResidualVdim1(config_of(dim))

    def update(self, module: nn.Module, state: Tensor, y: Tensor, context: Tensor) -> Tensor:
        return module(state, k_in=y, context=context)


class AuthorsChannels(_Delta):
    """`DeepDeltaResidualExpanded` of the authors' first code with its compressor, whose channels are the last axis."""

    scheme = DeepDelta(value_channels=CHANNELS, compress="channel")
    compressor = "ResidualShortConvCompressor"

    def connection(self, dim: int) -> Any:
        return self.imported.DeepDeltaResidualExpanded(config_of(dim))

    def compress(self, dim: int) -> nn.Module:
        """Return its compressor."""
        return getattr(self.imported, self.compressor)(config_of(dim))

    def module(self, dim: int) -> nn.Module:
        parts = nn.ModuleDict({"compress": self.compress(dim)})
        parts.update(super().module(dim).items())  # type: ignore[operator]
        return parts

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        taps = {"compress.weight": self.filters(ours["compress.taps"]), "compress.read": ours["compress.read"]}
        return {**taps, **super().values(ours)}

    def filters(self, taps: Tensor) -> Tensor:
        """Return the filters of the compressor, from ours."""
        return taps.T

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        x = state.mT.contiguous()
        x_in = module["compress"](x)  # type: ignore[index]
        context = module["norm"](x_in)  # type: ignore[index]
        after = module["delta"](x, k_in=sublayer(context), v_in=x_in, context=context)  # type: ignore[index]
        return after.mT


class AuthorsFused(AuthorsChannels):
    """The same with the authors' first Triton kernels."""

    scheme = DeepDelta(value_channels=CHANNELS, compress="channel", k_norm="rms_d")

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so for a direction of the size of its eps."""
        module = self.connection(self.dim)
        module.k_eps = eps = 0.5
        state, y, x_in, context = (normal(1, 1, *shape, self.dim, seed=i) for i, shape in enumerate([(4,), (), (), ()]))
        with torch.no_grad():
            state, y, x_in, context = (x.float() for x in (state, y, x_in, context))
            after = module(state.mT.contiguous(), k_in=y, v_in=x_in, context=context).mT
            n = y.square().sum(-1, keepdim=True)
            k = y / (n + self.dim * eps * eps).sqrt()
            v, beta = 4 * module.v_proj(x_in).sigmoid(), 2 * module.beta(context).sigmoid()
            ours = state + (beta * (v - (state @ k.mT).squeeze(-1))).unsqueeze(-1) * k.unsqueeze(-2)
            module.v_sigmoid = False
            ignored = module(state.mT.contiguous(), k_in=y, v_in=x_in, context=context).mT
        return {
            "compared with `k_norm='rms_d'`: its kernel divides k by sqrt(|k|^2 + d eps^2), the paper and the plain "
            "file by sqrt(|k|^2 + eps^2)": agree(after, ours, dtype=torch.float32),
            "it ignores `ddl_v_sigmoid=False` without an error": torch.equal(after, ignored),
        }


class AuthorsCurrent(AuthorsChannels):
    """`DeepDeltaResidualExpanded` of the authors' current code, with its compressor over the tokens."""

    scheme = DeepDelta(value_channels=CHANNELS, compress="token")

    def compress(self, dim: int) -> nn.Module:
        return self.imported.TemporalResidualShortConvCompressor(config_of(dim), implementation="torch")

    def filters(self, taps: Tensor) -> Tensor:
        return taps.flip(0).permute(2, 1, 0)  # their last tap is the current token


class Dragon(StreamAdapter):
    """Layers of Dragon-LLM's Megatron, with a compressor for the readout and a factor of 1 for each layer.

    A layer is its compressor, its two connections and their norms, called in the order of `DragonLayer.forward`.
    """

    scheme = DeepDelta(value_channels=CHANNELS, compress="token")
    dtype = torch.float32

    def __init__(self, imported: Any, device: str):
        self.imported, self.device = imported, device

    def build(self, dim: int, num_sublayers: int) -> nn.Module:
        compressor, connection = self.imported.ResidualShortConvCompressor, self.imported.DeepDeltaResidualExpanded
        layers = nn.ModuleList()
        for _ in range(num_sublayers // 2):
            layer = nn.ModuleDict({"compress": compressor(config_of(dim))})
            for name in ("mixer", "mlp"):
                layer[name] = connection(config_of(dim), input_scalar=1.0)
                layer[f"{name}_norm"] = nn.RMSNorm(dim, eps=self.norm_eps)
            layers.append(layer)
        return nn.ModuleDict({"layers": layers, "readout": compressor(config_of(dim))})

    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        values = {}

        def compressor(theirs: str, name: str) -> None:
            filters = ours[f"{name}.compress.taps"].flip(0).permute(2, 1, 0).flatten(0, 1)
            values[f"{theirs}.shortconv.weight"], values[f"{theirs}.read"] = filters, ours[f"{name}.compress.read"]

        for i in range(self.num_sublayers):
            theirs, name, here = f"layers.{i // 2}", ("mixer", "mlp")[i % 2], f"connections.{i}"
            if i % 2 == 0:
                compressor(f"{theirs}.compress", here)
            values[f"{theirs}.{name}_norm.weight"] = ours[f"{here}.norm.weight"]
            for kind in ("weight", "bias"):
                values[f"{theirs}.{name}.beta.{kind}"] = ours[f"{here}.beta.out.{kind}"]
                values[f"{theirs}.{name}.v_proj.{kind}"] = ours[f"{here}.value.project.{kind}"]
        compressor("readout", "collapse")
        return values

    def forward(self, module: nn.Module, x: Tensor, sublayers: list[Callable[..., Tensor]]) -> Tensor:
        state = x.unsqueeze(-1).expand(*x.shape, CHANNELS).flatten(-2).transpose(0, 1)  # (seq, batch, dim * channels)
        for layer, functions in zip(module["layers"], zip(sublayers[::2], sublayers[1::2])):  # type: ignore[index]
            for name, function in zip(("mixer", "mlp"), functions):
                x_in = layer["compress"](state)
                context = layer[f"{name}_norm"](x_in)
                exchanged = context.shape[0] == x.shape[0]
                y = function(context) if exchanged else function(context.transpose(0, 1)).transpose(0, 1)
                state = layer[name](state, k_in=y, v_in=x_in, context=context, scalar=1.0)
        return module["readout"](state).transpose(0, 1)  # type: ignore[index]

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so."""
        module = self.imported.DeepDeltaResidualExpanded(config_of(self.dim), input_scalar=1.0)
        state = normal(3, 2, self.dim * CHANNELS).float()
        y, x_in, context = (normal(3, 2, self.dim, seed=seed).float() for seed in (1, 2, 3))
        with torch.no_grad():
            start = 2 * module.beta.bias.sigmoid()
            module.beta.bias.zero_()
            after = module(state, k_in=y, v_in=x_in, context=context, scalar=1.0)
            k, streams = F.normalize(y, dim=-1), state.unflatten(-1, (-1, CHANNELS))
            v = 4 * (module.v_proj(x_in)[0] + module.v_proj.bias).sigmoid()
            beta = 2 * module.beta(context)[0].sigmoid()
            narrow = (k.unsqueeze(-1) * self.dim**0.5 * streams).sum(-2, dtype=torch.bfloat16) / self.dim**0.5
            step = ((beta * (v - narrow)).unsqueeze(-2) * k.unsqueeze(-1)).flatten(-2)
        return {
            "it takes (seq, batch) and returns (batch, seq), so that before every MLP its compressor convolves over "
            "the batch in place of the tokens": after.shape[:2] == (2, 3) and not self.agrees(exchanging=True),
            "its gate starts at 2e-6, nearly closed": math.isclose(start.item(), 2e-6, rel_tol=1e-3),
            "k^T X is summed in bfloat16, where the authors sum in float32": agree(
                after.transpose(0, 1) - state, step, dtype=torch.bfloat16, factor=0.1
            ),
            "with `b l m c -> b l (m c)` at its end it would be right to the rounding of bfloat16": self.agrees(
                exchanging=False
            ),
        }

    def agrees(self, *, exchanging: bool) -> bool:
        """Return whether its layers compute what ours do to 1 %, as they are or without the exchange of axes."""
        names = self.imported.DeepDeltaResidualExpanded.forward.__globals__

        def kept(x: Tensor, pattern: str, c: int = CHANNELS) -> Tensor:
            return x.flatten(-2) if pattern == "b l m c -> l b (m c)" else rearrange(x, pattern, c)

        pair = Pair(self)
        names["rearrange"] = rearrange if exchanging else kept
        try:
            with torch.no_grad():
                theirs = pair.candidate(pair.ours, pair.state(), pair.sublayers())
                ours = pair.reference(pair.ours, pair.state(), pair.sublayers())
            return ((theirs - ours).abs().max() < 0.01 * ours.abs().max()).item()
        finally:
            names["rearrange"] = rearrange


class Latent(_Delta):
    """`DeltaLatentUpdate` of Shrijeeth: the v-Map whose direction and gate read the state without a norm."""

    scheme = DeepDelta(
        map="v",
        phi_k_input="x_in",
        beta_input="pool_mean",
        v_activation="linear",
        v_bias=False,
        k_norm="clamp",
        k_eps=1e-12,
    )

    def connection(self, dim: int) -> Any:
        return self.imported.DeltaLatentUpdate(SimpleNamespace(n_embd=dim, beta_init=0.0))

    def maps(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            "k_proj.0.weight": ours["direction.map.up.weight"],
            "k_proj.2.weight": ours["direction.map.down.weight"],
            "beta_proj.weight": ours["beta.out.weight"],
            "beta_proj.bias": ours["beta.out.bias"],
            "v_proj.weight": ours["value.project.weight"],
        }

    def update(self, module: nn.Module, state: Tensor, y: Tensor, context: Tensor) -> Tensor:
        return module(state, y)


class Product(_Delta):
    """`DeepDeltaRes` of the 5-dollar-llm, which multiplies the state by the update."""

    scheme = DeepDelta(beta_head="mlp", beta_hidden=8, k_norm="clamp", k_eps=1e-6)

    def connection(self, dim: int) -> Any:
        return self.imported.DeepDeltaRes(dim, 8)

    def maps(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            "beta_in.weight": ours["beta.hidden.weight"],
            "beta_out.weight": ours["beta.out.weight"],
            "beta_out.bias": ours["beta.out.bias"],
            "v_proj.weight": ours["value.project.weight"],
            "v_proj.bias": ours["value.project.bias"],
        }

    def update(self, module: nn.Module, state: Tensor, y: Tensor, context: Tensor) -> Tensor:
        return module(state, y, context)

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so with random parameters."""
        module, state, y, context = self.drawn()
        with torch.no_grad():
            after = module(state, y, context)
            beta = 2 * module.beta_out(module.beta_in(context).tanh()).sigmoid()
            v = 4 * module.v_proj(state).sigmoid()

            def written(k: Tensor) -> Tensor:
                return beta * (v - (k * state).sum(-1, keepdim=True)) * k

            unlike = written(F.normalize(y, p=1, dim=-1))
            right = state + written(F.normalize(y, dim=-1))
            ours = written_by_us(state, y, v, beta)
        return {
            "k is divided by its L1 norm, and the state is multiplied by the update": agree(
                after, state * unlike, dtype=torch.float32
            ),
            "with k / |k| (p=2) and x + update it would be right": agree(right, ours, dtype=torch.float32),
        }


class TwiceScaled(_Delta):
    """`DeltaResidualScalar`, whose unit direction is divided by sqrt(d) once more."""

    scheme = DeepDelta(v_scale=1.0, v_bias=False, beta_init=0.5, k_norm="clamp", k_eps=1e-6)
    norm_eps = 1e-6

    def connection(self, dim: int) -> Any:
        return self.imported.DeltaResidualScalar(dim)

    def maps(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            "gate.norm.weight": ours["norm.weight"],
            "gate.net.weight": ours["beta.out.weight"],
            "gate.net.bias": ours["beta.out.bias"],
            "w_v.weight": ours["value.project.weight"],
        }

    def update(self, module: nn.Module, state: Tensor, y: Tensor, context: Tensor) -> Tensor:
        return module(state, y)

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so with random parameters."""
        module, state, y, _ = self.drawn()
        with torch.no_grad():
            k = F.normalize(y, dim=-1) / self.dim**0.5
            beta, v = module.gate(state), module.w_v(state).sigmoid()
            expected = state + beta * (v - (k * state).sum(-1, keepdim=True)) * k
            after = module(state, y)
            module.k_scale = 1.0
            right, ours = module(state, y), written_by_us(state, y, v, beta)
        return {
            "|k| is 1/sqrt(d): a direction of length 1 is divided by sqrt(d) once more, so that at d = 768 a gate of 1 "
            "erases a 768th of what the state holds along it": agree(after, expected, dtype=torch.float32),
            "with `k_scale = 1` it would be right": agree(right, ours, dtype=torch.float32),
        }


class ConstantGate(_Delta):
    """`DDLGate` of parameter-golf's pull request 738, whose direction and strength are parameters."""

    def connection(self, dim: int) -> Any:
        return self.imported.DDLGate(dim)

    def maps(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"direction": ours["value.project.weight"][0], "beta": ours["beta.out.bias"][0]}

    def update(self, module: nn.Module, state: Tensor, y: Tensor, context: Tensor) -> Tensor:
        return module(state, y)

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so with random parameters."""
        module, state, y, _ = self.drawn()
        with torch.no_grad():
            d = F.normalize(module.direction, dim=0)
            expected = state + y + module.beta * (state @ d).unsqueeze(-1) * d
            return {
                "it computes x + b (d . x) d + f(x): the direction d and the strength b are parameters, the same for "
                "all tokens, b has no bounds, and the output is added, not written along d": agree(
                    module(state, y), expected, dtype=torch.float32
                ),
            }
