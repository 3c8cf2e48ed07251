"""Write files so that a kill or a power cut leaves either the old content or the new, never half of it.

New content goes into `.NAME.RANDOM.partial` in the same folder and takes the name in one step. The next holder of the
folder removes the partial files of a killed writer, see `folder.hold`; the next writer of a folder removes its partial
folders, see `unfinished`.
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
    """Return `path`, a file or folder inside the folder of a run, a study or a sweep, before it is written to.

    Somebody else may have made that folder, so a link in it is never followed for writing. The folder itself may be a
    link, and so may the checkpoints of a run, if they name it.

    Raises:
        InputError: it is a link.
    """
    if path.is_symlink():
        raise InputError(
            f"{path}: must not be a link, as its content would land elsewhere, got one to {os.readlink(path)}; "
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
    """Open a file for the new content of `path`, which takes its place when the body ends; after an error the old
    content stays.

    Raises:
        InputError: `path` is a link.
        OSError: the content cannot be written, or `path` is a folder or a device, which stay.
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
            error.filename = str(path)  # a failed write names no file, and a user does not know ours
            del error.filename2  # None would be shown
        raise
    _settle(path)


def _settle(path: Path) -> None:
    """Wait until a name that was just given is on the disk. A failure is a warning, as the new content has its name."""
    try:
        sync(path.parent)
    except OSError as error:
        warnings.warn(f"{path} is written, but a power cut now could lose it: {error.strerror}", stacklevel=2)


def partial(path: Path) -> Path:
    """Return a new name for an unfinished `path`, in the same folder; `remove_partials` knows its form."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished folder its name, in one step if there is no folder of that name.

    Hidden files that a folder has, such as those of git, stay in it. Raises OSError, also if it has other files.
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
    """Return whether nothing has this name yet, or a folder with only hidden files, as file managers and git make."""
    return not path.exists() or (path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir()))


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Make an empty folder that takes the name `path` when the body ends; after a failure nothing stays.

    Unfinished folders of this name that killed processes left are removed.

    Raises OSError, also if `path` exists and is not a new folder, and for errors of the system that safetensors and
    tokenizers raise as types of their own.
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
            number = re.search(r"\(os error (\d+)\)", str(error))  # as Rust writes it
            if number is not None and not isinstance(error, (OSError, ValueError, RuntimeError)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
            raise


def _remove_abandoned(path: Path) -> None:
    """Remove unfinished folders of the name `path` that no process holds, as far as this system tells."""
    form = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(OSError):
        for stale in [entry for entry in path.parent.iterdir() if form.fullmatch(entry.name)]:
            if stale.is_dir() and not stale.is_symlink():
                with _held(stale) as held:
                    if held:
                        shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder until the body or this process ends; yield whether it could be locked. Some network file systems,
    and Windows, lock no folders."""
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
    """Remove the partial files of killed writers in `folder`; the caller must be its only writer. Raises OSError."""
    for stale in folder.glob(f".*.{'[0-9a-f]' * 8}.partial"):
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
    """Return the sha256 of a file's content. Raises OSError, also for a pipe or a device."""
    digest = hashlib.sha256()
    with regular(path).open("rb") as file:
        while chunk := file.read(16 * 2**20):
            digest.update(chunk)
    return digest.hexdigest()
