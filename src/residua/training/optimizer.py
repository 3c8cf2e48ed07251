"""AdamW with decay on matrices only, and a cosine learning rate with warmup."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from residua.training.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups for an optimizer: with weight decay and without; tied ones once.

    Decay pulls the weights of `nn.Linear` and `nn.Embedding` to zero. Gains, biases, taps of convolutions and read
    vectors, whatever their shape, have no reason to be small and get none.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if id(parameter) in matrices]
    others = [parameter for parameter in trainable if id(parameter) not in matrices]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, config: "TrainConfig") -> torch.optim.AdamW:
    """The optimizer of a run. Each group keeps the peak of its learning rate as `initial_lr`."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def learning_rate_factor(step: int, config: "TrainConfig") -> float:
    """The learning rate of step 1, 2, ..., `config.steps` as a share of the peak.

    It rises linearly to 1 at `warmup_steps`, then falls as a cosine to `min_lr_ratio` at the last step.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to this share of its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
