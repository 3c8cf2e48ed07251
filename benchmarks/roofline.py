"""The bytes that an operation has to move: every input and output crosses the memory bus once.

No implementation moves fewer, and these operations do so little arithmetic that bytes over the bandwidth of a copy is
the shortest possible time. Parameters, which all tokens share, do not count.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Passes(NamedTuple):
    """Traffic of one token: states (channels x dim numbers), vectors (dim numbers), single numbers in float32."""

    states: int = 0
    vectors: int = 0
    numbers: int = 0

    def bytes(self, *, dim: int, channels: int, state_bytes: int, vector_bytes: int) -> int:
        """Return the bytes for one token; `state_bytes` and `vector_bytes` are the size of one number."""
        return self.states * channels * dim * state_bytes + self.vectors * dim * vector_bytes + 4 * self.numbers


class Traffic(NamedTuple):
    """The forward and the backward pass. The backward pass reads an input again where a gradient needs it."""

    forward: Passes
    backward: Passes


# n is the number of channels or streams. In the comments: inputs -> outputs; g is a gradient.
TRAFFIC: Mapping[str, Callable[[int], Traffic]] = {
    # X, k, v, beta -> X;  gX', X, k, v, beta -> gX, gk, gv, gbeta
    "delta_write": lambda n: Traffic(Passes(2, 1, n + 1), Passes(3, 2, 2 * (n + 1))),
    # X -> x;  gx, X -> gX: X for the gradient of the weights
    "stream_read": lambda n: Traffic(Passes(1, 1), Passes(2, 1)),
    "causal_read": lambda n: Traffic(Passes(1, 1), Passes(2, 1)),
    # X, h -> x;  gx, X, h -> gX, gh
    "hyper_read": lambda n: Traffic(Passes(1, 1, n), Passes(2, 1, 2 * n)),
    # X, y, H, h -> X;  gX', X, y, H, h -> gX, gy, gH, gh
    "hyper_write": lambda n: Traffic(Passes(2, 1, n * n + n), Passes(3, 2, 2 * (n * n + n))),
    # L -> H;  gH, L -> gL
    "sinkhorn": lambda n: Traffic(Passes(0, 0, 2 * n * n), Passes(0, 0, 3 * n * n)),
    # X, u, v, k, beta, gamma -> X;  gX' and all of these -> their gradients
    "hybrid": lambda n: Traffic(Passes(2, 0, 3 * n + 2), Passes(3, 0, 2 * (3 * n + 2))),
    # x -> c;  gc, x -> gx
    "rms_norm": lambda n: Traffic(Passes(0, 2), Passes(0, 3)),
    # A delta write and the read that follows, with its norm and its maps of the context to a gate and a value:
    # X, k, v, beta -> X, c, gate, value;  gX', gc, ggate, gvalue, X, k, v, beta -> gX, gk, gv, gbeta
    "boundary": lambda n: Traffic(Passes(2, 2, 2 * (n + 1)), Passes(3, 3, 3 * (n + 1))),
    # The plain residual between two sublayers, x + y and its norm: x, y -> x, c;  gx', gc, x -> gx (= gy)
    "residual": lambda n: Traffic(Passes(0, 4), Passes(0, 4)),
    # Attention over n sources: all of them, y -> x and one source more;  gx, n sources, their gradients -> gradients
    "sources": lambda n: Traffic(Passes(0, n + 3), Passes(0, 3 * n + 3)),
}
