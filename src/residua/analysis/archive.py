"""Trace files: tensors in safetensors, everything else as JSON in the file's metadata.

metadata: residua_trace   the version of this format, "1"
          facts, tokens   JSON: an object, and the list of the tokens' pieces of text
tensors:  `Trace.values`, by name
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from residua.errors import InputError
from residua.runs.reading import parse_json
from residua.runs.tensors import read_tensors, undamaged, write_tensors

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
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: expected a trace, found no file; residua analyze RUN writes one")
    values, metadata = read_tensors(path, "a trace", "make it again")
    version = metadata.get("residua_trace")
    if version is None:
        raise InputError(f"{path}: expected a trace, got other tensors; residua analyze RUN writes one")
    if version != str(VERSION):
        raise InputError(
            f"{path}: expected a trace of version {VERSION}, got version {version}; make it again with this "
            "residua, or read it with the one that wrote it"
        )
    with undamaged(path, "a trace", "make it again"):
        facts, tokens = (parse_json(metadata[name], f"{path}: {name}") for name in ("facts", "tokens"))
        _check(facts, tokens, values)
        facts = facts if "gates" in facts else {**facts, "gates": _older_gates(facts, values)}
    return facts, tokens, values


def _older_gates(facts: Mapping[str, Any], values: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the fact "gates" of a file from before it was written: the gates that schemes had then."""
    ranges = {"beta": facts.get("beta_range", [0.0, 2.0]), "gamma": [0.0, 1.0]}
    scheme = facts.get("scheme") or {}
    return {
        name: {"range": ranges.get(name), "start": scheme.get(f"{name}_init") if name in ranges else None}
        for name in sorted(values)
        if re.fullmatch(r"beta|gamma|angle|cayley_beta|gate(_\d+)?", name)
    }


def _check(facts: Any, tokens: Any, values: Mapping[str, Tensor]) -> None:
    """Check that the parts belong together; raise ValueError here, as later errors would be less clear."""
    if not isinstance(facts, dict) or not isinstance(tokens, list) or not all(isinstance(text, str) for text in tokens):
        raise ValueError("facts or tokens are of another kind")
    sublayers, sampled, length = len(facts["sublayers"]), len(facts["sampled"]), len(tokens)
    depth = {"state_norm": (sublayers + 1, length), "input_norm": (sublayers, length), "token_ids": (length,)}
    for name, shape in depth.items():
        if values[name].shape != shape:
            raise ValueError(f"{name} is {tuple(values[name].shape)}, not {shape}")
    if "direction" in values and values["direction"].shape[:2] != (sublayers, sampled):
        raise ValueError("direction does not have a row for every sampled token")


def place(folder: str | Path, step: int | None) -> Path:
    """Return the path of the trace of a step in a run folder, or of the one trace of a folder without checkpoints."""
    return Path(folder) / "analysis" / ("trace.safetensors" if step is None else f"trace-step-{step}.safetensors")


def saved(folder: str | Path) -> list[tuple[int, Path]]:
    """Return step and path of each trace in a run folder, by step."""
    paths = place(folder, None).parent.glob("trace-step-*.safetensors")
    steps = ((path.stem.removeprefix("trace-step-"), path) for path in paths)
    return sorted((int(step), path) for step, path in steps if step.isdecimal())
