"""Tolerances between two ways to compute the same numbers."""

import torch
from torch import Tensor

# dtype: (tolerance relative to the largest expected number, absolute tolerance). float64 leaves room for a few hundred
# roundings, so that an identity with a wrong term, or with one step in float32 (6e-8), never passes.
TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (2e-5, 1e-6),
    torch.bfloat16: (2e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
}


def assert_close(
    actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, factor: float = 1.0, what: str = ""
) -> None:
    """Raise AssertionError unless shapes are equal, and numbers finite and within the tolerance of `dtype`.

    dtype: None for the dtype of `actual`. factor: widens the tolerance if the problem itself is ill-conditioned; say
    why at the call. what: the beginning of the message.
    """
    wrong = disagreement(actual, expected, dtype=dtype, factor=factor)
    if wrong is not None:
        raise AssertionError(f"{what}: {wrong}" if what else wrong)


def agree(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, factor: float = 1.0) -> bool:
    """Return whether `assert_close` would pass."""
    return disagreement(actual, expected, dtype=dtype, factor=factor) is None


def disagreement(
    actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, factor: float = 1.0
) -> str | None:
    """Describe how two tensors disagree; None if they agree."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return None
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return "not finite"
    relative, absolute = TOLERANCES[dtype or actual.dtype]
    expected = expected.to(torch.promote_types(actual.dtype, expected.dtype))
    allowed = factor * (absolute + relative * expected.abs().max().item())
    difference = (actual - expected).abs().max().item()
    return None if difference <= allowed else f"largest difference {difference:.3g}, allowed {allowed:.3g}"
