"""Claim the folder of a training run for one process, with the settings of its first start."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from residua.errors import InputError, shown
from residua.files.durable import remove, remove_partials, write_text
from residua.files.reading import write_yaml
from residua.lab.records.folder import (
    FREE_KEYS,
    LOCK,
    RunFolder,
    flatten,
    hold,
    read_settings,
    refuse_changes,
    writable,
)
from residua.lab.training.checkpoint import runs_of_checkpoints, saved_steps

PATIENCE_SECONDS = 3.0  # workers of a killed sweep keep the locks of their runs for a moment


@contextmanager
def claim(folder: str | Path, settings: Mapping[str, Any], *, resume: bool = False) -> Iterator[RunFolder]:
    """Lock a run folder for this process and write its config.yaml.

    A folder without training results may be used again. A folder with a run needs `resume`, and the settings of its
    first start, except for `FREE_KEYS`.

    If the `with` block raises InputError before anything is logged or saved, a newly made folder is removed.

    Args:
        settings: the resolved configuration by section: `{"model": {...}, "data": {...}, "train": {...}}`.

    Raises:
        InputError: the folder contains a run or other files, contains no run to resume, is held by another process,
            cannot be written, or was started with other settings.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{shown(str(folder))} must be a name in UTF-8, since safetensors opens no other") from error
    run = RunFolder(Path(folder), settings, resume)
    if resume and not run.config.is_file():
        raise InputError(f"{run.path} must be a run to resume, found no config.yaml; leave --resume out to start one")
    if not resume and run.config.exists() and not (run.path / LOCK).exists():  # a copy without hidden files
        _expect_no_run(run)
    new = not run.path.exists()
    with hold(run.path, markers=_markers(run), patience=PATIENCE_SECONDS):
        steps = saved_steps(run.path)
        if steps:
            _expect_own_checkpoints(run)
        if resume:
            earlier, now = flatten(read_settings(run.config)), flatten(settings)
            refuse_changes(earlier, now, run.config, free=FREE_KEYS | more_steps(max(steps, default=0), earlier, now))
        else:
            _expect_no_run(run)
        with writable(run.path):
            if steps or not run.checkpoints.is_symlink():
                remove_partials(run.checkpoints)
            if not resume:  # `RunState.restore` checks and writes the settings of a resumed run
                write_text(run.config, write_yaml(dict(settings)))
        try:
            yield run
        except InputError:
            if new and not run.metrics.exists() and not saved_steps(run.path):
                with suppress(OSError):
                    remove(run.path)
            raise


def _markers(run: RunFolder) -> list[str]:
    """Return the names of which one shows that a folder with files is one for runs, and not another folder of the user.

    Without a lock, any of its files may be the user's, but for a link to another disk that is alone there.
    """
    if run.resume or (run.path / LOCK).exists():
        return [run.metrics.name, run.config.name]
    names = [path.name for path in run.path.glob("*") if not path.name.startswith(".")]
    linked = run.checkpoints.is_symlink() and names == [run.checkpoints.name]
    return [LOCK, *names * linked]


def _expect_no_run(run: RunFolder) -> None:
    if saved_steps(run.path) or (run.metrics.exists() and run.metrics.stat().st_size):
        raise InputError(
            f"{run.path}: this folder holds a run already; continue it with --resume or choose another folder"
        )


def _expect_own_checkpoints(run: RunFolder) -> None:
    """Check that a link in place of the folder of checkpoints leads to checkpoints of this run.

    The run will delete old checkpoints there, and somebody else may have made the link.

    Raises:
        InputError: no checkpoint in the target names this run.
    """
    if run.checkpoints.is_symlink() and str(run.path.resolve()) not in runs_of_checkpoints(run.path):
        raise InputError(
            f"{run.checkpoints} must be checkpoints of this run, got a link to {run.checkpoints.resolve()}, where no "
            f"manifest.json names the run {run.path.resolve()}; if those checkpoints belong to this run, put their "
            "folder in place of the link"
        )


def more_steps(step: int, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the further settings that may change when a run at `step` resumes: `train.steps`, from `step` to more."""
    lengths = earlier.get("train.steps"), now.get("train.steps", 0)
    return {"train.steps"} if lengths[0] == step < lengths[1] else set()
