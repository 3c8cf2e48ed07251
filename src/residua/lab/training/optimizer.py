"""AdamW, or Muon with AdamW; weight decay only on matrices, muP's learning rates, a cosine schedule with warmup."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from residua.connections import Stream
from residua.connections.parts.projection import LINEAR_MAPS
from residua.conversion.flow import LayerStream
from residua.errors import extra, require
from residua.models.mup import learning_rate_factors
from residua.models.transformer import ResiduaForCausalLM

with extra("lab"):
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float, connection_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups, tied ones once; each group has `weight_decay` and `factor`.

    All weights of linear maps and embeddings are decayed, even those of maps around a sublayer that start as the
    identity, as in the code of arXiv 2605.06729. Gains, biases, taps of convolutions and read vectors of any shape need
    not be small and are not decayed. `factor` multiplies the learning rate. It combines muP's factor (`models.mup`)
    and, for the connections' own parameters, `connection_lr_factor`.

    A step of AdamW shrinks a weight by learning rate times decay. Under muP the decay is divided by muP's factor, so
    that this product is the same at every width, as in the package mup (MuAdamW).
    """
    matrices = {id(parameter) for module in model.modules() for parameter in _matrices(module)}
    by_width: dict[int, float] = {}
    for inner in model.modules():  # `model` may be a wrapper
        if isinstance(inner, ResiduaForCausalLM):
            parameters = dict(inner.named_parameters())
            by_width |= {id(parameters[name]): factor for name, factor in learning_rate_factors(inner).items()}
    own = {id(parameter) for parameter in connection_parameters(model)}
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decayed, width_factor = id(parameter) in matrices, by_width.get(id(parameter), 1.0)
            factor = width_factor * (connection_lr_factor if id(parameter) in own else 1.0)
            kind = decayed, factor, weight_decay / width_factor if decayed else 0.0
            groups.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "factor": factor}
        for (_, factor, decay), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def connection_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a scheme adds to the plain residual, except the gains of norms."""
    streams = [module for module in model.modules() if isinstance(module, (Stream, LayerStream))]
    parameters = {
        id(parameter): parameter
        for stream in streams
        for module in stream.modules()
        if not isinstance(module, (nn.RMSNorm, nn.LayerNorm))
        for parameter in module.parameters(recurse=False)
    }
    return list(parameters.values())


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear maps, embeddings and stacked experts that a module itself holds."""
    if isinstance(module, (*LINEAR_MAPS, nn.Embedding, Conv1D)):
        return [module.weight]
    if isinstance(module, nn.MultiheadAttention):
        return [weight for name, weight in module.named_parameters(recurse=False) if name.endswith("_proj_weight")]
    experts = type(module).__name__.endswith("Experts")
    return [x for x in module.parameters(recurse=False) if x.dim() == 3] if experts else []


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights for Muon: the matrices of attention, MLP and similar sublayers.

    Embeddings, the head of a language model, the connections' own parameters and stacks of experts are excluded.
    """
    excluded = {id(parameter) for parameter in connection_parameters(model)}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            excluded.add(id(module.weight))
        elif isinstance(module, PreTrainedModel) and (head := module.get_output_embeddings()) is not None:
            excluded |= {id(parameter) for parameter in head.parameters()}
    matrices = {id(x): x for module in model.modules() for x in _matrices(module) if x.dim() == 2 and x.requires_grad}
    return [parameter for key, parameter in matrices.items() if key not in excluded]


def make_optimizer(model: nn.Module, config: "TrainConfig") -> torch.optim.Optimizer:
    """Return the optimizer of a run. `initial_lr` of each group is its peak learning rate, `lr` times its factor.

    Raises:
        InputError: the optimizer is Muon, and the model has muP; or a parameter is a part of a larger tensor with gaps
            in memory, which a fused optimizer would fill.
    """
    for name, parameter in model.named_parameters():
        dense = parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        expected = "without gaps in memory (write p.data = p.data.contiguous())"
        require(dense or not parameter.requires_grad, f"the parameter {name}", expected, parameter.stride())
    mup = any(getattr(getattr(part, "config", None), "mup", False) is True for part in model.modules())
    muon = config.optimizer == "muon"
    require(not (mup and muon), "train.optimizer", "adamw with model.mup, whose rates are for Adam", "muon")
    groups = parameter_groups(model, config.weight_decay, config.connection_lr_factor)
    if muon:
        optimizer: torch.optim.Optimizer = MuonAndAdamW(groups, hidden_matrices(model), config)
    else:
        optimizer = _adamw(groups, config)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.lr * group["factor"]
    return optimizer


def _adamw(groups: list[dict[str, Any]], config: "TrainConfig") -> torch.optim.AdamW:
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for `matrices`, AdamW for all other parameters, as one optimizer with the groups and the state of both.

    An update of Muon is scaled to the RMS of AdamW's updates, by 0.2 sqrt(max(rows, columns)) (arXiv 2502.16982), so
    that both use the same learning rate. Like a fused optimizer, this one changes nothing while `found_inf` is not
    zero. Muon cannot check this on the device, so the host waits for the device in each step.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: Sequence[nn.Parameter], config: "TrainConfig"):
        matrix_ids = {id(parameter) for parameter in matrices}
        first, second = _part(groups, matrix_ids, inside=True), _part(groups, matrix_ids, inside=False)
        self._parts: list[torch.optim.Optimizer] = []
        if first:
            self._parts.append(torch.optim.Muon(first, lr=config.lr, adjust_lr_fn="match_rms_adamw"))
        if second:
            self._parts.append(_adamw(second, config))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        overflow = getattr(self, "found_inf", None)
        if overflow is None or not overflow.item():
            for part in self._parts:
                part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Not supported: a training checkpoint holds the state by the names of the weights."""
        raise NotImplementedError("use load_checkpoint, which restores this optimizer, got load_state_dict")


def _part(groups: list[dict[str, Any]], ids: set[int], *, inside: bool) -> list[dict[str, Any]]:
    """Keep only the parameters whose ids are in `ids`, or only all others if `inside` is false; drop empty groups."""
    parts = [
        {**group, "params": [parameter for parameter in group["params"] if (id(parameter) in ids) == inside]}
        for group in groups
    ]
    return [part for part in parts if part["params"]]


def learning_rate_factor(step: int, config: "TrainConfig") -> float:
    """Return the learning rate of step 1, 2, ..., `config.steps` as a fraction of the peak.

    The fraction rises linearly to 1 at `warmup_steps`, then falls as a cosine to `min_lr_ratio` at the last step.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to this fraction of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
