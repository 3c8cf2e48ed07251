"""The MLP, and the linear maps of attention and MLP: plain `nn.Linear`, as quantizers expect, started as ours."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.parts.sharded import on_whole_tensors
from residua.models.configuration import ResiduaConfig


def linear(in_features: int, out_features: int, *, std: float) -> nn.Linear:
    """Return a linear map without a bias whose weights start from N(0, std^2); `initialise` draws them again."""
    # On the meta device nn.Linear draws no numbers; it would draw weights that are not used.
    module = nn.Linear(in_features, out_features, bias=False, device="meta")
    module.weight = nn.Parameter(torch.empty(out_features, in_features))
    module.init_std = std  # type: ignore[assignment]
    initialise(module)
    return module


@on_whole_tensors
def initialise(module: nn.Module) -> None:
    """Draw or set the start of the parameters of `module` itself, not of its submodules."""
    std, reset = getattr(module, "init_std", None), getattr(module, "reset_parameters", None)
    if isinstance(module, nn.Linear) and std is not None:
        nn.init.normal_(module.weight, std=std)
    elif reset is not None:
        reset()


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), (..., hidden_size) -> (..., hidden_size), without biases. arXiv 2002.05202."""

    def __init__(self, config: ResiduaConfig):
        super().__init__()
        d: int = config.hidden_size
        hidden: int = config.intermediate_size  # type: ignore[assignment]  # the configuration has chosen it
        std = config.hidden_init_std_factor / math.sqrt(d)
        self.gate_proj = linear(d, hidden, std=std)
        self.up_proj = linear(d, hidden, std=std)
        # Two sublayers of every layer write into the residual; this keeps their sum from growing with depth.
        self.down_proj = linear(hidden, d, std=std / math.sqrt(config.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
