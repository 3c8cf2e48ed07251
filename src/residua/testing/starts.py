"""Compare two ways to start parameters, from what they draw with several seeds."""

from collections.abc import Sequence

import torch
from torch import Tensor

SEEDS = (1, 2, 3, 4)
FEW, ENOUGH = 16, 64
"""Numbers from which a spread is compared at all, and from which it is known well enough to be compared to a factor of
0.6 to 1.6."""


def drawn(tensors: Sequence[Tensor]) -> Tensor:
    """Return which entries differ from seed to seed: one bool for each entry of the tensors, which have one shape."""
    return torch.stack([x != tensors[0] for x in tensors]).any(0)


def different_draws(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Describe how entries that `expected` draws differ in mean or spread from ours; None if they do not.

    ours, expected: the same parameter, started with several seeds each. A start with fixed random numbers is allowed.
    The means may differ by five standard errors and the spreads by a factor of 0.6 to 1.6, by more if entries are few.
    """
    random = drawn(expected)
    if not random.any():
        return None
    a, b = (torch.stack([x.detach().double() for x in tensors]) for tensors in (ours, expected))
    rows = random.reshape(len(random), -1) if random.dim() > 1 else random.reshape(1, -1)
    values = a.reshape(len(ours), *rows.shape)
    still = sum(row.all().item() and (values[:, i] == values[0, i, 0]).all().item() for i, row in enumerate(rows))
    if still and values[:, 0].numel() > 1:
        return f"starts with {still} of {len(rows)} rows constant, which the scheme draws"
    a, b = a[:, random], b[:, random]
    count = a.numel() if drawn(ours)[random].any() else a.shape[1]
    spread = b.std().item()
    error = spread * (2 / count) ** 0.5 * (1 if count >= ENOUGH else 1 + 8 / count)  # a spread of few is itself unsure
    if (a.mean() - b.mean()).abs().item() > 5 * error:
        return f"starts with a mean of {a.mean():.2g}, the scheme's is {b.mean():.2g} (standard deviation {spread:.2g})"
    if count >= FEW:
        ratio, error = a.std().item() / spread, 0.0 if count >= ENOUGH else 5 / count**0.5
        if not 0.6 - error < ratio < 1.6 + error:
            return f"starts with a standard deviation {ratio:.2g} times the scheme's"
    return None
