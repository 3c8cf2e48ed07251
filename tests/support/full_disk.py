"""A disk that is full: a limit on the size of files fails as one does."""

from contextlib import contextmanager

import pytest


@contextmanager
def room(size):
    """No file can grow beyond `size` bytes."""
    resource = pytest.importorskip("resource", reason="this system has no limits of resources")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
