"""Spectra of shortcuts and of their products over depth, alignment and effective rank of directions.

There are S sublayers and P tokens. All results are computed in float64. If a value is not finite, the results of its
token are NaN from its sublayer on.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops import compose


class Products(NamedTuple):
    """Results for the product M = M_l ... M_0 of shortcuts, for every l: (S, P) each.

    determinant: that of M. singular_max, singular_min: the largest and the smallest singular value of M. defect: the
    spectral norm of M^T M - I, which is 0 for an isometry. singular_values: (P, r), those of the product of all S
    shortcuts.
    """

    determinant: Tensor
    singular_max: Tensor
    singular_min: Tensor
    defect: Tensor
    singular_values: Tensor


def rank_one_products(k: Tensor, beta: Tensor) -> Products:
    """Analyse the products of the shortcuts I - beta k k^T of S delta writes on R^d. k: (S, P, d), beta: (S, P).

    `ops.compose` gives a product in the WY form I - K^T T K, which is the identity outside the span of the k's. With
    the QR decomposition K^T = Q R, the small matrix I - R T R^T therefore has all singular values of the product,
    except d - min(S, d) that are 1. det M_l = prod(1 - beta |k|^2).
    """
    k, beta = k.double(), beta.double()
    broken = ~(k.isfinite().all(-1) & beta.isfinite())
    k, beta = k.masked_fill(broken.unsqueeze(-1), 0.0), beta.masked_fill(broken, 0.0)
    sublayers, _, dim = k.shape
    directions = k.transpose(0, 1)
    triangle = torch.linalg.qr(directions.mT, mode="r").R  # (P, r, S), upper triangular: column l uses rows up to l
    steps = compose(directions, beta.T).t  # the leading l x l block is T for the first l writes
    largest, smallest, defect, values = [], [], [], None
    for count in range(1, sublayers + 1):
        size = min(count, dim)
        r = triangle[:, :size, :count]
        identity = torch.eye(size, dtype=r.dtype, device=r.device)
        values = _singular_values(identity - r @ steps[:, :count, :count] @ r.mT)
        largest.append(values[:, 0].clamp_min(1.0) if dim > size else values[:, 0])
        smallest.append(values[:, -1].clamp_max(1.0) if dim > size else values[:, -1])
        defect.append((values.square() - 1).abs().amax(-1))
    determinant = (1 - beta * k.square().sum(-1)).cumprod(0)
    return _broken(Products(determinant, *map(torch.stack, (largest, smallest, defect)), values), broken)


def matrix_products(m: Tensor) -> Products:
    """Analyse the products of S shortcuts that are n x n matrices; m: (S, P, n, n), with the target stream first."""
    m = m.double()
    broken = ~m.isfinite().all(-1).all(-1)
    identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    m = torch.where(broken[..., None, None], identity, m)
    product, rows = identity, []
    for shortcut in m:
        product = shortcut @ product
        values = _singular_values(product)
        rows.append((torch.linalg.det(product), values[:, 0], values[:, -1], (values.square() - 1).abs().amax(-1)))
    return _broken(Products(*map(torch.stack, zip(*rows)), values), broken)


def _singular_values(m: Tensor) -> Tensor:
    """Return the singular values of matrices, (..., n, n) -> (..., n), NaN for one with a number that is not finite."""
    broken = ~m.isfinite().flatten(-2).all(-1)
    values = torch.linalg.svdvals(m.masked_fill(broken[..., None, None], 0.0))
    return values.masked_fill(broken.unsqueeze(-1), torch.nan)


def _broken(products: Products, broken: Tensor) -> Products:
    """Set the results of each token to NaN from its first `broken` sublayer on; broken: (S, P), boolean."""
    since = broken.cumsum(0) > 0
    *depth, last = products
    return Products(*(x.masked_fill(since, torch.nan) for x in depth), last.masked_fill(since[-1, :, None], torch.nan))


def orthogonality_error(m: Tensor) -> Tensor:
    """Return the spectral norm of M^T M - I: (..., n, n) -> (...)."""
    m = m.double()
    broken = ~m.isfinite().all(-1).all(-1)
    m = m.masked_fill(broken[..., None, None], 0.0)
    defect = m.mT @ m - torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    return torch.linalg.eigvalsh(defect).abs().amax(-1).masked_fill(broken, torch.nan)


def cosines(k: Tensor) -> Tensor:
    """Return cos(k_i, k_j) for the directions of S sublayers at each token: (S, P, d) -> (P, S, S); 0 if k = 0."""
    k = k.double().transpose(0, 1)
    k = k / k.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(k.dtype).tiny)
    return k @ k.mT


def alignment(k: Tensor) -> Tensor:
    """Return the mean of |cos(k_i, k_j)| over the tokens: (S, P, d) -> (S, S)."""
    return cosines(k).abs().mean(0)


def effective_rank(k: Tensor) -> Tensor:
    """Return the effective rank of the directions of S sublayers at each token (Roy and Vetterli 2007).

    It is exp of the entropy of the eigenvalues of `cosines`, normalised to sum 1: 1 if all directions are parallel,
    min(S, d) if they fill the space evenly. Directions k = 0 do not count; if all are 0, the rank is 0.
    k: (S, P, d) -> (P).
    """
    gram = cosines(k)
    broken = ~gram.isfinite().all(-1).all(-1)
    eigenvalues = torch.linalg.eigvalsh(gram.masked_fill(broken[:, None, None], 0.0)).clamp_min(0.0)
    total = eigenvalues.sum(-1, keepdim=True)
    shares = eigenvalues / total.masked_fill(total == 0, 1.0)
    rank = torch.special.entr(shares).sum(-1).exp().masked_fill(total.squeeze(-1) == 0, 0.0)
    return rank.masked_fill(broken, torch.nan)
