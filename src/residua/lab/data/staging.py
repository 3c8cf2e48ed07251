"""The hidden folder next to `out` in which a preparation is written until it is complete.

For a large text, its progress.json notes what is safely on the disk.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from residua.errors import InputError, RunError
from residua.lab.data.shards import SplitFiles, read_splits
from residua.lab.data.split import Split
from residua.records.durable import publish, remove, sync, unlinked, write_text
from residua.records.folder import LEASE, LOCK, hold, read_object
from residua.records.progress import say
from residua.records.reading import inside
from residua.records.tensors import undamaged

PROGRESS = "progress.json"


@dataclass
class Staging:
    """The folder of an unfinished preparation, and the part of every split that `save` noted, empty at first."""

    folder: Path
    plan: dict[str, Any]
    saved: Mapping[Split, SplitFiles]

    def save(self, splits: Mapping[Split, SplitFiles]) -> None:
        parts = {name: asdict(split) for name, split in splits.items()}
        write_text(self.folder / PROGRESS, json.dumps({"plan": self.plan, "splits": parts}))
        self.saved = splits

    def close(self) -> None:
        """Say what is kept for the next call, or remove the folder."""
        if not self.saved:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            tokens = sum(split.tokens for split in self.saved.values())
            say(f"prepare: {tokens:,} tokens are kept in {self.folder}: the same command continues from there")


@contextmanager
def staging(out: Path, plan: dict[str, Any]) -> Iterator[Staging]:
    """Yield a folder to write into, which becomes `out` if all goes well; otherwise it stays if it holds progress.

    The progress of an earlier preparation with the same `plan` is kept. Raises InputError if it has another plan,
    another process is preparing `out`, or `out` cannot be made; RunError if writing fails.
    """
    folder = unlinked(out.with_name(f".{out.name}.preparing"))
    with hold(folder, markers=None):
        stage = Staging(folder, plan, _read_progress(folder, plan))
        try:
            if not stage.saved:
                for path in folder.iterdir():
                    if path.name not in (LOCK, LEASE):
                        remove(path)
            yield stage
            for path in folder.rglob("*"):
                if path.is_file():
                    sync(path)
            publish(folder, out)
            for name in (PROGRESS, LOCK, LEASE):
                (out / name).unlink(missing_ok=True)
            stage.saved = {}
        except OSError as error:
            raise RunError(f"{out}: writing failed: {error.strerror}") from error
        finally:
            stage.close()


def _read_progress(folder: Path, plan: dict[str, Any]) -> Mapping[Split, SplitFiles]:
    """Return what an earlier preparation noted, if any. Raises InputError if it has another plan."""
    path = folder / PROGRESS
    if not path.exists():
        return {}
    with undamaged(path, "the progress of a preparation", f"remove {folder}"):
        progress = read_object(path)
        old_plan = dict(progress["plan"])
        saved = read_splits(path, progress["splits"])
        for split in saved.values():
            for shard in split.shards:
                inside(folder, shard.file)
    different_keys = [key for key in old_plan | plan if old_plan.get(key) != plan.get(key)]
    if different_keys:
        changes = ", ".join(f"{key} {old_plan.get(key)} there, {plan.get(key)} here" for key in different_keys)
        raise InputError(
            f"{folder}: an unfinished preparation with other settings or another text ({changes}); give the same to "
            "continue it, or remove that folder"
        )
    return saved
