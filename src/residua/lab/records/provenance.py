"""Record which code produced a number, on which machine, and when."""

import functools
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def circumstances(device: torch.device) -> dict[str, Any]:
    """Return commit, versions, hardware, threads, load and date of this process, as plain values.

    `load` is the average number of busy processes in the last minute, including this one, or None if unknown.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "residua": version("residua"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def version(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def repository() -> str | None:
    """Return the address of residua's repository from the metadata of the installed package; None if it has none."""
    try:
        addresses = metadata.metadata("residua").get_all("Project-URL", [])
    except metadata.PackageNotFoundError:
        return None
    return dict(address.split(", ", 1) for address in addresses).get("Repository")


@functools.cache  # the loaded code stays the same, even if files change
def _commit() -> str | None:
    """Return the commit of the checkout with this file, with "-dirty" if files differ; None if there is no checkout."""
    source = Path(__file__)
    if not _git(source.parent, "ls-files", "--error-unmatch", source.name):
        return None
    return _git(source.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


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
