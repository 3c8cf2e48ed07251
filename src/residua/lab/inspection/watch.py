"""Watch a forward pass: wrappers of the connections, which do the same and record their inputs and outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua.connections import Carry, Connection, Memory, Mixing, RankOne, Readout
from residua.connections.base import State
from residua.errors import InputError


class ConnectionRecord(NamedTuple):
    """The states before the read and after the write of one connection, and everything between them.

    normed: the input of the norm before the sublayer; None for a connection without a module `norm`.
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
        """Return the linear map that the connection applied to the state; None if it describes none."""
        return self.connection.shortcut(self.before, self.carry, self.y)


class Watched:
    """A wrapper of a connection that calls `record` after every write.

    It never fuses a write and a read into one kernel, because the state between them is recorded.
    """

    def __init__(self, connection: Connection, index: int, record: Callable[[ConnectionRecord], None]):
        self.connection = connection
        self.index = index
        self.record = record
        self._read: tuple[State, Tensor | None, Tensor] | None = None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        normed: list[Tensor] = []
        with _inputs_of(getattr(self.connection, "norm", None), normed):
            x, carry = self.connection.read(state, memory)
        self._read = state, normed[-1] if normed else None, x
        return x, carry

    def write(self, y: Tensor, carry: Carry) -> State:
        if self._read is None:
            raise InputError(
                "trace needs one output for every read, and a layer of this model adds two, attention and MLP in "
                "parallel, one after the other"
            )
        (before, normed, x), self._read = self._read, None
        after = self.connection.write(y, carry)
        self.record(ConnectionRecord(self.index, self.connection, before, normed, x, carry, y, after))
        return after

    def write_read(
        self, y: Tensor, carry: Carry, following: "Watched | Readout", memory: Memory | None = None
    ) -> tuple[Tensor, Carry]:
        return following.read(self.write(y, carry), memory)

    def penalty(self, coefficients: NamedTuple) -> Tensor | None:
        return self.connection.penalty(coefficients)


@contextmanager
def _inputs_of(module: nn.Module | None, inputs: list[Tensor]) -> Iterator[None]:
    """Collect the inputs of a module inside this context."""
    if module is None:
        yield
        return
    handle = module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield
    finally:
        handle.remove()


def watching(
    record: Callable[[ConnectionRecord], None],
) -> Callable[[list[Connection | Readout]], Sequence[Watched | Readout]]:
    """Return the argument `watch` of a model's forward pass that calls `record` after each write, in order."""

    def watch(readers: list[Connection | Readout]) -> list[Watched | Readout]:
        *connections, readout = readers
        return [*(Watched(connection, i, record) for i, connection in enumerate(connections)), readout]

    return watch


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run parts of the model that were compiled in place as Python: compiled code would not call `record`."""
    # This loads the compiler, which takes seconds, so skip it if nothing is compiled.
    if all(module._compiled_call_impl is None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
