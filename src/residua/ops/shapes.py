"""Check shapes that PyTorch would otherwise broadcast silently, with a wrong result."""

from collections.abc import Sequence

from torch import Tensor


def expect_shape(name: str, x: Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise ValueError unless x has exactly the `expected` shape.

    meaning: the shape in words, "(..., dim)" or "the shape of ...".
    """
    if tuple(x.shape) != tuple(expected):
        wanted = f"have {meaning}," if meaning.startswith("the shape of") else f"be {meaning} ="
        raise ValueError(f"{name} must {wanted} {tuple(expected)}, got {tuple(x.shape)}")


def expect_groups(name: str, x: Tensor, dim: int, meaning: str = "(..., groups)") -> None:
    """Raise ValueError unless the last axis of x is a number of groups into which `dim` features can be cut."""
    if not x.dim() or not x.shape[-1] or dim % x.shape[-1]:
        raise ValueError(f"{name} must be {meaning} with a number of groups that divides {dim}, got {tuple(x.shape)}")


def expand_leading(name: str, x: Tensor, leading: Sequence[int], trailing: Sequence[int], meaning: str) -> Tensor:
    """Expand x to a view of shape (*leading, *trailing).

    Leading axes of x may be missing or of size 1, its trailing axes must match. Raises ValueError for other shapes;
    `meaning` names the axes, such as "(..., n)".
    """
    expected = (*leading, *trailing)
    if x.shape == expected:
        return x
    shape = (1,) * (len(expected) - x.dim()) + tuple(x.shape)
    fits = len(shape) == len(expected) and shape[len(leading) :] == tuple(trailing)
    if not fits or any(size not in (1, target) for size, target in zip(shape, leading)):
        raise ValueError(
            f"{name} must be {meaning} = {expected}, with leading axes that may be 1 or missing, got {tuple(x.shape)}"
        )
    return x.expand(expected)
