"""What a result needs beside its numbers to be believed: which code ran, on what, and when."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from residua.errors import InputError, RunError


def circumstances(device: torch.device) -> dict[str, Any]:
    """Commit, versions, hardware, threads, load and date of this process, as plain values.

    `load` is the average number of busy processes in the last minute, this one included, or None where it is unknown.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "residua": _version("residua"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def open_records(path: str | Path) -> None:
    """Make sure, before hours are spent on results, that they can be appended to `path`.

    Raises:
        InputError: it cannot be written.
    """
    try:
        Path(path).open("a", encoding="utf-8").close()
    except OSError as error:
        raise InputError(f"{path}: expected a file to append to, got: {error.strerror or error}") from error


def append_records(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append every record to `path` as one line of JSON.

    Raises:
        RunError: it cannot be written.
    """
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise RunError(f"{path}: the results could not be written: {error.strerror or error}") from error


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that holds this file, with "-dirty" if files differ from it; None outside of one."""
    here = Path(__file__)
    if not _git(here.parent, "ls-files", "--error-unmatch", here.name):
        return None
    return _git(here.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
