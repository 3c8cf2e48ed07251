"""A disk that is full: a limit on the size of files fails as one does, and so does a refusal of new files."""

import errno
import os
import sys
from contextlib import contextmanager

import pytest

NEW = ("open", "os.mkdir", "os.rename")


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


def refuse_files(folder, number=errno.ENOSPC):
    """Return a function that lets this process make so many more files, folders and names in a folder, and then none:
    the system's error has this number. It lasts as long as the process."""
    left = None

    def refuse(event, arguments):
        nonlocal left
        if left is None or event not in NEW or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if os.fsdecode(arguments[0]).startswith(str(folder)):
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number), arguments[0])

    def allow(files):
        nonlocal left
        left = files

    sys.addaudithook(refuse)
    return allow
