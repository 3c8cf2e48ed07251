"""Set the number of threads that PyTorch uses on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run PyTorch with `count` threads on the CPU; None keeps the current number."""
    import torch  # imported here, because a pool of runs begins without torch

    previous = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
