"""Adapters: how to build your module, how its parameters correspond to ours, and how to call it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from residua.connections import Connection, Scheme, Stream
from residua.connections.parts.phases import SharedModule
from residua.errors import did_you_mean, types_of
from residua.testing.agreement import TOLERANCES, disagreement
from residua.testing.checks import CheckFailed, expect, tensors
from residua.testing.inputs import bare_sublayers, normal, perturbed, recorded

SublayerFunction = Callable[..., Tensor]


class Adapter(ABC):
    """The attributes and methods that both kinds of adapter have.

    scheme: our scheme, with all its options set; your module is compared with it. If its `published` lists an option
        and you leave this option at its default, the published version that is nearest to your module is taken.
    index: the index of our connection that is compared with yours; for a stack, only the names of its coefficients are
        used. The default is the third of four, because some schemes omit mappings without influence in the first and
        the last connection. If the connection borrows a part from an earlier one, our parameters include those of this
        part.
    owns_norm: whether your module contains the norm before the sublayer. With False the sublayer's input is compared
        before that norm.
    norm_eps: the eps of your norms, inside the mappings too.
    dtype: the dtype of both computations; torch.float32 if your module casts to float32 inside.
    evaluation_only: whether all calls are in evaluation mode; `check_module` sets it for a module with dropout.
    dim: the width of the model. num_sublayers: the number of sublayers in the whole stack.
    """

    scheme: Scheme
    index: int = 2
    owns_norm: bool = True
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float64
    evaluation_only: bool = False
    dim: int = 16
    num_sublayers: int = 4

    @abstractmethod
    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the value of each parameter of your module, by the names in its `state_dict`, computed from ours.

        Use differentiable operations, such as `.T`, `torch.cat` and slices. Our scheme omits parameters without
        influence; if your module has them, return any tensor of the right shape.
        """

    def reference(self) -> Stream:
        """Return the stack of our scheme, with which your module is compared."""
        norm = None if self.owns_norm else (lambda i: nn.Identity())
        return self.scheme.build(self.dim, self.num_sublayers, norm_eps=self.norm_eps, norm=norm)


class ConnectionAdapter(Adapter):
    """Your module is one connection around one sublayer; it is compared with connection `index` of our stack."""

    @abstractmethod
    def build(self, dim: int) -> nn.Module:
        """Return your module, freshly initialised."""

    @abstractmethod
    def connect(self, module: nn.Module, state: Any, sublayer: SublayerFunction) -> Any:
        """Return the state after your module around `sublayer`: (batch, seq, dim) -> the same shape.

        state: in our layout, such as (batch, seq, streams, dim) or a tuple of sources; convert it to yours here.
        """


class StreamAdapter(Adapter):
    """Your module is a whole stack: expansion, connections and head."""

    @abstractmethod
    def build(self, dim: int, num_sublayers: int) -> nn.Module:
        """Return your module, freshly initialised."""

    @abstractmethod
    def forward(self, module: nn.Module, x: Tensor, sublayers: list[SublayerFunction]) -> Tensor:
        """Return the output of your stack for x: (batch, seq, dim), the same shape, before the final norm."""


class Ours(dict[str, Tensor]):
    """Our parameters by name."""

    def __missing__(self, name: str) -> Tensor:
        raise CheckFailed(
            f"parameters(): the reference has no {name!r}{did_you_mean(name, self)}; it has {sorted(self)}"
        )


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Map all names of a module's parameters to the parameters, including parts that our connections borrow."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for path, part in _borrowed(module):
        parameters |= {f"{path}.{name}": parameter for name, parameter in part.named_parameters()}
    return parameters


def named_once(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module as `named_parameters`, each by its first name."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in named_parameters(module).items():
        named.setdefault(id(parameter), (name, parameter))
    return dict(named.values())


def _borrowed(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that a module uses and another module owns, by path."""
    own = set(module.modules())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, SharedModule) and value.module not in own:
                yield f"{path}.{name}".lstrip("."), value.module


def placed(module: nn.Module, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return `values`, keyed by the id of the parameter or buffer that each one replaces.

    Raises:
        CheckFailed: a name is unknown, a shape differs, or one parameter with two names gets two different values.
    """
    parameters = named_parameters(module)
    places: dict[str, Tensor] = {**dict(module.named_buffers(remove_duplicate=False)), **parameters}
    names: dict[int, str] = {}
    for name, value in values.items():
        if name not in places:
            raise CheckFailed(f"parameters(): your module has no {name!r}; it has {sorted(parameters)}")
        place = places[name]
        shape = tuple(place.shape)
        expect(tuple(value.shape) == shape, f"parameters(): {name} is {tuple(value.shape)}, your module has {shape}")
        first = names.setdefault(id(place), name)
        same = value is values[first] or torch.equal(value, values[first])
        expect(same, f"parameters(): {first} and {name} are one parameter of your module, and get two values")
    return {place: values[name] for place, name in names.items()}


@contextmanager
def holding(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with these values, keyed by parameter name, while the `with` block runs.

    They are moved to the module's device, and its own values are then restored. Unlike `torch.func.functional_call`,
    this sets and restores a parameter under all its names, and reaches parts that a connection borrows.
    """
    held = placed(module, values)
    modules = {*module.modules(), *(inner for _, part in _borrowed(module) for inner in part.modules())}
    tables = [table for part in modules for table in (part._parameters, part._buffers)]
    places = [(table, name, own) for table in tables for name, own in table.items() if id(own) in held]
    try:
        for table, name, own in places:
            table[name] = held[id(own)].to(own.device)  # type: ignore[assignment,union-attr]
        yield
    finally:
        for table, name, own in places:
            table[name] = own  # type: ignore[assignment]


class Pair:
    """Our module and the module under test, with the same parameters and the same interface.

    ours: the values of our parameters. `reference(ours, state, sublayer)` calls our module,
    `candidate(ours, state, sublayer)` the module under test; `result(state)` is the latter's result without gradients.
    """

    def __init__(self, adapter: Adapter, *, dtype: torch.dtype | None = None, scale: float = 0.3):
        self.adapter = adapter
        self.dtype = adapter.dtype if dtype is None else dtype
        self.whole = isinstance(adapter, StreamAdapter)
        self.stream = adapter.reference()
        perturbed(self.stream, scale=scale)
        self.part: nn.Module = self.stream if self.whole else self.connection
        self.module = built(adapter).to(self.dtype)
        if adapter.evaluation_only:
            self.module.eval()
        self.stream.to(self.dtype)
        self.ours = Ours((name, p.detach().clone().requires_grad_()) for name, p in named_once(self.part).items())

    def train(self, mode: bool) -> None:
        """Set the mode of the module under test."""
        self.module.train(mode and not self.adapter.evaluation_only)

    @property
    def connection(self) -> Connection:
        return self.stream.connections[self.adapter.index]  # type: ignore[attr-defined]

    def state(self) -> Any:
        """Return a random input: an embedding for a stack; for a connection, a state in which all rows differ."""
        if self.whole:
            return normal(2, 6, self.adapter.dim).to(self.dtype)
        spec = self.adapter.scheme.state_spec(self.adapter.index, self.adapter.dim)
        seeds = iter(range(10, 1000))
        return tree_map(lambda leaf: normal(2, 6, *leaf.shape, seed=next(seeds)).to(self.dtype), spec)

    def moved(self, state: Any) -> Any:
        """Return the state with entries changed by one or two units in the last place, like a rounding error."""
        step = torch.finfo(self.dtype).eps
        return tree_map(lambda x: x * (1 + step * normal(*x.shape, seed=60).sign().to(x)), state)

    def sublayers(self) -> Any:
        bare = bare_sublayers(self.adapter.dim, self.adapter.num_sublayers)
        return bare if self.whole else bare[self.adapter.index]

    def reference(self, ours: Mapping[str, Tensor], state: Any, sublayer: Any, part: nn.Module | None = None) -> Any:
        part = self.part if part is None else part
        with holding(part, ours):
            return part(state, sublayer)

    @torch.no_grad()
    def result(self, state: Any) -> Any:
        """Return the result of the module under test, which gets a copy of the state."""
        return self.candidate(self.ours, tree_map(torch.clone, state), self.sublayers())

    def candidate(self, ours: Mapping[str, Tensor], state: Any, sublayer: Any) -> Any:
        call = self.adapter.forward if self.whole else self.adapter.connect  # type: ignore[attr-defined]
        with holding(self.module, self.adapter.parameters(ours)):
            try:
                return call(self.module, state, sublayer)
            except RuntimeError as error:
                if self.dtype == torch.float64 and is_of_dtypes(error):
                    raise RuntimeError(f"{error}; {FLOAT32_HINT}") from error
                raise

    @cached_property
    @torch.no_grad()
    def steepness(self) -> float:
        """Return the factor >= 1 by which tolerances are widened, because our module amplifies rounding errors."""

        def run(ours: Mapping[str, Tensor], state: Any) -> list[Tensor]:
            sublayers, inputs = recorded(self.sublayers())
            return [*tensors(self.reference(ours, state, sublayers)), *tensors(inputs)]

        results, state = run(self.ours, self.state()), self.state()
        if self.dtype.itemsize > 2:
            times, others = ROUNDINGS, run(self.ours, self.moved(state))
        else:
            exact = {name: x.double() for name, x in self.ours.items()}
            times, others = NARROW_ROUNDINGS, run(exact, tree_map(torch.Tensor.double, state))
        relative, absolute = TOLERANCES[self.dtype]
        return max(
            1.0, *(times * _largest(b - a) / (absolute + relative * _largest(a)) for a, b in zip(results, others))
        )

    def disagreement(self, actual: Tensor, expected: Tensor) -> str | None:
        """Describe how two tensors differ beyond rounding; None if they agree."""
        if disagreement(actual, expected, dtype=self.dtype) is None:
            return None
        return disagreement(actual, expected, dtype=self.dtype, factor=self.steepness)

    def agree(self, actual: Tensor, expected: Tensor) -> bool:
        """Return whether two tensors are equal up to rounding."""
        return self.disagreement(actual, expected) is None


FLOAT32_HINT = "if your module casts to float32 inside, set dtype = torch.float32"


def is_of_dtypes(error: RuntimeError) -> bool:
    """Return whether PyTorch raised this error because two tensors have different dtypes."""
    return any(words in str(error) for words in ("dtype", "scalar type", "should be the same"))


ROUNDINGS = 30
"""Differences up to this multiple of the effect of rounding the state once count as rounding: a module rounds often."""
NARROW_ROUNDINGS = 4
"""In bfloat16 and float16, where one rounding has a large effect, differences up to this multiple of our own module's
error count as rounding."""


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def versions(scheme: Scheme) -> list[Scheme]:
    """Return the published versions that a scheme stands for.

    Each option in the scheme's `published` that is at its default takes all its values.
    """
    found = [scheme]
    for option in scheme.published:
        if getattr(scheme, option) == getattr(type(scheme), option):
            values = get_args(types_of(type(scheme))[option])
            with suppress(ValueError):  # the other options may exclude this value
                found = [replace(one, **{option: value}) for one in found for value in values]
    return found


def version_in_words(scheme: Scheme) -> str:
    """Return the class of a scheme, with the options that identify its published version."""
    several = len(versions(replace(scheme, **{name: getattr(type(scheme), name) for name in scheme.published}))) > 1
    options = [f"{name}={getattr(scheme, name)!r}" for name in scheme.published if several]
    return type(scheme).__name__ + (f"({', '.join(options)})" if options else "")


def with_attributes(adapter: Adapter, **attributes: Any) -> Adapter:
    """Return a copy of the adapter with some attributes changed."""
    other = copy(adapter)
    vars(other).update(attributes)
    return other


def built(adapter: Adapter) -> nn.Module:
    """Return the module under test, freshly initialised."""
    if isinstance(adapter, StreamAdapter):
        module = adapter.build(adapter.dim, adapter.num_sublayers)
    else:
        module = adapter.build(adapter.dim)  # type: ignore[attr-defined]
    if not isinstance(module, nn.Module):
        raise TypeError(f"build must return an nn.Module, got {type(module).__name__}")
    return module
