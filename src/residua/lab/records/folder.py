"""Run folders: the paths of their files, the lock of their single writer, and their first settings."""

import errno
import json
import shlex
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residua.connections.names import today
from residua.errors import InputError, RunError, extra, fits, mapping, require, words
from residua.files.durable import is_new, remove_partials, unlinked
from residua.files.reading import read_json, read_yaml
from residua.lab.records.progress import say

LOCK, LEASE = ".lock", ".lease"
"""The files with which a process locks a folder, see `hold`."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""System errors for a full or damaged disk. Other system errors mean that the path itself is unsuitable."""
LOSSLESS = ("bpe", "byte", "gpt2")
"""Tokenizers that reproduce every text."""
LEASE_SECONDS = 30.0
"""A lease of another machine counts as expired after this time without renewal."""
LOGGING_KEYS = frozenset({"train.connections_every", "train.tensorboard", "train.wandb"})
"""Settings that affect only logging. Runs that differ in nothing else are treated as equal."""
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
    "train.threads",
}
"""Settings that may change when a run resumes: they change results by rounding at most. Data and base may be moved:
the fingerprint of the data, which covers the tokenizer, and the sha256 of the base are compared instead."""


def _inside(name: str) -> Any:
    return property(lambda run: run.path / name)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a training run.

    settings: the resolved configuration by section, as in config.yaml; resume: whether the run resumes; tokenizer: a
    copy of the tokenizer of the training data; model: the configuration of a converted model.
    """

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False

    config = _inside("config.yaml")
    metrics = _inside("metrics.jsonl")
    connections = _inside("connections.jsonl")
    facts = _inside("facts.json")
    checkpoints = _inside("checkpoints")
    tensorboard = _inside("tensorboard")
    tokenizer = _inside("tokenizer")
    model = _inside("model")

    @property
    def resume_command(self) -> str:
        """The command line that resumes the run."""
        return f"residua train --run {shlex.quote(str(self.path))} --resume"


def new_folder(path: str | Path, name: str = "") -> Path:
    """Return the absolute path of a folder that does not exist yet, or is empty.

    name: the option that set `path`, for the error message.

    Raises:
        InputError: `path` is a file, is below a file, or is a folder with files that are not hidden.
    """
    folder = Path(path).resolve()
    above = next((parent for parent in folder.parents if parent.exists()), folder)
    below = "" if above.is_dir() else f", which is below the file {above}"
    if below or not is_new(folder):
        raise InputError(f"{name or 'folder'} must be a new or empty folder, got {path}{below}; choose another folder")
    return folder


@contextmanager
def hold(
    path: Path, *, markers: Collection[str] | None = (), hint: str = "choose another folder", patience: float = 0.0
) -> Iterator[None]:
    """Lock the folder `path` for this process, create it if needed, and remove partial files of killed writers.

    The system releases the lock whenever this process ends. The lock works among the processes of one machine, but
    often not across a network file system. Therefore this process also keeps a lease in the folder and renews it. After
    a kill, the next holder on another machine waits `LEASE_SECONDS` to see whether the lease is renewed.

    markers: a folder with files that are not hidden must contain one of these names; None accepts any folder.
    patience: seconds to wait for a process that is ending, such as a worker whose parent was killed.

    Raises:
        InputError: another process holds the folder, it contains other files, or it cannot be written.
        RunError: the disk is full or damaged.
    """
    with extra("lab"):
        import filelock

    with ExitStack() as stack:
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            if markers is not None and not is_new(path) and not any((path / name).exists() for name in markers):
                raise InputError(f"{path} must be a new or empty folder, got a folder with other files; {hint}")
            lock = filelock.FileLock(path / LOCK)  # FileLock follows no link
            lease_file = unlinked(path / LEASE)
            lease = filelock.SoftFileLease(lease_file, lease_duration=LEASE_SECONDS)
            try:
                stack.enter_context(lock.acquire(timeout=patience))
                if _holder_is_dead(lease):
                    lease_file.unlink(missing_ok=True)
                try:
                    stack.enter_context(lease.acquire(timeout=0))
                except filelock.Timeout:
                    seconds = f"{LEASE_SECONDS:.0f} seconds"
                    say(f"{path}: another machine worked here last; waiting {seconds} to see if it still does")
                    stack.enter_context(lease.acquire(timeout=1.2 * LEASE_SECONDS))
            except filelock.Timeout as error:
                raise InputError(f"{path}: another process is working in this folder; wait for it or {hint}") from error
            remove_partials(path)
        yield


def _holder_is_dead(lease: Any) -> bool:
    """Return whether the holder of a lease is a killed process of this machine that its parent has not reaped.

    Such zombies occur in a container without init. filelock regards them as alive.
    """
    holder = getattr(lease, "owner", None)
    if holder is None or holder.start is None or holder.hostname.partition("?")[0] != socket.gethostname():
        return False
    try:
        state, *fields = Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    # The 22nd field is the process's start time. filelock stores its low 64 bits, because process numbers are reused.
    return state == "Z" and int(fields[18]) == holder.start % 2**64


@contextmanager
def writable(path: str | Path, what: str = "a folder to write in") -> Iterator[None]:
    """Turn an OSError of the `with` block into an InputError: `path` cannot be used as `what`.

    If the disk is full or damaged, the OSError becomes a RunError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        if error.errno in DISK:
            raise RunError(f"{path}: cannot write: {reason}; free space or repair the disk, then continue") from error
        if isinstance(error, FileExistsError) and Path(path).is_file():
            raise InputError(f"{path} must be {what}, found a file; choose another name") from error
        raise InputError(f"{path} cannot be used as {what}: {reason}") from error


def not_a_run(folder: Path) -> InputError:
    """Return the error for a folder without config.yaml; it names the runs inside the folder, if there are any."""
    inside = [shlex.quote(str(path.parent)) for path in sorted(folder.glob("*/config.yaml"))]
    remedy = f"give a run inside it: {', '.join(inside[:5])}" if inside else "residua train --run makes one"
    found = "no config.yaml" if folder.exists() else "no such folder"
    return InputError(f"{folder} must be a run folder, found {found}; {remedy}")


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings by section into dotted keys: `{"train": {"lr": 1}}` gives `{"train.lr": 1}`."""
    return {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}


def refuse_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    source: Path,
    *,
    free: Collection[str] = FREE_KEYS,
    of: str = "a run",
) -> None:
    """Compare the flat settings `now` with `before`, the settings in the file `source`.

    of: the owner of the settings in the message, such as "a run".

    Raises:
        InputError: keys outside `free` differ; the message names them.
    """
    # Compare as JSON, in which a tuple is a list.
    before, now = (json.loads(json.dumps(dict(settings))) for settings in (before, now))
    changes = [
        f"{key} was {before.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted((before.keys() | now.keys()) - set(free))
        if key not in before or key not in now or before[key] != now[key]
    ]
    if not changes:
        return
    summary = "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
    raise InputError(f"{source}: {of} must resume with its first settings, but {summary}; use another folder")


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Read the settings in a config.yaml by section. Raises InputError if the file has no such content."""
    read = mapping(read_yaml(path), str(path))
    settings = {name: dict(mapping(keys, f"{path}: {name}")) for name, keys in read.items()}
    if "connection" in settings.get("model", {}):
        settings["model"]["connection"] = today(settings["model"]["connection"])
    return settings


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings in the config.yaml of a run by dotted key; empty without such a file. Raises InputError."""
    return flatten(read_settings(path)) if path.is_file() else {}


_TEXTS = "dataset", "fingerprint", "place", "sha256", "source", "split", "tokenizer", "tokenizer_fingerprint"
DATA_FACTS: Mapping[str, Any] = dict.fromkeys(_TEXTS, str | None) | {
    **dict.fromkeys(("bytes", "longest_document", "vocab_size"), int | None),
    **dict.fromkeys(("lost_share", "validation_fraction"), float | None),
}
"""The types of the facts about a run's data that are read later."""


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts.json of a run; empty if there is none, as in runs of early versions.

    Raises:
        InputError: the file does not hold a JSON object, or a value has the wrong type.
    """
    facts = read_object(path) if path.exists() else {}
    data, resumed, parameters = facts.get("data", {}), facts.get("resumed", []), facts.get("parameters")
    mapping(data, f"{path}: data")
    for name, kind in DATA_FACTS.items():
        require(fits(data.get(name), kind), f"{path}: data.{name}", words(kind), data.get(name))
    require(isinstance(resumed, list), f"{path}: resumed", "a list", resumed)
    for process in resumed:
        mapping(process, f"{path}: resumed")
    require(fits(parameters, int | None), f"{path}: parameters", "a whole number", parameters)
    return facts


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises InputError if it holds something else or cannot be read."""
    return dict(mapping(read_json(path), str(path)))
