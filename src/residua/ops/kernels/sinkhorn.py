"""Sinkhorn's iteration in Triton: forward it moves 2 n^2 numbers for each token, backward 3 n^2.

Backward there also are 2 n numbers for each iteration, written and read again by the same program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.tiling import MAX_CHANNELS, expect_dtypes, on_device_of
from residua.ops.shapes import expect_shape

# One program, of one warp, has the matrices of some tokens in registers for all iterations.
#
# Autograd would keep every step for the backward pass, 2 n^2 numbers for an iteration, when the streams themselves are
# only n d. Kept here are the logits alone. Backward the iterations run once more, and what each step divided by goes
# into memory that is free again when the kernel ends: multiplied with it, the matrix after a step is the one before.
NUMBERS = 256  # in the matrices of a program


@triton.jit
def load_matrices(start, token, tokens, row, column, N: tl.constexpr):
    """(tokens, rows, columns) in float32, with zeros outside of the tokens and of (N, N)."""
    inside = (token < tokens) & (row < N) & (column < N)
    return tl.load(start + (token * N + row) * N + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_matrices(start, matrices, token, tokens, row, column, N: tl.constexpr):
    inside = (token < tokens) & (row < N) & (column < N)
    tl.store(start + (token * N + row) * N + column, matrices.to(start.dtype.element_ty), mask=inside)


@triton.jit
def without_padding(log, row, column, N: tl.constexpr):
    """Logarithms of matrices that are zero outside of (N, N)."""
    return tl.where((row < N) & (column < N), log, float("-inf"))


@triton.jit
def divided(log, line, AXIS: tl.constexpr, N: tl.constexpr):
    """log - logsumexp(log) along an axis, as log - largest - log(total), where `total` is 1 at least.

    `line` numbers the rows or columns that are summed; from N on they are padding, and have no largest number.
    """
    largest = tl.maximum(tl.max(log, AXIS, keep_dims=True), -3e38)
    log = log - largest
    total = tl.where(line < N, tl.sum(tl.exp(log), AXIS, keep_dims=True), 1.0)
    return log - tl.log(total), largest, total


@triton.jit
def _forward(
    logits,
    matrices,
    tokens,
    iterations,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, ROWS)[None, None, :]
    log = without_padding(load_matrices(logits, token, tokens, row, column, N), row, column, N)
    for _iteration in range(iterations):
        log, _largest, _total = divided(log, row, 2, N)
        log, _largest, _total = divided(log, column, 1, N)
    store_matrices(matrices, tl.exp(log), token, tokens, row, column, N)


@triton.jit
def _backward(
    grad,
    logits,
    divisors,
    grad_logits,
    tokens,
    iterations,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, ROWS)[None, None, :]
    of_rows = (token < tokens) & (row < N)
    of_columns = (token < tokens) & (column < N)
    own = divisors + token * iterations * 2 * N
    log = without_padding(load_matrices(logits, token, tokens, row, column, N), row, column, N)
    for i in range(iterations):
        log, largest, total = divided(log, row, 2, N)
        # From the second step on nothing is above 1; the first divisor, which may be of any size, is not used.
        tl.store(own + 2 * i * N + row, tl.exp(tl.minimum(largest, 1.0)) * total, mask=of_rows)
        log, largest, total = divided(log, column, 1, N)
        tl.store(own + (2 * i + 1) * N + column, tl.exp(largest) * total, mask=of_columns)
    tl.debug_barrier()  # other threads may read what one has stored

    after = tl.exp(log)
    g = load_matrices(grad, token, tokens, row, column, N) * after
    for back in range(iterations):
        i = iterations - 1 - back
        g -= after * tl.sum(g, 1, keep_dims=True)
        after *= tl.load(own + (2 * i + 1) * N + column, mask=of_columns, other=0.0)
        g -= after * tl.sum(g, 2, keep_dims=True)
        after *= tl.load(own + 2 * i * N + row, mask=of_rows, other=0.0)
    store_matrices(grad_logits, g, token, tokens, row, column, N)


def cut(n: int, tokens: int) -> tuple[int, int, int]:
    """Programs, the power of two that n is filled up to, and the tokens of a program."""
    rows = triton.next_power_of_2(n)
    each = max(1, NUMBERS // (rows * rows))
    return triton.cdiv(tokens, each), rows, each


@torch.library.custom_op("residua::sinkhorn", mutates_args=())
def sinkhorn_op(logits: Tensor, iterations: int) -> Tensor:
    matrices = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        n = logits.shape[-1]
        tokens = logits.numel() // (n * n)
        programs, rows, each = cut(n, tokens)
        with on_device_of(logits):
            _forward[(programs,)](logits.contiguous(), matrices, tokens, iterations, n, rows, each, num_warps=1)
    return matrices


@sinkhorn_op.register_fake
def _(logits, iterations):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("residua::sinkhorn_backward", mutates_args=())
def sinkhorn_backward_op(grad: Tensor, logits: Tensor, iterations: int) -> Tensor:
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        n = logits.shape[-1]
        tokens = logits.numel() // (n * n)
        programs, rows, each = cut(n, tokens)
        divisors = torch.empty(tokens, iterations, 2, n, dtype=torch.float32, device=logits.device)
        with on_device_of(logits):
            _backward[(programs,)](
                grad.contiguous(),
                logits.contiguous(),
                divisors,
                grad_logits,
                tokens,
                iterations,
                n,
                rows,
                each,
                num_warps=1,
            )
    return grad_logits


@sinkhorn_backward_op.register_fake
def _(grad, logits, iterations):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx, inputs, output):
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _gradients(ctx, grad):
    return sinkhorn_backward_op(grad, *ctx.saved_tensors, ctx.iterations), None


sinkhorn_op.register_autograd(_gradients, setup_context=_setup_context)


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """exp(L) scaled to row and column sums of 1 as `residua.ops.sinkhorn` computes it, for matrices of up to 16 rows.

    logits: (..., n, n) in float32, bfloat16 or float16. Returns the same shape and dtype. The gradient is that of the
    iterations that were done, not of their limit, and can be taken once. Kept for the backward pass: the logits.

    Other shapes and less than one iteration raise ValueError, other dtypes TypeError.
    """
    expect_shape("logits", logits, (*logits.shape[:-1], logits.shape[-2]), "(..., n, n)")
    if iterations < 1:
        raise ValueError(f"iterations: expected 1 or more, got {iterations}")
    if logits.shape[-1] > MAX_CHANNELS:
        raise ValueError(
            f"logits: the Triton kernels take at most {MAX_CHANNELS} rows, got {logits.shape[-1]}: use 'reference'"
        )
    expect_dtypes(logits=logits)
    return sinkhorn_op(logits, iterations)
