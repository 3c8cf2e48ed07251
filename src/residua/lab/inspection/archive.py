"""Trace files: tensors in safetensors, everything else as JSON in the file's metadata.

metadata: residua_trace   the version of this format, "1"
          facts, tokens   JSON: an object, and the list of the tokens' pieces of text
tensors:  `Trace.values`, by name
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.errors import InputError, fits, words
from residua.records.reading import parse_json
from residua.records.tensors import read_tensors, undamaged, write_tensors

VERSION = 1
AXES = {
    "T": ("token_ids", "token_loss"),
    "E T": ("state_norm", "stream_similarity"),
    "S T": (
        *("input_norm", "output_norm", "change_norm", "erase_norm", "write_norm", "discrepancy_norm", "row_error"),
        *("column_error", "orthogonality_error", "sources_read"),
    ),
    "S T *": ("readout", "target", "h_pre", "h_post"),
    "S T n n": ("h_res",),
    "S *": ("compress_share",),
    "S P *": ("direction",),
    "S S": ("alignment",),
    "P": ("effective_rank",),
    "S P reads sources": ("depth_weights",),
    "S reads sources": ("depth_mean",),
    "S P": ("determinant", "singular_max", "singular_min", "defect"),
    "P *": ("singular_values",),
}
"""The axes of `Trace.values`, with the letters that stand there; E: S + 1, *: of any size, n: any, twice the same."""
NAMES = ("sublayers", "sources", "reads")
"""Facts that are lists of names."""
FACTS = {
    "preset": str | None,
    "scheme": dict,
    "constraint": str | None,
    "causal": bool,
    "checkpoint": int | None,
    "loss": float | None,
    "dim": int,
    "left_out": dict,
    "sampled": list,
    "shortcut": str | None,
    "rows": int,
}
"""Other facts that every trace has, by their types."""
TEXTS = ("run", "read", "date", "residua", "commit")
"""Facts that are a text, or not known."""
ALWAYS = ("token_ids", "state_norm", "input_norm", "output_norm", "change_norm")
"""Values that every trace has."""


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
        raise InputError(f"{path}: expected a trace, found no file; residua explore RUN writes one")
    values, metadata = read_tensors(path, "a trace", "make it again")
    version = metadata.get("residua_trace")
    if version is None:
        raise InputError(f"{path}: expected a trace, got other tensors; residua explore RUN writes one")
    if version != str(VERSION):
        raise InputError(
            f"{path}: expected a trace of version {VERSION}, got version {version}; make it again with this "
            "residua, or read it with the one that wrote it"
        )
    with undamaged(path, "a trace", "make it again"):
        facts, tokens = (parse_json(metadata[name], f"{path}: {name}") for name in ("facts", "tokens"))
        _check(facts, tokens, values)
        _check_gates(facts["gates"], values, (len(facts["sublayers"]), len(tokens)))
    return facts, tokens, values


def _check(facts: Any, tokens: Any, values: Mapping[str, Tensor]) -> None:
    """Check that the parts belong together; raise ValueError here, as later errors would be less clear."""
    if not isinstance(facts, dict) or not _texts(tokens):
        raise ValueError("facts or tokens are of another kind")
    if wrong := [name for name in NAMES if not _texts(facts.get(name, []))]:
        raise ValueError(f"{wrong[0]} is no list of names")
    for name, kind, value in (
        *((name, kind, facts[name]) for name, kind in FACTS.items()),
        *((name, str | None, facts.get(name)) for name in TEXTS),
        ("scheme", str, facts["preset"] or facts["scheme"]["scheme"]),
    ):
        if not fits(value, kind):
            raise ValueError(f"{name} is no {words(kind)}")
    sublayers, length, sampled = len(facts["sublayers"]), len(tokens), facts["sampled"]
    known = {"S": sublayers, "E": sublayers + 1, "T": length, "P": len(sampled)}
    known |= {"sources": len(facts.get("sources", [])), "reads": max(1, len(facts.get("reads", [])))}  # 1: no name
    for axes, names in AXES.items():
        for name in names:
            if name in values or name in ALWAYS:
                _check_value(name, values[name], axes.split(), known)
    places = [(sampled, length, "sampled"), *((some, sublayers, "left_out") for some in facts["left_out"].values())]
    for some, count, name in places:
        if not isinstance(some, list) or not all(fits(at, int) and 0 <= at < count for at in some):
            raise ValueError(f"{name} is no list of places, from 0 to {count - 1}")


def _check_value(name: str, value: Tensor, axes: Sequence[str], known: Mapping[str, int]) -> None:
    if value.dtype != (torch.int64 if name == "token_ids" else torch.float32):
        raise ValueError(f"{name} has the type {value.dtype}")
    sizes = dict(zip(axes, value.shape)) | known
    expected = tuple(size if axis == "*" else sizes.get(axis) for axis, size in zip(axes, value.shape))
    if len(axes) != value.dim() or expected != tuple(value.shape):
        got, told = (", ".join(map(str, sizes)) for sizes in (value.shape, (known.get(axis, axis) for axis in axes)))
        raise ValueError(f"{name} is ({got}), not ({told})")


def _check_gates(gates: Any, values: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Check the fact "gates" and the gates that it names."""
    if "beta" in values and "beta" not in gates:
        raise ValueError("gates: beta is missing")
    sublayers, length = shape
    for name, known in gates.items():
        _check_value(name, values[name], ("S", "T"), {"S": sublayers, "T": length})
        ends = known["range"]
        good = ends is None or (isinstance(ends, list) and len(ends) == 2 and all(fits(end, float) for end in ends))
        if not good or not fits(known["start"], float | None):
            raise ValueError(f"gates: range and start of {name} are no numbers")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def place(folder: str | Path, step: int | None) -> Path:
    """Return the path of the trace of a step in a run folder, or of the one trace of a folder without checkpoints."""
    return Path(folder) / "analysis" / ("trace.safetensors" if step is None else f"trace-step-{step}.safetensors")


def saved(folder: str | Path) -> list[tuple[int, Path]]:
    """Return step and path of each trace in a run folder, by step."""
    paths = place(folder, None).parent.glob("trace-step-*.safetensors")
    steps = ((path.stem.removeprefix("trace-step-"), path) for path in paths)
    return sorted((int(step), path) for step, path in steps if step.isdecimal())
