"""The MLP, and the linear maps of attention and MLP: `nn.Linear`, as quantizers expect, with our own initialisation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.parts.projection import spectral_std
from residua.connections.parts.sharded import on_whole_tensors
from residua.model_fields import ModelFields
from residua.models.configuration import ResiduaConfig


def linear(in_features: int, out_features: int, *, std: float) -> nn.Linear:
    """Return a linear map without a bias whose weights start from N(0, std^2); `initialise` draws them again."""
    # On the meta device nn.Linear does not draw initial weights, which would be replaced below.
    module = nn.Linear(in_features, out_features, bias=False, device="meta")
    module.weight = nn.Parameter(torch.empty(out_features, in_features))
    module.init_std = std  # type: ignore[assignment]
    initialise(module)
    return module


@on_whole_tensors
def initialise(module: nn.Module) -> None:
    """Initialise the parameters of `module` itself, not those of its submodules."""
    std, reset = getattr(module, "init_std", None), getattr(module, "reset_parameters", None)
    if isinstance(module, nn.Linear) and std is not None:
        nn.init.normal_(module.weight, std=std)
    elif reset is not None:
        reset()


def start_of(config: ModelFields, in_features: int, out_features: int, *, writes: bool = False) -> float:
    """Return the initial standard deviation of a projection's weights.

    writes: whether the projection writes into the residual. Smaller weights then keep the sum of all writes from
    growing with depth.
    """
    factor, layers = config.hidden_init_std_factor, config.num_hidden_layers
    if config.output_init == "depth":
        return spectral_std(in_features, out_features, factor) / (layers if writes else 1)
    std = factor / math.sqrt(config.hidden_size)
    return std / math.sqrt(layers) if writes else std


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), (..., hidden_size) -> (..., hidden_size), without biases. arXiv 2002.05202."""

    def __init__(self, config: ResiduaConfig):
        super().__init__()
        d: int = config.hidden_size
        hidden: int = config.intermediate_size  # type: ignore[assignment]  # the configuration has chosen it
        self.gate_proj = linear(d, hidden, std=start_of(config, d, hidden))
        self.up_proj = linear(d, hidden, std=start_of(config, d, hidden))
        self.down_proj = linear(hidden, d, std=start_of(config, hidden, d, writes=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
