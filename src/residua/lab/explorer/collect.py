"""Collect traces of runs, trace files and models, and turn them into the explorer's data: a JSON payload, and arrays.

The page must be small enough for email, so all arrays must fit into the part of `PAGE_BYTES` that the library and the
payload leave: as float32 if they all fit, otherwise as float16, except beta. Arrays that still do not fit are kept only
at the sampled tokens; the page says so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import torch

from residua.errors import InputError, extra
from residua.files.tensors import undamaged
from residua.lab.experiment import is_model_folder, open_model, trace_model
from residua.lab.explorer.comparison import comparison_payload, thinned
from residua.lab.inspection.summary import checks, overview, sublayer_statistics, summary, warnings
from residua.lab.inspection.trace import Trace, trace_file
from residua.lab.records import jsonlines
from residua.lab.records.progress import say
from residua.lab.records.terminal import one_line
from residua.lab.training import latest_checkpoint

with extra("lab"):
    import numpy as np

MOST_RUNS = 12
PAGE_BYTES = 5_700_000
LIBRARY_BYTES = 2_150_000
"""The size of the page without data, in bytes: plotly, and our modules and styles."""
BASE64 = 4 / 3
GATE_POINTS = 100
"""The largest number of points in a curve of a gate over training; a screen shows no more."""

OF_TOKENS = (
    *("mixing", "change", "state_norm", "erase_norm", "write_norm", "output_norm"),
    *("sources_read", "stream_similarity", "lens_loss"),
    *("change_norm", "discrepancy_norm", "row_error", "column_error", "orthogonality_error"),
    *("h_pre", "h_post", "h_res"),
)
"""Values with axes for sublayers and tokens, the most important first; gates come before all of them."""
SMALL = (
    *("token_loss", "alignment", "effective_rank", "depth_mean"),
    *("determinant", "singular_max", "singular_min", "defect", "singular_values"),
)
AT_SAMPLES = "depth_weights"
"""A value at the sampled tokens, which is left out if it takes more than a quarter of the available bytes."""
DRAWN = ("mean", "q05", "q50", "q95")


@dataclass(frozen=True)
class Reading:
    """The options for new traces. If any is given, a run that already has a trace is traced again.

    prompt: the text to read; None for the beginning of the validation data. tokens: the largest number of tokens. step,
    data: the arguments `checkpoint` and `data` of `open_run`.
    """

    prompt: str | None = None
    tokens: int | None = None
    step: int | Literal["best"] | None = None
    data: str | None = None

    @property
    def again(self) -> bool:
        return self != Reading()


@dataclass(frozen=True)
class Source:
    """A trace, with its name on the page, the path that the user gave, and its file if it has one."""

    name: str
    trace: Trace
    path: Path | None = None
    file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the facts of the trace, its warnings, and the numbers of every sublayer, as plain values."""
        statistics = {"warnings": warnings(self.trace), "sublayers": sublayer_statistics(self.trace)}
        return {"trace": self.file and str(self.file), **self.trace.facts, **statistics}

    def parts(self) -> Iterator[Any]:
        """Yield texts and a table about the trace, for a terminal."""
        first, *lines = overview(self.trace)
        yield fill(one_line(first), 79)
        yield summary(self.trace)
        yield from (fill(one_line(line), 79) for line in lines)
        yield from (f"warning: {one_line(warning)}" for warning in warnings(self.trace))
        if self.file is not None:
            yield f"trace: {self.file}"


def collect(paths: Sequence[str | Path], reading: Reading = Reading()) -> tuple[list[Source], dict[str, Any] | None]:
    """Return the traces of run folders, trace files and model folders, and the comparison of the runs, or None.

    A run is traced if it has no trace of its newest checkpoint, or if `reading` has any option. A new trace is saved in
    the run unless `reading` has a prompt, tokens or data. Two or more runs are compared.

    Raises:
        InputError: a path is not a run folder, a model or a trace; a trace has another version; a model is given
            without a prompt; or there are too many paths.
    """
    paths = list({Path(path).resolve(): Path(path) for path in paths}.values())
    if len(paths) > MOST_RUNS:
        raise InputError(f"one page takes at most {MOST_RUNS} runs and traces, got {len(paths)}")
    files = [_kept_trace(path, reading) for path in paths]
    runs = [path for path in paths if not (path.is_file() or is_model_folder(path))]
    # Read everything first, so that a mistake in the last path is found before the slow part.
    comparison = comparison_payload(runs) if len(runs) > 1 else None
    kept = [file and _loaded(path, file) for path, file in zip(paths, files)]
    return [source or _measured(path, reading) for path, source in zip(paths, kept)], comparison


def page_of(
    sources: Sequence[Source], comparison: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the payload and the arrays of a page for these traces and this comparison."""
    names = _numbered([source.name for source in sources])
    described: list[dict[str, Any]] = [
        {
            "name": name,
            "facts": source.trace.facts,
            "tokens": source.trace.tokens,
            "warnings": warnings(source.trace),
            "checked": [check.holds for check in checks(source.trace)],
            "arrays": {},
        }
        for name, source in zip(names, sources)
    ]
    shown = list(dict.fromkeys(source.name for source in sources))
    title = ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "") or "residua"
    payload = {"title": title, "traces": described, "comparison": comparison}
    room = (PAGE_BYTES - LIBRARY_BYTES - len(json.dumps(payload))) / BASE64
    arrays: dict[str, np.ndarray] = {}
    for number, source in enumerate(sources):
        over_training = _over_training(source)
        share = room / len(sources) - sum(values.nbytes for values in over_training.values())
        parts = {**_fitted(source.trace, share), **_whole(over_training)}
        for name, (values, tokens) in parts.items():
            key = f"{number}.{name}"
            arrays[key] = values
            described[number]["arrays"][name] = {"key": key, "shape": list(values.shape), "tokens": tokens}
    return payload, arrays


def _kept_trace(path: Path, reading: Reading) -> Path | None:
    """Return the trace file of a path; None if a new trace is needed. Raises InputError if none can be made."""
    if path.is_file():
        if reading.again:
            raise InputError(f"{path} must be a run or a model to make a new trace, got the file of a trace")
        return path
    if is_model_folder(path):
        if reading.prompt is None:
            raise InputError(f"{path}: this model has no validation text of its own; give --prompt TEXT")
        return None
    newest = None if reading.again else latest_checkpoint(path)
    kept = newest and trace_file(path, newest.step)
    return kept if kept and kept.is_file() else None


def _loaded(path: Path, file: Path) -> Source | None:
    """Return the source of a trace file; None, after a line that says so, if that of a run must be made again."""
    try:
        trace = Trace.load(file)
        source = Source(_name(path, trace), trace, path, file)
        with undamaged(file, "a trace", "residua explore RUN writes one"):  # values or facts may lack others
            json.dumps([source.to_json(), *source.parts()], allow_nan=False)
        return source
    except InputError as error:
        if path == file:  # which the user named
            raise
        say(f"explore: makes the trace again: {one_line(str(error))}")
        return None


def _measured(folder: Path, reading: Reading) -> Source:
    """Return a new trace of a run or a model. Only the trace of a run on its own text is saved, in its folder."""
    opened = open_model(folder, reading.step, data=reading.data)
    if not reading.again:
        say(f"{folder}: measuring its connections on held-out text")
    trace = trace_model(opened, reading.prompt, tokens=reading.tokens)
    keeps = not is_model_folder(folder) and reading == Reading(step=reading.step)
    return Source(_name(folder, trace), trace, folder, trace.keep(folder) if keeps else None)


def _name(path: Path, trace: Trace) -> str:
    """Return the name of a folder; for a trace file, the run and the step if the trace has them."""
    run, step = trace.facts["run"], trace.facts["checkpoint"]
    if run is None or path.is_dir():
        return path.resolve().name.removesuffix(".safetensors")
    return run if step is None else f"{run}, step {step}"


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names, with numbers appended to duplicates."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(f"{name} ({counts[name]})" if names.count(name) > 1 else name)
    return result


def _fitted(trace: Trace, room: float) -> dict[str, tuple[np.ndarray, list[int] | None]]:
    """Return the arrays of a trace within `room` bytes, each with the tokens that it covers (None for all)."""
    values = _derived(trace)
    small = {name: values[name].float().numpy() for name in SMALL if name in values}
    large = {name: values[name].float().numpy() for name in (*trace.facts["gates"], *OF_TOKENS) if name in values}
    arrays = _whole(small)
    room -= sum(array.nbytes for array in small.values())
    if AT_SAMPLES in values:
        weights = values[AT_SAMPLES].float().numpy()
        weights = weights if weights.nbytes <= room / 4 else weights.astype(np.float16)
        if weights.nbytes <= room / 4:
            arrays |= _whole({AT_SAMPLES: weights})
            room -= weights.nbytes
    if sum(array.nbytes for array in large.values()) > room:
        large = {name: array if name == "beta" else _halved(array) for name, array in large.items()}
    sampled = list(trace.facts["sampled"])
    for name, array in large.items():
        whole = array.nbytes <= room
        arrays[name] = (array, None) if whole else (array[:, sampled], sampled)
        room -= arrays[name][0].nbytes
    return arrays


def _whole(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, None]]:
    return {name: (array, None) for name, array in arrays.items()}


def _derived(trace: Trace) -> dict[str, torch.Tensor]:
    """Return the values of a trace, with the distance of each mixing matrix from the identity and relative changes."""
    values = dict(trace.values)
    if "h_res" in values:
        mix = values["h_res"].float()
        values["mixing"] = torch.linalg.matrix_norm(mix - torch.eye(mix.shape[-1]))
    if "change_norm" in values and "state_norm" in values:
        values["change"] = values["change_norm"] / values["state_norm"][:-1]
    return values


def _halved(array: np.ndarray) -> np.ndarray:
    """Return the array as float16 if that keeps three digits, otherwise unchanged."""
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    fits = sizes.size == 0 or (sizes.max() < 6e4 and sizes.min() > 1e-4)
    return array.astype(np.float16) if fits else array


def _over_training(source: Source) -> dict[str, np.ndarray]:
    """Return the gates over training, if they were logged: `training.beta.steps` (N), `training.beta.mean` (N, S), ...

    There are N logged steps and S sublayers.
    """
    folder = source.path
    if folder is None or not folder.is_dir():
        return {}
    path = folder / "connections.jsonl"
    with undamaged(path, "the gates of a run over its steps", "explore only its trace file"):
        return _gates_over_training(jsonlines.read(path), source.trace.facts["gates"])


def _gates_over_training(rows: list[dict[str, Any]], gates: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if len(rows) < 2:
        return {}
    rows = thinned(rows, GATE_POINTS)
    arrays: dict[str, np.ndarray] = {}
    for gate in gates:
        arrays[f"training.{gate}.steps"] = np.array([row["step"] for row in rows], dtype=np.float32)
        for quantile in DRAWN:
            numbers = [[np.nan if x is None else x for x in row[gate][quantile]] for row in rows]
            arrays[f"training.{gate}.{quantile}"] = np.array(numbers, dtype=np.float32)
    return arrays
