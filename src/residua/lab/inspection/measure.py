"""Measure one connection of a forward pass, for any scheme.

The functions take data of one sequence (batch 1) and return tensors with one row for each of its T tokens, keyed as in
`Trace.values`. Only the connection knows the structure of the state.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from residua.connections import Mixing, RankOne
from residua.connections.base import State
from residua.lab.inspection.spectrum import orthogonality_error
from residua.lab.inspection.watch import ConnectionRecord
from residua.ops import at_least_float32


def measured(record: ConnectionRecord, shortcut: RankOne | Mixing | None) -> dict[str, Tensor]:
    """Return the norms and the values of the shortcut of one record. The keys depend only on the connection."""
    values = {"output_norm": norm(record.y), "change_norm": change(record.before, record.after)}
    if record.normed is not None:
        values["input_norm"] = norm(record.normed)
    if isinstance(shortcut, RankOne):
        return values | rank_one(shortcut, record.y)
    return values if shortcut is None else values | mixing(shortcut, record.y)


def stream_similarity(streams: Tensor) -> Tensor:
    """Return the mean cosine between different streams of a token: (1, T, n, dim) -> (T); 1 for copies.

    A stream of zeros has the cosine 0 with all others.
    """
    directions = torch.nn.functional.normalize(at_least_float32(streams[0]), dim=-1)
    cosines = directions @ directions.mT
    n = streams.shape[-2]
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1))


def norm(state: State) -> Tensor:
    """Return the Frobenius norm of each token's part of the state: (1, T, ...) -> (T)."""
    norms = [at_least_float32(leaf)[0].flatten(1).norm(dim=-1) for leaf in tree_leaves(state)]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm(dim=0)


def change(before: State, after: State) -> Tensor:
    """Return |X' - X| of each token, (T). A tensor that is only in X', such as a new source, counts in full."""
    earlier = tree_leaves(before)
    return norm(
        [
            at_least_float32(leaf) - at_least_float32(earlier[i]) if i < len(earlier) else leaf
            for i, leaf in enumerate(tree_leaves(after))
        ]
    )


def gates(shortcut: RankOne | Mixing | None) -> dict[str, Tensor]:
    """Return the gates of a shortcut by name, (batch, T) each: beta, or the gates of a mixing matrix."""
    return {"beta": shortcut.beta} if isinstance(shortcut, RankOne) else dict(shortcut.gates) if shortcut else {}


def rank_one(shortcut: RankOne, y: Tensor) -> dict[str, Tensor]:
    """Return the gate, readout and direction of X - beta (X k) k^T, and the write along k if there is one."""
    beta, k, readout = (
        each_token(x, y, axes) for x, axes in ((shortcut.beta, 0), (shortcut.k, 1), (shortcut.readout, 1))
    )
    values = {"beta": beta, "readout": readout, "erase_norm": beta * readout.norm(dim=-1), "direction": k}
    if shortcut.v is not None:
        v = each_token(shortcut.v, y, 1)
        values |= {
            "target": v,
            "write_norm": beta * v.norm(dim=-1),
            "discrepancy_norm": (v - readout).norm(dim=-1),
        }
    return values if shortcut.read_share is None else values | {"compress_share": shortcut.read_share}


def mixing(shortcut: Mixing, y: Tensor) -> dict[str, Tensor]:
    """Return the mixing matrix, its gates, its errors, and the weights that read and write the rows."""
    h_res = each_token(shortcut.h_res, y, 2)
    values = {
        "h_res": h_res,
        "row_error": (h_res.sum(-1) - 1).abs().amax(-1),
        "column_error": (h_res.sum(-2) - 1).abs().amax(-1),
        "orthogonality_error": orthogonality_error(h_res),
    }
    for name in ("h_pre", "h_post"):
        if getattr(shortcut, name) is not None:
            values[name] = each_token(getattr(shortcut, name), y, 1)
    return values | {name: each_token(gate, y, 0) for name, gate in shortcut.gates.items()}


def each_token(coefficient: Tensor, y: Tensor, axes: int) -> Tensor:
    """Return a coefficient with one row per token of y, (1, T, dim), expanded if tokens share it.

    axes: the number of the coefficient's axes after (batch, seq).
    """
    inner = coefficient.shape[coefficient.dim() - axes :]
    return at_least_float32(coefficient).expand(1, y.shape[1], *inner)[0]
