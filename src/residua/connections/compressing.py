"""Connections whose sublayers read the state through a compressor, which the sublayers of a block may share."""

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
