"""The folder of one run: who may write in it, and which settings it was begun with."""

import fcntl
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residua.durable import write_text
from residua.errors import InputError, extra
from residua.runs.reading import read_yaml

with extra("train"):
    import yaml

# What may change when a run goes on: nothing here changes the numbers of a step that is done. The place of the data
# is free because their fingerprint is compared instead.
FREE_KEYS = frozenset(
    {
        "data.path",
        "train.activation_checkpointing",
        "train.checkpoint_every",
        "train.compile",
        "train.connections_every",
        "train.device",
        "train.evaluate_every",
        "train.keep_best",
        "train.keep_checkpoints",
        "train.log_every",
        "train.parallel",
        "train.tensorboard",
        "train.wandb",
    }
)


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process holds; `claim` makes it.

    `settings` is the resolved configuration by section, as in config.yaml; `resume` says that the run goes on.
    """

    path: Path
    settings: Mapping[str, Any]
    resume: bool

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def connections(self) -> Path:
        return self.path / "connections.jsonl"

    @property
    def facts(self) -> Path:
        return self.path / "facts.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def resume_command(self) -> str:
        """What a person types to go on."""
        return f"residua train --run {shlex.quote(str(self.path))} --resume"


@contextmanager
def claim(folder: str | Path, settings: Mapping[str, Any], *, resume: bool = False) -> Iterator[RunFolder]:
    """Hold a run folder for this process and write its config.yaml.

    A folder in which nothing was trained yet may be begun anew; one with a run in it only goes on with `resume`, and
    then with the settings it was begun with, `FREE_KEYS` excepted.

    Args:
        settings: the resolved configuration by section: `{"model": {...}, "data": {...}, "train": {...}}`.

    Raises:
        InputError: the folder holds a run or other files, holds no run to resume, belongs to another process, cannot
            be written, or was begun with other settings.
    """
    run = RunFolder(Path(folder), settings, resume)
    path = run.path
    if resume and not run.config.is_file():
        raise InputError(f"{path}: expected a run to resume, found no config.yaml; leave --resume out to start one")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # The lock file also tells a run that stopped before its first step from a folder of something else.
        foreign = next(path.iterdir(), None) is not None and not (path / ".lock").exists()
        if foreign and not resume and not _has_run(run):
            raise InputError(f"{path}: expected a new or empty folder, found other files in it; choose another folder")
        lock = (path / ".lock").open("a")
    except OSError as error:
        raise InputError(f"{path}: expected a folder to write the run in, got: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{path}: another process is training in this folder; wait for it or choose another folder"
            ) from error
        if resume:
            refuse_changes(flatten(_read_settings(run.config)), flatten(settings), run.config)
        elif _has_run(run):
            raise InputError(f"{path}: this folder holds a run already; go on with --resume or choose another folder")
        try:
            for stale in (*path.glob(".*.partial"), *run.checkpoints.glob(".*.partial")):
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
            write_text(run.config, yaml.safe_dump(dict(settings), sort_keys=False))
        except OSError as error:
            raise InputError(
                f"{path}: expected a folder to write the run in, got: {error.strerror or error}"
            ) from error
        yield run


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section as one mapping with dotted keys: `{"train": {"lr": 1}}` gives `{"train.lr": 1}`."""
    return {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], source: Path) -> None:
    """Compare flat settings, those that `source` was written with and those of now.

    Raises:
        InputError: keys other than `FREE_KEYS` differ; it names them.
    """
    # As JSON holds them: there a tuple is a list.
    before, now = (json.loads(json.dumps(dict(settings))) for settings in (before, now))
    changed = [
        f"{key} was {before.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted((before.keys() | now.keys()) - FREE_KEYS)
        if key not in before or key not in now or before[key] != now[key]
    ]
    if not changed:
        return
    shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
    raise InputError(f"{source}: a run goes on with the settings it was begun with, but {shown}; use another folder")


def _has_run(run: RunFolder) -> bool:
    return run.metrics.exists() or run.checkpoints.exists()


def _read_settings(path: Path) -> dict[str, dict[str, Any]]:
    settings = read_yaml(path)
    if not isinstance(settings, dict) or not all(isinstance(keys, dict) for keys in settings.values()):
        raise InputError(f"{path}: expected the settings of a run by section, got something else")
    return settings
