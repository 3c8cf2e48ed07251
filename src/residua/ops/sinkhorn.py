"""Doubly stochastic matrices (rows and columns sum to 1, no entry negative): by Sinkhorn's iteration, or exactly.

Both mix n streams without growing them: the spectral norm is at most 1, and the mean of the streams is preserved.
"""

import itertools

import torch
from torch import Tensor

from residua.ops.dispatch import Implementation, choose
from residua.ops.precision import at_least_float32, without_autocast
from residua.ops.shapes import expect_shape


def sinkhorn(logits: Tensor, iterations: int = 20, *, implementation: Implementation = "reference") -> Tensor:
    """exp(L) scaled to row and column sums of 1: each iteration divides by the row sums, then by the column sums.

    In the log domain, L <- L - logsumexp(L, rows), L <- L - logsumexp(L, columns): logits of any size stay finite.
    At the end the columns sum to 1, and the rows as nearly as the iterations brought them. logits: (..., n, n); returns
    the same shape and dtype, computed in at least float32. `implementation`: the plain definition or the Triton kernel,
    see `ops.dispatch.choose`. arXiv 2512.24880 (20 iterations).
    """
    expect_shape("logits", logits, (*logits.shape[:-1], logits.shape[-2]), "(..., n, n)")
    if iterations < 1:
        raise ValueError(f"iterations: expected 1 or more, got {iterations}")
    if choose(implementation, logits) == "triton":
        from residua.ops.kernels.sinkhorn import sinkhorn as kernel

        return kernel(logits, iterations)
    # With the tokens last in memory, each sum over rows or columns is a few additions of long vectors.
    log = at_least_float32(logits).movedim((-2, -1), (0, 1)).contiguous()
    return _Sinkhorn.apply(log, iterations).movedim((0, 1), (-2, -1)).to(logits.dtype)


class _Sinkhorn(torch.autograd.Function):
    """logits: (n, n, ...). A step takes L to L' = L - logsumexp(L), and its gradient G' to G = G' - exp(L') sum(G').

    Written out because autograd takes twice the time.
    """

    @staticmethod
    def forward(ctx, log: Tensor, iterations: int) -> Tensor:
        steps = _normalised(log, iterations)
        ctx.save_for_backward(log, *steps)
        return steps[-1].exp()

    @staticmethod
    def backward(ctx, grad: Tensor):
        log, *steps = ctx.saved_tensors
        if torch.is_grad_enabled():
            # A second derivative needs the steps as functions of the logits.
            steps = _normalised(log, len(steps) // 2)
        grad = grad.contiguous() * steps[-1].exp()
        for i in reversed(range(len(steps))):
            grad = torch.addcmul(grad, steps[i].exp(), grad.sum(1 - i % 2, keepdim=True), value=-1)
        return grad, None


def _normalised(log: Tensor, iterations: int) -> list[Tensor]:
    """Return the logits after every division, by rows (axis 1) and columns (axis 0) in turn."""
    steps = []
    for axis in (1, 0) * iterations:
        log = log - log.logsumexp(axis, keepdim=True)
        steps.append(log)
    return steps


def permutations(n: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the n! permutation matrices of n streams, identity first: (n!, n, n), for 1 <= n <= 8."""
    if not 1 <= n <= 8:
        raise ValueError(f"n: expected 1 to 8 streams (8 have 40320 permutations), got {n}")
    columns = torch.tensor(list(itertools.permutations(range(n))), device=device)
    return (columns.unsqueeze(-1) == torch.arange(n, device=device)).to(dtype)


def permutation_mixture(weights: Tensor) -> Tensor:
    """H = sum_m w_m P_m over all n! permutation matrices: doubly stochastic exactly if all w_m >= 0 and sum to 1.

    weights: (..., n!), a softmax in arXiv 2601.05732 (mHC-lite); by Birkhoff's theorem every doubly stochastic matrix
    is such a mixture. Returns (..., n, n) in the dtype of `weights`, computed in at least float32.
    """
    n = 1
    count = 1
    while count < weights.shape[-1]:
        n += 1
        count *= n
    if count != weights.shape[-1]:
        raise ValueError(f"weights: expected (..., n!), one for each permutation of n streams, got {weights.shape[-1]}")
    wide = at_least_float32(weights)
    matrices = permutations(n, weights.device, wide.dtype).flatten(1)
    with without_autocast(weights.device):
        return (wide @ matrices).unflatten(-1, (n, n)).to(weights.dtype)
