"""The options of schemes whose states are recomputed in the backward pass (`ops.recompute`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from residua.connections.base import Scheme
from residua.errors import Range
from residua.ops.derived import derive


@dataclass(frozen=True, kw_only=True)
class RecomputingScheme(Scheme):
    """A scheme whose write is linear in a state of several rows. The options change memory and speed, never numbers.

    recompute        "replay" keeps every `recompute_every`-th state and recomputes the others in the backward pass,
                     equal to the last bit on a CPU, within rounding on a GPU; "none" keeps all states. Second
                     derivatives need "none". A compiled model and the Triton kernels always keep all
    recompute_every  keep one state in this many, 1 to 64
    """

    recompute: Literal["none", "replay"] = "replay"
    # Recomputing recurses once for each state that was not kept; 64 stays well inside Python's recursion limit.
    recompute_every: Annotated[int, Range("1 to 64", lambda count: 1 <= count <= 64)] = 4

    @property
    def keeps_every(self) -> int:
        """m: one state in m is kept."""
        return self.recompute_every if self.recompute == "replay" else 1

    def derive(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs) of a state, recomputed in the backward pass like the states."""
        return derive(function, *inputs) if self.recompute == "replay" else function(*inputs)
