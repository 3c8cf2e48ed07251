"""Claim the folder of a training run for one process, with the settings it was started with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from residua.errors import InputError
from residua.runs.durable import remove_partials, write_text
from residua.runs.folder import RunFolder, flatten, hold, read_settings, refuse_changes, writable
from residua.runs.reading import write_yaml


@contextmanager
def claim(folder: str | Path, settings: Mapping[str, Any], *, resume: bool = False) -> Iterator[RunFolder]:
    """Hold a run folder for this process and write its config.yaml.

    A folder without training results may be started again. A folder with a run needs `resume`, and then the settings
    it was started with, except `FREE_KEYS`.

    Args:
        settings: the resolved configuration by section: `{"model": {...}, "data": {...}, "train": {...}}`.

    Raises:
        InputError: the folder holds a run or other files, holds no run to resume, belongs to another process, cannot
            be written, or was started with other settings.
    """
    run = RunFolder(Path(folder), settings, resume)
    if resume and not run.config.is_file():
        raise InputError(f"{run.path}: expected a run to resume, found no config.yaml; leave --resume out to start one")
    parts = run.metrics, run.checkpoints
    with hold(run.path, own=[path.name for path in (*parts, *([run.config] if resume else []))]):
        if resume:
            refuse_changes(flatten(read_settings(run.config)), flatten(settings), run.config)
        elif any(path.exists() for path in parts):
            raise InputError(
                f"{run.path}: this folder holds a run already; continue it with --resume or choose another folder"
            )
        with writable(run.path):
            remove_partials(run.checkpoints)
            write_text(run.config, write_yaml(dict(settings)))
        yield run
