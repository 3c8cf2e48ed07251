"""The linear maps of attention and MLP: plain `nn.Linear`, as quantizers expect, with our initialisation."""

import torch
from torch import nn

from residua.connections.sharded import on_whole_tensors


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
