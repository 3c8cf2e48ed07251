"""The shapes of a state: a pytree of `TensorSpec`, one for each tensor."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a state: (batch, seq, *shape), in `dtype`, or in the embedding's dtype if `dtype` is None."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def expect_state(state: Any, spec: Any) -> None:
    """Raise ValueError unless the tensors of `state` end with the shapes of `spec`, a pytree of `TensorSpec`."""
    if isinstance(spec, TensorSpec):
        rank = len(spec.shape)
        if isinstance(state, Tensor) and state.dim() >= rank and tuple(state.shape[-rank:]) == spec.shape:
            return
        expected = f"(batch, seq, {', '.join(map(str, spec.shape))})"
    elif isinstance(spec, dict):
        if isinstance(state, dict) and state.keys() == spec.keys():
            for name, described in spec.items():
                expect_state(state[name], described)
            return
        expected = f"a dict of {', '.join(map(str, spec))}"
    else:
        if isinstance(state, (tuple, list)) and len(state) == len(spec):
            for part, described in zip(state, spec):
                expect_state(part, described)
            return
        expected = f"a {type(spec).__name__} of {len(spec)} tensors"
    got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
    raise ValueError(f"state must be {expected}, from stream.expand or the connection before, got {got}")
