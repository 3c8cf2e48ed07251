"""Trace files: tensors in safetensors, everything else as JSON in the file's metadata.

metadata: residua_trace   the version of this format, "1"
          facts, tokens   JSON: an object, and the list of the tokens' pieces of text
tensors:  `Trace.values`, by name
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from residua.errors import InputError
from residua.records.tensors import read_tensors, write_tensors

VERSION = 1


def write(path: str | Path, facts: Mapping[str, Any], tokens: Sequence[str], values: Mapping[str, Tensor]) -> Path:
    """Write a trace in one step; an older file of this name is replaced. Raises OSError."""
    path = Path(path)
    metadata = {
        "residua_trace": str(VERSION),
        "facts": json.dumps(dict(facts), allow_nan=False),
        "tokens": json.dumps(list(tokens)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, values, metadata)
    return path


def read(path: str | Path) -> tuple[dict[str, Any], list[str], dict[str, Tensor]]:
    """Return the facts, tokens and values of a trace.

    Raises:
        InputError: the file is missing, damaged, of another version, or not a trace.
    """
    values, metadata = read_tensors(path, "a trace", "residua explore RUN writes one")
    version = metadata.get("residua_trace")
    if version != str(VERSION):
        other = "other tensors" if version is None else f"version {version}"
        raise InputError(f"{path} must be a trace of version {VERSION}, got {other}; residua explore RUN writes one")
    return json.loads(metadata["facts"]), json.loads(metadata["tokens"]), values


def place(folder: str | Path, step: int | None) -> Path:
    """Return the path of the trace of a step in a run folder, or of the one trace of a folder without checkpoints."""
    return Path(folder) / "analysis" / ("trace.safetensors" if step is None else f"trace-step-{step}.safetensors")
