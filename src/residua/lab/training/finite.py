"""Stop a run at the first loss or gradient that is not finite, before the optimizer applies it."""

from pathlib import Path

import torch
from torch import Tensor, nn

from residua.errors import Diverged

MOST_GRADIENTS = 5


class FiniteCheck:
    """Check loss and gradients on the device, so that no step waits for the host.

    Once a step is not finite, the optimizer skips all updates (by `found_inf`, which a GradScaler also sets on a fused
    optimizer), so the weights stay as after the last good step. The numbers of the failed step are kept for the
    `error`. The loss must be the mean over all ranks, so that they all agree.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._failed = torch.zeros((), device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self._norms = torch.zeros(len(self._named), device=device)
        optimizer.found_inf = self._failed

    def observe(self, step: int, loss: Tensor) -> Tensor:
        """Check a step between its backward pass and its update; return the gradient norm, a 0-d tensor."""
        gradients = [parameter.grad for _, parameter in self._named]
        zero = self._loss.new_zeros(())
        norms = torch.stack([zero if gradient is None else gradient.norm() for gradient in gradients])
        norm = norms.norm()
        good = self._failed == 0
        self._step = torch.where(good, step, self._step)
        self._loss = torch.where(good, loss, self._loss)
        self._norms = torch.where(good, norms, self._norms)
        self._failed.logical_or_(~torch.isfinite(loss + norm))
        return norm

    @property
    def failed(self) -> bool:
        """Whether a step was not finite. Waits for the device."""
        return bool(self._failed.item())

    def error(self, last_good: Path | None) -> Diverged:
        """Return the error for the failed step, with its number, its loss and its largest gradient norms.

        last_good: the folder of the newest checkpoint, which the message names.
        """
        norms = self._norms.tolist()
        # NaN first, then infinity, then by size, so that the likeliest causes come first.
        order = sorted(range(len(norms)), key=lambda i: (norms[i] != norms[i], norms[i]), reverse=True)[:MOST_GRADIENTS]
        largest = ", ".join(f"{self._named[i][0]} {norms[i]:.3g}" for i in order)
        return Diverged(
            f"step {self._step.item()}: loss and gradient must be finite, got loss {self._loss.item():.4g}; "
            f"the update was not applied; last good checkpoint: {last_good or 'none'}; "
            f"largest gradient norms: {largest}"
        )
