"""Run a model without training it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode without gradients in the `with` block; then restore all modes and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices} or {"cuda"}
    with torch.no_grad(), torch.random.fork_rng([device.index or 0 for device in devices], device_type=kinds.pop()):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
