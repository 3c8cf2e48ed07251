"""Atomic checkpoints: a folder of safetensors files, and a manifest that lists them.

    manifest.json            step, seconds, validation loss, settings and run; bytes and sha256 of every data file
    model.safetensors        weights and persistent buffers by name; shared tensors only once
    optimizer.safetensors    `optimizer.NAME.KEY` for the optimizer's state of a weight, `random.cpu.RANK` and
                             `random.cuda.RANK` for the random states of torch

Only the first rank writes checkpoints, and any number of ranks can resume from them. Learning rates and other settings
of the optimizer follow from the configuration and the step. Other files in the folder are ignored.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.names import today
from residua.errors import InputError, Natural, check_types, decoded, extra, mapping, require
from residua.files.durable import file_sha256, partial, remove, unfinished
from residua.files.reading import inside, regular
from residua.files.tensors import undamaged
from residua.lab.records.folder import read_object
from residua.lab.records.progress import say
from residua.lab.training.distributed import Ranks

with extra("lab"):
    from safetensors import safe_open
    from safetensors.torch import save_file

MANIFEST = "manifest.json"
WEIGHTS, OPTIMIZER = "model", "optimizer"
EXAMPLES = 5


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, and the content of manifest.json.

    settings: flat, as from `flatten`; val_loss: None if the model was not evaluated at this step; files: size in bytes
    and sha256 of each safetensors file by name; run: the real path of the run that saved it.
    """

    path: Path
    step: Natural
    seconds: float
    settings: Mapping[str, Any]
    val_loss: float | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    run: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        named = _named_step(self.path)
        require(named in (None, self.step), "step", f"{named}, as in the folder's name", self.step)


Tensors = Mapping[str, Mapping[str, Tensor]]
"""The tensors of each file, by `WEIGHTS` and `OPTIMIZER`."""


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, ranks: Ranks) -> Tensors:
    """Return the tensors to save, on the CPU. All ranks must call this; all but the first get empty mappings."""
    random_states = ranks.gather(_random_state(device))
    if not ranks.first:
        return {}
    weights = checkpoint_tensors(model)
    names = {id(tensor): name for name, tensor in weights.items()}
    state = {
        f"optimizer.{names[id(parameter)]}.{key}": value
        for parameter, values_by_key in optimizer.state.items()
        for key, value in values_by_key.items()
    }
    for rank, values_by_kind in enumerate(random_states):
        state |= {f"random.{kind}.{rank}": values for kind, values in values_by_kind.items()}
    parts = {WEIGHTS: weights, OPTIMIZER: state}
    return {kind: {name: x.detach().cpu().contiguous() for name, x in part.items()} for kind, part in parts.items()}


def write_checkpoint(checkpoint: Checkpoint, tensors: Tensors) -> Checkpoint:
    """Write a checkpoint, completely or not at all; return it with `files` filled in. Raises OSError."""
    files = {}
    with unfinished(checkpoint.path) as temporary:
        for kind in (WEIGHTS, OPTIMIZER):
            path = temporary / f"{kind}.safetensors"
            _write_tensors(path, tensors[kind])
            files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        checkpoint = replace(checkpoint, files=files)
        manifest = {name: value for name, value in vars(checkpoint).items() if name != "path"}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return checkpoint


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a new file. Raises SafetensorError if the disk is full or fails."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # safetensors makes files readable only by their owner
    save_file(dict(tensors), path, {"format": "pt"})
    path.chmod(mode)


def drop_old(folder: Path, *, keep: int, keep_best: bool) -> None:
    """Delete all checkpoints except the newest `keep`, and the best if `keep_best`. Raises OSError."""
    paths = [*_saved(folder).values()]
    survivors = {*paths[:keep], _best(paths) if keep_best else None}
    for path in paths:
        if path not in survivors:
            _remove(path)


def drop_later(folder: Path, step: int) -> None:
    """Delete the damaged checkpoints after `step`, at which a run resumes. Raises OSError."""
    for later, path in _saved(folder).items():
        if later > step:
            _remove(path)


def _best(paths: Collection[Path]) -> Path | None:
    """Return the checkpoint with the lowest validation loss (of equal ones the newest), without verifying its files."""
    losses = {}
    for path in paths:
        try:
            losses[path] = _read_manifest(path).val_loss
        except InputError:
            continue
    comparable = {path: loss for path, loss in losses.items() if loss is not None and loss == loss}
    return min(comparable, key=comparable.get, default=None)


def find_checkpoint(folder: Path, which: int | Literal["best"] | None) -> Checkpoint:
    """Open a checkpoint of a run. which: a step, "best" for the lowest validation loss, None for the newest complete.

    Raises InputError if there is no such checkpoint, or it is damaged.
    """
    saved = _saved(folder / "checkpoints")
    if which is None:
        expected, checkpoint = "a checkpoint", latest_checkpoint(folder)
    else:
        expected = "a checkpoint with a validation loss" if which == "best" else f"a checkpoint of step {which}"
        path = _best(saved.values()) if which == "best" else saved.get(which)
        checkpoint = path and open_checkpoint(path)
    if checkpoint is None:
        steps = f"those of steps {', '.join(map(str, sorted(saved)))}" if saved else "none"
        raise InputError(f"{folder} must hold {expected}, found {steps}")
    return checkpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint after checking every file against its manifest.

    Raises:
        InputError: a file is missing, truncated, changed or unreadable; the message names it.
    """
    path = Path(path)
    checkpoint = _read_manifest(path)
    for name, entry in checkpoint.files.items():
        file, expected = inside(path, name), mapping(entry, f"{path / MANIFEST}: {name}")
        try:
            size = regular(file).stat().st_size
            whole = size == expected.get("bytes", size) and file_sha256(file) == expected.get("sha256")
        except OSError as error:
            raise InputError(f"{path}: cannot read {name}: {error.strerror or error}") from error
        if not whole:
            raise InputError(
                f"{path / name} was cut short or changed: its sha256 differs from {MANIFEST}; use another checkpoint"
            )
    listed = [*checkpoint.files]
    for file in path.glob("*.safetensors"):
        require(file.name in listed, f"{path / MANIFEST}: files", f"all data files, {file.name} among them", listed)
    return checkpoint


def _read_manifest(path: Path) -> Checkpoint:
    """Return a checkpoint from its manifest, without checking its files."""
    manifest = path / MANIFEST
    try:
        checkpoint = decoded(read_object(manifest) | {"path": path}, Checkpoint)
        if (connection := "model.connection") in checkpoint.settings:
            named = {connection: today(checkpoint.settings[connection])}
            checkpoint = replace(checkpoint, settings={**checkpoint.settings, **named})
        return checkpoint
    except InputError as error:
        raise InputError(f"{manifest}: {error}") from error


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run folder, or None. The run may still be training.

    Prints one line for each damaged checkpoint that it skips.
    """
    attempts: set[Path] = set()
    while paths := [path for path in _saved(Path(folder) / "checkpoints").values() if path not in attempts]:
        for path in paths:
            attempts.add(path)
            try:
                return open_checkpoint(path)
            except InputError as error:
                if not path.exists():
                    break  # the run deleted it meanwhile, and has saved a newer one
                say(f"skipping a damaged checkpoint: {error}")
    return None


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | None = None,
    rank: int = 0,
) -> None:
    """Load the weights into `model`. If an `optimizer` is given, also restore its state and torch's random state.

    Args:
        checkpoint: from `latest_checkpoint` or `open_checkpoint`.
        device: the device whose random state is restored in addition to the CPU's.
        rank: the rank whose random state is restored.

    Raises:
        InputError: the checkpoint is damaged, or comes from another model.
    """
    tensors = checkpoint_tensors(model)
    with _stored(checkpoint, WEIGHTS) as stored:
        _refuse_other_weights(checkpoint.path, stored, tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(stored.get_tensor(name))
    if optimizer is not None:
        with _stored(checkpoint, OPTIMIZER) as stored:
            _restore_optimizer(stored, tensors, optimizer)
            _restore_random_state(stored, device, rank)


@contextmanager
def _stored(checkpoint: Checkpoint, kind: str) -> Iterator[Any]:
    """Open a file of a checkpoint, memory-mapped. Raises InputError if the file is damaged."""
    path = checkpoint.path / f"{kind}.safetensors"
    with undamaged(checkpoint.path, "a checkpoint"), safe_open(regular(path), "pt") as stored:
        yield stored


STATES = ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})
"""The keys of the state of a weight in AdamW and Muon. `step` is one float32 number; the rest are like the weight."""


def _restore_optimizer(stored: Any, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Read the optimizer's state, on the devices of the weights.

    Raises:
        LookupError, ValueError: a tensor belongs to no weight, or has a shape or dtype that the optimizer does not use.
            A fused optimizer would read as many bytes as the weight has, even beyond the end of a smaller tensor.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for full_name in stored.keys():  # noqa: SIM118, a file is no mapping
        kind, _, name_and_key = full_name.partition(".")
        if kind == "optimizer":
            name, _, key = name_and_key.rpartition(".")
            weight, value = weights[name], stored.get_tensor(full_name)
            like = torch.zeros((), dtype=torch.float32) if key == "step" else weight
            if (value.shape, value.dtype) != (like.shape, like.dtype):
                expected, found = (f"{tuple(x.shape)} of {x.dtype}" for x in (like, value))
                raise ValueError(f"{full_name} must be {expected}, got {found}")
            # In the weight's layout, as the optimizer itself makes it: fused ones read the bytes of both in one order.
            state.setdefault(name, {})[key] = torch.empty_like(like, device=weight.device).copy_(value)
    for name, values in state.items():
        if set(values) not in STATES:
            raise ValueError(f"optimizer.{name} must have {' or '.join(map(str, STATES))}, got {set(values)}")
    optimizer.state.update({weights[name]: values for name, values in state.items()})


def _restore_random_state(stored: Any, device: torch.device | None, rank: int) -> None:
    """Restore the random state of this rank. A rank without a saved state keeps its current one."""
    for kind in ("cpu", "cuda"):
        name = f"random.{kind}.{rank}"
        if name not in stored.keys() or (kind == "cuda" and (device is None or device.type != "cuda")):  # noqa: SIM118
            continue
        state = stored.get_tensor(name)
        try:
            torch.set_rng_state(state) if kind == "cpu" else torch.cuda.set_rng_state(state, device)
        except RuntimeError as error:
            raise ValueError(f"{name} must be a random state of torch, got: {error}") from error


def _refuse_other_weights(source: Path, stored: Any, weights: Mapping[str, Tensor]) -> None:
    """Check the shapes of stored weights against a model's.

    Raises:
        InputError: they differ; the message names the first differences.
    """
    stored_shapes = {name: str(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    model_shapes = {name: str(list(tensor.shape)) for name, tensor in weights.items()}
    differences = [
        f"{name} ({stored_shapes.get(name, 'absent')} in the file, {model_shapes.get(name, 'absent')} in the model)"
        for name in sorted(stored_shapes.keys() | model_shapes.keys())
        if stored_shapes.get(name) != model_shapes.get(name)
    ]
    if differences:
        examples = ", ".join(differences[:EXAMPLES]) + (" and others" if len(differences) > EXAMPLES else "")
        raise InputError(
            f"{source} must hold weights with the names and shapes of this model, got other names or shapes: {examples}"
        )


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; shared tensors only under their first name.

    Tensors named in the model's attribute `kept_elsewhere` are excluded; the code that builds the model loads them.
    """
    first_name: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    excluded: Collection[str] = getattr(model, "kept_elsewhere", ())
    for name, tensor in tensors.items():
        if name not in excluded:
            first_name.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_name.values()}


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def saved_steps(folder: str | Path) -> list[int]:
    """Return the steps of the checkpoints in a run folder, in order, without checking the files."""
    return sorted(_saved(Path(folder) / "checkpoints"))


def runs_of_checkpoints(folder: str | Path) -> set[str | None]:
    """Return the paths of the runs that saved the checkpoints in a run folder, None for an unknown run."""
    runs = set()
    for path in _saved(Path(folder) / "checkpoints").values():
        with suppress(InputError):
            runs.add(_read_manifest(path).run)
    return runs


def _saved(folder: Path) -> dict[int, Path]:
    """Return the folders that are named like checkpoints, by step, newest first."""
    paths = {step: path for path in folder.glob("step-*") if (step := _named_step(path)) is not None}
    return dict(sorted(paths.items(), reverse=True))


def _named_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None if the folder is named otherwise."""
    step = path.name.removeprefix("step-")
    return int(step) if step != path.name and step.isdecimal() else None


def _remove(path: Path) -> None:
    """Delete a checkpoint. A kill can leave a partial folder, but never a checkpoint with missing files."""
    trash = partial(path)
    os.replace(path, trash)
    remove(trash)
