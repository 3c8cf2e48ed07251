"""The norm before a sublayer."""

import torch.nn.functional as F
from torch import Tensor, nn

from residua.ops import at_least_float32


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in float32 at least, with the result in the dtype of its input: gains keep their precision."""

    def forward(self, x: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x), self.normalized_shape, weight, self.eps).to(x.dtype)
