"""The hidden folder next to `out` in which a preparation is written until it is complete.

For a large text, its progress.json notes what is safely on the disk.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from residua.errors import InputError, RunError
from residua.lab.data.shards import SplitFiles
from residua.records.durable import remove, sync, unlinked, write_text
from residua.records.folder import LEASE, LOCK, hold
from residua.records.progress import say
from residua.records.reading import read_json

PROGRESS = "progress.json"


@dataclass(frozen=True)
class State:
    """The part of a text whose tokens are on the disk.

    documents: their number.
    size: the part of `Corpus.size` that they complete.
    """

    documents: int
    size: int
    splits: dict[str, SplitFiles]


def damage_error(path: Path) -> InputError:
    return InputError(f"{path}: part of an unfinished preparation is damaged or gone; remove {path.parent}")


class Staging:
    """The folder of an unfinished preparation. `saved` is the state in its progress.json, None without one."""

    def __init__(self, folder: Path, plan: dict[str, Any], saved: State | None):
        self.folder, self.plan, self.saved = folder, plan, saved

    def save(self, state: State) -> None:
        write_text(self.folder / PROGRESS, json.dumps({"plan": self.plan, **asdict(state)}))
        self.saved = state

    def close(self) -> None:
        """Say what is kept for the next call, or remove the folder."""
        if self.saved is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            tokens = sum(split.tokens for split in self.saved.splits.values())
            say(f"prepare: {tokens:,} tokens are kept in {self.folder}: the same command continues from there")


@contextmanager
def staging(out: Path, plan: dict[str, Any]) -> Iterator[Staging]:
    """Yield a folder to write into, which becomes `out` if all goes well; otherwise it stays if it holds progress.

    The progress of an earlier preparation with the same `plan` is kept. Raises InputError if it has another plan,
    another process is preparing `out`, or `out` cannot be made; RunError if writing fails.
    """
    folder = unlinked(out.with_name(f".{out.name}.preparing"))
    with hold(folder, markers=None):
        stage = Staging(folder, plan, _read_state(folder, plan))
        try:
            if stage.saved is None:
                for path in folder.iterdir():
                    if path.name not in (LOCK, LEASE):
                        remove(path)
            yield stage
            for path in folder.rglob("*"):
                if path.is_file():
                    sync(path)
            os.replace(folder, out)
            for name in (PROGRESS, LOCK, LEASE):
                (out / name).unlink(missing_ok=True)
            stage.saved = None
            sync(out.parent)
        except OSError as error:
            raise RunError(f"{out}: writing failed: {error.strerror}") from error
        finally:
            stage.close()


def _read_state(folder: Path, plan: dict[str, Any]) -> State | None:
    """Return the state of an earlier preparation, if any. Raises InputError if it has another plan."""
    path = folder / PROGRESS
    if not path.exists():
        return None
    saved = read_json(path)
    old_plan = saved.pop("plan")
    splits = {name: SplitFiles.read(split) for name, split in saved.pop("splits").items()}
    different_keys = [key for key in old_plan | plan if old_plan.get(key) != plan.get(key)]
    if different_keys:
        changes = ", ".join(f"{key} {old_plan.get(key)} there, {plan.get(key)} here" for key in different_keys)
        raise InputError(
            f"{folder}: an unfinished preparation with other settings or another text ({changes}); give the same to "
            "continue it, or remove that folder"
        )
    return State(**saved, splits=splits)
