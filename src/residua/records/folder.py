"""Run folders: the paths of their files, the lock of their one writer, and the settings they were begun with."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residua.errors import InputError, extra
from residua.records.durable import is_new, remove_partials, unlinked
from residua.records.reading import read_json, read_yaml

LOCK = ".lock"
LOGGING_KEYS = frozenset({"train.connections_every", "train.tensorboard", "train.wandb"})
"""Settings that only affect logging. Runs that differ in nothing else are treated as equal."""
FREE_KEYS = LOGGING_KEYS | {
    "data.further_validation",
    "data.path",
    "data.tokenizer_fingerprint",
    "model.base",
    "train.activation_checkpointing",
    "train.checkpoint_every",
    "train.compile",
    "train.device",
    "train.evaluate_every",
    "train.keep_best",
    "train.keep_checkpoints",
    "train.log_every",
    "train.parallel",
    "train.threads",
}
"""Settings that may change when a run resumes, as no step's numbers depend on them. The data may move, because their
fingerprint is compared instead, which covers the tokenizer, and so may a base, whose sha256 is compared."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a training run.

    `settings` is the resolved configuration by section, as in config.yaml; `resume` says that the run resumes.
    """

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False

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
    def tokenizer(self) -> Path:
        """The run's own copy of the tokenizer that made its tokens."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """The configuration of the model, for a run that trains a converted one."""
        return self.path / "model"

    @property
    def resume_command(self) -> str:
        """What a person types to resume."""
        return f"residua train --run {shlex.quote(str(self.path))} --resume"


def new_folder(path: str | Path, name: str = "") -> Path:
    """Return the absolute path of a folder to make, which takes its name when it is finished.

    name: of the option that it was given with, for the error.

    Raises:
        InputError: something has this name, and is not an empty folder, hidden files aside.
    """
    if not is_new(Path(path)):
        raise InputError(f"{name or 'folder'} must be a new or empty folder, got {path}; choose another folder")
    return Path(path).resolve()


@contextmanager
def hold(
    path: Path, *, own: Collection[str] | None = (), hint: str = "choose another folder", patience: float = 0.0
) -> Iterator[None]:
    """Hold `path` as the one process that writes in it, and remove what killed writers left there. The folder is made
    where there is none; the system gives it back when this process ends, however it ends.

    own: a folder that is not empty, hidden files aside, must contain one of these names to be recognised as ours; None
        for one that was recognised already.
    patience: seconds to wait for a process that is ending, such as a worker whose parent was killed.

    Raises:
        InputError: another process holds the folder, it holds other files, or it cannot be written.
    """
    with extra("lab"):
        import filelock

    with writable(path):
        path.mkdir(parents=True, exist_ok=True)
        if own is not None and not is_new(path) and not any((path / name).exists() for name in own):
            raise InputError(f"{path}: must be a new or empty folder, got one with other files in it; {hint}")
        lock = filelock.FileLock(unlinked(path / LOCK))
        try:
            lock.acquire(timeout=patience)
        except filelock.Timeout as error:
            raise InputError(f"{path}: another process is working in this folder; wait for it or {hint}") from error
    try:
        with writable(path):
            remove_partials(path)
        yield
    finally:
        lock.release()


@contextmanager
def writable(path: str | Path, what: str = "a folder to write in") -> Iterator[None]:
    """Turn an OSError inside into an InputError: `path` was expected to be `what`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: expected {what}, got: {error.strerror or error}") from error


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section as one mapping with dotted keys: `{"train": {"lr": 1}}` gives `{"train.lr": 1}`."""
    return {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}


def refuse_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], source: Path, *, free: Collection[str] = FREE_KEYS
) -> None:
    """Compare the flat settings that `source` was written with and the current ones.

    Raises:
        InputError: keys outside `free` differ; it names them.
    """
    # As JSON holds them: there a tuple is a list.
    before, now = (json.loads(json.dumps(dict(settings))) for settings in (before, now))
    changed = [
        f"{key} was {before.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted((before.keys() | now.keys()) - set(free))
        if key not in before or key not in now or before[key] != now[key]
    ]
    if not changed:
        return
    shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
    raise InputError(f"{source}: a run resumes with the settings it was begun with, but {shown}; use another folder")


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Read the settings of a config.yaml by section. Raises InputError where the file holds something else."""
    settings = read_yaml(path)
    if not isinstance(settings, dict) or not all(isinstance(keys, dict) for keys in settings.values()):
        raise InputError(f"{path}: expected the settings of a run by section, got something else")
    return settings


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises InputError where it holds something else or cannot be read."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
