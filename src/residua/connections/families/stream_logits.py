"""The logits, sigmoid gates and sigmoid readout that released models with mHC share."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Connection, Norm, Stream
from residua.connections.families.mixing import MixingScheme
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams
from residua.connections.parts.gates import Scale, logit
from residua.connections.parts.memory import Memory
from residua.connections.parts.norm import LayerNorm
from residua.connections.parts.options import Factor, only_with, require_option
from residua.connections.parts.projection import WideProjection, project, project_normalised
from residua.connections.parts.sharded import SelfStarting
from residua.errors import NotNegative
from residua.ops import at_least_float32, hyper_read
from residua.ops.derived import flattened
from residua.ops.dispatch import Implementation

# How far the logits on the diagonal of h_res start above the others. With 6, h_res starts with e^-6 = 0.0025 off its
# diagonal: a difference between streams is multiplied by 0.99 in each sublayer, and by 0.79 in 24 of them. With 4, the
# factor for 24 sublayers would be 0.18. With 8, the difference would hardly shrink, but the gradient, which is
# proportional to the entries off the diagonal, would be a seventh of that with 6.
OFFSET = 6.0


class StreamLogits(SelfStarting):
    """z_g = s_g W_g r + b_g for every group g of rows of W, with r = vec(X) / sqrt(mean(vec(X)^2) + eps).

    (batch, seq, n, dim) -> one tensor (batch, seq, size) for each group, in at least float32. W starts from
    N(0, std^2), every s_g at `scale` and b_g at `biases[g]`. With `gain`, r is multiplied by a gain for each stream and
    feature. `names`: the names of W and s in a state dict. arXiv 2512.24880 equations 7 and 8.
    """

    def __init__(
        self,
        num_streams: int,
        dim: int,
        biases: Sequence[Sequence[float]],
        *,
        std: float,
        scale: float,
        eps: float,
        gain: bool = False,
        names: tuple[str, str] = ("project", "scale"),
    ):
        super().__init__()
        self.names = names
        self.biases = [bias for group in biases for bias in group]
        self.sizes = [len(group) for group in biases]
        self.scale_start = scale
        self.eps = eps
        self.gain = Scale(1.0, num_streams * dim) if gain else None
        self.add_module(names[0], WideProjection(num_streams * dim, sum(self.sizes), std=std))
        self.register_parameter(names[1], nn.Parameter(torch.empty(len(biases))))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(getattr(self, self.names[1]), self.scale_start)
        with torch.no_grad():
            self.bias.copy_(torch.tensor(self.biases, dtype=self.bias.dtype, device="cpu"))

    def forward(self, streams: Tensor, gain: Tensor | None = None) -> list[Tensor]:
        gain = gain if self.gain is None else self.gain()
        project, scale = (getattr(self, name) for name in self.names)
        products = project_normalised(project, flattened(streams), self.eps, gain=gain)
        shares, biases = products.split(self.sizes, -1), at_least_float32(self.bias).split(self.sizes)
        return [s * share + b for s, share, b in zip(at_least_float32(scale).unbind(), shares, biases)]


class SigmoidCollapse(nn.Module):
    """The readout x = sum_i (sigmoid(z_i) + eps) X_i, z = `StreamLogits`: (batch, seq, n, dim) -> (batch, seq, dim)."""

    def __init__(self, logits: StreamLogits, *, eps: float, implementation: Implementation):
        super().__init__()
        self.logits = logits
        self.eps = eps
        self.implementation: Implementation = implementation

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        (z,) = self.logits(streams)
        return hyper_read(streams, torch.sigmoid(z) + self.eps, implementation=self.implementation)


@dataclass(frozen=True)
class ProductionHyperConnections(ExpandingScheme, MixingScheme):
    """Base of the hyper-connections of released models, with a choice of readout and start.

    The weights come from `StreamLogits` with a random W; an eps is added to the gates. Streams are read out by sigmoids
    or as their mean. A subclass gives the connection and its initial biases.

    scale_init  initial factor on the token-dependent part of all logits
    weight_std  standard deviation of the initial W, the map from the state to the logits, with start="published"
    """

    gate_eps: float = 1e-6
    scale_init: Factor = 1.0
    weight_std: Annotated[NotNegative, only_with(start="published")] = 0.02
    head: Literal["sigmoid", "mean"] = "sigmoid"
    start: Literal["published", "residual"] = "published"

    def __post_init__(self):
        super().__post_init__()
        require_option(
            self, "gate_eps", 0 <= self.gate_eps < 0.5 / self.num_streams, "0 or more, far below 1 / num_streams"
        )

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        return {"start": "residual", "weight_std": type(self).weight_std}

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [self.connection(dim, i, norm(i), norm_eps) for i in range(num_sublayers)]
        collapse: nn.Module = MeanStreams()
        if self.head == "sigmoid":
            logits = self.logits(dim, [self.read_biases(num_sublayers)], norm_eps)
            collapse = SigmoidCollapse(logits, eps=self.gate_eps, implementation=self.implementation)
        return Stream(self.expander(dim), connections, collapse)

    def logits(self, dim: int, biases: list[list[float]], eps: float) -> StreamLogits:
        std = self.weight_std if self.start == "published" else 0.0
        return StreamLogits(self.num_streams, dim, biases, std=std, scale=self.scale_init, eps=eps)

    @abstractmethod
    def connection(self, dim: int, index: int, norm: nn.Module, norm_eps: float) -> Connection:
        """Return the connection around sublayer `index`."""

    @abstractmethod
    def read_biases(self, index: int) -> list[float]:
        """Return the initial biases of the read before sublayer `index`; the readout is the read after the last one."""


def reading_biases(num_streams: int, preferred: int, *, eps: float = 0.0, total: float = 1.0) -> list[float]:
    """Return biases b with sum_i (sigmoid(b_i) + eps) = total.

    If all streams are equal, the read is therefore `total` times a stream.

    The stream `preferred` gets about half of the total (with two streams 0.73 to 0.82), so that streams preferred by
    different sublayers can become different. Its bias compensates the rounding of the other biases to the default
    dtype. It is near 0, where floating-point numbers are dense, so the sum is exact to 1e-12 even in float32.
    """
    others = num_streams - 1
    if others == 1:  # with a half each, both would be read alike and stay equal
        pair = _different_pair(total - 2 * eps)
        return [*pair] if preferred == 0 else [*reversed(pair)]
    rounded = torch.tensor(logit(total / (2 * others) - eps), device="cpu").item()
    rest = others * (1 / (1 + math.exp(-rounded)) + eps)
    biases = [rounded] * num_streams
    biases[preferred] = logit(total - rest - eps)
    return biases


@cache
def even_biases(num_streams: int, *, eps: float = 0.0) -> tuple[float, ...]:
    """Return palindromic biases b with read weights sigmoid(b_i) + eps = 1 / n within 1e-3, summing to 1 within 1e-11.

    If the streams lie in symmetric pairs around their mean, such weights read exactly this mean.
    """
    middle = 2 - num_streams % 2
    outer = num_streams - middle
    side, center = _balanced(logit(1 / num_streams - eps), 2**-21, 1 - num_streams * eps, (outer, middle))
    return (*[side] * (outer // 2), *[center] * middle, *[side] * (outer // 2))


@cache
def mirrored_biases(num_streams: int, spread: float, *, magnitude: float, eps: float) -> tuple[float, ...]:
    """Return biases b whose write weights magnitude sigmoid(b_i) + eps lie evenly from 1 - spread to 1 + spread.

    The weights lie in symmetric pairs around 1, with mean 1 within 1e-9. If n is odd, the middle weight is 1.
    """
    places = [spread * (1 - 2 * i / (num_streams - 1)) for i in range(num_streams // 2)]
    total = 2 * (1 - eps) / magnitude
    pairs = [_balanced(logit((1 - place - eps) / magnitude), 2**-26, total, (1, 1)) for place in places]
    middle = [logit((1 - eps) / magnitude)] * (num_streams % 2)
    return (*(low for low, _ in pairs), *middle, *(high for _, high in reversed(pairs)))


@cache
def _different_pair(total: float) -> tuple[float, float]:
    """Return two numbers near 1 and -1 whose sigmoids sum to `total` within 1e-12; `total` must be near 1."""
    low, high = _balanced(-1, -(2**-19), total, (1, 1), choices=2**18)  # down to -1.5
    return high, low


def _balanced(
    start: float, step: float, total: float, counts: tuple[int, int], *, choices: int = 2**12
) -> tuple[float, float]:
    """Return float32 numbers a, b with counts[0] sigmoid(a) + counts[1] sigmoid(b) = total as nearly as possible.

    The best pair is chosen from `choices` candidates for a: start, start + step, start + 2 step, ...
    """
    first, second = counts
    ones = (start + step * torch.arange(choices, dtype=torch.float64, device="cpu")).float().double()
    others = torch.special.logit((total - first * ones.sigmoid()) / second).float().double()
    best = (first * ones.sigmoid() + second * others.sigmoid() - total).abs().argmin()
    return ones[best].item(), others[best].item()


class Router(SelfStarting):
    """Logits of the mixing matrices `maps`, such as "pre" and "post": LayerNorm of the state, then a linear map.

    Weights and biases start at 0, except the bias of "post", which is drawn from N(0, 1), because streams with equal
    writes would stay equal.
    (..., streams, dim) -> (..., maps, streams, streams) in at least float32.
    """

    def __init__(self, dim: int, num_streams: int, maps: list[str], *, norm_eps: float):
        super().__init__()
        self.maps = maps
        self.norm = LayerNorm(num_streams * dim, eps=norm_eps)
        self.project = WideProjection(num_streams * dim, len(maps) * num_streams**2, std=0.0)
        self.bias = nn.Parameter(torch.empty(len(maps), num_streams, num_streams))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        if "post" in self.maps:
            nn.init.normal_(self.bias[self.maps.index("post")])

    def forward(self, streams: Tensor) -> Tensor:
        logits = project(self.project, self.norm(flattened(streams)), bias=self.bias.flatten())
        return logits.unflatten(-1, self.bias.shape)
