"""Checkpoints that are whole or not there: a folder of files, and a manifest that vouches for them.

One process writes model.safetensors and optimizer.pt; several write the files of torch.distributed.checkpoint
(`training.shards`). Any number of processes goes on from either.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.durable import partial, publish, sync
from residua.errors import InputError, extra
from residua.training.distributed import ALONE, Ranks
from residua.training.folder import settings_hash
from residua.training.shards import METADATA, read_shards, refuse_other_weights

with extra("lab"):
    from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"
FILES = (WEIGHTS, OPTIMIZER)
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole. `settings` are flat, as `flatten` makes them; `val_loss` is there if
    the step was one of evaluation.
    """

    path: Path
    step: int
    seconds: float
    settings: Mapping[str, Any]
    val_loss: float | None = None

    @property
    def sharded(self) -> bool:
        """Whether several processes wrote it."""
        return (self.path / METADATA).exists()


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    seconds: float,
    settings: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    val_loss: float | None = None,
) -> Checkpoint:
    """Write `folder/step-N` in one step.

    It holds the weights (shared ones once), the optimizer, the random state of torch on the CPU and on `device`, and
    the settings. A failure or an interruption leaves the older checkpoints as they are and nothing of this one.

    Raises:
        OSError, RuntimeError, safetensors.SafetensorError: the disk is full or cannot be written.
    """
    checkpoint = Checkpoint(folder / f"step-{step}", step, seconds, settings, val_loss)
    with unfinished(checkpoint.path) as temporary:
        temporary.mkdir(parents=True, exist_ok=True)  # a kill may have left one
        tensors = {name: tensor.detach().contiguous() for name, tensor in own_tensors(model).items()}
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        with (temporary / OPTIMIZER).open("wb") as file:  # by name, torch would hide why the system refused a write
            torch.save({"optimizer": optimizer.state_dict(), "rng": _random_state(device)}, file)
        shutil.copymode(temporary / OPTIMIZER, temporary / WEIGHTS)  # safetensors lets the owner alone read its files
        publish_checkpoint(checkpoint, {name: digest(temporary / name) for name in FILES})
    return checkpoint


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """The folder in which the checkpoint `path` is put together; of a failure nothing stays."""
    try:
        yield partial(path)
    except BaseException:
        shutil.rmtree(partial(path), ignore_errors=True)
        raise


def digest(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def publish_checkpoint(checkpoint: Checkpoint, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Vouch for the files, by name, of a finished folder and give it its name. Raises OSError."""
    temporary = partial(checkpoint.path)
    manifest = {
        "step": checkpoint.step,
        "seconds": checkpoint.seconds,
        "val_loss": checkpoint.val_loss,
        "config_hash": settings_hash(checkpoint.settings),
        "settings": dict(checkpoint.settings),
        "files": dict(files),
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*files, MANIFEST):
        sync(temporary / name)
    sync(temporary)
    _remove(checkpoint.path)  # only a damaged one can stand here: the run resumed before it
    publish(checkpoint.path)


def drop_old(folder: Path, step: int, *, keep: int, keep_best: bool, damaged: Collection[int] = ()) -> None:
    """Drop all checkpoints up to `step` but the newest `keep`, and the best where that is wanted. Raises OSError.

    damaged: the steps of those that do not count, and are dropped too.
    """
    there = [path for path in _step_folders(folder) if int(_step(path)) <= step]
    whole = [path for path in there if int(_step(path)) not in damaged]
    kept = {*whole[:keep], _best(whole) if keep_best else None}
    for path in there:
        if path not in kept:
            _remove(path)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of `folder` with the lowest validation loss, the newest of equals; its files are not checked."""
    return _best(_step_folders(folder))


def _best(paths: Sequence[Path]) -> Path | None:
    losses = {}
    for path in paths:
        try:
            loss = json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("val_loss")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(loss, int | float) and loss == loss:
            losses[path] = loss
    return min(losses, key=losses.get, default=None)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest.

    Raises:
        InputError: a file is missing, cut short, changed or cannot be read; it names the file.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        names = "step", "seconds", "settings"
        checkpoint = Checkpoint(path, *(manifest[name] for name in names), manifest.get("val_loss"))
        files = {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
    except FileNotFoundError as error:
        raise InputError(f"{path}: expected a checkpoint, found no {MANIFEST}: its save was cut short") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected a checkpoint, found a {MANIFEST} that cannot be read ({error})") from error
    for name, (size, sha256) in files.items():
        if not (path / name).is_file():
            raise InputError(f"{path}: expected {name}, found no such file")
        try:
            found = (path / name).stat().st_size
            changed = found == size and _sha256(path / name) != sha256
        except OSError as error:
            raise InputError(f"{path}: expected to read {name}, got: {error.strerror or error}") from error
        if found != size:
            raise InputError(f"{path}: expected {size} bytes in {name}, found {found}")
        if changed:
            raise InputError(f"{path}: expected the sha256 of {MANIFEST} for {name}, found another: it was changed")
    return checkpoint


def latest_checkpoint(folder: str | Path, report: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder, or None. The run may be training, and drop and add some meanwhile.

    Args:
        report: takes one line for each damaged checkpoint that was passed over; standard error where None.
    """
    seen: set[Path] = set()
    while path := next((path for path in _step_folders(Path(folder) / "checkpoints") if path not in seen), None):
        seen.add(path)
        try:
            return open_checkpoint(path)
        except InputError as error:
            if path.exists():
                message = f"skipping a damaged checkpoint: {error}"
                report(message) if report else print(message, file=sys.stderr, flush=True)
    return None


def load_checkpoint(
    checkpoint: Checkpoint | str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | None = None,
    ranks: Ranks = ALONE,
) -> Checkpoint:
    """Put the weights into `model`; with an `optimizer`, its state and the random state of torch are restored too.

    Args:
        checkpoint: a folder, which is checked first, or what `latest_checkpoint` or `open_checkpoint` gave.
        device: whose random state is restored beside the CPU's.
        ranks: all of them call this, and each takes what its part of the model needs.

    Raises:
        InputError: the checkpoint is damaged or was not made by such a model.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    own = own_tensors(model)
    if checkpoint.sharded:
        random = read_shards(checkpoint.path, own, optimizer, ranks)
    else:
        tensors = load_file(checkpoint.path / WEIGHTS)
        refuse_other_weights(checkpoint.path, {name: tensor.shape for name, tensor in tensors.items()}, own)
        for name, tensor in own.items():
            tensor.detach().copy_(_as_held(tensors[name], tensor))
        random = {} if optimizer is None else _restore_optimizer(checkpoint.path, optimizer, ranks)
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if device is not None and device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], device)
    return checkpoint


def _restore_optimizer(path: Path, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """Put what one process saved into the optimizer; returns the random state, which is the first rank's."""
    stored = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(stored["optimizer"])
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value.shape == parameter.shape:
                state[key] = _as_held(value, parameter)
    return stored["rng"] if ranks.first else {}


def _as_held(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as this rank holds `like`: as it is, or as a DTensor with the shard of this rank."""
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; one that has several names under its first."""
    first_name: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first_name.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_name.values()}


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


def saved_steps(folder: str | Path) -> list[int]:
    """The steps of which a run folder has checkpoints, in order; their files are not checked."""
    return sorted(int(_step(path)) for path in _step_folders(Path(folder) / "checkpoints"))


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
