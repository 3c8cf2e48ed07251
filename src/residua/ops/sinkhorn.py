"""Doubly stochastic matrices (rows and columns sum to 1, no entry negative): by Sinkhorn's iteration, or exactly.

Such matrices mix n streams without making them larger: the spectral norm is at most 1, and the mean of the streams is
preserved.
"""

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

from residua.ops.dispatch import Implementation, choose
from residua.ops.precision import at_least_float32, new_symbol, without_autocast
from residua.ops.shapes import expect_shape
from residua.ops.transforms import Function, applied

Order = Literal["rows", "columns"]
"""The sums that `sinkhorn` divides by first; the sums of the other kind are 1 at the end."""


def sinkhorn(
    logits: Tensor, iterations: int = 20, *, order: Order = "rows", implementation: Implementation = "reference"
) -> Tensor:
    """Scale exp(L) to row and column sums of 1: each iteration divides by the row sums, then by the column sums.

    It runs in the log domain, L <- L - logsumexp(L, rows), L <- L - logsumexp(L, columns), so that logits of any size
    stay finite. At the end the columns sum to 1, and the rows only up to the remaining error. With order="columns" each
    iteration divides by the column sums, then by the row sums, and the rows are exact: M <- T_r(T_c(M)), arXiv
    2512.24880 equation 9 (20 iterations). logits: (..., n, n); returns the same shape and dtype, computed in at least
    float32.
    `implementation`: the plain definition or the Triton kernel, see `ops.dispatch.choose`.
    """
    expect_shape("logits", logits, (*logits.shape[:-1], logits.shape[-2]), "(..., n, n)")
    if iterations < 1:
        raise ValueError(f"iterations must be 1 or more, got {iterations}")
    if order not in ("rows", "columns"):
        raise ValueError(f"order must be 'rows' or 'columns', got {order!r}")
    if order == "columns":
        return sinkhorn(logits.mT, iterations, implementation=implementation).mT
    if choose(implementation, logits) == "triton":
        from residua.ops.kernels.sinkhorn import sinkhorn as kernel

        return kernel(logits, iterations)
    # With the tokens on the last axis, each sum over rows or columns is a few additions of long vectors.
    log = at_least_float32(logits).movedim((-2, -1), (0, 1)).contiguous()
    return applied(_Sinkhorn, log, iterations).movedim((0, 1), (-2, -1)).to(logits.dtype)


class _Sinkhorn(Function):
    """logits: (n, n, ...). A step maps L to L' = L - logsumexp(L). The gradient of L is G = G' - exp(L') sum(G'), where
    G' is the gradient of L'.

    Autograd would take twice the time and keep every step; this backward pass recomputes the steps.
    """

    @staticmethod
    def plain(log: Tensor, iterations: int) -> Tensor:
        return _normalised(log, iterations)[-1].exp()

    @staticmethod
    def forward(ctx, log: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(log)
        ctx.iterations = iterations
        return _normalised(log, iterations)[-1].exp()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (log,) = ctx.saved_tensors
        steps = _normalised(log, ctx.iterations)
        grad = grad.contiguous() * steps[-1].exp()
        for i in reversed(range(len(steps))):
            grad = torch.addcmul(grad, steps[i].exp(), grad.sum(1 - i % 2, keepdim=True), value=-1)
        return grad, None


def _normalised(log: Tensor, iterations: int) -> list[Tensor]:
    """Return the logits after every division, in turn by row sums (axis 1) and column sums (axis 0)."""
    steps = []
    for axis in (1, 0) * iterations:
        largest = log.amax(axis, keepdim=True)
        log = log - (log - largest).exp_().sum(axis, keepdim=True).log_().add_(largest)  # logsumexp in fewer steps
        steps.append(log)
    return steps


def guarded_sinkhorn(logits: Tensor, iterations: int = 20, *, eps: float = 1e-6) -> Tensor:
    """Divide softmax(L) + eps by (column sums + eps); then divide by rows and columns, iterations - 1 more times.

    The form of DeepSeek-V4 and GLM-5.3-Flash (`deepseek_v4` and `glm5_next` in transformers). The softmax, by rows, is
    the first division by row sums, so eps = 0 gives `sinkhorn`. With eps > 0 the columns sum to s / (s + eps) at the
    end, about eps below 1, where s is their sum before the last division. The models mix with the transpose,
    X'[o] = sum_i C[i, o] X[i]. logits: (..., n, n); returns the same shape and dtype, computed in at least float32. The
    backward pass keeps only the logits and recomputes the rest.
    """
    expect_shape("logits", logits, (*logits.shape[:-1], logits.shape[-2]), "(..., n, n)")
    if iterations < 1:
        raise ValueError(f"iterations must be 1 or more, got {iterations}")
    wide = at_least_float32(logits).movedim((-2, -1), (0, 1)).contiguous()
    return applied(_GuardedSinkhorn, wide, iterations, new_symbol(eps)).movedim((0, 1), (-2, -1)).to(logits.dtype)


class _GuardedSinkhorn(Function):
    """logits: (n, n, ...). A step maps C to C' = C / (s + eps), s = sum(C). The gradient of C is
    G = (G' - sum(G' C')) / (s + eps), where G' is the gradient of C'.
    """

    @staticmethod
    def plain(logits: Tensor, iterations: int, eps: float) -> Tensor:
        _, steps = _divided(logits, iterations, eps)
        return steps[-1][1]

    @staticmethod
    def forward(ctx, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        return _GuardedSinkhorn.plain(logits, iterations, eps)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (logits,) = ctx.saved_tensors
        rows, steps = _divided(logits, ctx.iterations, ctx.eps)
        for i in reversed(range(len(steps))):
            divisor, matrix = steps[i]
            grad = (grad - (grad * matrix).sum(i % 2, keepdim=True)) / divisor
        return rows * (grad - (grad * rows).sum(1, keepdim=True)), None, None


def _divided(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the softmax over rows (axis 1), and (divisor, result) of every division, column sums (axis 0) first."""
    rows = logits.softmax(1)
    matrix, steps = rows + eps, []
    for i in range(2 * iterations - 1):
        divisor = matrix.sum(i % 2, keepdim=True) + eps
        matrix = matrix / divisor
        steps.append((divisor, matrix))
    return rows, steps


def kronecker_mixture(weights: Tensor) -> Tensor:
    """H = U_1 kron ... kron U_K, U_k = [[p_k, 1 - p_k], [1 - p_k, p_k]]: doubly stochastic exactly, and symmetric.

    weights: (..., K), the p_k in [0, 1], the weights of the identity. Returns (..., 2^K, 2^K) in the dtype of
    `weights`, computed in at least float32. arXiv 2601.21579 (KromHC).
    """
    # Entry (i, j) is a product over k, with the factor p_k if i and j agree in bit k, and 1 - p_k otherwise.
    wide = at_least_float32(weights)
    matrix = wide.new_ones(*wide.shape[:-1], 1, 1)
    for p in wide.unbind(-1):
        factor = torch.stack([p, 1 - p, 1 - p, p], -1).unflatten(-1, (2, 2))
        product = matrix[..., :, None, :, None] * factor[..., None, :, None, :]
        matrix = product.flatten(-2).flatten(-3, -2)
    return matrix.to(weights.dtype)


def permutations(n: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the n! permutation matrices of n streams, identity first: (n!, n, n)."""
    columns = torch.tensor(list(itertools.permutations(range(n))), device=device)
    return (columns.unsqueeze(-1) == torch.arange(n, device=device)).to(dtype)


def permutation_mixture(weights: Tensor) -> Tensor:
    """H = sum_m w_m P_m over all n! permutation matrices: doubly stochastic exactly if all w_m >= 0 and sum to 1.

    weights: (..., n!), a softmax in arXiv 2601.05732 (mHC-lite); by Birkhoff's theorem every doubly stochastic matrix
    is such a mixture. Returns (..., n, n) in the dtype of `weights`, computed in at least float32.
    """
    n = 1
    while math.factorial(n) < weights.shape[-1]:
        n += 1
    if math.factorial(n) != weights.shape[-1]:
        raise ValueError(f"weights must be (..., n!), one for each permutation, got {tuple(weights.shape)}")
    wide = at_least_float32(weights)
    matrices = permutations(n, weights.device, wide.dtype).flatten(1)
    with without_autocast(weights.device):
        return (wide @ matrices).unflatten(-1, (n, n)).to(weights.dtype)
