"""The state of a run that is under way: one safetensors file, so that opening it executes nothing."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from residua.records.reading import parse_json
from residua.records.tensors import read_tensors, undamaged, write_tensors

EXPECTED = "the state of a run", "remove it to begin again"


def save_checkpoint(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Write weights, optimizer state and plain values to `place` in one step. Raises OSError."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
    write_tensors(place, tensors, {"progress": json.dumps(progress)})


def load_checkpoint(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put weights and optimizer state back; return the plain values.

    Raises:
        InputError: the file is damaged, or belongs to another model.
    """
    tensors, metadata = read_tensors(place, *EXPECTED)
    with undamaged(place, *EXPECTED):
        progress = parse_json(metadata["progress"], place)
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                states.setdefault(int(number), {})[key] = value
        try:
            model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
        except RuntimeError as error:
            raise ValueError(f"another model's: {str(error)[:200]}") from error
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        return {name: progress[name] for name in ("step", "curve", "gates", "seconds")}
