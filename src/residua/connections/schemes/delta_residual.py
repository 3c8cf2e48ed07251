"""The delta write as a self-contained residual block, without the two phases around a sublayer (arXiv 2601.00417)."""

from typing import Literal

from torch import Tensor, nn

from residua.connections.parts.delta_maps import ChannelPool, Gate, Value
from residua.errors import require
from residua.ops import KNorm, delta_write


class DeltaResidual(nn.Module):
    """The general delta-residual block: X <- X + beta k (v^T - k^T X) with k, v and beta all computed from X.

    Use it like any module in a stack. phi_k and phi_v are modules that take the whole state
    (..., value_channels, dim): phi_k returns the raw direction (..., dim), phi_v the value (..., value_channels).
    Without phi_v the value is a linear map of the mean over the channels. beta = 2 sigmoid(linear(G(X))), where `pool`
    selects G: "mean", "flatten", or "conv" over a sequence axis, for states (batch, seq, value_channels, dim).
    arXiv 2601.00417 section 2.
    """

    def __init__(
        self,
        dim: int,
        value_channels: int,
        phi_k: nn.Module,
        phi_v: nn.Module | None = None,
        *,
        pool: Literal["mean", "flatten", "conv"] = "mean",
        beta_init: float = 1.0,
        k_norm: KNorm = "rms",
        k_eps: float = 1e-5,
    ):
        super().__init__()
        require(pool in ("mean", "flatten", "conv"), "pool", "'mean', 'flatten' or 'conv'", pool)
        require(0 <= beta_init <= 2, "beta_init", "a number in [0, 2]", beta_init)
        self.phi_k = phi_k
        if phi_v is None:
            value = Value(dim, value_channels, activation="linear", bias=False)
            phi_v = nn.Sequential(ChannelPool("mean", dim, value_channels), value)
        self.phi_v = phi_v
        self.pool = ChannelPool(pool, dim, value_channels)
        self.beta = Gate(self.pool.out_features, beta_init=beta_init)
        self.k_norm, self.k_eps = k_norm, k_eps

    def forward(self, state: Tensor) -> Tensor:
        k, v, beta = self.phi_k(state), self.phi_v(state), self.beta(self.pool(state))
        return delta_write(state, k, v, beta, k_norm=self.k_norm, eps=self.k_eps)
