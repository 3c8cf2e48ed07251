"""Adapters: how to build your module, how its parameters correspond to ours, and how to call it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from residua.connections import Connection, Scheme, Stream
from residua.errors import did_you_mean
from residua.testing.checks import CheckFailed
from residua.testing.inputs import bare_sublayers, normal, perturbed

Sublayer = Callable[..., Tensor]


class Adapter(ABC):
    """The common part of the two adapters.

    scheme: the scheme of ours to compare with, all options set.
    index: which of our connections to compare with, or to say more about. The first and the last of some
        schemes lack mappings that cannot have an influence there, and the second sublayer of a
        block may share a part with the first, so the third of four is the default.
    owns_norm: whether your module contains the norm before the sublayer. With False the sublayer's input is compared
        before that norm.
    norm_eps: the eps of your norms, inside the mappings too.
    dtype: in which both are computed. torch.float32 if your module casts to float32 inside.
    dim: the width of the model; num_sublayers: of the stack that your module is, or is a part of.
    """

    scheme: Scheme
    index: int = 2
    owns_norm: bool = True
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float64
    dim: int = 16
    num_sublayers: int = 4

    @abstractmethod
    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the value of each parameter of your module, by the names in its `state_dict`, computed from ours.

        Use operations that autograd knows, such as `.T`, `torch.cat`, slices. For a parameter that can have no
        influence and that our scheme therefore lacks, return any tensor of its shape.
        """

    def reference(self) -> Stream:
        """Return our stack to compare with."""
        norm = None if self.owns_norm else (lambda i: nn.Identity())
        return self.scheme.build(self.dim, self.num_sublayers, norm_eps=self.norm_eps, norm=norm)


class ConnectionAdapter(Adapter):
    """One connection around one sublayer: number `index` of a stack of ours."""

    @abstractmethod
    def build(self, dim: int) -> nn.Module:
        """Return your module, freshly initialised."""

    @abstractmethod
    def connect(self, module: nn.Module, state: Any, sublayer: Sublayer) -> Any:
        """Return the state after your module around `sublayer`: (batch, seq, dim) -> the same shape.

        state: as in our scheme, such as (batch, seq, streams, dim), or a tuple of sources. Change the layout here.
        """


class StreamAdapter(Adapter):
    """A whole stack: expansion, connections and head."""

    @abstractmethod
    def build(self, dim: int, num_sublayers: int) -> nn.Module:
        """Return your module, freshly initialised."""

    @abstractmethod
    def forward(self, module: nn.Module, x: Tensor, sublayers: list[Sublayer]) -> Tensor:
        """Return the output of your stack for x: (batch, seq, dim), the same shape, before the final norm."""


class Ours(dict[str, Tensor]):
    """Our parameters by name."""

    def __missing__(self, name: str) -> Tensor:
        raise CheckFailed(f"parameters(): ours has no {name!r}{did_you_mean(name, self)}; it has {sorted(self)}")


class Pair:
    """Our module and the module under test, with the same parameters and the same way to call them.

    ours: values of our parameters. `reference(ours, state, sublayer)` and `candidate(ours, state, sublayer)` call ours
    and theirs; `result(state)` is theirs without gradients.
    """

    def __init__(self, adapter: Adapter, *, dtype: torch.dtype | None = None, scale: float = 0.3):
        self.adapter = adapter
        self.dtype = adapter.dtype if dtype is None else dtype
        self.whole = isinstance(adapter, StreamAdapter)
        self.stream = adapter.reference()
        perturbed(self.stream, scale=scale)
        self.part: nn.Module = self.stream if self.whole else self.connection
        self.module = built(adapter).to(self.dtype)
        self.part.to(self.dtype)
        self.ours = Ours((name, p.detach().clone().requires_grad_()) for name, p in self.part.named_parameters())

    @property
    def connection(self) -> Connection:
        return self.stream.connections[self.adapter.index]  # type: ignore[attr-defined]

    def state(self) -> Any:
        """Return the input: an embedding for a stack, a state whose rows all differ for one connection."""
        if self.whole:
            return normal(2, 6, self.adapter.dim).to(self.dtype)
        spec = self.adapter.scheme.state_spec(self.adapter.index, self.adapter.dim)
        seeds = iter(range(10, 1000))
        return tree_map(lambda leaf: normal(2, 6, *leaf.shape, seed=next(seeds)).to(self.dtype), spec)

    def sublayers(self) -> Any:
        bare = bare_sublayers(self.adapter.dim, self.adapter.num_sublayers)
        return bare if self.whole else bare[self.adapter.index]

    def reference(self, ours: Mapping[str, Tensor], state: Any, sublayer: Any, part: nn.Module | None = None) -> Any:
        return functional_call(self.part if part is None else part, dict(ours), (state, sublayer))

    @torch.no_grad()
    def result(self, state: Any) -> Any:
        """Return the result of the module under test, which gets a copy of the state."""
        return self.candidate(self.ours, tree_map(torch.clone, state), self.sublayers())

    def candidate(self, ours: Mapping[str, Tensor], state: Any, sublayer: Any) -> Any:
        theirs = {f"module.{name}": value for name, value in self.adapter.parameters(ours).items()}
        call = self.adapter.forward if self.whole else self.adapter.connect  # type: ignore[attr-defined]
        return functional_call(_Called(self.module, call), theirs, (state, sublayer))


class _Called(nn.Module):
    """The module under test, called as the adapter calls it."""

    def __init__(self, module: nn.Module, call: Callable):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, state: Any, sublayer: Any) -> Any:
        return self.call(self.module, state, sublayer)


def built(adapter: Adapter) -> nn.Module:
    """Return the module under test, freshly initialised."""
    if isinstance(adapter, StreamAdapter):
        module = adapter.build(adapter.dim, adapter.num_sublayers)
    else:
        module = adapter.build(adapter.dim)  # type: ignore[attr-defined]
    if not isinstance(module, nn.Module):
        raise TypeError(f"build must return an nn.Module, got {type(module).__name__}")
    return module
