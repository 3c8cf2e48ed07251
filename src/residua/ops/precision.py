"""Small computations that decide what a connection does run in float32 at least, whatever dtype the model is in."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 if its dtype is narrower (bfloat16, float16), unchanged otherwise (float32, float64)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Matrix products inside this context run in the dtype of their arguments, also where autocast is on."""
    # The meta device, on which shapes are computed without numbers, knows no autocast.
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def linear_at_least_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` with inputs AND weights in float32 at least, also inside autocast.

    x: (..., in_features); weight: (out_features, in_features); bias: (out_features,) or None.
    Returns (..., out_features) in float32, or float64 where x or weight is float64.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    with without_autocast(x.device):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
