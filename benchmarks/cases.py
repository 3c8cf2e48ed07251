"""Operations with random inputs: in the dtype to measure, and again, part by part, in float64."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from benchmarks.exact import perturb
from residua import ops
from residua.connections import Connection, named, resolve
from residua.connections.base import as_inputs
from residua.errors import InputError, require

Dtype = Literal["float32", "bfloat16", "float16"]
KERNEL = 4  # taps over the tokens
CONNECTION = "connection:"
SUBLAYERS, MEASURED = 4, 2  # of a connection that is measured: neither the first nor the last, which may differ


class Sizes(NamedTuple):
    """tokens = sequences x length, of width dim, with `channels` value channels or streams."""

    tokens: int
    length: int
    dim: int
    channels: int
    dtype: Dtype

    @property
    def leading(self) -> tuple[int, int]:
        return self.tokens // self.length, self.length


class Draw:
    """Draw random inputs: large ones in the dtype to measure, coefficients in float32."""

    def __init__(self, sizes: Sizes, device: torch.device, seed: int):
        self.dtype = getattr(torch, sizes.dtype)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def large(self, *shape: int) -> Tensor:
        return self.coefficients(*shape).to(self.dtype)

    def streams(self, sizes: Sizes) -> Tensor:
        return self.large(*sizes.leading, sizes.channels, sizes.dim)

    def coefficients(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)


@dataclass(frozen=True)
class Case:
    """An operation and its inputs. `shared`: inputs that all tokens share, as they share a module's parameters."""

    function: Callable[..., Any]
    inputs: Mapping[str, Tensor]
    shared: frozenset[str] = frozenset()
    module: nn.Module | None = field(default=None, repr=False)

    @property
    def has_kernel(self) -> bool:
        return self.module is None and "implementation" in inspect.signature(self.function).parameters

    def leaves(self) -> list[Tensor]:
        """Return the tensors with a gradient: the inputs in their order, then the parameters of the module."""
        return [*self.inputs.values(), *(self.module.parameters() if self.module is not None else ())]

    def __call__(self) -> tuple[Tensor, ...]:
        results = self.function(**self.inputs)
        return results if isinstance(results, tuple) else (results,)

    def part(self, low: int, high: int) -> "Case":
        """Return the sequences from `low` to below `high`, in float64."""
        module = None if self.module is None else copy.deepcopy(self.module).double()
        inputs = {
            name: (x if name in self.shared else x[low:high]).detach().double().requires_grad_()
            for name, x in self.inputs.items()
        }
        return replace(self, function=self.function if module is None else module, inputs=inputs, module=module)


def _delta_write(sizes: Sizes, draw: Draw) -> Case:
    inputs = {
        "state": draw.streams(sizes),
        "k": draw.large(*sizes.leading, sizes.dim),
        "v": draw.coefficients(*sizes.leading, sizes.channels),
        "beta": 2 * draw.coefficients(*sizes.leading).sigmoid(),
    }
    return Case(partial(ops.delta_write, k_norm="rms"), inputs)


def _stream_read(sizes: Sizes, draw: Draw) -> Case:
    inputs = {"streams": draw.streams(sizes), "weights": draw.coefficients(sizes.channels, sizes.dim)}
    return Case(ops.stream_read, inputs, frozenset({"weights"}))


def _causal_read(sizes: Sizes, draw: Draw) -> Case:
    inputs = {"streams": draw.streams(sizes), "taps": draw.coefficients(KERNEL, sizes.channels, sizes.dim)}
    return Case(ops.causal_read, inputs, frozenset({"taps"}))


def _hyper_read(sizes: Sizes, draw: Draw) -> Case:
    inputs = {"streams": draw.streams(sizes), "h_pre": draw.coefficients(*sizes.leading, sizes.channels)}
    return Case(ops.hyper_read, inputs)


def _hyper_write(sizes: Sizes, draw: Draw) -> Case:
    n = sizes.channels
    inputs = {
        "streams": draw.streams(sizes),
        "y": draw.large(*sizes.leading, sizes.dim),
        "h_res": draw.coefficients(*sizes.leading, n, n).softmax(-1),
        "h_post": draw.coefficients(*sizes.leading, n),
    }
    return Case(ops.hyper_write, inputs)


def _sinkhorn(sizes: Sizes, draw: Draw) -> Case:
    return Case(ops.sinkhorn, {"logits": draw.coefficients(*sizes.leading, sizes.channels, sizes.channels)})


def _hybrid(sizes: Sizes, draw: Draw) -> Case:
    directions = {name: draw.coefficients(*sizes.leading, sizes.channels) for name in ("u", "v", "k")}
    inputs = {
        "x": draw.streams(sizes),
        **{name: x / x.norm(dim=-1, keepdim=True) for name, x in directions.items()},
        "beta": draw.coefficients(*sizes.leading),
        "gamma": draw.coefficients(*sizes.leading).sigmoid(),
    }
    return Case(ops.hybrid, inputs)


def _rms_norm(sizes: Sizes, draw: Draw) -> Case:
    inputs = {"x": draw.large(*sizes.leading, sizes.dim), "weight": 1 + 0.1 * draw.coefficients(sizes.dim)}
    return Case(ops.rms_norm, inputs, frozenset({"weight"}))


class Around(nn.Module):
    """A connection without its sublayer: the sublayer's input comes out, its output y goes in.

    The tensors of the state are arguments and results of their own; `spec` is the scheme's `state_spec`.
    """

    def __init__(self, connection: Connection, spec: Any):
        super().__init__()
        self.connection = connection
        self.spec = spec

    def forward(self, y: Tensor, **state: Tensor) -> tuple[Tensor, ...]:
        x, carry = self.connection.read(tree_unflatten(state.values(), tree_structure(self.spec)))
        return *as_inputs(x), *tree_leaves(self.connection.write(y, carry))


def _connection(preset: str, sizes: Sizes, draw: Draw) -> Case:
    name, options = named(preset)
    scheme = resolve(name)
    for rows in ("value_channels", "num_streams"):
        if scheme.state_size(0, 1) > 1 and rows in scheme.__dataclass_fields__:
            options.setdefault(rows, sizes.channels)
    scheme = resolve({"preset": name, **options})
    stream = scheme.build(sizes.dim, SUBLAYERS)
    perturb(stream)
    state = scheme.state_spec(MEASURED, sizes.dim)
    module = Around(stream.connections[MEASURED], state).to(draw.device)
    inputs = {
        f"state{i}": draw.coefficients(*sizes.leading, *spec.shape).to(draw.dtype)
        for i, spec in enumerate(tree_leaves(state))
    }
    return Case(module, {**inputs, "y": draw.large(*sizes.leading, sizes.dim)}, module=module)


CASES: dict[str, Callable[[Sizes, Draw], Case]] = {
    "delta_write": _delta_write,
    "stream_read": _stream_read,
    "causal_read": _causal_read,
    "hyper_read": _hyper_read,
    "hyper_write": _hyper_write,
    "sinkhorn": _sinkhorn,
    "hybrid": _hybrid,
    "rms_norm": _rms_norm,
}
CONNECTIONS = tuple(CONNECTION + preset for preset in ("residual", "ddl-cc", "ddl-tc", "hc", "mhc", "attnres"))


def make(operation: str, sizes: Sizes, draw: Draw) -> Case:
    """Return the operation, one of `CASES` or "connection:PRESET", with random inputs.

    Raises InputError for an unknown operation, or sizes that it cannot have.
    """
    try:
        if operation.startswith(CONNECTION):
            return _connection(operation.removeprefix(CONNECTION), sizes, draw)
        if operation in CASES:
            return CASES[operation](sizes, draw)
    except ValueError as error:
        raise InputError(f"{operation}: {error}") from error
    known = ", ".join([*CASES, *CONNECTIONS])
    raise InputError(f"operations: no operation is called {operation!r} (known: {known}, or another preset)")


def expect_at_least(least: int, settings: object, *names: str) -> None:
    """Raise InputError if one of these settings, or a number in its tuple, is below `least`."""
    for name in names:
        values = getattr(settings, name)
        for value in values if isinstance(values, tuple) else (values,):
            require(value >= least, name, f"at least {least}", value)
