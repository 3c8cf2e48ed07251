"""SiameseNorm: the forms of the public code and of the paper, its pre-norm case, and a stream that stays bounded."""

import torch
from torch import Tensor

from residua import Residual, SiameseNorm
from support.references import assert_computes, rms_norm
from support.stream_cases import DIM, SUBLAYERS, built
from support.tolerances import assert_close
from support.variants import bare_sublayers, every, normal


def published(stream, embedding: Tensor, sublayers: list, scheme: SiameseNorm) -> Tensor:
    """Token by token, in pairs of sublayers as a block of the authors' code, whose `index` counts from 0."""
    result = []
    for token in embedding.flatten(0, 1):
        x, y = token, token.clone()
        for i, (connection, sublayer) in enumerate(zip(stream.connections, sublayers)):
            index = i // 2
            c = {"code": ((index + 1) * 2) ** 0.5, "paper": (index + 1) ** 0.5, "none": 1.0}[scheme.depth_scaling]
            x = rms_norm(x, connection.x_norm.weight)
            if scheme.normalised_input:
                z = sublayer(rms_norm(x + rms_norm(y, connection.y_norm.weight), connection.norm.weight))
            else:
                z = sublayer(x + rms_norm(y, connection.norm.weight))
            x, y = x + z / c, y + z
        end = stream.collapse
        result.append(
            rms_norm(x, end.x_norm.weight) + (rms_norm(y, end.y_norm.weight) if scheme.head == "norms" else y)
        )
    return torch.stack(result).view_as(embedding)


@every(SiameseNorm)
def test_values_and_gradients_are_those_of_the_public_form(scheme):
    assert_computes(built(scheme, noise=0.3, count=5), published, scheme, tokens=(1, 2))


def test_zero_gains_give_the_plain_residual_except_for_the_eps_of_a_second_norm():
    """The pre-norm case of the paper."""
    x, sublayers = normal(2, 5, DIM), bare_sublayers(DIM, SUBLAYERS)
    expected = built(Residual())(x, sublayers)
    twice = built(SiameseNorm(start="residual", head="stream"))(x, sublayers)
    assert 0 < (twice - expected).abs().max() < 1e-3


def test_one_stream_is_bounded_and_the_other_is_the_sum():
    stream = built(SiameseNorm())
    loud = [lambda x, f=f: 100 * f(x) for f in bare_sublayers(DIM, SUBLAYERS)]
    state, total = stream.expand(normal(2, 5, DIM)), normal(2, 5, DIM)
    for connection, sublayer in zip(stream.connections, loud):
        x, carry = connection.read(state)
        assert (carry.residual[0].square().mean(-1) - 1).abs().max() < 1e-4  # the eps of the norm
        y = sublayer(x)
        state, total = connection.write(y, carry), total + y
        assert_close(state[1], total)
