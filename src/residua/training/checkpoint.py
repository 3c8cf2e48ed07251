"""Checkpoints that are whole or not there: model.safetensors, optimizer.pt, and a manifest that vouches for both."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.errors import InputError, extra
from residua.training.durable import partial, publish, sync
from residua.training.folder import settings_hash

with extra("train"):
    from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"
FILES = (WEIGHTS, OPTIMIZER)
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole. `settings` are flat, as `flatten` makes them."""

    path: Path
    step: int
    seconds: float
    settings: Mapping[str, Any]


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    seconds: float,
    settings: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    keep: int,
) -> Checkpoint:
    """Write `folder/step-N` in one step, then drop all but the newest `keep`.

    It holds the weights (shared ones once), the optimizer, the random state of torch on the CPU and on `device`, and
    the settings. A failure or an interruption leaves the older checkpoints as they are and nothing of this one.

    Raises:
        OSError, RuntimeError, safetensors.SafetensorError: the disk is full or cannot be written.
    """
    path = folder / f"step-{step}"
    temporary = partial(path)
    try:
        temporary.mkdir(parents=True)
        tensors = {name: tensor.detach().contiguous() for name, tensor in _own_tensors(model).items()}
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        with (temporary / OPTIMIZER).open("wb") as file:  # by name, torch would hide why the system refused a write
            torch.save({"optimizer": optimizer.state_dict(), "rng": _random_state(device)}, file)
        shutil.copymode(temporary / OPTIMIZER, temporary / WEIGHTS)  # safetensors lets the owner alone read its files
        manifest = {
            "step": step,
            "seconds": seconds,
            "config_hash": settings_hash(settings),
            "settings": dict(settings),
            "files": {
                name: {"bytes": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)}
                for name in FILES
            },
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for name in (*FILES, MANIFEST):
            sync(temporary / name)
        sync(temporary)
        _remove(path)  # only a damaged one can stand here: the run resumed before it
        publish(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in [other for other in _step_folders(folder) if int(_step(other)) <= step][keep:]:
        _remove(old)
    return Checkpoint(path, step, seconds, settings)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest.

    Raises:
        InputError: a file is missing, cut short or changed; it names the file.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        checkpoint = Checkpoint(path, manifest["step"], manifest["seconds"], manifest["settings"])
        files = {name: (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]) for name in FILES}
    except FileNotFoundError as error:
        raise InputError(f"{path}: expected a checkpoint, found no {MANIFEST}: its save was cut short") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected a checkpoint, found a {MANIFEST} that cannot be read ({error})") from error
    for name, (size, sha256) in files.items():
        if not (path / name).is_file():
            raise InputError(f"{path}: expected {name}, found no such file")
        found = (path / name).stat().st_size
        if found != size:
            raise InputError(f"{path}: expected {size} bytes in {name}, found {found}")
        if _sha256(path / name) != sha256:
            raise InputError(f"{path}: expected the sha256 of {MANIFEST} for {name}, found another: it was changed")
    return checkpoint


def latest_checkpoint(folder: str | Path, report: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder, or None.

    Args:
        report: takes one line for each damaged checkpoint that was passed over; standard error where None.
    """
    for path in _step_folders(Path(folder) / "checkpoints"):
        try:
            return open_checkpoint(path)
        except InputError as error:
            message = f"skipping a damaged checkpoint: {error}"
            report(message) if report else print(message, file=sys.stderr, flush=True)
    return None


def load_checkpoint(
    checkpoint: Checkpoint | str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | None = None,
) -> Checkpoint:
    """Put the weights into `model`; with an `optimizer`, its state and the random state of torch are restored too.

    Args:
        checkpoint: a folder, which is checked first, or what `latest_checkpoint` or `open_checkpoint` gave.
        device: whose random state is restored beside the CPU's.

    Raises:
        InputError: the checkpoint is damaged or was not made by such a model.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    tensors = load_file(checkpoint.path / WEIGHTS)
    own = _own_tensors(model)
    differences = [
        f"{name} ({_shape(tensors.get(name))} in the file, {_shape(own.get(name))} in the model)"
        for name in sorted(tensors.keys() | own.keys())
        if _shape(tensors.get(name)) != _shape(own.get(name))
    ]
    if differences:
        shown = ", ".join(differences[:5]) + (" and others" if len(differences) > 5 else "")
        raise InputError(f"{checkpoint.path}: expected the weights of this model, which differ in {shown}")
    model.load_state_dict(tensors, strict=False)  # not strict: the second names of shared weights are not in the file
    if optimizer is not None:
        state = torch.load(checkpoint.path / OPTIMIZER, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["cpu"])
        if device is not None and device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"], device)
    return checkpoint


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; one that has several names under its first."""
    first_name: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first_name.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_name.values()}


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _step(path: Path) -> str:
    return path.name.removeprefix("step-")


def _step_folders(folder: Path) -> list[Path]:
    """The folders named as checkpoints, the newest first."""
    paths = (path for path in folder.glob("step-*") if _step(path).isdecimal())
    return sorted(paths, key=lambda path: int(_step(path)), reverse=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint; a kill on the way leaves a stale partial folder, never a checkpoint with files missing."""
    if path.exists():
        doomed = partial(path.with_name(f"{path.name}.old"))
        os.replace(path, doomed)
        shutil.rmtree(doomed)
