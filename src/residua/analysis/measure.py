"""What is measured where a forward pass goes through one connection, for every family of schemes.

All take a `Passage` of one sequence (batch 1) and return tensors with one row for each of its T tokens, by the names
under which `Trace.values` keeps them for all sublayers.
"""

import math
from typing import Any

import torch
from torch import Tensor

from residua.analysis.spectrum import orthogonality_error
from residua.analysis.watch import Passage
from residua.connections.deep_delta import DeltaCoefficients
from residua.connections.mhc import SplitConnection
from residua.ops import at_least_float32, cayley_angle, hybrid, hyper_read, unit


def measured(passage: Passage, family: str) -> dict[str, Tensor]:
    """Norms, coefficients and what they did; the keys depend on the scheme alone, whose `Scheme.family` is given."""
    found = {
        "input_norm": norm(passage.before),
        "output_norm": norm(passage.y),
        "change_norm": norm(at_least_float32(passage.after) - at_least_float32(passage.before)),
    }
    if family == "delta":
        return found | delta(passage)
    if family == "streams":
        return found | mixing(passage)
    if family == "geometric":
        return found | (blend(passage) if hasattr(passage.carry.coefficients, "gamma") else erasure(passage))
    return found


def norm(state: Tensor) -> Tensor:
    """The Frobenius norm of every token: (1, T, ...) -> (T)."""
    return at_least_float32(state)[0].flatten(1).norm(dim=-1)


def gates(passage: Passage) -> dict[str, Tensor]:
    """The gates alone, beta of a Householder shortcut and gamma, (batch, T) each; empty for other schemes."""
    coefficients = passage.carry.coefficients
    if isinstance(coefficients, DeltaCoefficients):
        return {"beta": passage.connection.completed(passage.y, coefficients).beta}
    name = "gamma" if hasattr(coefficients, "gamma") else "beta"
    return {name: getattr(coefficients, name)} if hasattr(coefficients, name) else {}


def delta(passage: Passage) -> dict[str, Tensor]:
    """Every form of the delta write as X + beta k (v^T - k^T X), with |k| = 1 up to `k_norm`'s eps.

    The first version's I - beta k k^T / (k^T k + eps) and beta k v^T are this with k / sqrt(k^T k + eps) and
    sqrt(k^T k + eps) v.
    """
    connection, scheme = passage.connection, passage.connection.scheme
    beta, v, k = (at_least_float32(x) for x in connection.completed(passage.y, passage.carry.coefficients))
    if scheme.operator == "unit":
        k = unit(k, k_norm=scheme.k_norm, eps=scheme.k_eps)
    else:
        length = (k.square().sum(-1, keepdim=True) + scheme.k_eps).sqrt()
        k, v = k / length, length * v
    streams = passage.before if scheme.has_stream_axis else passage.before.unsqueeze(-2)
    readout = (at_least_float32(streams) * k.unsqueeze(-2)).sum(-1)
    return {
        "input_norm": norm(connection.compressor(streams)),
        "beta": beta[0],
        "readout": readout[0],
        "target": v[0],
        "erase_norm": beta[0] * readout[0].norm(dim=-1),
        "write_norm": beta[0] * v[0].norm(dim=-1),
        "discrepancy_norm": (v - readout)[0].norm(dim=-1),
        "direction": k[0],
    }


def erasure(passage: Passage) -> dict[str, Tensor]:
    """X - beta k (k^T X) of the pooled Householder shortcut, with one k for the whole width; nothing is written."""
    beta, k = (each_token(at_least_float32(c), passage.y) for c in passage.carry.coefficients)
    readout = (at_least_float32(passage.before)[0] * k).sum(-1, keepdim=True)
    return {
        "input_norm": norm(passage.carry.residual),
        "beta": beta,
        "readout": readout,
        "erase_norm": beta * readout.norm(dim=-1),
        "direction": k,
    }


def mixing(passage: Passage) -> dict[str, Tensor]:
    """h_pre, h_post and h_res; a mapping that a connection leaves out is what its leaving out amounts to."""
    h_pre, h_res, h_post = passage.carry.coefficients
    split = isinstance(passage.connection, SplitConnection)
    streams = passage.connection.pieces(passage.before) if split else passage.before
    n = streams.shape[-2]
    identity = torch.eye(n, dtype=h_post.dtype, device=h_post.device)
    h_pre = identity[0] if h_pre is None else h_pre
    h_res = identity if h_res is None else h_res
    h_pre, h_res, h_post = (each_token(h, passage.y, axes) for h, axes in ((h_pre, 1), (h_res, 2), (h_post, 1)))
    # The mixture of the pieces is repeated as often as there are pieces.
    width = math.sqrt(n) if split else 1.0
    return {
        "input_norm": width * norm(hyper_read(streams, h_pre[None])),
        "h_pre": h_pre,
        "h_post": h_post,
        "h_res": h_res,
        "row_error": (h_res.sum(-1) - 1).abs().amax(-1),
        "column_error": (h_res.sum(-2) - 1).abs().amax(-1),
        "orthogonality_error": orthogonality_error(h_res),
    }


def blend(passage: Passage) -> dict[str, Tensor]:
    """gamma Q + (1 - gamma) H as the n x n matrix h_res, the rotation's angle, and the router where there is one."""
    coefficients, g = passage.carry.coefficients, passage.carry.residual
    n = coefficients.k.shape[-1]
    gamma, beta, k, u, v = (at_least_float32(c) for c in coefficients[:5])
    identity = torch.eye(n, dtype=gamma.dtype, device=gamma.device).expand(*passage.y.shape[:2], n, n)
    h_res = hybrid(identity, u, v, beta, k, gamma)[0]
    found = {
        "input_norm": norm(g),
        "gamma": each_token(gamma, passage.y),
        "cayley_beta": each_token(beta, passage.y),
        "angle": each_token(cayley_angle(u, v, beta), passage.y),
        "h_res": h_res,
        "orthogonality_error": orthogonality_error(h_res),
    }
    if not hasattr(coefficients, "h_pre"):
        return found
    h_pre, h_post = coefficients.h_pre, coefficients.h_post
    h_pre = gamma.new_full((n,), 1 / n) if h_pre is None else h_pre
    h_post = gamma.new_ones(n) if h_post is None else h_post
    h_pre, h_post = each_token(h_pre, passage.y, 1), each_token(h_post, passage.y, 1)
    return found | {"input_norm": norm(hyper_read(g, h_pre[None])), "h_pre": h_pre, "h_post": h_post}


def each_token(coefficient: Tensor, y: Tensor, axes: int | None = None) -> Tensor:
    """A row for each token of y: (1, T, dim), also of a coefficient for all of them, with `axes` axes of its own."""
    own = coefficient.shape[coefficient.dim() - axes :] if axes is not None else coefficient.shape[2:]
    return coefficient.expand(1, y.shape[1], *own)[0]


def left_out(coefficients: Any) -> list[str]:
    """The mappings that this connection leaves out, because they could not change anything."""
    return [name for name in ("h_pre", "h_res", "h_post") if getattr(coefficients, name, 0) is None]
