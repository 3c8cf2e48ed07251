"""Rotations, reflections and the gate between them: the theory as properties in float64.

The references are dense: a solve for the Cayley transform, outer products for the reflection.
"""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from residua.ops import (
    cayley,
    cayley_angle,
    cayley_apply,
    cayley_transform,
    delta_operator,
    gate_penalty,
    householder,
    hybrid,
    iterative_cayley,
)
from support.delta_cases import direction, generator, leaves, normal, outer
from support.tolerances import assert_close

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 7)  # up to 4 streams and beyond: two ways to apply an operator
lengths = st.one_of(st.sampled_from([0.0, 1e-8, 1.0]), st.floats(1e-3, 10.0))
betas = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(-30.0, 30.0))
gammas = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 1.0))


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


class Plane(NamedTuple):
    u: Tensor
    v: Tensor
    beta: Tensor

    @property
    def skew(self) -> Tensor:
        return outer(self.u, self.v) - outer(self.v, self.u)

    @property
    def mu(self) -> Tensor:
        """The area of the parallelogram of u and v, from the minors: no cancellation."""
        return (self.skew.square().sum((-2, -1)) / 2).sqrt()

    @property
    def half_tangent(self) -> Tensor:
        return self.beta * self.mu / 2

    def solved(self) -> Tensor:
        m = self.beta[..., None, None] / 2 * self.skew
        return torch.linalg.solve(eye(len(self.u)) + m, eye(len(self.u)) - m)


@st.composite
def planes(draw, *, n=sizes, gates=betas, length=lengths) -> Plane:
    """u and v of any length, sometimes parallel or almost so."""
    n = draw(n)
    g = generator(draw(seeds))
    u = draw(length) * direction(g, n)
    v = draw(length) * direction(g, n)
    nearness = draw(st.sampled_from([None, None, None, 0.0, 1e-9, 1e-4]))
    if nearness is not None:
        v = draw(st.floats(-2.0, 2.0)) * u + nearness * v
    return Plane(u, v, scalar(draw(gates)))


def lifted(op, n: int, d: int) -> Tensor:
    """The matrix of an operator on R^{n d}, column by column."""
    return op(eye(n * d).unflatten(-1, (n, d))).flatten(-2).mT.contiguous()


# The exact Cayley transform


@given(planes())
def test_closed_form_is_the_solve(plane):
    assert_close(cayley(*plane), plane.solved())


@given(planes(), st.integers(1, 5), seeds)
def test_matrix_free_application_is_the_product(plane, d, seed):
    x = normal(generator(seed), 2, len(plane.u), d)
    assert_close(cayley_apply(x, *plane), plane.solved() @ x)


@given(planes(gates=st.floats(-1e6, 1e6), length=st.floats(0.0, 1e4)))
def test_orthogonal_unconditionally_with_determinant_one(plane):
    """No condition on u, v or beta: the angle comes as near to pi as the numbers allow, Q stays a rotation."""
    q = cayley(*plane)
    assert_close(q.mT @ q, eye(len(plane.u)))
    assert_close(torch.linalg.det(q), scalar(1.0))


@pytest.mark.slow
@given(planes())
def test_eigenvalues_and_angle(plane):
    """1 (n - 2 times) and e^{+-i theta}, theta = 2 arctan(beta mu / 2)."""
    angle, n = cayley_angle(*plane), len(plane.u)
    tau = plane.half_tangent
    assert_close(angle, 2 * torch.arctan(tau))
    assert angle.abs() < math.pi
    assert_close(angle.cos(), (1 - tau.square()) / (1 + tau.square()))
    values = [torch.polar(scalar(1.0), angle), torch.polar(scalar(1.0), -angle)] if n > 1 else []
    expected = torch.stack(values + [torch.ones((), dtype=torch.complex128)] * (n - len(values)))
    actual = torch.linalg.eigvals(cayley(*plane))
    actual, expected = (values[values.imag.argsort()] for values in (actual, expected))
    assert_close(actual.imag, expected.imag)
    assert_close(actual.real.sort().values, expected.real.sort().values)


@given(sizes.filter(lambda n: n > 1), betas, seeds)
def test_angle_is_from_u_towards_v(n, beta, seed):
    g = generator(seed)
    u = direction(g, n)
    v = normal(g, n)
    v = v - u.dot(v) * u
    v = v / v.norm()
    plane = Plane(u, v, scalar(beta))
    angle = cayley_angle(*plane)
    assert_close(cayley(*plane) @ u, angle.cos() * u + angle.sin() * v)


@given(planes(), st.floats(-3.0, 3.0))
def test_the_transform_has_its_symmetries(plane, shear):
    u, v, beta = plane
    q = cayley(u, v, beta)
    assert_close(cayley(u, v, -beta), q.mT)
    assert_close(cayley(v, u, beta), q.mT)
    assert_close(cayley(2 * u, v / 2, beta), q)
    assert_close(cayley(u, v + shear * u, beta), q)  # the plane and its area are all that counts
    assert_close(cayley_angle(u, v, -beta), -cayley_angle(u, v, beta))


@given(planes(), st.floats(-3.0, 3.0))
def test_parallel_directions_or_no_gate_change_nothing(plane, factor):
    u, v, beta = plane
    unchanged = eye(len(u))
    zero = torch.zeros_like(u)
    for arguments in [(u, factor * u, beta), (u, v, scalar(0.0)), (u, zero, beta), (zero, v, beta), (zero, zero, beta)]:
        assert_close(cayley(*arguments), unchanged)
        assert_close(cayley_angle(*arguments), scalar(0.0))


@given(planes(n=st.integers(3, 7)), seeds)
def test_vectors_orthogonal_to_the_plane_are_fixed(plane, seed):
    u, v, _ = plane
    basis = torch.linalg.qr(torch.stack([u, v], -1)).Q
    x = normal(generator(seed), len(u))
    x = x - basis @ (basis.mT @ x)
    assert_close(cayley(*plane) @ x, x)


@given(planes(n=st.integers(2, 7), gates=st.floats(-100.0, 100.0)))
def test_minus_one_is_never_an_eigenvalue_of_the_exact_transform(plane):
    """Q + I = 2 (I + M)^{-1}: its smallest singular value, the distance to -1, is 2 / sqrt(1 + tau^2) > 0."""
    assume(plane.half_tangent.abs() < 1e4)  # below that, rounding leaves digits to compare
    distance = torch.linalg.svdvals(cayley(*plane) + eye(len(plane.u))).min()
    expected = 2 / (1 + plane.half_tangent.square()).sqrt()
    assert_close(distance, expected)
    assert distance > 0


@given(sizes, seeds, st.floats(-3.0, 3.0), st.floats(0.0, 10.0))
def test_transform_of_any_skew_matrix_is_orthogonal(n, seed, alpha, scale):
    w = scale * normal(generator(seed), n, n)
    w = w - w.mT
    y = cayley_transform(w, alpha)
    assert_close(y.mT @ y, eye(n))
    assert_close(torch.linalg.det(y), scalar(1.0))
    assert torch.linalg.svdvals(y + eye(n)).min() > 0
    mu = torch.linalg.eigvals(w).imag
    assert_close(torch.linalg.eigvals(y).angle().sort().values, (2 * torch.arctan(alpha * mu / 2)).sort().values)


# The iterated one


def skew_blocks(mu: float, n: int = 4) -> Tensor:
    """Block-diagonal skew matrix with the eigenvalues +-i mu."""
    return mu * torch.kron(eye(n // 2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64))


def two_steps(t: Tensor, start: str) -> Tensor:
    """Eigenvalue of Y after 2 steps for the eigenvalue i mu of W, t = alpha mu."""
    return torch.complex(1 - t.square() / 2, t - t**3 / 4 if start == "linear" else t)


@pytest.mark.parametrize("start", ["linear", "identity"])
@given(n=sizes, seed=seeds, alpha=st.floats(0.01, 1.0), scale=st.floats(0.0, 3.0))
def test_eigenvalues_of_two_steps(start, n, seed, alpha, scale):
    """|lambda|^2 = 1 - t^4/4 + t^6/16 from I + alpha W, and 1 + t^4/4 from I: the defect of orthogonality, exactly."""
    w = scale * normal(generator(seed), n, n)
    w = w - w.mT
    y = iterative_cayley(w, alpha, 2, start)
    values, vectors = torch.linalg.eigh(torch.complex(torch.zeros_like(w), -w))  # -i W is Hermitian
    t = alpha * values
    expected = two_steps(t, start)
    assert_close(torch.view_as_real(y.to(vectors.dtype) @ vectors), torch.view_as_real(vectors * expected))
    square = 1 - t**4 / 4 + t**6 / 16 if start == "linear" else 1 + t**4 / 4
    assert_close(expected.abs().square(), square)
    defect = torch.linalg.matrix_norm(y.mT @ y - eye(n), 2)
    assert_close(defect, (square - 1).abs().max(), factor=square.max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 4])
def test_two_steps_from_the_linear_start_can_have_the_eigenvalue_minus_one(dtype, n):
    """mu = 20, alpha = 0.1 gives t = 2: Y = -I to the last bit, which no exact transform reaches."""
    w = skew_blocks(20.0, n).to(dtype)
    assert torch.equal(iterative_cayley(w, alpha=0.1, steps=2, start="linear"), -torch.eye(n, dtype=dtype))
    exact = cayley_transform(w, alpha=0.1)
    distance = torch.linalg.svdvals(exact + torch.eye(n, dtype=dtype)).min()
    assert_close(distance, scalar(2 / math.sqrt(1 + 1**2)), dtype=dtype)


def test_two_steps_from_the_identity_never_have_the_eigenvalue_minus_one():
    """|lambda + 1|^2 = 4 - t^2 + t^4/4 >= 3, with equality at t^2 = 2, where Y x is orthogonal to x."""
    for t in [*torch.linspace(0, 10, 201).tolist(), math.sqrt(2)]:
        y = iterative_cayley(skew_blocks(t), alpha=1.0, steps=2, start="identity")
        square = torch.linalg.svdvals(y + eye(4)).min().square()
        assert_close(square, scalar(4 - t**2 + t**4 / 4))
        assert square >= 3 - 1e-12
    least = iterative_cayley(skew_blocks(math.sqrt(2)), alpha=1.0, steps=2, start="identity")
    assert_close(torch.linalg.svdvals(least + eye(4)).min().square(), scalar(3.0))
    x = normal(generator(0), 4)
    assert abs(x.dot(least @ x)) < 1e-12


@pytest.mark.parametrize("start", ["linear", "identity"])
@pytest.mark.parametrize(("t", "converges"), [(0.1, True), (1.0, True), (1.8, True), (2.2, False)])
def test_steps_converge_to_the_transform_below_t_of_two(t, converges, start):
    w = skew_blocks(t)
    exact = cayley_transform(w)
    errors = [(iterative_cayley(w, 1.0, steps, start) - exact).abs().max().item() for steps in (0, 2, 8, 400)]
    if converges:
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-12
    else:
        assert errors == sorted(errors)


def test_the_steps_equal_the_expanded_formula():
    w = normal(generator(0), 2, 3, 3)
    w = w - w.mT
    assert_close(iterative_cayley(w, 0.1, 0), eye(3) + 0.1 * w)
    assert_close(iterative_cayley(w, 0.1, 0, "identity"), eye(3).expand(2, 3, 3))
    assert_close(iterative_cayley(w, 0.1, 1, "identity"), eye(3) + 0.1 * w)
    assert_close(iterative_cayley(w, 0.1, 1), eye(3) + 0.1 * w + 0.005 * w @ w)
    assert_close(iterative_cayley(w), eye(3) + 0.05 * w @ (2 * eye(3) + 0.1 * w + 0.005 * w @ w))


# The reflection


@given(sizes, seeds, st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(-1.0, 3.0)), st.integers(1, 4))
def test_householder_equals_its_definition(n, seed, beta, d):
    g = generator(seed)
    k, x = direction(g, n), normal(g, 2, n, d)
    h = householder(eye(n), k, beta)
    assert_close(h, delta_operator(k, scalar(beta)))
    assert_close(h, householder(eye(n), k, scalar(beta)))
    assert_close(householder(eye(n), k), eye(n) - 2 * outer(k, k))
    assert_close(h, eye(n) - beta * outer(k, k))
    assert_close(householder(x, k, beta), h @ x)
    assert_close(
        torch.linalg.eigvalsh(h), torch.tensor([1 - beta] + [1.0] * (n - 1), dtype=torch.float64).sort().values
    )
    assert_close(torch.linalg.det(h), scalar(1 - beta))
    defect = h.mT @ h - eye(n)
    assert_close(defect, (beta**2 - 2 * beta) * outer(k, k))
    assert_close(torch.linalg.matrix_norm(defect, 2), scalar(abs(beta**2 - 2 * beta)))
    # |H x|^2 = |x|^2 + (beta^2 - 2 beta) (k^T x)^2, for every feature; its mean over directions of x follows
    readout = (k.unsqueeze(-1) * x).sum(-2)
    change = (beta**2 - 2 * beta) * readout.square()
    assert_close((h @ x).square().sum(-2), x.square().sum(-2) + change)
    assert_close((h.mT @ h).trace() / n, scalar(1 + (beta**2 - 2 * beta) / n))


# The gate


def gated(plane: Plane, k: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """G by the operation, and the dense Q and H."""
    n = len(k)
    g = hybrid(eye(n), *plane, k, scalar(gamma))
    return g, plane.solved(), eye(n) - 2 * outer(k, k)


@given(planes(), seeds, gammas, st.integers(1, 5))
def test_hybrid_is_the_gated_sum(plane, seed, gamma, d):
    g = generator(seed)
    n = len(plane.u)
    k, x = direction(g, n), normal(g, 2, n, d)
    _, q, h = gated(plane, k, gamma)
    actual = hybrid(x, *plane, k, scalar(gamma))
    assert_close(actual, gamma * (q @ x) + (1 - gamma) * (h @ x))
    assert_close(actual, gamma * cayley_apply(x, *plane) + (1 - gamma) * householder(x, k))


@given(planes(), seeds, gammas)
def test_penalty_is_the_spectral_defect_of_orthogonality(plane, seed, gamma):
    """|G^T G - I|_2 = 4 gamma (1 - gamma), because R = Q^T H always has the eigenvalue -1."""
    k = direction(generator(seed), len(plane.u))
    g, q, h = gated(plane, k, gamma)
    n = len(k)
    r = q.mT @ h
    assert_close(torch.linalg.det(r), scalar(-1.0))
    assert_close(g.mT @ g - eye(n), gamma * (1 - gamma) * (r + r.mT - 2 * eye(n)))
    assert_close(torch.linalg.svdvals(r + eye(n)).min(), scalar(0.0))
    assert_close(torch.linalg.matrix_norm(g.mT @ g - eye(n), 2), gate_penalty(scalar(gamma)))


@given(planes(), seeds, gammas)
def test_singular_values_of_the_hybrid(plane, seed, gamma):
    """It never expands, and always contracts one direction by |2 gamma - 1|: to nothing for gamma = 1/2."""
    k = direction(generator(seed), len(plane.u))
    values = torch.linalg.svdvals(gated(plane, k, gamma)[0])
    assert_close(values.min(), scalar(abs(2 * gamma - 1)))
    assert values.max() <= 1 + 1e-10
    assert torch.linalg.svdvals(gated(plane, k, 0.5)[0]).min() < 1e-10


@given(planes(), seeds, gammas)
def test_determinant_of_the_hybrid(plane, seed, gamma):
    """(2 gamma - 1) (gamma^2 + (1 - gamma)^2 + 2 gamma (1 - gamma) cos phi): from -1 to 1 with the gate."""
    k = direction(generator(seed), len(plane.u))
    g, q, h = gated(plane, k, gamma)
    n = len(k)
    expected = 2 * gamma - 1
    if n >= 3:
        cos_phi = ((q.mT @ h).trace().item() - (n - 3) + 1) / 2
        expected *= gamma**2 + (1 - gamma) ** 2 + 2 * gamma * (1 - gamma) * cos_phi
    assert_close(torch.linalg.det(g), scalar(expected))
    assert_close(torch.linalg.det(gated(plane, k, 1.0)[0]), scalar(1.0))
    assert_close(torch.linalg.det(gated(plane, k, 0.0)[0]), scalar(-1.0))


@given(planes(), seeds, gammas)
def test_norm_ratio_of_the_hybrid(plane, seed, gamma):
    g = generator(seed)
    k, x = direction(g, len(plane.u)), normal(g, len(plane.u))
    operator, q, h = gated(plane, k, gamma)
    agreement = (q @ x).dot(h @ x) / x.dot(x)
    ratio = (operator @ x).square().sum() / x.dot(x)
    assert_close(ratio, gamma**2 + (1 - gamma) ** 2 + 2 * gamma * (1 - gamma) * agreement)


@given(planes(n=st.integers(1, 5)), seeds, gammas, st.integers(1, 4))
def test_determinants_on_all_streams_and_features_are_powers(plane, seed, gamma, d):
    """On R^{n d} every operator acts d times: a reflection of the streams has det (-1)^d, which is +1 for even d."""
    n = len(plane.u)
    k = direction(generator(seed), n)
    rotation = lifted(lambda x: cayley_apply(x, *plane), n, d)
    reflection = lifted(lambda x: householder(x, k), n, d)
    mixture = lifted(lambda x: hybrid(x, *plane, k, scalar(gamma)), n, d)
    assert_close(rotation, torch.kron(plane.solved().contiguous(), eye(d)))
    assert_close(torch.linalg.det(rotation), scalar(1.0))
    assert_close(torch.linalg.det(reflection), scalar((-1.0) ** d))
    assert_close(torch.linalg.det(mixture), torch.linalg.det(gated(plane, k, gamma)[0]) ** d)
    # Only k times any feature is turned round: d directions, never all of them unless there is one stream.
    assert int((torch.linalg.eigvalsh(reflection) < 0).sum()) == d


@pytest.mark.parametrize("logit", [-3.0, -1.5, 0.0, 1.5, 3.0])
def test_gradient_of_the_penalty(logit):
    """Descent pushes the gate away from 1/2 and, through the sigmoid, ever more slowly towards 0 and 1."""
    z = scalar(logit).requires_grad_()
    gamma = z.sigmoid()
    of_gate, of_logit = torch.autograd.grad(gate_penalty(gamma), (gamma, z))
    assert_close(of_gate, 4 * (1 - 2 * gamma))
    assert_close(of_logit, 4 * (1 - 2 * gamma) * gamma * (1 - gamma))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(("bias", "moved"), [(0.0, 0), (1e-3, 1), (-1e-3, -1)])
def test_a_gate_of_one_half_gets_no_gradient_and_is_unstable(optimizer, bias, moved):
    """With zero weights and bias the gate stays 1/2 to the bit; the smallest bias decides where it goes."""
    w, b = torch.zeros(8, requires_grad=True), torch.tensor(bias, requires_grad=True)
    x = torch.randn(16, 8, generator=generator(0))
    steps = optimizer([w, b], lr=0.1)
    for _ in range(50):
        steps.zero_grad()
        gate_penalty((x @ w + b).sigmoid()).mean().backward()
        steps.step()
    gamma = (x @ w + b).sigmoid().detach()
    if moved:
        assert ((gamma.mean() - 0.5).sign() == moved).item()
        assert abs(b.item()) > abs(bias)
    else:
        assert torch.equal(gamma, torch.full_like(gamma, 0.5))


def symmetric(seed):
    """A smooth penalty with f(gamma) = f(1 - gamma): every one is h(gamma) + h(1 - gamma), here for a drawn h."""
    a, b, c, d = normal(generator(seed), 4)

    def h(gamma):
        return a * gamma**3 + b * (3 * c * gamma).sin() + d * gamma.exp()

    return lambda gamma: h(gamma) + h(1 - gamma)


PENALTIES = {
    "published": gate_penalty,
    "squared": lambda gamma: gate_penalty(gamma) ** 2,
    "entropy": lambda gamma: torch.special.entr(gamma) + torch.special.entr(1 - gamma),
    **{f"drawn {seed}": symmetric(seed) for seed in range(5)},
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_no_smooth_symmetric_penalty_moves_a_gate_of_one_half_or_prefers_a_side(penalty):
    half = scalar(0.5).requires_grad_()
    assert_close(torch.autograd.grad(penalty(half), half)[0], scalar(0.0))
    z = normal(generator(7), 100)
    z = torch.stack((z, -z)).requires_grad_()
    slopes = torch.autograd.grad(penalty(z.sigmoid()).sum(), z)[0]
    assert slopes.abs().max() > 0.01
    assert_close(slopes[0], -slopes[1])  # so gates that start in the mirror stay in it


# Gradients


@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["general", "parallel", "equal", "zero", "one zero", "no gate"])
def test_rotation_gradcheck(n, case):
    g = generator(n)
    x, u, v, beta = normal(g, 1, n, 2), normal(g, 1, n), normal(g, 1, n), normal(g, 1)
    if case == "parallel":
        v = 1.7 * u
    elif case == "equal":
        v = u
    elif case == "zero":
        u = v = torch.zeros_like(u)
    elif case == "one zero":
        u = torch.zeros_like(u)
    elif case == "no gate":
        beta = torch.zeros_like(beta)
    assert torch.autograd.gradcheck(cayley_apply, leaves(x, u, v, beta))
    assert torch.autograd.gradcheck(cayley, leaves(u, v, beta))
    assert torch.autograd.gradgradcheck(cayley, leaves(u, v, beta))
    k, gamma = direction(g, 1, n), normal(g, 1).sigmoid()
    assert torch.autograd.gradcheck(hybrid, leaves(x, u, v, beta, k, gamma))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angle_of_parallel_directions_has_zero_gradient(dtype):
    u = normal(generator(0), 4).to(dtype)
    zero, beta = torch.zeros(4, dtype=dtype), torch.tensor(3.0, dtype=dtype)
    for first, second in [(u, u), (u, -2 * u), (u, zero), (zero, u), (zero, zero)]:
        inputs = leaves(first, second, beta)
        for grad in torch.autograd.grad(cayley_angle(*inputs), inputs):
            assert torch.equal(grad, torch.zeros_like(grad))
    inputs = leaves(u, 1.7 * u, beta)  # parallel up to rounding: anything finite
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(cayley_angle(*inputs), inputs))


def test_one_operator_may_apply_to_one_sequence_or_to_the_whole_batch():
    g = generator(0)
    for n in (4, 5):
        x = normal(g, 2, 3, n, 2)
        for leading in [(2, 1), (3,), (), (1, 3)]:
            u, v, k = normal(g, *leading, n), normal(g, *leading, n), direction(g, *leading, n)
            beta, gamma = normal(g, *leading), normal(g, *leading).sigmoid()
            every = [t.expand(2, 3, n) for t in (u, v)] + [beta.expand(2, 3)]
            assert_close(cayley_apply(x, u, v, beta), cayley_apply(x, *every))
            assert_close(householder(x, k, beta), householder(x, k.expand(2, 3, n), beta.expand(2, 3)))
            expected = hybrid(x, *every, k.expand(2, 3, n), gamma.expand(2, 3))
            assert_close(hybrid(x, u, v, beta, k, gamma), expected)
        per_token = normal(g, 2, 3)
        rotated = cayley_apply(x, normal(generator(1), n), normal(generator(2), n), per_token)
        assert_close(rotated.norm(dim=-2), x.norm(dim=-2))


# Precision


@pytest.mark.parametrize("nearness", [1.0, 1e-2, 1e-4, 1e-6, 0.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3, 1e10, 1e18])
def test_float32_stays_orthogonal_for_long_and_almost_parallel_directions(scale, nearness):
    """|u|^2 |v|^2 - (u . v)^2 computed as it stands is wrong by 1e-7 |u|^2 |v|^2 here, far more than the 1 in Delta."""
    g = generator(0)
    for n in (2, 4, 7):
        u = scale * normal(g, 200, n)
        v = normal(g, 200, 1) * u + nearness * scale * normal(g, 200, n)
        u, v, beta = u.float(), v.float(), (30 * normal(g, 200)).float()
        q = cayley(u, v, beta)
        assert_close(q.mT @ q, torch.eye(n).expand(200, n, n))
        x = normal(g, 200, n, 3).float()
        assert_close(cayley_apply(x, u, v, beta).norm(dim=-2), x.norm(dim=-2))


@pytest.mark.parametrize("length", [1e10, 1e15, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_directions_turn_by_half_a_turn(dtype, length):
    """|u|^2 |v|^2 would be infinite in float32 from lengths of 5e9, and Q would be I."""
    g = generator(0)
    u, v = normal(g, 50, 5), normal(g, 50, 5)
    plane = torch.linalg.qr(torch.stack([u, v], -1)).Q
    u, v, beta = (length * u).to(dtype), (length * v).to(dtype), torch.ones(50, dtype=dtype)
    assert_close(cayley(u, v, beta), (eye(5) - 2 * plane @ plane.mT).to(dtype))
    assert_close(cayley_angle(u, v, beta), torch.full((50,), math.pi, dtype=dtype))


@pytest.mark.parametrize("op", [cayley, cayley_angle])
@pytest.mark.parametrize("length", [1e-8, 1e-3, 1.0, 1e3, 1e6, 1e8])
def test_float32_has_the_gradients_of_directions_of_any_length(op, length):
    """From lengths of 1e5 the square of Delta, by which a gradient is divided, would be infinite."""
    g = generator(0)
    inputs = length * normal(g, 200, 5), length * normal(g, 200, 5), torch.full((200,), 2.0, dtype=torch.float64)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        u, v, beta = (x.to(dtype).requires_grad_() for x in inputs)
        y = op(u, v, beta)
        weights = torch.arange(1, y[0].numel() + 1).view(y[0].shape).sin()
        return torch.autograd.grad((weights * y).sum(), (u, v))

    for found, exact in zip(gradients(torch.float32), gradients(torch.float64)):
        assert_close(found / exact.abs().max(), (exact / exact.abs().max()).float(), factor=10)


# Bad input


@pytest.mark.parametrize("n", [4, 6])
def test_shapes_that_do_not_fit_are_named(n):
    x, u, beta = torch.ones(2, 3, n, 5), torch.ones(2, 3, n), torch.ones(2, 3)
    for bad in (torch.ones(2, 3, n + 1), torch.ones(2, 3, 1)):
        expected = rf"must be \(\.\.\., n\) = \(2, 3, {n}\), got \(2, 3, {bad.shape[-1]}\)"
        with pytest.raises(ValueError, match="^v " + expected):
            cayley(u, bad, beta)
        with pytest.raises(ValueError, match="^v " + expected):
            cayley_angle(u, bad, beta)
        with pytest.raises(ValueError, match="^u " + expected):
            cayley_apply(x, bad, u, beta)
        with pytest.raises(ValueError, match="^k " + expected):
            householder(x, bad)
        with pytest.raises(ValueError, match="^k " + expected):
            hybrid(x, u, u, beta, bad, beta)
    for leading in [(3, 3), (2, 2), (1, 2, 3)]:
        with pytest.raises(ValueError, match="must"):
            cayley_apply(x, torch.ones(*leading, n), torch.ones(*leading, n), torch.ones(leading))
        with pytest.raises(ValueError, match="must"):
            householder(x, torch.ones(*leading, n))


def test_bad_options_are_named():
    with pytest.raises(ValueError, match=r"^w must be \(\.\.\., n, n\) = \(3, 3\), got \(3, 4\)"):
        iterative_cayley(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"^w must be \(\.\.\., n, n\) = \(3, 3\), got \(3, 4\)"):
        cayley_transform(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"^start must be 'linear' or 'identity', got 'x'"):
        iterative_cayley(torch.zeros(3, 3), start="x")
    with pytest.raises(ValueError, match=r"^steps must be 0 or more, got -1"):
        iterative_cayley(torch.zeros(3, 3), steps=-1)
