"""Write files so that a kill or a power cut leaves either the old content or the new, never half of it.

New content goes into `.NAME.RANDOM.partial` beside its place and takes the name in one step. The random part cannot be
guessed and the file is created exclusively, so a link planted in the folder is never followed. A writer holds a lock on
its partial file; the next writer removes what killed ones left.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows, which refuses to remove a file that is open
    flock = None  # type: ignore[assignment]


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file in one step, see `replacing`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file in one step, see `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for the new content of `path`, which takes its place when the body ends; after an error the old
    content stays.

    Where `path` is a symbolic link, the file that it names is replaced and the link stays. Devices, pipes and the file
    behind standard output or error cannot be replaced: they are written to as the body goes.

    Raises:
        OSError: the content cannot be written, or `path` is a folder, a disk or a socket.
    """
    stream = _stream(path)
    if stream is not None:
        with stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    _remove_abandoned(target)
    temporary, file = _create(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name != "nt":  # Windows renames no file that is open; elsewhere the lock is kept until the end
                os.replace(temporary, target)
        if os.name == "nt":
            os.replace(temporary, target)
        sync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def partial(path: Path) -> Path:
    """Return a name beside `path` that nobody can guess, for what is not finished; `remove_partials` knows its form."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished folder its name in one step. Raises OSError, also where `path` is a folder with files in it."""
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Make an empty folder beside `path`, which takes that name when the body ends; after a failure nothing stays.

    Raises OSError, also where `path` is there and not an empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = partial(path)
    temporary.mkdir()
    lock = None
    try:
        if flock is not None:
            lock = os.open(temporary, os.O_RDONLY)
            _lock(lock)
        yield temporary
        for written in temporary.rglob("*"):
            sync(written)
        sync(temporary)
        publish(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def remove_partials(folder: Path) -> None:
    """Remove what killed writers left in `folder`; the caller must be its only writer. Raises OSError."""
    for stale in folder.glob(".*.partial"):
        remove(stale)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it, if there is one. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder, and writes names at once
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(16 * 2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _stream(path: Path) -> BinaryIO | None:
    """Open `path` for writing where it cannot be replaced by a file; return None where it can."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    for number, standard in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(number)):
                if standard is not None:
                    standard.flush()
                return os.fdopen(os.dup(number), "wb")
    if stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode):
        return path.open("wb")
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "expected a file or a pipe, found a disk or a socket", str(path))
    return None


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """Create a partial file for `path`, locked as long as it is open."""
    while True:
        temporary = partial(path)
        file = temporary.open("xb")
        if flock is None:
            return temporary, file
        _lock(file.fileno())
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # another writer removed it before it was locked


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks
        flock(descriptor, LOCK_EX | LOCK_NB)


def _remove_abandoned(path: Path) -> None:
    """Remove the partial files and folders of `path` that no process writes."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(OSError):
        for other in path.parent.iterdir():
            if not pattern.fullmatch(other.name):
                continue
            with suppress(OSError):
                if flock is None:
                    remove(other)
                    continue
                descriptor = os.open(other, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    flock(descriptor, LOCK_EX | LOCK_NB)
                    remove(other)
                finally:
                    os.close(descriptor)
