"""Linear maps with their own initialisation."""

import math
from typing import Literal, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from residua.connections.parts.phases import is_unobserved
from residua.connections.parts.sharded import SelfStarting
from residua.ops.norm import mean_square
from residua.ops.precision import at_least_float32, linear, linear_at_least_float32

Kind = TypeVar("Kind", bound=nn.Module)


def is_plain(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Return whether a call of `module` runs exactly the `forward` of the class `kind`.

    False if the module was replaced by an adapter, a quantised map or a parametrisation (all have other types), if it
    has a hook, such as one that prunes or gathers parameters, or if a library has replaced its `forward`.
    """
    return type(module) is kind and is_unobserved(module)


def spectral_std(in_features: int, out_features: int, factor: float = 0.5) -> float:
    """Return factor / sqrt(in_features) min(1, sqrt(out_features / in_features)), which bounds a map's spectral norm.

    The DDL authors' current code (commit d1f7621) draws every map with this standard deviation.
    """
    return factor / math.sqrt(in_features) * min(1.0, math.sqrt(out_features / in_features))


class LinearMap(SelfStarting):
    """Base of the linear maps of connections. They have the parameters of `nn.Linear` without being subclasses of it.

    Adapters, quantizers and initialisations that look for `nn.Linear` therefore skip connections. Many of these maps
    start from zero, so an adapter that divides by the norm of a weight (DoRA) would have no direction.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        std: float | Literal["identity"] | None = None,
        bias: float | Literal["uniform"] | None = None,
    ):
        """Start the weights from N(0, std^2), by default with the authors' std = 0.5 / sqrt(in_features).

        std: "identity" for the identity; bias: its initial value, "uniform" for PyTorch's
        U(-1/sqrt(in_features), 1/sqrt(in_features)), or None for no bias.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.std = 0.5 / math.sqrt(in_features) if std is None else std
        self.bias_start = bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = None if bias is None else nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.std == "identity":
            nn.init.eye_(self.weight)
        else:
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is None or self.bias_start is None:
            return
        if self.bias_start == "uniform":
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)
        else:
            nn.init.constant_(self.bias, self.bias_start)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


LINEAR_MAPS = (nn.Linear, LinearMap)  # their `weight` has weight decay, and a learning rate that depends on the width


class Projection(LinearMap):
    """A linear map that computes in the dtype of its weights, or of autocast, not in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class WideProjection(LinearMap):
    """The linear map of a gate or a mapping: inputs and weights in at least float32, also inside autocast.

    Its weights must stay in float32 if a model is narrowed (`Stream.float32_parameters`).
    """

    def forward(self, x: Tensor, *, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return W (gain x) + bias: (..., in_features) -> (..., out_features), in at least float32.

        gain: (in_features,), multiplied into the weights, which have fewer entries than x. bias: (out_features,), used
        in place of the module's own bias.
        """
        weight = self.weight if gain is None else at_least_float32(self.weight) * at_least_float32(gain)
        return linear_at_least_float32(x, weight, self.bias if bias is None else bias)


def project(module: nn.Module, x: Tensor, *, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return module(gain x) + bias, folding gain and bias into the product if `module` is a `WideProjection`.

    A replacement of that module, such as an adapter, takes only an input, so gain and bias are applied outside it.
    """
    if isinstance(module, WideProjection):
        return module(x, gain=gain, bias=bias)
    y = module(x if gain is None else at_least_float32(x) * at_least_float32(gain))
    return y if bias is None else y + at_least_float32(bias)


def project_normalised(module: nn.Module, x: Tensor, eps: float, *, gain: Tensor | None = None) -> Tensor:
    """Return W (gain x) / sqrt(mean(x^2) + eps) in at least float32: (..., in_features) -> (..., out_features).

    W is the linear map `module`; gain: (in_features,).

    Dividing after the product avoids a normalised copy of a state that is several times as wide as the model
    (arXiv 2512.24880 equations 14 to 16).
    """
    return project(module, x, gain=gain) * torch.rsqrt(mean_square(x) + eps)
