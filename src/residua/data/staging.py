"""The folder in which a preparation is written, beside its place, until it is whole.

While a large text is prepared, progress.json in it says what is safely on the disk.
"""

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from residua.data.tokenizer import tokenizer_hash
from residua.errors import InputError, RunError
from residua.runs.durable import publish, sync, unlinked, write_text
from residua.runs.folder import LOCK, hold
from residua.runs.progress import say
from residua.runs.reading import read_json

PROGRESS = "progress.json"


def changed(path: Path) -> InputError:
    return InputError(
        f"{path}: part of an unfinished preparation was changed or is gone; remove {path.parent} to start again"
    )


class Staging:
    """The folder that becomes `out`. `saved` is the content of its progress.json, None without one."""

    def __init__(self, out: Path, folder: Path, plan: dict[str, Any], saved: dict[str, Any] | None):
        self.out, self.folder, self.plan, self.saved = out, folder, plan, saved

    @property
    def tokens(self) -> int:
        """The number of tokens that `saved` keeps."""
        return sum(split["tokens"] for split in self.saved["splits"].values()) if self.saved else 0

    def save(self, state: dict[str, Any]) -> None:
        state = state | {"tokenizer_sha256": tokenizer_hash(self.folder / "tokenizer")}
        write_text(self.folder / PROGRESS, json.dumps({"plan": self.plan, **state}))
        self.saved = state

    def kept(self) -> str:
        if self.saved is None:
            return "nothing was kept, prepare the data again"
        return f"{self.tokens:,} tokens are kept in {self.folder}: the same command continues from there"


@contextmanager
def staging(out: Path, plan: dict[str, Any]) -> Iterator[Staging]:
    """Yield a folder to write into, which becomes `out` if all goes well; otherwise it stays if it holds progress.

    A folder that an earlier preparation with the same `plan` left is taken up again. Raises InputError if such a folder
    has another plan or `out` cannot be made, RunError if writing fails.
    """
    with ExitStack() as held:
        try:
            staged = _claim(out, plan, held)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise InputError(f"{out}: cannot be made here: {error.strerror}; give another folder") from None
        except OSError as error:
            raise RunError(f"{out}: writing failed: {error.strerror}") from error
        try:
            yield staged
            for path in staged.folder.rglob("*"):
                if path.is_file():
                    sync(path)
            publish(staged.folder, out)
            for name in (PROGRESS, LOCK):
                (out / name).unlink(missing_ok=True)
            staged.saved = None
            sync(out.parent)
        except OSError as error:
            raise RunError(f"{out}: writing failed: {error.strerror}; {staged.kept()}") from error
        except (InputError, RunError) as error:
            if staged.saved is None:
                raise
            raise type(error)(f"{error}; {staged.kept()}") from error
        except KeyboardInterrupt:
            if staged.saved is not None:
                say(f"prepare: {staged.kept()}")
            raise
        finally:
            if staged.saved is None:
                shutil.rmtree(staged.folder, ignore_errors=True)


def _claim(out: Path, plan: dict[str, Any], held: ExitStack) -> Staging:
    """Find what an earlier preparation with this plan left, or make a new folder, and hold it in `held`.

    Removes what cannot be continued, and leaves alone what another process holds.
    """
    prefix = f".{out.name}.preparing-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in out.parent.iterdir() if path.name.startswith(prefix)):
        with ExitStack() as lock:
            try:
                lock.enter_context(hold(unlinked(folder), own=None))
            except InputError:
                continue
            saved = _read_progress(folder)
            if saved is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                _compare_plans(out, folder, saved.pop("plan"), plan)
                held.push(lock.pop_all())
                return Staging(out, folder, plan, saved)
    folder = out.with_name(prefix + secrets.token_hex(4))
    folder.mkdir()
    held.enter_context(hold(folder))
    return Staging(out, folder, plan, None)


def _read_progress(folder: Path) -> dict[str, Any] | None:
    path = folder / PROGRESS
    if not path.exists():
        return None
    try:
        saved = read_json(path)
        for key in ("reader", "text_sha256", "size", "split", "tokenizer_sha256"):
            saved[key]
        tokens = [part["tokens"] for part in saved["splits"].values()]
        if not (isinstance(saved["plan"], dict) and all(isinstance(count, int) for count in tokens)):
            raise TypeError("plan or tokens")
    except (InputError, KeyError, TypeError, AttributeError) as error:
        raise changed(path) from error
    return saved


def _compare_plans(out: Path, folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    differing = [key for key in here | there if there.get(key) != here.get(key)]
    if differing:
        what = ", ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in differing)
        raise InputError(
            f"{out}: an unfinished preparation in {folder} has other settings or another text ({what}); give the same "
            "to continue it, or remove that folder"
        )
