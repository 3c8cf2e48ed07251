"""The state of a run that is under way: one safetensors file, so that opening it executes nothing."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from residua.errors import InputError, extra
from residua.runs.durable import replacing
from residua.runs.reading import parse_json

with extra("lab"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save


def save_progress(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Write weights, optimizer state and plain values to `place` in one step. Raises OSError."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
    content = save({name: value.contiguous() for name, value in tensors.items()}, {"progress": json.dumps(progress)})
    with replacing(place) as file:
        file.write(content)


def load_progress(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put weights and optimizer state back; return the plain values.

    Raises:
        InputError: the file is damaged, or belongs to another model.
    """
    try:
        with safe_open(place, framework="pt") as file:
            progress = parse_json(file.metadata()["progress"], place)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                states.setdefault(int(number), {})[key] = value
        model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        return {name: progress[name] for name in ("step", "curve", "gates", "seconds")}
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{place}: expected the state of a run, got: {reason}; remove it to begin again") from error
