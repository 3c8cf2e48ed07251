"""Inkling-2's attention residuals against a form with stacks, their sources, and what they promise."""

import torch
from torch import Tensor, nn

from residua import InklingAttentionResiduals
from residua.connections import PRESETS
from residua.connections.base import as_inputs
from support.references import assert_computes
from support.stream_cases import DIM, built
from support.variants import bare_sublayers, every, normal, perturbed

SUBLAYERS = 14


def published(stream, x: Tensor, sublayers: list, scheme: InklingAttentionResiduals) -> Tensor:
    """Layer by layer: a stack of completed blocks and the running sum, and attention over both, normalised."""

    def attend(queries: Tensor, blocks: list[Tensor], partial: Tensor) -> list[Tensor]:
        states = torch.stack([*blocks, partial], -2)
        states = states / (states.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        weights = (states @ queries.mT / DIM**0.5).softmax(-2)
        return list((weights.mT @ states).unbind(-2))

    def norm(module: nn.Module, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight

    blocks: list[Tensor] = []
    partial = x
    for index, (connection, sublayer) in enumerate(zip(stream.connections, sublayers)):
        layer, mlp = divmod(index, 2)
        separate = not mlp and scheme.separate_every and (layer + 1) % scheme.separate_every == 0
        used = [connection.norm, connection.key_norm, connection.value_norm] if separate else [connection.norm]
        read = [partial] if index == 0 else attend(connection.attend.query, blocks, partial)
        read = read * len(used) if len(read) == 1 else read
        y = sublayer(*(norm(module, one) for module, one in zip(used, read, strict=True)))
        if index % scheme.block_size == 0:
            blocks, partial = [*blocks, partial], y
        else:
            partial = partial + y
    return attend(stream.collapse.attend.query, blocks, partial)[0]


@every(InklingAttentionResiduals)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3, count=SUBLAYERS), published, scheme)


def test_every_sixth_layer_reads_queries_keys_and_values_separately():
    stream = built(InklingAttentionResiduals(), noise=0.3, count=26)
    state = stream.expand(normal(2, 3, DIM))
    inputs = []
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, 26)):
        x, carry = connection.read(state)
        inputs.append(len(as_inputs(x)))
        weights = carry.coefficients
        assert (weights.key_weights is not None) == (weights.value_weights is not None) == (inputs[-1] == 3)
        assert (weights.weights is None) == (len(inputs) == 1), "the first sublayer reads the embedding"
        if inputs[-1] == 3:
            depth = connection.depth_weights(carry)
            assert depth.reads == ("q", "k", "v")
            assert torch.equal(depth.weights, torch.stack(weights, -2))
        state = connection.write(sublayer(*as_inputs(x)), carry)
    assert [index for index, count in enumerate(inputs) if count == 3] == [10, 22]
    assert set(inputs) == {1, 3}


def test_sources_are_those_of_attnres_in_blocks():
    ours, theirs = PRESETS["attnres-inkling"], PRESETS["attnres-block"]
    for boundary in range(40):
        assert ours.state_spec(boundary, DIM) == theirs.state_spec(boundary, DIM)


def test_a_given_norm_is_used_for_queries_and_copied_for_keys_and_values():
    own = perturbed(nn.LayerNorm(DIM))
    connection = InklingAttentionResiduals(separate_every=1).build(DIM, 1, norm=lambda _: own).connections[0]
    assert connection.norm is own
    for copy in (connection.key_norm, connection.value_norm):
        assert copy is not own
        assert torch.equal(copy.weight, own.weight)


def test_reads_in_a_bfloat16_model_are_float32_up_to_the_norm():
    narrow = built(InklingAttentionResiduals(), noise=0.3, count=4).to(torch.bfloat16)
    sources = tuple(normal(2, 3, DIM, seed=i, dtype=torch.bfloat16) for i in range(2))
    seen = []
    narrow.connections[3].norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    x, carry = narrow.connections[3].read(sources)
    assert seen == [torch.float32]
    assert x.dtype == torch.bfloat16
    assert carry.coefficients.weights.dtype == torch.float32
