"""Write files so that a kill or a power cut leaves either the old content or the new content, never a part.

New content is written to `.NAME.RANDOM.partial` in the same folder, which is then renamed in one step. Partial files of
a killed writer are removed by the next process that locks the folder (`hold` in lab/records/folder.py), partial folders
by the next writer of the same folder (`unfinished`).
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from residua.errors import InputError
from residua.files.reading import regular

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


def unlinked(path: Path) -> Path:
    """Return `path` if it is not a link. Call this before writing inside the folder of a run, a study or a sweep.

    Somebody else may have made the folder, so links in it are never followed for writing. The folder itself may be a
    link. Training does not call this for a run's folder of checkpoints, which may be a link to checkpoints of the same
    run; `lab/training/folder.py` checks that.

    Raises:
        InputError: `path` is a link.
    """
    if path.is_symlink():
        raise InputError(
            f"{path}: must not be a link, because writing would change its target, got a link to {os.readlink(path)}; "
            "remove it, or put a copy in its place"
        )
    return path


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file in one step, see `replacing`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file in one step, see `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for the new content of `path`, which replaces the old content at the end of the `with` block.

    After an error the old content stays.

    Raises:
        InputError: `path` is a link.
        OSError: the content cannot be written, or `path` is a folder or a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "must be a file, got a folder or a device", str(path))
    temporary = partial(unlinked(path))
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and str(error.filename) in ("None", str(temporary)):
            error.filename = str(path)  # name the user's file in place of our partial file
            del error.filename2  # otherwise the message ends with "-> None"
        raise
    _settle(path)


def _settle(path: Path) -> None:
    """Wait until the name that a file or folder just got is on the disk.

    A failure is only a warning, because the new content is already in place.
    """
    try:
        sync(path.parent)
    except OSError as error:
        warnings.warn(f"{path} is written, but a power cut now could lose it: {error.strerror}", stacklevel=2)


def partial(path: Path) -> Path:
    """Return a new name for an unfinished `path`, in the same folder; `remove_partials` recognises such names."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def publish(temporary: Path, path: Path) -> None:
    """Move a finished folder to `path`, in one step if nothing is there.

    If `path` is a folder with hidden files, such as those of git, they stay. Raises OSError if it has other files, or
    if the move fails.
    """
    if path.is_dir():
        if not is_new(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        for entry in temporary.iterdir():
            os.replace(entry, path / entry.name)
        temporary.rmdir()
    else:
        os.replace(temporary, path)
    _settle(path)


def is_new(path: Path) -> bool:
    """Return whether `path` does not exist, or is a folder with only hidden files, as git and file managers make."""
    return not path.exists() or (path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir()))


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Make an empty folder that is renamed to `path` at the end of the `with` block, or removed after an error.

    Unfinished folders for `path` that killed processes left are removed first.

    Raises OSError if `path` exists and `is_new` is false, and for every system error, including those for which
    safetensors and tokenizers have exceptions of their own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = partial(path)
    temporary.mkdir()
    with _held(temporary):
        try:
            yield temporary
            for written in temporary.rglob("*"):
                sync(written)
            sync(temporary)
            publish(temporary, path)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            number = re.search(r"\(os error (\d+)\)", str(error))  # Rust's format
            if number is not None and not isinstance(error, (OSError, ValueError, RuntimeError)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
            raise


def _remove_abandoned(path: Path) -> None:
    """Remove unfinished folders for `path` that no process has locked, on systems that can lock folders."""
    form = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(OSError):
        for stale in [entry for entry in path.parent.iterdir() if form.fullmatch(entry.name)]:
            if stale.is_dir() and not stale.is_symlink():
                with _held(stale) as held:
                    if held:
                        shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder while the `with` block runs, and yield whether this succeeded.

    Windows and some network file systems cannot lock folders.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def remove_partials(folder: Path) -> None:
    """Remove the partial files of killed writers in `folder`. The caller must be the only writer. Raises OSError."""
    for stale in folder.glob(f".*.{'[0-9a-f]' * 8}.partial"):
        remove(stale)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk. Raises OSError."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders, and writes entries at once
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content. Raises OSError, also for a pipe or a device."""
    digest = hashlib.sha256()
    with regular(path).open("rb") as file:
        while chunk := file.read(16 * 2**20):
            digest.update(chunk)
    return digest.hexdigest()
