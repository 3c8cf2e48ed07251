"""The regression models of the geometry laboratory: any residual scheme in the wrapper of arXiv 2605.06729.

The wrapper maps features to the width, adds learned positions, runs blocks of causal attention and GELU MLP, normalises
and maps back. A name stands for a row of a table: one of `MODELS`, any preset, or either with options,
`edelta-token:gate_bias=0`. `match` gives every row the parameter count of the plain residual, wrapper included.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections import PRESETS, Projection, Scheme, TensorSpec, named, resolve, schemes
from residua.connections.base import as_inputs
from residua.errors import InputError, did_you_mean

STD = 0.02
TOLERANCE = 0.03  # of the plain residual's parameter count


class Attention(nn.Module):
    """Causal attention without positions or biases, (batch, seq, dim) -> (batch, seq, dim)."""

    def __init__(self, dim: int, num_heads: int, *, std_out: float):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Projection(dim, 3 * dim, std=STD)
        self.out = Projection(dim, dim, std=std_out)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = (batch, seq, self.num_heads, dim // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


class MLP(nn.Module):
    """out(gelu(up(x))) with the exact GELU, without biases, (..., dim) -> (..., dim)."""

    def __init__(self, dim: int, hidden: int, *, std_out: float):
        super().__init__()
        self.up = Projection(dim, hidden, std=STD)
        self.out = Projection(hidden, dim, std=std_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class RegressionModel(nn.Module):
    """A sequence of vectors to one prediction for every position, through the residual stream of a scheme.

    `wide`: the wrapper writes and reads every row of the state (`rows * dim` features) by its own linear maps, as
    published for JPmHC and EDelta-Stream; otherwise the scheme's expand and collapse open and close the state. Without
    layers it is the zero-layer network: linear, positions, norm, linear.

    Three differences from the published wrapper: the norms before the sublayers belong to the connections and are
    RMSNorm, where the published ones are LayerNorm without bias (the last norm is); tables that the published core
    carries and never uses (a token embedding and second positions) are left out; and there are as many positions as the
    task has inputs.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        features: int,
        length: int,
        dim: int,
        num_layers: int,
        num_heads: int = 4,
        hidden: int | None = None,
        wide: bool = False,
    ):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of the {num_heads} attention heads, got {dim}")
        spec = scheme.state_spec(0, dim)
        if wide and (not isinstance(spec, TensorSpec) or len(spec.shape) == 1):
            raise ValueError("wide needs a scheme whose state is one tensor of several rows, got another state")
        stream = scheme.build(dim, 2 * num_layers)
        self.dim = dim
        self.width = math.prod(spec.shape) if wide else dim
        self.input = Projection(features, self.width, std=STD, bias=0.0)
        self.positions = nn.Parameter(torch.empty(length, self.width))
        self.expand = None if wide else stream.expand
        self.connections = stream.connections
        self.collapse = None if wide else stream.collapse
        std_out = STD / math.sqrt(2 * max(num_layers, 1))
        self.sublayers = nn.ModuleList()
        for _ in range(num_layers):
            self.sublayers.append(Attention(dim, num_heads, std_out=std_out))
            self.sublayers.append(MLP(dim, 4 * dim if hidden is None else hidden, std_out=std_out))
        self.norm = nn.LayerNorm(self.width, bias=False)
        self.output = Projection(self.width, features, std=STD, bias=0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the positions; every other module draws its own parameters."""
        nn.init.normal_(self.positions, std=STD)

    def forward(self, x: Tensor, *, states: list[Any] | None = None, coefficients: list[Any] | None = None) -> Tensor:
        """Return predictions of the shape of x: (batch, seq, features) with at most `length` positions.

        `states` collects the residual state before the first and after every sublayer, `coefficients` what every
        connection read from it. A sequence of one token is whole, so no connection needs a memory.
        """
        h = self.input(x) + self.positions[: x.shape[1]]
        state = h.unflatten(-1, (-1, self.dim)) if self.expand is None else self.expand(h)
        if states is not None:
            states.append(state)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            inputs, carry = connection.read(state)
            state = connection.write(sublayer(*as_inputs(inputs)), carry)
            if states is not None:
                states.append(state)
            if coefficients is not None:
                coefficients.append(carry.coefficients)
        return self.output(self.norm(state.flatten(-2) if self.collapse is None else self.collapse(state)))

    def penalty(self, coefficients: list[Any]) -> Tensor | None:
        """Return the sum of the mean auxiliary losses for the `coefficients` that `forward` collected, or None."""
        found = [connection.penalty(one) for connection, one in zip(self.connections, coefficients, strict=True)]
        found = [one.mean() for one in found if one is not None]
        return torch.stack(found).sum() if found else None


class LinearModel(nn.Module):
    """One linear map, the same for every position, (batch, seq, features) -> the same shape: a baseline."""

    def __init__(self, features: int):
        super().__init__()
        self.output = nn.Linear(features, features)

    def forward(self, x: Tensor, *, states: list[Any] | None = None, coefficients: list[Any] | None = None) -> Tensor:
        return self.output(x)

    def penalty(self, coefficients: list[Any]) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Row:
    """One row of a table of models.

    connection  argument of `connections.resolve`; None for the one linear map
    layers      layers of the published model at width 128, 0 for the zero-layer network; None: the closest fit
    wide        see `RegressionModel`
    cost        rough cost of a training step relative to the plain residual; only for planning
    """

    connection: Mapping[str, Any] | None
    layers: int | None = None
    wide: bool = False
    cost: float = 2.0


PUBLISHED_LAYERS = 9  # of the plain residual
MODELS: dict[str, Row] = {
    "residual": Row({"preset": "residual"}, PUBLISHED_LAYERS, cost=1),
    "ddl": Row({"preset": "ddl"}, cost=1.3),
    "ddl-cc": Row({"preset": "ddl-cc"}, cost=1.8),
    "pooled-householder": Row({"preset": "pooled-householder", "context": "cumulative"}, 8, cost=1.7),
    "pooled-householder-sequence": Row({"preset": "pooled-householder", "context": "sequence"}, 8, cost=1.5),
    "hc": Row({"preset": "hc"}, cost=2.6),
    "mhc": Row({"preset": "mhc", "layout": "copies"}, cost=3.2),
    "mhc-split": Row({"preset": "mhc", "layout": "split"}, 9, cost=2.7),
    "jpmhc": Row({"preset": "jpmhc"}, 7, wide=True, cost=1.7),
    "edelta-token": Row({"preset": "edelta", "context": "token"}, 6, cost=1.8),
    "edelta-cumulative": Row({"preset": "edelta", "context": "cumulative"}, 6, cost=1.8),
    "edelta-sequence": Row({"preset": "edelta", "context": "sequence"}, 6, cost=1.6),
    "edelta-stream": Row({"preset": "edelta-stream"}, 6, wide=True, cost=2.2),
    "zero-layer": Row({"preset": "residual"}, 0, cost=0.1),
    "linear": Row(None, 0, cost=0.05),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes that all models of a comparison share: width, layers of the plain residual, attention heads."""

    dim: int = 128
    layers: int = PUBLISHED_LAYERS
    heads: int = 4


@dataclass(frozen=True)
class Architecture:
    """A model with all its sizes. `ratio`: its parameter count over the plain residual's, wrappers included."""

    name: str
    row: Row = field(repr=False)
    features: int
    length: int
    dim: int
    layers: int
    heads: int
    hidden: int
    parameters: int = 0
    ratio: float = 0.0

    def build(self) -> nn.Module:
        """Build the model, initialised from PyTorch's global generator. Raises InputError if its sizes do not fit."""
        if self.row.connection is None:
            return LinearModel(self.features)
        try:
            return RegressionModel(
                resolve(self.row.connection),
                features=self.features,
                length=self.length,
                dim=self.dim,
                num_layers=self.layers,
                num_heads=self.heads,
                hidden=self.hidden,
                wide=self.row.wide,
            )
        except ValueError as error:
            raise InputError(f"model {self.name}: {error}") from error

    @property
    def width(self) -> int:
        """Features of the residual state at one position, as the wrapper writes them."""
        return resolve(self.row.connection).state_size(0, self.dim) if self.row.wide else self.dim

    def describe(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {key: value for key, value in asdict(self).items() if key != "row"} | {
            "width": self.width,
            "connection": dict(self.row.connection) if self.row.connection else None,
        }


def row(name: str) -> Row:
    """Return the row called `name`: one of `MODELS`, a preset, or either with options, `name:option=value`.

    Raises:
        InputError: an unknown name (with the nearest one), option or value, or a package whose scheme cannot be used.
    """
    try:
        base, options = named(name)
    except ValueError as error:
        raise InputError(f"model {error}") from error
    if base in MODELS:
        found = MODELS[base]
    elif base in PRESETS or base in schemes():
        found = Row({"preset": base})
    else:
        known = list(dict.fromkeys([*MODELS, *PRESETS]))
        raise InputError(f"no model is called {base!r}{did_you_mean(base, known)} (known: {', '.join(known)})")
    if options and found.connection is None:
        raise InputError(f"model {name}: {base} has no options")
    wide = options.pop("wide", found.wide)
    if not isinstance(wide, bool) or (wide and not found.wide):
        # Other schemes count on streams that start as copies of one another.
        able = ", ".join(key for key, one in MODELS.items() if one.wide)
        raise InputError(f"model {name}: wide must be false, or true for {able}; got {wide!r}")
    found = replace(found, wide=wide)
    if options:
        found = replace(found, connection={**found.connection, **options})
    if found.connection is not None:
        try:
            resolve(found.connection)
        except (ValueError, TypeError) as error:
            raise InputError(f"model {name}: {error}") from error
    return found


@lru_cache
def match(name: str, *, features: int, length: int, sizes: Sizes) -> Architecture:
    """Return the sizes at which the model `name` has as many parameters as the plain residual, wrapper included.

    Published models keep their number of layers if they can (in proportion, where the plain residual has fewer than 9),
    others take the number that leaves the MLP closest to 4 times the width; the MLP's hidden width takes up the rest.
    The zero-layer network and the linear map are as small as they are.

    Raises:
        InputError: unknown name, sizes that do not fit the scheme, or no sizes within 3 % of the plain residual.
    """
    chosen = row(name)

    def sized(row: Row, layers: int, hidden: int) -> Architecture:
        found = Architecture(name, row, features, length, sizes.dim, layers, sizes.heads, hidden)
        return replace(found, parameters=_count(found))

    standard = 4 * sizes.dim
    target = sized(MODELS["residual"], sizes.layers, standard).parameters
    if chosen.layers == 0:
        found = sized(chosen, 0, 0)
        return replace(found, ratio=found.parameters / target)
    # Published models stay as near their layers as they can, others near the usual width of the MLP.
    usual = None if chosen.layers is None else max(1, round(chosen.layers * sizes.layers / PUBLISHED_LAYERS))
    best = None
    for layers in sorted(range(1, sizes.layers + 1), key=lambda layers: abs(layers - (usual or sizes.layers))):
        missing = target - sized(chosen, layers, standard).parameters
        # Every hidden unit costs a row and a column in each layer; steps of 4 keep the matrices aligned.
        hidden = max(4, standard + 4 * round(missing / (layers * 2 * sizes.dim * 4)))
        found = sized(chosen, layers, hidden)
        found = replace(found, ratio=found.parameters / target)
        distance = abs(math.log(hidden / standard))
        if abs(found.ratio - 1) <= TOLERANCE and (best is None or distance < best[0]):
            best = distance, found
            if usual is not None:
                break
    if best is None:
        raise InputError(
            f"model {name}: no number of layers and MLP width comes within {TOLERANCE:.0%} of the {target:,} "
            f"parameters of the plain residual at width {sizes.dim} with {sizes.layers} layers; choose a larger width"
        )
    return best[1]


def _count(architecture: Architecture) -> int:
    with torch.device("meta"):
        model = architecture.build()
    return sum(parameter.numel() for parameter in model.parameters())
