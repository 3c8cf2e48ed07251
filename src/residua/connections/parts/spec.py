"""The shapes of a state: a pytree of `TensorSpec`, one for each tensor."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a state: (batch, seq, *shape), in the dtype of the state."""

    shape: tuple[int, ...]


def expect_state(state: Any, spec: Any, *, sequence: bool = False) -> None:
    """Raise ValueError unless the tensors of `state` end with the shapes of `spec`, a pytree of `TensorSpec`.

    sequence: whether the leading axes must be (batch, seq), as a read of other tokens requires.
    """
    if _fits(state, spec, sequence):
        return
    (specs, structure), (leaves, built) = tree_flatten(spec), tree_flatten(state)
    right = structure == built and all(isinstance(leaf, Tensor) for leaf in leaves)
    if not right or not all(_fits(x, leaf, sequence) for x, leaf in zip(leaves, specs)):
        shapes = tree_map(lambda leaf: f"(batch, seq, {', '.join(map(str, leaf.shape))})", spec)
        needed = str(shapes).replace("'", "")
        actual = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        if isinstance(state, dict):
            actual = f"dict with the keys {', '.join(map(str, state))}, whose order counts"
        raise ValueError(f"state must be {needed}, from stream.expand or the connection before, got {actual}")


def _fits(state: Any, spec: Any, sequence: bool) -> bool:
    """Return whether nested tuples of tensors have the shapes of a spec. Faster than flattening both on every read."""
    if isinstance(spec, TensorSpec):
        axes = state.dim() - len(spec.shape) if isinstance(state, Tensor) else -1
        return (axes == 2 or (axes >= 0 and not sequence)) and state.shape[axes:] == spec.shape
    same = type(state) is type(spec) is tuple and len(state) == len(spec)
    return same and all(_fits(part, of, sequence) for part, of in zip(state, spec))
