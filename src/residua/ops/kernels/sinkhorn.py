"""Sinkhorn's iteration in Triton. The forward pass moves 2 n^2 numbers per token, the backward pass 3 n^2.

In the backward pass, a program also writes 2 n numbers per iteration and reads them back.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.launch import empty, launch, operator, runs

# One program, of one warp, holds the matrices of some tokens in registers for all iterations.
#
# Autograd would keep every step for the backward pass, 2 n^2 numbers per iteration, although the streams have only n d.
# Here only the logits are kept. The backward kernel runs the iterations again and stores the divisors of each step in
# scratch memory. It multiplies the matrix after a step by the divisors to get the matrix before the step.
NUMBERS = 256  # numbers in the matrices of one program


@triton.jit
def load_matrices(start, token, tokens, row, column, N: tl.constexpr):
    """Load (tokens, rows, columns) in float32, with zeros outside the tokens and outside (N, N)."""
    inside = (token < tokens) & (row < N) & (column < N)
    return tl.load(start + (token * N + row) * N + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_matrices(start, matrices, token, tokens, row, column, N: tl.constexpr):
    inside = (token < tokens) & (row < N) & (column < N)
    tl.store(start + (token * N + row) * N + column, matrices.to(start.dtype.element_ty), mask=inside)


@triton.jit
def without_padding(log, row, column, N: tl.constexpr):
    """Set the logarithms outside (N, N) to -inf, so that the matrices are zero there."""
    return tl.where((row < N) & (column < N), log, float("-inf"))


@triton.jit
def divided(log, line, AXIS: tl.constexpr, N: tl.constexpr):
    """Return log - logsumexp(log) along an axis, computed as log - largest - log(total) with `total` at least 1.

    `line`: the indices of the rows or columns that are summed; indices from N on are padding, without a largest entry.
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
    sums = divisors + token * iterations * 2 * N
    log = without_padding(load_matrices(logits, token, tokens, row, column, N), row, column, N)
    for i in range(iterations):
        log, largest, total = divided(log, row, 2, N)
        # From the second step on no entry exceeds 1. The first divisor, which may have any size, is not used.
        tl.store(sums + 2 * i * N + row, tl.exp(tl.minimum(largest, 1.0)) * total, mask=of_rows)
        log, largest, total = divided(log, column, 1, N)
        tl.store(sums + (2 * i + 1) * N + column, tl.exp(largest) * total, mask=of_columns)
    tl.debug_barrier()  # other threads may read these sums

    after = tl.exp(log)
    g = load_matrices(grad, token, tokens, row, column, N) * after
    for back in range(iterations):
        i = iterations - 1 - back
        g -= after * tl.sum(g, 1, keep_dims=True)
        after *= tl.load(sums + (2 * i + 1) * N + column, mask=of_columns, other=0.0)
        g -= after * tl.sum(g, 2, keep_dims=True)
        after *= tl.load(sums + 2 * i * N + row, mask=of_rows, other=0.0)
    store_matrices(grad_logits, g, token, tokens, row, column, N)


def cut(n: int, tokens: int) -> tuple[int, int, int]:
    """Return the number of programs, the power of two that n is padded to, and the tokens of a program."""
    rows = triton.next_power_of_2(n)
    share = max(1, NUMBERS // (rows * rows))
    return triton.cdiv(tokens, share), rows, share


@operator("sinkhorn")
def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Compute `ops.sinkhorn`. It has only a first derivative, that of the iterations, not of their limit."""
    matrices = empty(logits)
    if runs(logits):
        n = logits.shape[-1]
        tokens = logits.numel() // (n * n)
        programs, rows, share = cut(n, tokens)
        arguments = (logits.contiguous(), matrices, tokens, iterations, n, rows, share)
        launch(_forward, (programs,), *arguments, num_warps=1)
    return matrices


@operator("sinkhorn_backward")
def sinkhorn_backward(grad: Tensor, logits: Tensor, iterations: int) -> Tensor:
    grad_logits = empty(logits)
    if runs(logits):
        n = logits.shape[-1]
        tokens = logits.numel() // (n * n)
        programs, rows, share = cut(n, tokens)
        divisors = empty(logits, (tokens, iterations, 2, n), torch.float32)
        inputs = (grad.contiguous(), logits.contiguous(), divisors, grad_logits)
        launch(_backward, (programs,), *inputs, tokens, iterations, n, rows, share, num_warps=1)
    return grad_logits


def _setup_context(ctx: Any, inputs, output):
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _gradients(ctx: Any, grad):
    return sinkhorn_backward(grad, *ctx.saved_tensors, ctx.iterations), None


sinkhorn.register_autograd(_gradients, setup_context=_setup_context)
