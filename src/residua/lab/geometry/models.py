"""The regression models of the geometry laboratory: any residual scheme in the wrapper of arXiv 2605.06729.

The wrapper maps features to the width, adds learned positions, runs blocks of causal attention and GELU MLP, normalises
and maps back. A model's name is one of `MODELS` or any preset, with options if wanted: `edelta-token:gamma_init=0.5`.
`match` gives every model the parameter count of the plain residual, including the wrapper.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections import Projection, Scheme, named, resolve
from residua.connections.base import as_inputs
from residua.connections.names import key, label, meaning, options_text
from residua.connections.parts.memory import whole_sequence
from residua.errors import InputError, did_you_mean
from residua.models.transformer import total_penalty

STD = 0.02
SIZE_TOLERANCE = 0.03  # of the plain residual's parameter count


class PlainAttention(nn.Module):
    """Causal attention without positions or biases, (batch, seq, dim) -> (batch, seq, dim)."""

    def __init__(self, dim: int, num_heads: int, *, std_out: float):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Projection(dim, 3 * dim, std=STD)
        self.out = Projection(dim, dim, std=std_out)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = (batch, seq, self.num_heads, dim // self.num_heads)
        parts = self.qkv(x).chunk(3, -1)
        if others:  # the connection reads three inputs
            parts = [self.qkv(each).chunk(3, -1)[i] for i, each in enumerate((x, *others))]
        q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


@dataclass(frozen=True)
class ModelRow:
    """One row of a table of models.

    connection  an argument for `connections.resolve`
    layers      the number of layers of the published model at width 128; 0 for the zero-layer network; None: best fit
    wide        see `RegressionModel`
    cost        the rough cost of a training step relative to the plain residual; only for planning
    """

    connection: Mapping[str, Any]
    layers: int | None = None
    wide: bool = False
    cost: float = 2.0


PUBLISHED_LAYERS = 9  # of the plain residual
MODELS: dict[str, ModelRow] = {
    "residual": ModelRow({"preset": "residual"}, PUBLISHED_LAYERS, cost=1),
    "ddl": ModelRow({"preset": "ddl"}, cost=1.3),
    "ddl-cc": ModelRow({"preset": "ddl-cc"}, cost=1.8),
    "pooled-householder": ModelRow({"preset": "pooled-householder", "context": "cumulative"}, 8, cost=1.7),
    "pooled-householder-sequence": ModelRow({"preset": "pooled-householder", "context": "sequence"}, 8, cost=1.5),
    "hc": ModelRow({"preset": "hc"}, cost=2.6),
    "mhc": ModelRow({"preset": "mhc", "layout": "copies"}, cost=3.2),
    "mhc-split": ModelRow({"preset": "mhc", "layout": "split"}, 9, cost=2.7),
    "jpmhc": ModelRow({"preset": "jpmhc"}, 7, wide=True, cost=1.7),
    "edelta-token": ModelRow({"preset": "edelta", "context": "token"}, 6, cost=1.8),
    "edelta-cumulative": ModelRow({"preset": "edelta", "context": "cumulative"}, 6, cost=1.8),
    "edelta-sequence": ModelRow({"preset": "edelta", "context": "sequence"}, 6, cost=1.6),
    "edelta-stream": ModelRow({"preset": "edelta-stream"}, 6, wide=True, cost=2.2),
    "zero-layer": ModelRow({"preset": "residual"}, 0, cost=0.1),
}


@dataclass(frozen=True)
class Architecture:
    """A model with all its sizes. ratio: its parameter count relative to the plain residual's, including wrappers."""

    name: str
    row: ModelRow = field(repr=False)
    features: int
    length: int
    dim: int
    layers: int
    heads: int
    hidden: int
    parameters: int = 0
    ratio: float = 0.0

    def build(self) -> "RegressionModel":
        """Build the model, initialised by PyTorch's global generator. Raises InputError if its sizes do not fit."""
        try:
            return RegressionModel(self)
        except ValueError as error:
            raise InputError(f"model {self.name}: {error}") from error

    @property
    def scheme(self) -> Scheme:
        return resolve(self.row.connection)

    @property
    def width(self) -> int:
        """The number of features that the wrapper writes into the residual state at one position."""
        return self.scheme.state_size(0, self.dim) if self.row.wide else self.dim

    def describe(self) -> dict[str, Any]:
        """Return the sizes, the width and the connection as plain values."""
        sizes = {key: value for key, value in asdict(self).items() if key != "row"}
        return sizes | {"width": self.width, "connection": dict(self.row.connection)}


class RegressionModel(nn.Module):
    """Predicts a vector at every position of a sequence of vectors, through the residual stream of a scheme.

    If `wide`, the wrapper's linear maps write and read all rows of the state (`rows * dim` features), as published for
    JPmHC and EDelta-Stream; otherwise the scheme's expand and collapse make the state and read it out. Without layers
    this is the zero-layer network: linear, positions, norm, linear.

    There are three differences from the published wrapper. The norms before the sublayers belong to the connections and
    are RMSNorm; the published ones are LayerNorm without bias, as the last norm is here. Tables that the published code
    never uses (a token embedding and second positions) are omitted. There are as many positions as the task has inputs.
    """

    def __init__(self, architecture: Architecture):
        super().__init__()
        dim, width, wide = architecture.dim, architecture.width, architecture.row.wide
        stream = architecture.scheme.build(dim, 2 * architecture.layers)
        self.dim = dim
        self.positions = nn.Embedding.from_pretrained(torch.empty(architecture.length, width), freeze=False)
        self.input = Projection(architecture.features, width, std=STD, bias=0.0)
        self.expand = None if wide else stream.expand
        self.connections = stream.connections
        self.collapse = None if wide else stream.collapse
        std_out = STD / math.sqrt(2 * max(architecture.layers, 1))
        self.sublayers = nn.ModuleList()
        for _ in range(architecture.layers):
            self.sublayers.append(PlainAttention(dim, architecture.heads, std_out=std_out))
            up, down = Projection(dim, architecture.hidden, std=STD), Projection(architecture.hidden, dim, std=std_out)
            self.sublayers.append(nn.Sequential(up, nn.GELU(), down))
        self.norm = nn.LayerNorm(width, bias=False)
        self.output = Projection(width, architecture.features, std=STD, bias=0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the positions; every other module initialises its own parameters."""
        nn.init.normal_(self.positions.weight, std=STD)

    def forward(self, x: Tensor, *, states: list[Any] | None = None, coefficients: list[Any] | None = None) -> Tensor:
        """Return predictions of the shape of x: (batch, seq, features) with at most `length` positions.

        states: a list that collects the residual state before the first sublayer and after each. coefficients: a list
        that collects the coefficients of every connection. A single token is treated as a complete sequence, not as a
        generation step that needs a memory.
        """
        h = self.input(x) + self.positions.weight[: x.shape[1]]
        state = h.unflatten(-1, (-1, self.dim)) if self.expand is None else self.expand(h, whole_sequence(self.expand))
        if states is not None:
            states.append(state)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            inputs, carry = connection.read(state, whole_sequence(connection))
            state = connection.write(sublayer(*as_inputs(inputs)), carry)
            if states is not None:
                states.append(state)
            if coefficients is not None:
                coefficients.append(carry.coefficients)
        collapse = self.collapse
        h = state.flatten(-2) if collapse is None else collapse(state, whole_sequence(collapse))
        return self.output(self.norm(h))

    def penalty(self, coefficients: list[Any]) -> Tensor | None:
        """Return the sum of the mean auxiliary losses for the `coefficients` that `forward` collected, or None."""
        losses = [connection.penalty(part) for connection, part in zip(self.connections, coefficients, strict=True)]
        return total_penalty([loss for loss in losses if loss is not None], padding=None)


def row(name: str) -> ModelRow:
    """Return the row of a name: one of `MODELS` or a preset, with options if wanted (`name:option=value`).

    Raises:
        InputError: the name (the message has the nearest), an option or a value is unknown, or the scheme of another
            package cannot be used.
    """
    hint = ""
    try:
        base, options = named(name)
        base = _own(base)
        hint = "" if base in MODELS else did_you_mean(base, MODELS)
        model = MODELS.get(base, ModelRow({"preset": base}))
        model = replace(model, connection={**model.connection, **options})
        resolve(model.connection)
    except (ValueError, TypeError) as error:
        raise InputError(f"model {name}: {error}{hint}") from error
    return model


def own_name(name: str) -> str:
    """Return the name that records have, whatever the spelling of this one. Raises InputError as `row` does."""
    row(name)
    base, options = named(name)
    own = _own(base)
    if own not in MODELS:
        return label(name)
    return f"{own}:{options_text(options)}" if options else own


def _own(base: str) -> str:
    """Return the name in `MODELS` that may be spelled in another way, or the name unchanged."""
    spellings = {key(base), key(meaning(base))}
    return next((own for own in MODELS if key(own) in spellings), base)


@lru_cache
def match(name: str, *, features: int, length: int, dim: int, layers: int, heads: int) -> Architecture:
    """Return the sizes at which the model `name` has as many parameters as the plain residual, including the wrapper.

    dim, layers, heads: the plain residual's. Published models keep their number of layers if possible (scaled down if
    the plain residual has fewer than 9). Others get the number of layers with which the hidden width of the MLP is
    closest to 4 times the width. The hidden width then absorbs the rest. The zero-layer network keeps its small size.

    Raises:
        InputError: the name is unknown, the sizes do not fit the scheme, or no sizes are within 3 % of the plain
            residual.
    """

    def sized(name: str, row: ModelRow, layers: int, hidden: int, target: int = 1) -> Architecture:
        architecture = Architecture(name, row, features, length, dim, layers, heads, hidden)
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in architecture.build().parameters())
        return replace(architecture, parameters=parameters, ratio=parameters / target)

    model, standard = row(name), 4 * dim
    target = sized("residual", MODELS["residual"], layers, standard).parameters
    if model.layers == 0:
        return sized(name, model, 0, 0, target)
    # Published models stay close to their number of layers, others to the usual hidden width of the MLP.
    usual = None if model.layers is None else max(1, round(model.layers * layers / PUBLISHED_LAYERS))
    matches = []
    for count in sorted(range(1, layers + 1), key=lambda count: abs(count - (usual or layers))):
        missing = target - sized(name, model, count, standard).parameters
        # Every hidden unit has a row and a column in each layer; multiples of 4 keep the matrices aligned.
        hidden = max(4, standard + 4 * round(missing / (count * 2 * dim * 4)))
        architecture = sized(name, model, count, hidden, target)
        if abs(architecture.ratio - 1) <= SIZE_TOLERANCE:
            matches.append(architecture)
            if usual is not None:
                break
    if not matches:
        raise InputError(
            f"model {name}: no number of layers and MLP width comes within {SIZE_TOLERANCE:.0%} of the {target:,} "
            f"parameters of the plain residual at width {dim} with {layers} layers; choose a larger width"
        )
    return min(matches, key=lambda architecture: abs(math.log(architecture.hidden / standard)))
