"""Watch a forward pass with stand-ins that call the original `read` and `write` and record inputs and outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections import Carry, Connection, Memory, Mixing, RankOne, Stream
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
        """Return the linear map that the connection applied to the state; None if it does not describe one."""
        return self.connection.shortcut(self.before, self.carry, self.y)


class StandIn:
    """Replaces the `read` and `write` of a connection; the originals are `inner_read` and `inner_write`."""

    read: Callable[..., tuple[Any, Carry]]
    write: Callable[[Tensor, Carry], State]

    def __init__(self, connection: Any):
        self.connection = connection
        self.inner_read, self.inner_write = connection.read, connection.write


@contextmanager
def replaced(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """Use the stand-ins in place of their connections while the `with` block runs, in any model."""
    with ExitStack() as stack:
        for stand_in in stand_ins:
            stack.enter_context(swapped(vars(stand_in.connection), read=stand_in.read, write=stand_in.write))
        yield


@contextmanager
def swapped(entries: dict[str, Any], **values: Any) -> Iterator[None]:
    """Set entries while the `with` block runs, and then restore the earlier ones: such blocks can be nested."""
    before = {name: entries[name] for name in values if name in entries}
    entries.update(values)
    try:
        yield
    finally:
        for name in values:
            del entries[name]
        entries.update(before)


class Watched(StandIn):
    """A stand-in that calls `record` after every write."""

    def __init__(self, connection: Any, index: int, record: Callable[[ConnectionRecord], None]):
        super().__init__(connection)
        self.index = index
        self.record = record
        self._read: tuple[State, Tensor | None, Tensor] | None = None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        normed: list[Tensor] = []
        with ExitStack() as stack:
            if (norm := getattr(self.connection, "norm", None)) is not None:
                stack.callback(norm.register_forward_pre_hook(lambda _, inputs: normed.append(inputs[0])).remove)
            x, carry = self.inner_read(state, memory)
        self._read = state, normed[-1] if normed else None, x
        return x, carry

    def write(self, y: Tensor, carry: Carry) -> State:
        if self._read is None:
            raise InputError(
                "trace needs one output for every read, but a layer of this model adds two for one read, those of "
                "attention and of the MLP, which run in parallel"
            )
        (before, normed, x), self._read = self._read, None
        after = self.inner_write(y, carry)
        self.record(ConnectionRecord(self.index, self.connection, before, normed, x, carry, y, after))
        return after


def watching(stream: Stream, record: Callable[[ConnectionRecord], None]) -> AbstractContextManager[None]:
    """Call `record` after each write of the connections of a stream, in order."""
    return replaced([Watched(connection, i, record) for i, connection in enumerate(stream.connections)])


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run modules without their compiled code while the `with` block runs, because compiled code skips `record`."""
    # Do nothing if no module is compiled, because set_stance loads the compiler, which takes seconds.
    if all(module._compiled_call_impl is None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
