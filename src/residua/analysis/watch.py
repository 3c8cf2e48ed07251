"""Watching a forward pass: stand-ins for the connections, which do the same and show what went through them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua.connections import Carry, Connection, Memory, Mixing, RankOne, Readout
from residua.connections.base import State


class Passage(NamedTuple):
    """What passed one connection: the states before its read and after its write, and everything between.

    normed: what the norm before the sublayer was given; None for a connection without a module `norm`.
    """

    index: int
    connection: Connection
    before: State
    normed: Tensor | None
    x: Tensor
    carry: Carry
    y: Tensor
    after: State

    def shortcut(self) -> RankOne | Mixing | None:
        """What the connection says of the linear map that the state went through."""
        return self.connection.shortcut(self.before, self.carry, self.y)


class Watched:
    """A stand-in for a connection that calls `see` after every write.

    It never joins a write and a read in one kernel: the state between them is what one wants to see.
    """

    def __init__(self, connection: Connection, index: int, see: Callable[[Passage], None]):
        self.connection = connection
        self.index = index
        self.see = see
        self._read: tuple[State, Tensor | None, Tensor] | None = None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        normed: list[Tensor] = []
        with _given_to(getattr(self.connection, "norm", None), normed):
            x, carry = self.connection.read(state, memory)
        self._read = state, normed[-1] if normed else None, x
        return x, carry

    def write(self, y: Tensor, carry: Carry) -> State:
        (before, normed, x), self._read = self._read, None
        after = self.connection.write(y, carry)
        self.see(Passage(self.index, self.connection, before, normed, x, carry, y, after))
        return after

    def write_read(
        self, y: Tensor, carry: Carry, following: "Watched | Readout", memory: Memory | None = None
    ) -> tuple[Tensor, Carry]:
        return following.read(self.write(y, carry), memory)

    def penalty(self, coefficients: NamedTuple) -> Tensor | None:
        return self.connection.penalty(coefficients)


@contextmanager
def _given_to(module: nn.Module | None, inputs: list[Tensor]) -> Iterator[None]:
    """Collect what a module is called with inside this context."""
    if module is None:
        yield
        return
    handle = module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield
    finally:
        handle.remove()


def watching(see: Callable[[Passage], None]) -> Callable[[list[Connection | Readout]], Sequence[Watched | Readout]]:
    """The argument `watch` of a model's forward pass: `see` is called after the write of every sublayer, in order."""

    def watch(readers: list[Connection | Readout]) -> list[Watched | Readout]:
        *connections, readout = readers
        return [*(Watched(connection, i, see) for i, connection in enumerate(connections)), readout]

    return watch


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Parts of the model that were compiled in place run as Python here: compiled code would not call `see`."""
    # Asking for it loads the compiler, which takes seconds and is of no use where nothing is compiled.
    if all(module._compiled_call_impl is None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
