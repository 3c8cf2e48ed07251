"""Equations of the delta operator A(k, beta) = I - beta k k^T and of the delta write (arXiv 2601.00417).

Shapes: a state X has value_channels rows of width dim, `(..., value_channels, dim)`: the paper's X in R^{d x d_v},
transposed, because a row of width dim is contiguous. k: (..., dim), v: (..., value_channels), beta: (...,).
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from residua.ops.precision import at_least_float32, new_symbol, promote, without_autocast
from residua.ops.recompute import expect_first_derivative, release, save_state
from residua.ops.shapes import expect_shape
from residua.ops.transforms import Function, applied

KNorm = Literal["rms", "add", "clamp", "rms_d"]
K_NORMS: tuple[str, ...] = get_args(KNorm)


def unit(k: Tensor, *, k_norm: KNorm = "rms", eps: float = 1e-5) -> Tensor:
    """Normalise a raw direction k~ of length n = |k~| to the direction k. Every `k_norm` is finite at n = 0.

    `rms`    k = k~ / sqrt(n^2 + eps^2)       arXiv 2601.00417v2 section 4.1; |k| < 1, and k~ = 0 gives k = 0
    `add`    k = k~ / (n + eps)               arXiv 2601.00417v1 appendix A.1
    `clamp`  k = k~ / max(n, eps)             the wording of v2 appendix B.1
    `rms_d`  k = k~ / sqrt(n^2 + dim eps^2)   the accelerated kernels of the authors' first code

    k: (..., dim). Returns (..., dim) in the same dtype; the norm is computed in at least float32. At k~ = 0 each form
    has the finite derivative I / eps (I / (eps sqrt(dim)) for `rms_d`). Raises ValueError for other names.
    """
    return applied(_Unit, k, k_norm, new_symbol(eps))


def _inverse_norm(raw: Tensor, k_norm: KNorm, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return 1 / m for the m that divides k~, and (m / n) dm/dn with n = |k~|, or None if that is 1; (..., 1) each."""
    if k_norm not in K_NORMS:
        raise ValueError(f"k_norm must be one of {', '.join(K_NORMS)}, got {k_norm!r}")
    square = raw.square().sum(-1, keepdim=True)
    if k_norm == "rms":
        return torch.rsqrt(square + eps**2), None
    if k_norm == "rms_d":
        return torch.rsqrt(square + raw.shape[-1] * eps**2), None
    # sqrt has an infinite derivative at 0; the inner where keeps it out of derivatives.
    norm = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
    if k_norm == "clamp":
        return 1 / norm.clamp_min(eps), (norm >= eps).to(norm.dtype)
    return 1 / (norm + eps), torch.where(norm > 0, (norm + eps) / norm, 0.0)


def _through_unit(grad: Tensor, k: Tensor, scale: Tensor, ratio: Tensor | None) -> Tensor:
    """Return the gradient of k~ from g, the gradient of k = k~ / m: (g - r k (k . g)) / m.

    scale: 1 / m; ratio: r = (m / n) dm/dn with n = |k~|, None if that is 1.
    """
    along = (grad * k).sum(-1, keepdim=True)
    return scale * torch.addcmul(grad, along if ratio is None else ratio * along, k, value=-1)


class _Unit(Function):
    @staticmethod
    def plain(k: Tensor, k_norm: KNorm, eps: float) -> Tensor:
        raw = at_least_float32(k)
        return (raw * _inverse_norm(raw, k_norm, eps)[0]).to(k.dtype)

    @staticmethod
    def forward(ctx, k: Tensor, k_norm: KNorm, eps: float) -> Tensor:
        raw = at_least_float32(k)
        scale, ratio = _inverse_norm(raw, k_norm, eps)
        ctx.save_for_backward(k, scale, ratio)
        ctx.options = k_norm, eps
        return (raw * scale).to(k.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        k, scale, ratio = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need these as functions of k
            scale, ratio = _inverse_norm(at_least_float32(k), *ctx.options)
        return _through_unit(grad.to(scale.dtype), k * scale, scale, ratio).to(k.dtype), None, None


class _DeltaWrite(Function):
    """The additive form with an explicit gradient, which makes fewer passes over the state than autograd.

    With G = dL/dX', r = v - k^T X and p = k^T G (one number per value channel):
    dX = G - beta k p^T, dv = beta p, dbeta = p . r, dk = beta (G r - X p).

    Keeps only the first of every `recompute_every` states in a chain (`ops.recompute`).
    """

    @staticmethod
    def plain(state, k, v, beta, k_norm, eps, recompute_every):
        return _written(state, k, v, beta, k_norm, eps)[0]

    @staticmethod
    def forward(ctx, state, k, v, beta, k_norm, eps, recompute_every):
        written, scale, ratio, wide_beta, error = _written(state, k, v, beta, k_norm, eps)
        ctx.dtypes = state.dtype, k.dtype, v.dtype, beta.dtype
        ctx.k_norm = k_norm, eps
        # Large tensors are kept in their own dtype, so that a bfloat16 state takes two bytes per number, not four.
        again = (v, beta) if recompute_every == 1 else ()  # for a second derivative
        saved = (state, k, scale, ratio, wide_beta, error, *again)
        save_state(ctx, *saved, replay=_replay, every=recompute_every)
        return written

    @staticmethod
    def backward(ctx, grad: Tensor):
        state, raw, scale, ratio, beta, error, *again = release(ctx)
        if not again:
            expect_first_derivative()
        elif torch.is_grad_enabled():  # second derivatives need these as functions of the inputs
            _, scale, ratio, beta, error = _written(state, raw, *again, *ctx.k_norm)
        # State and gradient are widened at each use, because a compiler would keep widened copies of twice the size.
        k = _direction(raw, scale, error.dtype)
        needs_state, needs_k, needs_v, needs_beta, *_ = ctx.needs_input_grad
        readout = (grad * k.unsqueeze(-2)).sum(-1)
        grad_v = beta.unsqueeze(-1) * readout
        grad_state = grad_k = grad_beta = None
        if needs_state:
            grad_state = torch.addcmul(grad, grad_v.unsqueeze(-1), k.unsqueeze(-2), value=-1)
        if needs_k:
            scaled_error = beta.unsqueeze(-1) * error
            grad_k = grad[..., 0, :] * scaled_error[..., 0, None]
            for j in range(state.shape[-2]):
                # One channel at a time: a sum over channels would write all its products to memory first.
                if j:
                    grad_k.addcmul_(grad[..., j, :], scaled_error[..., j, None])
                grad_k.addcmul_(state[..., j, :], grad_v[..., j, None], value=-1)
            if scale is not None:
                grad_k = _through_unit(grad_k, k, scale, ratio)
        if needs_beta:
            grad_beta = (readout * error).sum(-1)
        grads = (grad_state, grad_k, grad_v if needs_v else None, grad_beta)
        return *(None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes)), None, None, None


def _written(
    state: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_norm: KNorm | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return X', and the wide tensors for its gradient: both results of `_inverse_norm`, beta and r."""
    wide_state, wide_k, wide_v, wide_beta = promote(state, k, v, beta)
    scale, ratio = (None, None) if k_norm is None else _inverse_norm(wide_k, k_norm, eps)
    wide_k = wide_k if scale is None else wide_k * scale
    error = wide_v - (wide_state * wide_k.unsqueeze(-2)).sum(-1)
    return _step(state, wide_state, wide_k, wide_beta, error), scale, ratio, wide_beta, error


def _direction(k: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return k.to(dtype) if scale is None else k.to(dtype) * scale


def _step(state: Tensor, wide_state: Tensor, k: Tensor, beta: Tensor, error: Tensor) -> Tensor:
    """Return X + k (beta r)^T, in the forward pass and in every replay."""
    step = (beta.unsqueeze(-1) * error).unsqueeze(-1)
    return torch.addcmul(wide_state, step, k.unsqueeze(-2)).to(state.dtype)


def _replay(
    state: Tensor, k: Tensor, scale: Tensor | None, ratio: Tensor | None, beta: Tensor, error: Tensor, *_: Tensor
) -> Tensor:
    """Return the state that a write made, by replaying the write."""
    return _step(state, state.to(error.dtype), _direction(k, scale, error.dtype), beta, error)


def expect_write(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
    """Raise ValueError unless the shapes of the arguments of a delta write match."""
    *leading, value_channels, dim = state.shape
    expect_shape("k", k, (*leading, dim), "(..., dim)")
    expect_shape("v", v, (*leading, value_channels), "(..., value_channels)")
    expect_shape("beta", beta, leading, "(...,)")


def delta_write(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    k_norm: KNorm | None = None,
    eps: float = 1e-5,
    recompute_every: int = 1,
) -> Tensor:
    """X' = X + beta k (v^T - k^T X): erase the component of X along k, write v there (arXiv 2601.00417, additive form).

    state: (..., value_channels, dim), k: (..., dim), v: (..., value_channels), beta: (...,), equal leading sizes; other
    shapes raise ValueError. Without `k_norm`, k is used as it is; pass `unit(k)` for the paper's operator. With
    `k_norm`, k is first normalised as by `unit`, without rounding in between. Computed in at least float32; returns the
    shape and dtype of `state`. Equals `delta_operator(k, beta) @ X + beta k v^T`, without forming the operator.

    The backward pass needs X. With `recompute_every` = m > 1, only every m-th state along a chain of writes is kept.
    The others are recomputed by replaying the writes, on a CPU with gradients equal to the last bit (`ops.recompute`).
    Second derivatives need m = 1: otherwise `create_graph=True` raises RuntimeError.
    """
    expect_write(state, k, v, beta)
    return applied(_DeltaWrite, state, k, v, beta, k_norm, new_symbol(eps), recompute_every)


def delta_write_v1(state: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, eps: float = 1e-5) -> Tensor:
    """X' = (I - beta k k^T / (k^T k + eps)) X + beta k v^T with the raw k (arXiv 2601.00417v1 eq. 2.2).

    Shapes and dtypes as in `delta_write`. Only the erased part is normalised, so this write equals `delta_write`
    only for |k| = 1. With k = 0 the state is unchanged, because of eps.
    """
    expect_write(state, k, v, beta)
    wide_state, wide_k, wide_v, wide_beta = promote(state, k, v, beta)
    readout = (wide_state * wide_k.unsqueeze(-2)).sum(-1) / (wide_k.square().sum(-1, keepdim=True) + eps)
    step = (wide_beta.unsqueeze(-1) * (wide_v - readout)).unsqueeze(-1)
    return torch.addcmul(wide_state, step, wide_k.unsqueeze(-2)).to(state.dtype)


def delta_operator(k: Tensor, beta: Tensor) -> Tensor:
    """Return A = I - beta k k^T, dense: (..., dim, dim). k: (..., dim), beta: (...,). arXiv 2601.00417v2.

    beta = 0 keeps the state, beta = 1 projects k out, beta = 2 is the Householder reflection (|k| = 1). Symmetric.
    """
    expect_shape("beta", beta, k.shape[:-1], "(...,)")
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return identity - beta[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)


def delta_inverse(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return the X for which `delta_write(X, k, v, beta)` is `state`: a write with beta' = beta / (beta |k|^2 - 1).

    For |k| = 1, (1 - beta)(1 - beta') = 1: a reflection (beta = 2) is its own inverse. A projection (beta = 1) has no
    inverse: the result is not finite, or meaningless if rounding leaves beta |k|^2 close to 1. Shapes and dtypes as in
    `delta_write`. Derived from the write; neither version of the paper has it.
    """
    expect_write(state, k, v, beta)
    wide_k, wide_beta = at_least_float32(k), at_least_float32(beta)
    return delta_write(state, wide_k, v, wide_beta / (wide_beta * wide_k.square().sum(-1) - 1))


class Composition(NamedTuple):
    """n delta writes as one: X_n = X_0 + K T (V - K^T X_0), with the n directions as columns of K.

    k: (..., n, dim), the directions as rows; t: (..., n, n), the matrix T.
    """

    k: Tensor
    t: Tensor

    def operator(self) -> Tensor:
        """P_n = A_n ... A_1 = I - K T K^T, (..., dim, dim)."""
        identity = torch.eye(self.k.shape[-1], dtype=self.k.dtype, device=self.k.device)
        with without_autocast(self.k.device):
            return identity - self.k.mT @ self.t @ self.k

    def write(self, state: Tensor, v: Tensor) -> Tensor:
        """Return the state, (..., value_channels, dim), after all n writes of the values v: (..., n, value_channels).

        The result has the dtype of the state.
        """
        expect_shape("v", v, (*state.shape[:-2], self.k.shape[-2], state.shape[-2]), "(..., n, value_channels)")
        wide_state, wide_v, k, t = promote(state, v, self.k, self.t)
        with without_autocast(self.k.device):
            steps = t @ (wide_v - k @ wide_state.mT)
            return (wide_state + steps.mT @ k).to(state.dtype)


def compose(k: Tensor, beta: Tensor) -> Composition:
    """Return the WY form of n delta writes in the order of the rows of k: (..., n, dim), beta: (..., n).

    T = (I + D S)^{-1} D with D = diag(beta) and S the strictly lower part of K K^T (K by rows); I + D S is unit lower
    triangular, so T exists for every beta. det P_n = prod(1 - beta_i |k_i|^2). Computed in at least float32.
    """
    expect_shape("beta", beta, k.shape[:-1], "(..., n)")
    k, beta = promote(k, beta)
    scale = torch.diag_embed(beta)
    with without_autocast(k.device):
        lower = scale @ torch.tril(k @ k.mT, diagonal=-1)
        return Composition(k, torch.linalg.solve_triangular(lower, scale, upper=False, unitriangular=True))


def eigenvalues(beta: Tensor, dim: int) -> Tensor:
    """Return the eigenvalues of A(k, beta), |k| = 1: 1 - beta (of k), then dim - 1 ones. beta: (...,) -> (..., dim)."""
    ones = torch.ones(*beta.shape, dim - 1, dtype=beta.dtype, device=beta.device)
    return torch.cat([(1 - beta).unsqueeze(-1), ones], -1)


def singular_values(beta: Tensor, dim: int) -> Tensor:
    """Return the singular values of A(k, beta), |k| = 1: |1 - beta|, then dim - 1 ones. (...,) -> (..., dim)."""
    return eigenvalues(beta, dim).abs()


def determinant(beta: Tensor, value_channels: int = 1) -> Tensor:
    """Return det of X -> A X on R^{dim x value_channels}, |k| = 1: (1 - beta)^value_channels.

    The orientation flips exactly if value_channels is odd and beta > 1 (arXiv 2601.00417v2; v1 omits beta > 1).
    """
    return (1 - beta) ** value_channels
