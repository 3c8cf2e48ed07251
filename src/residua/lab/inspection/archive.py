"""Trace files: tensors in safetensors, everything else as JSON in the file's metadata.

metadata: residua_trace   the version of this format, "1"
          facts, tokens   JSON: an object, and the list of the tokens' pieces of text
tensors:  `Trace.values`, by name
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from residua.errors import InputError, first_line, fits, shown, words
from residua.records.reading import parse_json
from residua.records.tensors import read_tensors, write_tensors

VERSION = 1
FACTS = {
    **dict.fromkeys(("preset", "shortcut", "constraint", "run", "read", "date", "residua", "commit"), str | None),
    **dict.fromkeys(("sublayers", "sampled"), list),
    **dict.fromkeys(("sources", "reads"), list | None),
    **dict.fromkeys(("scheme", "gates", "left_out"), dict),
    **dict.fromkeys(("dim", "rows"), int),
    **{"causal": bool, "checkpoint": int | None, "loss": float | None},
}
"""The facts of a trace, by their types; one that is absent is None."""
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
        raise InputError(f"{path}: must be a trace, got no file; residua explore RUN writes one")
    values, metadata = read_tensors(path, "a trace", "make it again")
    version = metadata.get("residua_trace")
    if version is None:
        raise InputError(f"{path}: must be a trace, got other tensors; residua explore RUN writes one")
    if version != str(VERSION):
        raise InputError(
            f"{path}: must be a trace of version {VERSION}, got version {version}; make it again with this "
            "residua, or read it with the one that wrote it"
        )
    with readable(path):
        facts, tokens = (parse_json(metadata[name], f"{path}: {name}") for name in ("facts", "tokens"))
        kinds = [(name, facts.get(name), kind) for name, kind in FACTS.items()]
        for name, value, kind in [*kinds, ("tokens", tokens, list)]:
            if not fits(value, kind):
                raise ValueError(f"{name} must be {words(kind)}, got {shown(value)}")
        if missing := sorted(set(ALWAYS) - values.keys()):
            raise ValueError(f"no values of {', '.join(missing)}")
    return facts, tokens, values


@contextmanager
def readable(source: object) -> Iterator[None]:
    """Read or show the trace `source` in this context.

    Raises:
        InputError: whatever forged or damaged content raises.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{source}: must be a trace, got a damaged one ({first_line(error)}); make it again"
        ) from error


def place(folder: str | Path, step: int | None) -> Path:
    """Return the path of the trace of a step in a run folder, or of the one trace of a folder without checkpoints."""
    return Path(folder) / "analysis" / ("trace.safetensors" if step is None else f"trace-step-{step}.safetensors")


def saved(folder: str | Path) -> list[tuple[int, Path]]:
    """Return step and path of each trace in a run folder, by step."""
    paths = place(folder, None).parent.glob("trace-step-*.safetensors")
    steps = ((path.stem.removeprefix("trace-step-"), path) for path in paths)
    return sorted((int(step), path) for step, path in steps if step.isdecimal())
