"""Stops a run at the first loss or gradient that is not finite, before the optimizer applies it."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from residua.errors import Diverged

SHOWN = 5


class FiniteCheck:
    """Watches loss and gradients on the device, so that a step waits for nothing.

    From the first step that is not finite on, the optimizer skips its updates (`found_inf`, by which a GradScaler
    tells a fused optimizer the same) and the check keeps that step's numbers, until `check` reads them. However long
    that takes, the weights stay those of the last good step. Where ranks hold shards of the gradients, `total` sums a
    tensor over them; the loss must be that of all ranks, so that they all agree.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        total: Callable[[Tensor], Tensor] | None = None,
    ):
        self._total = total
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._failed = torch.zeros((), device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self._norms = torch.zeros(len(self._named), device=device)
        optimizer.found_inf = self._failed

    def observe(self, step: int, loss: Tensor) -> Tensor:
        """Take note of a step between its backward and its update; returns the gradient norm, a 0-d tensor."""
        gradients = [parameter.grad for _, parameter in self._named]
        zero = self._loss.new_zeros(())
        norms = torch.stack([zero if gradient is None else _local(gradient).norm() for gradient in gradients])
        if self._total is not None:
            norms = self._total(norms.square()).sqrt()
        norm = norms.norm()
        good = self._failed == 0
        self._step = torch.where(good, step, self._step)
        self._loss = torch.where(good, loss, self._loss)
        self._norms = torch.where(good, norms, self._norms)
        self._failed.logical_or_(~torch.isfinite(loss + norm))
        return norm

    def check(self, last_good: Callable[[], Path | None]) -> None:
        """Wait for the device and raise Diverged if a step failed: its number, loss and largest gradient norms, and
        the checkpoint that `last_good` finds.
        """
        if not self._failed.item():
            return
        norms = self._norms.tolist()
        # NaN first, then infinity, then by size: the first ones are where to look.
        order = sorted(range(len(norms)), key=lambda i: (norms[i] != norms[i], norms[i]), reverse=True)[:SHOWN]
        largest = ", ".join(f"{self._named[i][0]} {norms[i]:.3g}" for i in order)
        raise Diverged(
            f"step {self._step.item()}: expected a finite loss and gradient, got loss {self._loss.item():.4g}; "
            f"the update was not applied; last good checkpoint: {last_good() or 'none'}; "
            f"largest gradient norms: {largest}"
        )


def _local(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient: all of it, or the shard of a DTensor."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
