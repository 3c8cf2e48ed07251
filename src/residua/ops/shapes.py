"""The check of shapes that PyTorch would silently broadcast to another result."""

from collections.abc import Sequence

from torch import Tensor


def expect_shape(name: str, x: Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise ValueError unless x has exactly the `expected` shape; `meaning` names its axes, as in "(..., dim)"."""
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name}: expected {meaning} = {tuple(expected)}, got {tuple(x.shape)}")
