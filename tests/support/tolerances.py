"""The one table of tolerances: how far two ways to compute the same numbers may lie apart, by dtype."""

import torch
from torch import Tensor

# dtype: (relative to the largest expected number, absolute). float64 leaves room for a few hundred roundings, so that
# an identity with a wrong term, or one float32 step on the way (6e-8), never passes.
TOLERANCES = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (2e-5, 1e-6),
    torch.bfloat16: (2e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
}


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, factor: float = 1.0) -> None:
    """Equal shapes and finite numbers whose largest difference is within the row of `dtype` (that of `actual`).

    `factor` widens the row where the problem itself is ill-conditioned: say why where it is used.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    assert actual.isfinite().all(), "not finite"
    relative, absolute = TOLERANCES[dtype or actual.dtype]
    expected = expected.to(torch.promote_types(actual.dtype, expected.dtype))
    allowed = factor * (absolute + relative * expected.abs().max().item())
    difference = (actual - expected).abs().max().item()
    assert difference <= allowed, f"largest difference {difference:.3g}, allowed {allowed:.3g}"
