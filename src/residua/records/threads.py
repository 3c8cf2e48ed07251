"""How many threads PyTorch computes with on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run PyTorch with `count` threads on the CPU; None leaves the number as it is."""
    import torch  # here, for a pool of runs begins without it

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
