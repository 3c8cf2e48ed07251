"""Connections whose sublayers read the state through a compressor, which the sublayers of a block may share."""

from collections.abc import Callable
from typing import Literal, TypeVar

from torch import Tensor, nn

from residua.connections.base import Connection, State
from residua.connections.memory import Memory, window_of
from residua.connections.phases import called


class CompressingConnection(Connection):
    """A connection that reads the state through a compressor, its own or that of an earlier connection."""

    separates_documents = True

    def __init__(self, compress: "nn.Module | CompressingConnection"):
        super().__init__()
        # A list does not register the owner as a submodule, so a shared compressor's parameters have one name.
        self._borrowed: list[CompressingConnection] = []
        if isinstance(compress, CompressingConnection):
            self._borrowed.append(compress)
        else:
            self.compress = compress
        self.window = window_of(self.compressor)

    @property
    def compressor(self) -> nn.Module:
        """The map from the state to x_in: (batch, seq, dim); may be borrowed."""
        return self._borrowed[0].compressor if self._borrowed else self.compress

    def compressed(self, state: State, memory: Memory | None = None) -> Tensor:
        """Return x_in: (batch, seq, dim) of the state."""
        if self._borrowed:  # hooks on the owner may gather or load its parameters
            return called(self._borrowed[0], self.compressor, state, memory)
        return self.compress(state, memory)


C = TypeVar("C", bound=CompressingConnection)
M = TypeVar("M", bound=nn.Module)


def connected(
    num_sublayers: int,
    sharing: Literal["block", "separate"],
    compressor: Callable[[int], M],
    connection: Callable[[int, M | C], C],
) -> tuple[list[C], M]:
    """Return the connections of a stack, `connection(i, compress)` for sublayer i, and the compressor of the readout.

    sharing      whether the two sublayers of a block share a compressor: the second borrows that of the first
    compressor   makes compressor j of the stack, that of the readout as the last
    """
    connections: list[C] = []
    count = 0
    for i in range(num_sublayers):
        if sharing == "block" and i % 2:
            connections.append(connection(i, connections[-1]))
        else:
            connections.append(connection(i, compressor(count)))
            count += 1
    return connections, compressor(count)
