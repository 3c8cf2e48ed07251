"""The scaled plain residual against the public forms that it stands for, written as they are there."""

import pytest
import torch
from torch import Tensor, nn

from residua import Lambdas, Residual
from residua.connections import resolve
from support.references import assert_computes
from support.tolerances import assert_close
from support.variants import ALL, bare_sublayers, normal, perturbed

DIM = 8
EPS = 1e-5


def built(scheme: Lambdas, sublayers: int):
    return perturbed(scheme.build(DIM, sublayers)).double()


def normed(connection, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (DIM,), connection.norm.weight, EPS)


def scale(connection, name: str) -> Tensor:
    return connection.scales[name].weight


def nanochat(stream, x: Tensor, functions: list) -> Tensor:
    """Blocks of two sublayers; each block starts with r x + z x0; the state after block L // 2 is backed out."""
    x0, backed, layers = x, None, len(functions) // 2
    for layer in range(layers):
        attention, mlp = stream.connections[2 * layer], stream.connections[2 * layer + 1]
        x = scale(attention, "r") * x + scale(attention, "z") * x0
        x = x + functions[2 * layer](normed(attention, x))
        x = x + functions[2 * layer + 1](normed(mlp, x))
        if layer == layers // 2:
            backed = x
    return x - stream.collapse.backout.weight * backed


def nanochat_with_smear(stream, x: Tensor, functions: list) -> Tensor:
    """A gated copy of the embedding before is added to each embedding; the gate reads normalised features."""
    normalised = nn.functional.rms_norm(x, (DIM,))
    rows = [x[:, 0]]
    for t in range(1, x.shape[1]):
        gate = stream.expand.scale * torch.sigmoid(normalised[:, t, :24] @ stream.expand.gate)
        rows.append(x[:, t] + gate.unsqueeze(-1) * x[:, t - 1])
    return nanochat(stream, torch.stack(rows, 1), functions)


def modded_nanogpt(stream, x: Tensor, functions: list) -> Tensor:
    """Each sublayer reads x and writes r x + p h; attention also writes z x0."""
    x0 = x
    for i, (connection, function) in enumerate(zip(stream.connections, functions)):
        written = scale(connection, "r") * x + scale(connection, "p") * function(normed(connection, x))
        x = written if i % 2 else written + scale(connection, "z") * x0
    return x


def scaled_output(stream, x: Tensor, functions: list) -> Tensor:
    """ReZero and LayerScale: x + p h."""
    for connection, function in zip(stream.connections, functions):
        x = x + scale(connection, "p") * function(normed(connection, x))
    return x


def gated(stream, x: Tensor, functions: list) -> Tensor:
    """Sublayers read u = r x + z x0; what they write, p h, loses e of its part along u."""
    x0 = backed = x
    for i, (connection, function) in enumerate(zip(stream.connections, functions)):
        u = scale(connection, "r") * x + (0 if i % 2 else scale(connection, "z") * x0)
        context = normed(connection, u)
        h = scale(connection, "p") * function(context)
        e = (context @ connection.gate.out.weight.T + connection.gate.out.bias).tanh()
        along = (h * u).sum(-1, keepdim=True) / (u.square().sum(-1, keepdim=True) + 1e-6)
        x = u + h - e * along * u
        if i == 5:
            backed = x
    return x - stream.collapse.backout.weight * backed


def zaya(stream, x: Tensor, functions: list) -> Tensor:
    """ZAYA1 adds a vector to the state and to the output before it scales them."""
    for connection, function in zip(stream.connections, functions):
        h, biases = function(normed(connection, x)), connection.biases
        x = scale(connection, "r") * (x + biases["r"].weight) + scale(connection, "p") * (h + biases["p"].weight)
    return x


def deepnorm(stream, x: Tensor, functions: list) -> Tensor:
    for connection, function in zip(stream.connections, functions):
        x = normed(connection, (2 * len(functions) / 2) ** 0.25 * x + function(x))
    return x


FORMS = {
    "nanochat": (resolve("lambdas"), nanochat),
    "nanochat-smear": (resolve("lambdas+smear"), nanochat_with_smear),
    "modded-nanogpt": (ALL["lambdas-written"], modded_nanogpt),
    "gated": (ALL["lambdas-gated"], gated),
    "zaya": (ALL["lambdas-bias"], zaya),
    "rezero": (ALL["rezero"], scaled_output),
    "layer-scale": (ALL["layer-scale"], scaled_output),
    "deepnorm": (ALL["deepnorm"], deepnorm),
}


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_those_of_the_public_form(name):
    scheme, form = FORMS[name]
    assert_computes(built(scheme, 8), form)


def test_after_the_embedding_convolution_the_stream_is_the_same_as_without_it():
    plain, behind = (built(resolve(f"lambdas:gate=token{more}"), 4) for more in ("", ",expand=conv"))
    plain.load_state_dict({name: x for name, x in behind.state_dict().items() if name != "expand.taps"})
    x, functions = normal(2, 5, DIM), bare_sublayers(DIM, 4)
    convolved = behind.expand(x)
    assert all(part is convolved[0] for part in convolved), "copies of one tensor take no memory"
    assert not torch.equal(convolved[0], x)
    assert torch.equal(behind(x, functions), plain(convolved[0], functions))


def test_the_look_back_starts_as_that_of_nanochat():
    """Without a copy, behind a gate of 24 features that are drawn from [0, 0.02)."""
    plain, behind = (resolve(name).build(32, 2).expand for name in ("lambdas", "lambdas+smear"))
    x = normal(2, 5, 32).float()
    assert torch.equal(behind(x)[0], plain(x)[0])
    assert behind.gate.shape == (24,)
    assert 0 <= behind.gate.min() < behind.gate.max() < 0.02


def test_the_look_back_reads_the_first_24_features_of_the_token_and_scales_with_the_embedding():
    """nanochat's own embeddings are normalised; the gate is the same for embeddings of another size."""
    expand = perturbed(resolve("residual+smear").build(32, 2)).expand.double()
    x = normal(1, 2, 32)
    x[:, 0] = 1.0
    copy = (expand(x) - x)[0, 1, 0]
    mirrored = x.clone()
    mirrored[:, 1, 24:] *= -1  # no other norm, and nothing that the gate reads
    assert_close((expand(mirrored) - mirrored)[0, 1, 0], copy)
    mirrored[:, 1, 23] *= -1
    assert not torch.allclose((expand(mirrored) - mirrored)[0, 1, 0], copy)
    assert_close(expand(x * 50), expand(x) * 50)


def starts(scheme: Lambdas, sublayers: int, name: str) -> list[float]:
    found = [
        connection.scales[name] for connection in scheme.build(DIM, sublayers).connections if name in connection.scales
    ]
    return [one.weight.item() for one in found]


def test_the_preset_starts_as_nanochat_does():
    """12 layers: 1.15 - 0.10 i / 11 and 0.20 - 0.15 i / 11 at layer i, 0.2 for the backout."""
    scheme = resolve("lambdas")
    assert starts(scheme, 24, "r") == pytest.approx([1.15 - 0.10 * i / 11 for i in range(12)])
    assert starts(scheme, 24, "z") == pytest.approx([0.20 - 0.15 * i / 11 for i in range(12)])
    assert starts(scheme, 24, "p") == []
    assert scheme.build(DIM, 24).collapse.backout.weight.item() == pytest.approx(0.2)


def test_scales_at_every_sublayer_run_from_the_first_to_the_last():
    scheme = Lambdas(r=1.0, r_last=0.0, r_every="sublayer", z=0.5)
    assert starts(scheme, 5, "r") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert starts(scheme, 5, "z") == [0.5, 0.5, 0.5]
    assert starts(scheme, 1, "r") == [1.0]


def test_a_given_first_value_is_also_the_default_of_the_last_value():
    assert resolve("lambdas:r=1.0,z=0.0") == Lambdas(backout=0.2)
    assert resolve("lambdas:r=1.0,r_last=0.9").r_last == 0.9


@pytest.mark.parametrize(("sublayers", "middle"), [(24, 14), (8, 6), (6, 4), (4, 3), (2, 1), (1, 0)])
def test_the_middle_state_is_taken_after_half_of_the_blocks_or_before_the_last_sublayer(sublayers, middle):
    stream = Lambdas(backout=1.0).build(DIM, sublayers).double()
    functions, states = bare_sublayers(DIM, sublayers), [normal(1, 2, DIM)]
    plain = Residual().build(DIM, sublayers).double()
    for connection, function in zip(plain.connections, functions):
        states.append(connection(states[-1], function))
    assert_close(stream(states[0], functions), states[-1] - states[middle])


def test_the_state_holds_the_tensors_that_its_options_need():
    x = normal(1, 2, DIM)
    assert Lambdas(z=None).build(DIM, 2).expand(x) is x
    for scheme, count in ((Lambdas(), 2), (Lambdas(z=None, backout=0.1), 2), (Lambdas(backout=0.1), 3)):
        state = scheme.build(DIM, 2).expand(x)
        assert len(state) == count
        assert all(part is x for part in state), "copies of one tensor take no memory"


@pytest.mark.parametrize("name", ["lambdas", "lambdas-written", "lambdas-all", "lambdas-gated", "rezero"])
def test_the_shortcut_is_the_update_of_x_and_x0(name):
    stream, functions = built(ALL[name], 4), bare_sublayers(DIM, 4)
    state = stream.expand(normal(2, 3, DIM))
    for connection, function in zip(stream.connections, functions):
        seen, carry = connection.read(state)
        y = function(seen)
        found = connection.shortcut(state, carry, y)
        n = found.h_res.shape[-1]
        rows = torch.stack((state if isinstance(state, tuple) else (state,))[:n], -2)
        after = connection.write(y, carry)
        expected = torch.stack((after if isinstance(after, tuple) else (after,))[:n], -2)
        assert_close(found.h_res @ rows + found.h_post.unsqueeze(-1) * y.unsqueeze(-2), expected)
        assert_close(normed(connection, (found.h_pre.unsqueeze(-1) * rows).sum(-2)), seen)
        state = after


def test_a_read_through_a_convolution_is_not_a_mixture_of_the_rows_of_one_token():
    stream = built(ALL["lambdas-tc4"], 2)
    state, connection = stream.expand(normal(2, 3, DIM)), stream.connections[0]
    x, carry = connection.read(state)
    assert connection.shortcut(state, carry, x).h_pre is None


def test_a_preserving_start_keeps_the_placement_of_scales():
    scheme = resolve("lambdas")
    assert scheme.preserving() == Lambdas(r=1.0, z=0.0, backout=0.0)
    assert ALL["lambdas-gated"].preserving() == Lambdas(r_every="sublayer", p=1.0, backout=0.0, gate="token")
    assert ALL["rezero"].preserving() == Lambdas(r=None, z=None, p=1.0)
