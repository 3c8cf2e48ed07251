"""The theory of the delta operator as properties in float64; the dense product form is the independent reference."""

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from residua.ops import (
    compose,
    delta_inverse,
    delta_operator,
    delta_write,
    delta_write_v1,
    determinant,
    eigenvalues,
    singular_values,
    unit,
)
from support.delta_cases import (
    betas,
    cases,
    dims,
    direction,
    generator,
    invertible_betas,
    length_one,
    normal,
    outer,
    product_form,
)
from support.tolerances import assert_close

seeds = st.integers(0, 2**31)
norms = st.one_of(st.sampled_from([0.0, 1e-5, 1.0]), st.floats(0.0, 1.5))


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def identity(dim: int) -> torch.Tensor:
    return torch.eye(dim, dtype=torch.float64)


# Householder reflections


@given(dims, seeds, st.floats(1e-3, 1e3))
def test_householder_reflection(dim, seed, length):
    raw = length * direction(generator(seed), dim)
    reflection = delta_operator(raw / raw.norm(), scalar(2.0))
    assert_close(reflection, identity(dim) - 2 * torch.outer(raw, raw) / raw.dot(raw))
    assert_close(reflection.mT, reflection)
    assert_close(reflection @ reflection, identity(dim))
    assert_close(reflection.mT @ reflection, identity(dim))
    assert_close(reflection @ raw, -raw)
    assert_close(torch.linalg.eigvalsh(reflection), torch.tensor([-1.0] + [1.0] * (dim - 1), dtype=torch.float64))


# The write


@given(cases(norms=norms))
def test_additive_form_is_the_product_form(case):
    assert_close(delta_write(*case), product_form(*case))


@given(cases(norms=norms))
def test_the_operator_is_the_write_of_a_zero_value(case):
    written = delta_write(case.state, case.k, torch.zeros_like(case.v), case.beta)
    assert_close(written.mT, delta_operator(case.k, case.beta) @ case.state.mT)


@given(cases(norms=norms))
def test_the_common_sign_of_k_and_v_changes_nothing(case):
    assert torch.equal(delta_write(*case), delta_write(case.state, -case.k, -case.v, case.beta))


@given(cases(), seeds)
def test_projected_dynamics(case, seed):
    state, k, v, beta = case
    written = delta_write(*case)
    before, after = state @ k.unsqueeze(-1), written @ k.unsqueeze(-1)
    gate = beta[..., None, None]
    assert_close(after, (1 - gate) * before + gate * v.unsqueeze(-1))
    assert_close(after - v.unsqueeze(-1), (1 - gate) * (before - v.unsqueeze(-1)))
    u = normal(generator(seed), *k.shape)
    u = u - (u * k).sum(-1, keepdim=True) * k
    assert_close(written @ u.unsqueeze(-1), state @ u.unsqueeze(-1))


@given(cases(), st.floats(1e-7, 10.0), st.floats(1e-5, 1.0))
def test_projected_dynamics_of_a_direction_shorter_than_one(case, length, eps):
    state, direction_, v, beta = case
    k = unit(length * direction_, eps=eps)
    square = length**2 / (length**2 + eps**2)
    gate = (beta * square)[..., None, None]
    after = delta_write(state, k, v, beta) @ k.unsqueeze(-1)
    assert_close(after, (1 - gate) * (state @ k.unsqueeze(-1)) + gate * v.unsqueeze(-1))


@given(cases())
def test_norm_identity_and_non_expansiveness(case):
    kept = delta_write(case.state, case.k, torch.zeros_like(case.v), case.beta)
    readout = (case.state @ case.k.unsqueeze(-1)).squeeze(-1)
    before, after = case.state.square().sum(-1), kept.square().sum(-1)
    beta = case.beta.unsqueeze(-1)
    assert_close(after, before + (beta**2 - 2 * beta) * readout**2)
    assert (after <= before * (1 + 1e-12)).all()


# The spectrum


@given(dims, betas, seeds)
def test_the_spectrum_is_the_stated_one(dim, beta, seed):
    operator = delta_operator(direction(generator(seed), dim), scalar(beta))
    assert_close(torch.linalg.eigvalsh(operator), eigenvalues(scalar(beta), dim).sort().values)
    assert_close(torch.linalg.svdvals(operator), singular_values(scalar(beta), dim).sort(descending=True).values)
    assert_close(torch.linalg.det(operator), determinant(scalar(beta)))


@given(dims, betas, seeds)
def test_the_eigenvectors_are_the_stated_ones(dim, beta, seed):
    g = generator(seed)
    k, u = direction(g, dim), normal(g, dim)
    operator = delta_operator(k, scalar(beta))
    u = u - u.dot(k) * k
    assert_close(operator @ k, (1 - beta) * k)
    assert_close(operator @ u, u)


def test_spectrum_of_many_gates_at_once():
    beta = torch.tensor([[0.0, 0.5], [1.0, 2.0]], dtype=torch.float64)
    assert torch.equal(eigenvalues(beta, 3)[..., 0], 1 - beta)
    assert torch.equal(eigenvalues(beta, 3)[..., 1:], torch.ones(2, 2, 2, dtype=torch.float64))
    assert torch.equal(singular_values(beta, 1), (1 - beta).abs().unsqueeze(-1))
    assert torch.equal(determinant(beta, 2), (1 - beta) ** 2)


@given(st.integers(1, 4), st.integers(1, 4), betas, seeds)
def test_lifted_determinant_and_orientation(dim, value_channels, beta, seed):
    operator = delta_operator(direction(generator(seed), dim), scalar(beta))
    lifted = torch.linalg.det(torch.kron(identity(value_channels), operator))
    expected = determinant(scalar(beta), value_channels)
    assert_close(lifted, expected)
    assert (expected < 0).item() == (value_channels % 2 == 1 and beta > 1)


@given(dims, betas, seeds)
def test_identity_projection_and_reflection(dim, beta, seed):
    k = direction(generator(seed), dim)
    operator = delta_operator(k, scalar(beta))
    # A^T A = I exactly where beta (beta - 2) = 0.
    assert_close(operator.mT @ operator - identity(dim), beta * (beta - 2) * torch.outer(k, k))
    assert_close(delta_operator(k, scalar(0.0)), identity(dim))
    projector = delta_operator(k, scalar(1.0))
    assert_close(projector @ projector, projector)
    assert_close(projector.trace(), scalar(dim - 1))


# The inverse


@given(cases(gates=invertible_betas))
def test_inverse_is_a_delta_write(case):
    state, k, v, beta = case
    assert_close(delta_inverse(delta_write(*case), k, v, beta), state, factor=20)  # 1 / |1 - beta| is up to 20
    gate = (beta / (1 - beta))[..., None, None]
    inverse = identity(k.shape[-1]) + gate * outer(k, k)
    assert_close(
        delta_inverse(state, k, torch.zeros_like(v), beta).mT, inverse @ state.mT, factor=20
    )  # A^{-1} = I + beta / (1 - beta) k k^T


@given(cases(), st.floats(1e-3, 10.0), st.floats(1e-3, 1.0))
def test_inverse_of_a_direction_shorter_than_one(case, length, eps):
    assume(((1 - case.beta * length**2 / (length**2 + eps**2)).abs() > 0.05).all())
    k = unit(length * case.k, eps=eps)
    written = delta_write(case.state, k, case.v, case.beta)
    assert_close(delta_inverse(written, k, case.v, case.beta), case.state, factor=20)


@given(cases(gates=st.just(2.0)))
def test_reflection_is_its_own_inverse(case):
    written = delta_write(*case)
    assert_close(delta_inverse(*case), written)
    assert_close(delta_write(written, *case[1:]), case.state)


def test_projection_has_no_inverse():
    k = torch.tensor([1.0, 0.0], dtype=torch.float64)
    inverse = delta_inverse(torch.ones(1, 2, dtype=torch.float64), k, torch.zeros(1, dtype=torch.float64), scalar(1.0))
    assert not inverse.isfinite().all()


# The form of the first version of the paper, with the raw k


@given(cases(norms=norms), st.floats(1e-5, 1.0))
def test_v1_write_is_its_product_form(case, eps):
    state, k, v, beta = case
    gate, square = beta[..., None, None], k.square().sum(-1)[..., None, None]
    operator = identity(k.shape[-1]) - gate * outer(k, k) / (square + eps)
    assert_close(delta_write_v1(*case, eps=eps), (operator @ state.mT + gate * outer(k, v)).mT)


@given(cases(norms=st.floats(0.1, 2.0), gates=invertible_betas), st.floats(1e-5, 1.0))
def test_v1_eigenvalue_and_inverse(case, eps):
    state, k, v, beta = case
    square = k.square().sum(-1)
    eigenvalue = 1 - beta * square / (square + eps)
    assume((eigenvalue.abs() > 0.05).all())
    nothing = torch.zeros_like(v)
    along_k = torch.zeros_like(state) + k.unsqueeze(-2)
    assert_close(delta_write_v1(along_k, k, nothing, beta, eps=eps), eigenvalue[..., None, None] * along_k)
    gate = (beta / (square + eps - beta * square))[..., None, None]
    inverse = identity(k.shape[-1]) + gate * outer(k, k)
    kept = delta_write_v1(state, k, nothing, beta, eps=eps)
    assert_close((inverse @ kept.mT).mT, state, factor=20)  # 1 / |eigenvalue| is up to 20


@given(cases())
def test_v1_meets_the_unit_form_only_for_unit_k(case):
    state, k, v, beta = case
    assert_close(delta_write_v1(*case, eps=0.0), delta_write(*case))
    gate = beta[..., None, None]
    # Twice as long a k erases as before and writes twice as much.
    assert_close(delta_write_v1(state, 2 * k, v, beta, eps=0.0), delta_write(*case) + (gate * outer(k, v)).mT)


# Composition


@st.composite
def sequences(draw, norms=length_one):
    """n writes (n from 0 to beyond dim) into states with leading axes: k, v, beta, and the first state."""
    leading = draw(st.sampled_from([(), (2,)]))
    dim, value_channels = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    n = draw(st.integers(0, dim + 3))
    g = generator(draw(seeds))
    beta = torch.tensor([draw(betas) for _ in range(n)], dtype=torch.float64).expand(*leading, n)
    k = draw(norms) * direction(g, *leading, n, dim)
    return k, normal(g, *leading, n, value_channels), beta, normal(g, *leading, value_channels, dim)


@given(sequences(norms))
def test_composition_is_the_writes_one_after_another(sequence):
    k, v, beta, state = sequence
    composition = compose(k, beta)
    assert compose(k.float(), beta).t.dtype == torch.float64, "the wider of both"
    product = identity(k.shape[-1]).expand(*k.shape[:-2], -1, -1)
    step = state
    for i in range(k.shape[-2]):
        step = product_form(step, k[..., i, :], v[..., i, :], beta[..., i])
        product = delta_operator(k[..., i, :], beta[..., i]) @ product
    # Directions longer than 1 make T grow with every write.
    assert_close(composition.write(state, v), step, factor=1e3)
    assert_close(composition.operator(), product, factor=1e3)


@given(sequences())
def test_composition_determinant_and_norm(sequence):
    k, _, beta, _ = sequence
    operator = compose(k, beta).operator()
    assert_close(torch.linalg.det(operator), (1 - beta).prod(-1))
    assert (torch.linalg.matrix_norm(operator, 2) <= 1 + 1e-12).all()


# Special states and directions


@given(dims, betas, seeds)
def test_diagonal_state(dim, beta, seed):
    g = generator(seed)
    s, k = normal(g, dim), direction(g, dim)
    mixed = delta_write(torch.diag(s), k, torch.zeros(dim, dtype=torch.float64), scalar(beta))
    # (A X)_ij = s_i delta_ij - beta s_j k_i k_j; the state's rows are the columns j.
    assert_close(mixed.mT, torch.diag(s) - beta * torch.outer(k, s * k))


@given(cases(), st.data())
def test_one_hot_direction_changes_one_coordinate(case, data):
    dim = case.k.shape[-1]
    i = data.draw(st.integers(0, dim - 1))
    k = torch.zeros_like(case.k)
    k[..., i] = 1.0
    written = delta_write(case.state, k, case.v, case.beta)
    others = [j for j in range(dim) if j != i]
    assert torch.equal(written[..., others], case.state[..., others])
    beta = case.beta.unsqueeze(-1)
    assert_close(written[..., i], (1 - beta) * case.state[..., i] + beta * case.v)


# The flow X' = r k (v^T - k^T X)


def flow(state, k, v, rate):
    """The generator of the flow on [X; v^T], with v constant."""
    dim = k.shape[-1]
    augmented = torch.zeros(dim + 1, dim + 1, dtype=torch.float64)
    augmented[:dim, :dim] = -rate * torch.outer(k, k)
    augmented[:dim, dim] = rate * k
    return augmented, torch.cat([state.mT, v.unsqueeze(0)])


def exponential(matrix):
    """Its Taylor series; `torch.linalg.matrix_exp` is off by 2e-10 for some norms below 0.05."""
    total = term = torch.eye(len(matrix), dtype=matrix.dtype)
    for n in range(1, 60):
        term = term @ matrix / n
        total = total + term
    return total


@given(dims, st.integers(1, 3), st.floats(0.01, 3.0), st.floats(0.01, 3.0), seeds)
@example(dim=1, value_channels=1, rate=0.21875, step=0.21875, seed=1)
def test_euler_step_and_exact_flow_are_delta_writes(dim, value_channels, rate, step, seed):
    g = generator(seed)
    state, k, v = normal(g, value_channels, dim), direction(g, dim), normal(g, value_channels)
    generator_, start = flow(state, k, v, rate)
    euler = start + step * generator_ @ start
    assert_close(delta_write(state, k, v, scalar(rate * step)), euler[:dim].mT)
    exact = exponential(step * generator_) @ start
    beta = 1 - math.exp(-rate * step)
    assert_close(delta_write(state, k, v, scalar(beta)), exact[:dim].mT)
    assert 0 < beta < 1  # so a gate above 1 is an overshooting Euler step, and no flow


# Depth as time


@given(sequences())
def test_writes_over_depth_are_deltanet_over_time(sequence):
    keys, values, betas_, first = sequence
    state = first
    s = first.mT  # (dim, value_channels), the recurrence S_t = (I - beta k k^T) S_{t-1} + beta k v^T
    m = first  # its transpose, M_t = M_{t-1} + beta (v - M_{t-1} k) k^T
    for t in range(keys.shape[-2]):
        k, v, beta = keys[..., t, :], values[..., t, :], betas_[..., t]
        gate = beta[..., None, None]
        s = s - gate * k.unsqueeze(-1) * (k.unsqueeze(-2) @ s) + gate * outer(k, v)
        m = m + gate * (v.unsqueeze(-1) - m @ k.unsqueeze(-1)) @ k.unsqueeze(-2)
        state = delta_write(state, k, v, beta)
    assert_close(state, s.mT)
    assert_close(state, m)
    assert_close(compose(keys, betas_).write(first, values), m)


# Shapes that would broadcast to something else


@pytest.mark.parametrize("write", [delta_write, delta_write_v1, delta_inverse])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v", (2, 5, 1)),
        ("v", (4,)),
        ("k", (2, 5, 1)),
        ("k", (2, 5, 9)),
        ("k", (8,)),
        ("beta", (2, 1)),
        ("beta", ()),
        ("beta", (2, 5, 1)),
    ],
)
def test_a_write_names_the_argument_with_the_wrong_shape(write, name, shape):
    arguments = {"state": (2, 5, 4, 8), "k": (2, 5, 8), "v": (2, 5, 4), "beta": (2, 5), name: shape}
    with pytest.raises(ValueError, match=rf"^{name} must be \(\.\.\.,.*got \("):
        write(**{key: torch.full(size, 0.5) for key, size in arguments.items()})


def test_operators_name_the_argument_with_the_wrong_shape():
    with pytest.raises(ValueError, match=r"^beta must be \(\.\.\.,\) = \(3,\), got \(1,\)"):
        delta_operator(torch.ones(3, 4), torch.ones(1))
    with pytest.raises(ValueError, match=r"^beta must be \(\.\.\., n\) = \(3,\), got \(\)"):
        compose(torch.ones(3, 4), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^v must be \(\.\.\., n, value_channels\) = \(3, 2\), got \(3, 1\)"):
        compose(torch.ones(3, 4), torch.ones(3)).write(torch.ones(2, 4), torch.ones(3, 1))
