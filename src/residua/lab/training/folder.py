"""Claim the folder of a training run for one process, with the settings of its first start."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from residua.errors import InputError, RunError
from residua.lab.training.checkpoint import saved_steps
from residua.records.durable import is_new, remove, remove_partials, write_bytes, write_text
from residua.records.folder import (
    FREE_KEYS,
    LEASE,
    LOCK,
    RunFolder,
    flatten,
    hold,
    read_settings,
    refuse_changes,
    writable,
)
from residua.records.reading import write_yaml

PATIENCE_SECONDS = 3.0  # the workers of a killed sweep hold their runs for a moment, until they end


@contextmanager
def claim(folder: str | Path, settings: Mapping[str, Any], *, resume: bool = False) -> Iterator[RunFolder]:
    """Lock a run folder for this process and write its config.yaml.

    A folder without training results may be started again. A folder with a run needs `resume`, and then the settings
    it was started with, except `FREE_KEYS`.

    If the body raises an exception other than RunError before anything is logged or saved, the folder is restored.

    Args:
        settings: the resolved configuration by section: `{"model": {...}, "data": {...}, "train": {...}}`.

    Raises:
        InputError: the folder holds a run or other files, holds no run to resume, belongs to another process, cannot
            be written, or was started with other settings.
    """
    run = RunFolder(Path(folder), settings, resume)
    if resume and not run.config.is_file():
        raise InputError(f"{run.path} must be a run to resume, found no config.yaml; leave --resume out to start one")
    has_run = resume or (run.path / LOCK).exists()  # without a lock, config.yaml may be the user's
    markers = [path.name for path in (run.metrics, run.checkpoints, *([run.config] if has_run else []))]
    new, locked = not run.path.exists(), (run.path / LOCK).exists()
    with hold(run.path, markers=markers, patience=PATIENCE_SECONDS):
        before = {entry.name for entry in run.path.iterdir()}  # read under the lock, so that no other run adds to them
        new = new and before <= {LOCK, LEASE}
        if not locked and is_new(run.path):
            before -= {LOCK, LEASE}
        config = run.config.read_bytes() if run.config.is_file() else None
        progress_before = _progress(run)
        try:
            if resume:
                earlier, now = flatten(read_settings(run.config)), flatten(settings)
                last = progress_before[1][-1] if progress_before[1] else 0
                refuse_changes(earlier, now, run.config, free=FREE_KEYS | more_steps(last, earlier, now))
            elif run.metrics.exists() or progress_before[1]:
                raise InputError(
                    f"{run.path}: this folder holds a run already; continue it with --resume or choose another folder"
                )
            with writable(run.path):
                remove_partials(run.checkpoints)
                write_text(run.config, write_yaml(dict(settings)))
            yield run
        except RunError:
            raise
        except Exception:
            if _progress(run) == progress_before:
                with suppress(OSError):
                    _roll_back(run, None if new else before, config)
            raise


def more_steps(step: int, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the settings that may change when a run that ended at `step` continues: its steps, if they grow."""
    lengths = earlier.get("train.steps"), now.get("train.steps", 0)
    return {"train.steps"} if lengths[0] == step < lengths[1] else set()


def _progress(run: RunFolder) -> tuple[int, list[int]]:
    """Return how far training got: the length of its log, and the steps of its checkpoints."""
    return run.metrics.stat().st_size if run.metrics.is_file() else 0, saved_steps(run.path)


def _roll_back(run: RunFolder, before: Collection[str] | None, config: bytes | None) -> None:
    """Remove all entries except `before`, or the whole folder if it is None, and restore config.yaml."""
    if before is None:
        remove(run.path)
        return
    for entry in run.path.iterdir():
        if entry.name not in before:
            remove(entry)
    if config is not None:
        write_bytes(run.config, config)
