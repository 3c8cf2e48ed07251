"""One step of training, for language models, the geometric benchmarks, and measurements of cost."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from residua.lab.training.distributed import ALONE, BatchShard, Ranks, parallelize
from residua.lab.training.finite import FiniteCheck
from residua.lab.training.optimizer import make_optimizer
from residua.models.cache import documents_apart

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


def next_token_loss(
    model: Callable[..., Any], inputs: Tensor, labels: Tensor, *, end_of_text: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the mean loss of a language model and the penalty in this loss (or None), each of shape ().

    end_of_text: the token before each document, if the model must read documents separately; None if it reads rows
        as a whole.
    """
    output = model(input_ids=inputs, labels=labels, shift_labels=labels, **documents_apart(inputs, end_of_text))
    return output.loss, getattr(output, "penalty", None)


class Update(NamedTuple):
    """The result of a step: the mean loss over all ranks and the norm of the gradient, each of shape ().

    penalty: this rank's mean, of shape (), or None if the model has none; first_row: the first row of this rank's
    inputs, of shape (1, ...).
    """

    loss: Tensor
    norm: Tensor
    penalty: Tensor | None
    first_row: Tensor

    def numbers(self, ranks: Ranks, lr: float) -> Mapping[str, float]:
        """Return the numbers of this update for the row of its step. Every rank calls this."""
        loss, penalties = self.loss, {}
        if self.penalty is not None:  # schemes are compared by the language model's loss without the penalty
            penalty = ranks.mean(self.penalty)
            loss, penalties = loss - penalty, {"penalty": penalty.item()}
        return {"loss": loss.item(), "lr": lr, **penalties, "grad_norm": self.norm.item()}


class Step:
    """A step of training: forward and backward over its micro-batches, a check for NaN and infinity, clipping,
    and the update.

    The model is moved to the device and left there in training mode. The optimizer has the peak learning rates. After a
    loss or gradient that is not finite (see `finite`), nothing more is updated.

    Args:
        batch: a function from the index of a micro-batch to the arguments of the loss.
        optimizer: None for the optimizer of `config`.
        loss: `loss(model, *batch)` returns the mean loss of a micro-batch, and the penalty that it includes or None.

    Raises:
        InputError: the ranks cannot share the sequences of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[int], tuple[Tensor, ...]],
        config: "TrainConfig",
        device: torch.device,
        *,
        ranks: Ranks = ALONE,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[..., tuple[Tensor, Tensor | None]] = next_token_loss,
    ):
        self.model, self.device, self.ranks = model, device, ranks
        self._batch, self._loss, self._clip = batch, loss, config.clip
        self._shard = BatchShard.of(config, ranks)
        self._forward = parallelize(model.to(device).train(), config, ranks, device)
        self.optimizer = optimizer or make_optimizer(model, config)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.finite = FiniteCheck(model, self.optimizer, device)
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bfloat16")

    def __call__(self, step: int) -> Update:
        loss, penalty, first_row = self._backward(self._shard.micro_batches(step))
        loss = self.ranks.mean(loss)
        norm = self.finite.observe(step, loss)
        if self._clip:
            nn.utils.clip_grads_with_norm_(self.parameters, self._clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Update(loss, norm, penalty, first_row)

    def loss(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Run the forward pass over a micro-batch on the device; return the loss, and its penalty or None."""
        with self.autocast:
            return self._loss(self._forward, *batch)

    def _backward(self, indices: range) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run forward and backward on these micro-batches; return this rank's loss, penalty and first row."""
        total = torch.zeros((), device=self.device)
        total_penalty = None
        for index in indices:
            batch = self._on_device(*self._batch(index))
            if index == indices[0]:
                first_row = batch[0][:1]
            whole = index == indices[-1] or not isinstance(self._forward, DistributedDataParallel)
            with nullcontext() if whole else self._forward.no_sync():  # the last pass averages over the ranks
                loss, penalty = self.loss(batch)
                part = loss / len(indices)
                part.backward()
            total = total + part.detach()
            if penalty is not None:
                part = penalty.detach() / len(indices)
                total_penalty = part if total_penalty is None else total_penalty + part
        return total, total_penalty, first_row

    def _on_device(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copy tensors to the device. Copies from pinned memory are asynchronous, so the host does not wait."""
        if self.device.type != "cuda":
            return tensors
        return tuple(x if x.is_cuda else x.pin_memory().to(self.device, non_blocking=True) for x in tensors)
