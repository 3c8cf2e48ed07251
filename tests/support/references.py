"""What second implementations of schemes share: how they are compared with ours, norms, and the logits of a token."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from residua import Stream
from support.stream_cases import DIM
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal


def assert_computes(
    stream: Stream, reference: Callable[..., Tensor], *options: object, tokens: tuple[int, int] = (2, 3), dim: int = DIM
) -> None:
    """Check that a stream gives the values of `reference(stream, x, sublayers, *options)`, and the gradients of its
    parameters and of x, (*tokens, dim).
    """
    sublayers = bare_sublayers(dim, len(stream.connections))
    leaves = [normal(*tokens, dim).requires_grad_(), *stream.parameters()]
    ours, theirs = stream(leaves[0], sublayers), reference(stream, leaves[0], sublayers, *options)
    assert_close(ours, theirs)
    grad = normal(*tokens, dim, seed=7)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad), strict=True):
        assert_close(a, b)


def by_token(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reference for x: (batch, seq, dim), from one for a token, (dim,)."""

    def of_all(stream: Stream, x: Tensor, *arguments: object) -> Tensor:
        return torch.stack([reference(stream, token, *arguments) for token in x.flatten(0, 1)]).view_as(x)

    return of_all


def rms_norm(x: Tensor, gain: Tensor | float = 1.0, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def logits_of_token(part, rows: Tensor) -> Tensor:
    """The logits of `StreamLogits` for one token, before they are split: rows (n, dim)."""
    flat = rows.reshape(-1)
    gain = 1 if part.gain is None else part.gain.weight
    scales = torch.cat([scale.expand(size) for scale, size in zip(part.scale, part.sizes)])
    return scales * (part.project.weight @ rms_norm(flat, gain)) + part.bias
