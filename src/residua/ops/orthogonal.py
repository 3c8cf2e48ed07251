"""Orthogonal mixing of n streams: Cayley rotations, Householder reflections, and a gate between the two.

Shapes: a state X has n rows of width d, `(..., n, d)`; directions u, v, k lie in R^n, `(..., n)`; beta and gamma are
`(...)`. Leading axes of the coefficients broadcast against the leading axes of the state, so that one operator can
serve a whole sequence. Computed in at least float32. Sources: arXiv 2605.06729 (exact Cayley, gate), arXiv 2602.18308
(iterative Cayley).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from residua.ops.precision import at_least_float32, dot, promote, without_autocast
from residua.ops.shapes import expand_leading, expect_shape
from residua.ops.streams import hyper_mix

CayleyStart = Literal["linear", "identity"]


def _sheared(u: Tensor, v: Tensor) -> Tensor:
    """Return w = v - s u with the s that makes w . u = 0. For any s, u w^T - w u^T = u v^T - v u^T, which is A.

    With v in place of w, mu^2 = |u|^2 |v|^2 - (u . v)^2 and A^2 would lose digits to cancellation if u and v are almost
    parallel. The operator does not depend on s, so no gradient has to flow through s.
    """
    for _ in range(2):  # the second pass removes the remainder that rounding left
        with torch.no_grad():
            s = dot(u, v) / dot(u, u).clamp_min(torch.finfo(u.dtype).tiny)
        v = v - s.unsqueeze(-1) * u
    return v


def _scaled(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return u / s, w / t and s t: w as in `_sheared`, s and t their lengths, or 1 for 0. A is s t times theirs.

    The fourth powers of long directions would overflow, and their gradients vanish before that.
    """
    w = _sheared(u, v)
    with torch.no_grad():  # Q and its angle do not depend on s and t
        s, t = (torch.where(x > 0, x, 1.0) for x in (dot(u, u).sqrt(), dot(w, w).sqrt()))
        product = (s * t).clamp_max(torch.finfo(u.dtype).max)
    return u / s.unsqueeze(-1), w / t.unsqueeze(-1), product


def _rotation(u: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return L and R, both (..., n, 2), with Q = I + L R^T."""
    _expect_directions(u.shape[-1], v=v)
    u, w, product = _scaled(u, v)
    h, a, b, c = beta / 2, dot(u, u), dot(w, w), dot(u, w)  # 1, 1 and 0, but for rounding, zeros and gradients
    with torch.no_grad():  # of h s t = q / r neither part is large
        tangent = h.abs() * product * (a * b).sqrt()
        r = 1 / tangent.clamp_min(1)
        scale = torch.where(tangent > 1, 1 / h.abs(), product)
    q = h * scale
    a, b, c = q * a, q * b, q * c
    # Q = I - step A + step h A^2, A = u w^T - w u^T, A^2 = c (u w^T + w u^T) - b u u^T - a w w^T, step = 2 h / Delta
    double = (2 / (r.square() + a * b - c.square())).unsqueeze(-1)
    qu, qw = q.unsqueeze(-1) * u, q.unsqueeze(-1) * w
    from_u = double * ((c - r).unsqueeze(-1) * qw - b.unsqueeze(-1) * qu)
    from_w = double * ((c + r).unsqueeze(-1) * qu - a.unsqueeze(-1) * qw)
    u, w = torch.broadcast_tensors(u, w)
    return torch.stack([u, w], -1), torch.stack([from_u, from_w], -1)


def _expect_directions(n: int, **directions: Tensor) -> None:
    for name, x in directions.items():
        expect_shape(name, x, (*x.shape[:-1], n), "(..., n)")


def _matrix(left: Tensor, right: Tensor) -> Tensor:
    """Return I + L R^T, (..., n, n)."""
    identity = torch.eye(left.shape[-2], dtype=left.dtype, device=left.device)
    with without_autocast(left.device):
        return identity + left @ right.mT


def _updated(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return (I + L R^T) x. x: (..., n, d), left and right: (..., n, r)."""
    if x.shape[-2] <= 4:
        # One product with a matrix this small is faster than two with its factors.
        return hyper_mix(x, _matrix(left, right))
    wide, left, right = promote(x, left, right)
    sizes = left.shape[-2:]
    left, right = (expand_leading("coefficients", part, x.shape[:-2], sizes, "(..., n, r)") for part in (left, right))
    with without_autocast(x.device):
        return (wide + left @ (right.mT @ wide)).to(x.dtype)


def cayley(u: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Q = (I + M)^{-1} (I - M) with M = beta/2 A, A = u v^T - v u^T: a rotation of the plane of u and v, exactly.

    In closed form, with h = beta/2 and Delta = 1 + h^2 mu^2, mu^2 = |u|^2 |v|^2 - (u . v)^2:
    Q = I - (2h/Delta) A + (2h^2/Delta) A^2. Orthogonal with determinant 1 for every u, v and beta; I if u and v are
    parallel or beta = 0. u, v: (..., n), beta: (...). Returns (..., n, n) in the widest dtype of the three.
    The operator is that of arXiv 2605.06729; the closed form is derived from it.
    """
    dtype = torch.promote_types(torch.promote_types(u.dtype, v.dtype), beta.dtype)
    left, right = _rotation(*promote(u, v, beta))
    return _matrix(left, right).to(dtype)


def cayley_apply(x: Tensor, u: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Q X for the Q of `cayley(u, v, beta)` without forming it, in O(n d). x: (..., n, d); returns its dtype."""
    _expect_directions(x.shape[-2], u=u, v=v)
    return _updated(x, *_rotation(*promote(u, v, beta)))


def cayley_angle(u: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return the angle 2 arctan(beta mu / 2) in (-pi, pi) radians by which `cayley(u, v, beta)` turns u towards v.

    Q has the eigenvalues e^{+-i angle}, and 1 (n - 2 times); the angle pi, eigenvalue -1, is never reached.
    u, v: (..., n), beta: (...). Returns (...) in the widest dtype. mu = sqrt(|u|^2 |v|^2 - (u . v)^2) has a kink where
    u and v are parallel; its derivative there is taken as 0.
    """
    dtype = torch.promote_types(torch.promote_types(u.dtype, v.dtype), beta.dtype)
    u, v, beta = promote(u, v, beta)
    _expect_directions(u.shape[-1], v=v)
    u, w, product = _scaled(u, v)
    square = dot(u, u) * dot(w, w) - dot(u, w).square()
    # sqrt has an infinite derivative at 0; the inner where keeps it out of the backward pass.
    mu = product * torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
    return (2 * torch.arctan(beta * mu / 2)).to(dtype)


def cayley_transform(w: Tensor, alpha: float = 1.0) -> Tensor:
    """Y = (I - alpha/2 W)^{-1} (I + alpha/2 W) by a solve: orthogonal for every skew W, never with eigenvalue -1.

    w: (..., n, n), skew. Returns the same shape and dtype. arXiv 2602.18308; the sign of W is opposite to the sign
    of A in `cayley`.
    """
    expect_shape("w", w, (*w.shape[:-1], w.shape[-2]), "(..., n, n)")
    half = at_least_float32(w) * (alpha / 2)
    identity = torch.eye(w.shape[-1], dtype=half.dtype, device=w.device)
    return torch.linalg.solve(identity - half, identity + half).to(w.dtype)


def iterative_cayley(w: Tensor, alpha: float = 0.1, steps: int = 2, start: CayleyStart = "linear") -> Tensor:
    """Iterate Y <- I + alpha/2 W (I + Y) `steps` times; the fixed point is `cayley_transform(w, alpha)`.

    Y starts from I + alpha W (`linear`, arXiv 2602.18308) or from I (`identity`, the reflection experiment of
    arXiv 2605.06729). The result is orthogonal in the limit of many steps. The iteration converges only for
    alpha mu < 2, where i mu is the largest eigenvalue of W. w: (..., n, n), skew. Returns the same shape and dtype;
    computed in at least float32. Raises ValueError for other shapes, starts and negative steps.
    """
    expect_shape("w", w, (*w.shape[:-1], w.shape[-2]), "(..., n, n)")
    if start not in get_args(CayleyStart):
        raise ValueError(f"start must be 'linear' or 'identity', got {start!r}")
    if steps < 0:
        raise ValueError(f"steps must be 0 or more, got {steps}")
    wide = at_least_float32(w)
    identity = torch.eye(w.shape[-1], dtype=wide.dtype, device=w.device)
    y = identity + alpha * wide if start == "linear" else identity.expand_as(wide)
    with without_autocast(w.device):
        for _ in range(steps):
            y = identity + alpha / 2 * (wide + wide @ y)
    return y.to(w.dtype)


def householder(x: Tensor, k: Tensor, beta: Tensor | float = 2.0) -> Tensor:
    """H X = X - beta k (k^T X) on the n streams; with beta = 2 and |k| = 1 it is the reflection that flips k.

    x: (..., n, d), k: (..., n), beta: a number or (...). Returns the dtype of x. The same operator as
    `delta_operator(k, beta)`, with one k for all d features. arXiv 2605.06729.
    """
    _expect_directions(x.shape[-2], k=k)
    if isinstance(beta, Tensor):
        k, beta = promote(k, beta)
        beta = beta.unsqueeze(-1)
    else:
        k = at_least_float32(k)
    return _updated(x, k.unsqueeze(-1), (-beta * k).unsqueeze(-1))


def hybrid(x: Tensor, u: Tensor, v: Tensor, beta: Tensor, k: Tensor, gamma: Tensor) -> Tensor:
    """G X = gamma Q X + (1 - gamma) (X - 2 k k^T X), |k| = 1: the gate between rotation and reflection.

    Q is `cayley(u, v, beta)`. G is orthogonal only for gamma = 0 and 1: |G^T G - I|_2 = 4 gamma (1 - gamma), the
    singular values lie in [|2 gamma - 1|, 1], and G is singular for gamma = 1/2. x: (..., n, d), u, v, k: (..., n),
    beta, gamma: (...). Returns the dtype of x, in O(n d). arXiv 2605.06729.
    """
    _expect_directions(x.shape[-2], u=u, v=v, k=k)
    u, v, beta, k, gamma = promote(u, v, beta, k, gamma)
    left, right = _rotation(u, v, beta)
    gate = gamma.unsqueeze(-1)
    parts = torch.broadcast_tensors(left[..., 0], left[..., 1], k)
    weights = torch.broadcast_tensors(gate * right[..., 0], gate * right[..., 1], 2 * (gate - 1) * k)
    return _updated(x, torch.stack(parts, -1), torch.stack(weights, -1))


def gate_penalty(gamma: Tensor) -> Tensor:
    """4 gamma (1 - gamma), which is |G^T G - I|_2 of `hybrid`: 0 for a gate of 0 or 1, and 1 for 1/2.

    It is largest at 1/2, so a gate of exactly 1/2 has gradient 0. Same shape and dtype as gamma. arXiv 2605.06729.
    """
    wide = at_least_float32(gamma)
    return (4 * wide * (1 - wide)).to(gamma.dtype)
