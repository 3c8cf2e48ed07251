"""The plain residual with the convolutions of Deep Delta Learning, the controls of what these do there."""

import pytest
import torch
from torch import Tensor, nn

from residua import DeepDelta, GatedDelta, Residual
from residua.connections import resolve
from residua.models import ResiduaConfig, ResiduaForCausalLM
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM, VOCAB, PAD = 8, 40, 1


def outputs(scheme: Residual, x: Tensor, *, start: bool = False) -> Tensor:
    torch.manual_seed(0)
    stream = scheme.build(DIM, 4).double()
    return (stream if start else perturbed(stream))(x, bare_sublayers(DIM, 4))


def count(scheme: Residual) -> int:
    return sum(parameter.numel() for parameter in scheme.build(DIM, 4).parameters())


def test_the_plain_residual_has_no_convolution():
    assert Residual() == Residual(expand="repeat", expand_kernel=4)
    assert [name for name, _ in Residual().build(DIM, 2).named_parameters()] == [
        "connections.0.norm.weight",
        "connections.1.norm.weight",
    ]


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_it_starts_as_the_plain_residual_to_the_bit(kernel):
    scheme = Residual(expand="conv", expand_kernel=kernel)
    x = normal(2, 6, DIM)
    assert torch.equal(outputs(scheme, x, start=True), outputs(Residual(), x, start=True))
    assert count(scheme) - count(Residual()) == kernel * DIM


@pytest.mark.parametrize("kernel", [1, 3, 6])
def test_it_is_the_plain_residual_of_a_grouped_convolution(kernel):
    """Also where the text is shorter than the kernel."""
    stream = perturbed(Residual(expand="conv", expand_kernel=kernel).build(DIM, 2)).double()
    x = normal(2, 5, DIM)
    filters = stream.expand.taps[:, 0].T.flip(-1).unsqueeze(1)  # (dim, 1, kernel), the current token last
    ahead = nn.functional.pad(x.mT, (kernel - 1, 0))
    expected = nn.functional.conv1d(ahead, filters, groups=DIM).mT
    assert stream.expand(x).shape == x.shape
    assert_close(stream.expand(x), expected)
    for connection, sublayer in zip(stream.connections, sublayers := bare_sublayers(DIM, 2)):
        expected = expected + sublayer(connection.norm(expected))
    assert_close(stream(x, sublayers), expected)


def test_the_convolution_is_that_of_deep_delta_with_one_channel():
    ours = perturbed(Residual(expand="conv", expand_kernel=3).build(DIM, 2).expand)
    theirs = DeepDelta(expand="conv", expand_kernel=3).build(DIM, 2).expand
    theirs.load_state_dict(ours.state_dict())
    x = normal(2, 5, DIM, dtype=torch.float32)
    assert torch.equal(ours(x), theirs(x).squeeze(-2))


@pytest.mark.parametrize("options", [{}, {"compress_kernel": 2, "compress_sharing": "separate"}])
def test_reading_through_the_token_compression_is_deep_delta_that_writes_h(options):
    """One channel of `gated-delta` that erases nothing is the same scheme, to the last bit, and has the same names."""
    ours = Residual(compress="token", **options).build(DIM, 4)
    theirs = GatedDelta(erase="none", compress="token", **options).build(DIM, 4)
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    perturbed(ours)
    theirs.load_state_dict(ours.state_dict())
    x, sublayers = normal(2, 6, DIM), bare_sublayers(DIM, 4)
    assert torch.equal(ours.double()(x, sublayers), theirs.double()(x, sublayers))


@pytest.mark.parametrize("preset", ["residual", "lambdas", "gated-orthogonal", "orthogonal"])
def test_a_scheme_that_reads_through_a_convolution_starts_as_without(preset):
    x = normal(2, 6, DIM)
    plain, through = (resolve(preset + options) for options in ("", ":compress=token"))
    assert torch.equal(outputs(plain, x, start=True), outputs(through, x, start=True))
    assert count(through) - count(plain) == 3 * (4 * DIM + 1)  # two blocks and the readout


def test_what_is_written_goes_to_the_stream_itself():
    stream = perturbed(Residual(compress="token").build(DIM, 2)).double()
    x, sublayers = normal(2, 5, DIM), bare_sublayers(DIM, 2)
    filters = [part.compress.weights()[:, 0] for part in (stream.connections[0], stream.collapse)]  # (taps, dim)

    def read(state: Tensor, taps: Tensor) -> Tensor:
        return sum(nn.functional.pad(state, (0, 0, s, 0))[:, :5] * taps[s] for s in range(4))

    state = x
    for connection, sublayer in zip(stream.connections, sublayers):
        state = state + sublayer(connection.norm(read(state, filters[0])))
    assert_close(stream(x, sublayers), read(state, filters[1]))


@pytest.mark.parametrize("scheme", [Residual(expand="conv"), Residual(compress="token")])
@torch.no_grad()
def test_generation_with_a_cache_and_left_padding_equals_the_full_pass(scheme):
    torch.manual_seed(0)
    config = ResiduaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        connection=scheme, embedding_init_std=2.0, tie_word_embeddings=False, pad_token_id=PAD,
    )  # fmt: skip
    model = perturbed(ResiduaForCausalLM(config)).double().eval()
    prompts = [torch.arange(2, 2 + length) for length in (6, 3, 1)]
    ids = torch.stack([nn.functional.pad(row, (6 - len(row), 0), value=PAD) for row in prompts])
    made = model.generate(
        ids, attention_mask=(ids != PAD).long(), do_sample=False, max_new_tokens=6, eos_token_id=-1, pad_token_id=PAD
    )
    assert made[:, 6:].unique().numel() > 4, "a text of few tokens would hide mistakes"
    for row, text in zip(made, prompts):
        for _ in range(6):  # from a fresh pass over everything, without padding
            text = torch.cat([text, model(text[None], use_cache=False).logits[0, -1:].argmax(-1)])
        assert torch.equal(row[-len(text) :], text)


def test_a_convolution_wants_a_sequence():
    """A batch (batch, dim) would be taken for a text."""
    stream = Residual(compress="token", expand="conv").build(DIM, 2).double()
    for part in (stream.expand, stream.connections[0].read, stream.connections[1].read, stream.collapse):
        with pytest.raises(ValueError, match=r"must get \(batch, seq, dim\).*got \(3, 8\)"):
            part(normal(3, DIM))
