"""MUDD against the published form, the plain residual, and what may be kept."""

import pytest
import torch
from torch import Tensor, nn

from residua import MultiwayDynamicDense
from residua.connections import resolve
from support.references import assert_computes, gelu, rms_norm
from support.variants import bare_sublayers, normal, perturbed

DIM, EPS = 8, 1e-5
FORMS = {
    "mudd": MultiwayDynamicDense(),
    "r": MultiwayDynamicDense(ways="r"),
    "prepost": MultiwayDynamicDense(prepost_norm=True),
    "vr": MultiwayDynamicDense(ways="vr", sources=(1,)),
    "trimmed": MultiwayDynamicDense(ways="vr", layers=2, sources=(0, 2), write_gate=True),
    "gates": MultiwayDynamicDense(write_gate=True, layers=3),
    "gates-r": MultiwayDynamicDense(ways="r", layers=2, write_gate=True, hidden_multiple=1),
    "prepost-r": MultiwayDynamicDense(prepost_norm=True, ways="r", hidden_multiple=1),
}
every_form = pytest.mark.parametrize("scheme", FORMS.values(), ids=FORMS)


def mapped(part: nn.Module, x: Tensor) -> Tensor:
    return torch.einsum("btk,mk->btm", gelu(torch.einsum("btd,kd->btk", rms_norm(x), part.up.weight)), part.down.weight)


def averages(part: nn.Module, outputs: list[Tensor], sources: list[Tensor], ways: int, named=None) -> list[Tensor]:
    """The sums over a stack of sources, by weights from the last output; with norms, the last output is added."""
    last = outputs[-1]
    sources = [x for j, x in enumerate(sources) if named is None or j in named or j == len(sources) - 1]
    w = mapped(part, last)[..., : ways * len(sources)].view(*last.shape[:2], ways, len(sources)) + part.static
    summed = list(torch.einsum("btcn,nbtd->cbtd", w, torch.stack(sources)))
    if part.after is None:
        return summed
    summed[-1] = rms_norm(summed[-1], part.after.weight)
    return [last + one for one in summed]


def published(stream, x: Tensor, sublayers: list, scheme: MultiwayDynamicDense) -> Tensor:
    """Block by block: lists of the outputs and of the sources, which are the outputs or the normalised outputs."""
    normed, blocks = scheme.prepost_norm, (len(sublayers) + 1) // 2
    outputs, sources = [x], []
    q = k = v = r = x
    for first in range(0, len(sublayers), 2):
        attention = stream.connections[first]
        averaged = first > 0 and (scheme.layers is None or first // 2 > blocks - scheme.layers)
        gates = [torch.ones(2).double()] * 2
        if first == 0:
            if normed:
                sources.append(rms_norm(x, attention.embedding_norm.weight))
            else:
                sources.append(x)
            inputs = (rms_norm(x, attention.norm.weight),)
        elif not averaged:
            r = outputs[-1]
            sources.append(r)
            inputs = (rms_norm(r, attention.norm.weight),)
        else:
            ways = len(scheme.ways)
            sources.append(rms_norm(outputs[-1], attention.average.before.weight) if normed else outputs[-1])
            reads = averages(attention.average, outputs, sources, ways, scheme.sources)
            if scheme.write_gate:
                gates[0] = mapped(attention.average, outputs[-1])[..., -2:] + attention.average.gates.weight
            if ways == 2:
                v, r = reads
                x_last, gain = outputs[-1], attention.norm.weight
                inputs = (rms_norm(x_last, gain), rms_norm(x_last, gain), rms_norm(v, attention.others[0].weight))
            elif ways == 4:
                q, k, v, r = reads
                gains = [attention.norm.weight, *(norm.weight for norm in attention.others)]
                inputs = tuple(rms_norm(one, gain) for one, gain in zip((q, k, v), gains))
            else:
                (r,) = reads
                inputs = (rms_norm(r, attention.norm.weight),)
        h = gates[0][..., :1] * r + gates[0][..., 1:] * sublayers[first](*inputs)
        if first + 1 < len(sublayers):
            mlp = stream.connections[first + 1]
            if averaged and scheme.write_gate:
                gates[1] = mapped(mlp.gates, h) + mlp.gates.static.weight
            h = gates[1][..., :1] * h + gates[1][..., 1:] * sublayers[first + 1](rms_norm(h, mlp.norm.weight))
        outputs.append(h)
    end = stream.collapse.average
    sources.append(rms_norm(outputs[-1], end.before.weight) if normed else outputs[-1])
    return averages(end, outputs, sources, 1, scheme.sources)[0]


@every_form
@pytest.mark.parametrize("sublayers", [1, 2, 7])
def test_values_and_gradients_are_those_of_the_published_form(scheme, sublayers):
    assert_computes(perturbed(scheme.build(DIM, sublayers)).double(), published, scheme)


def test_attention_reads_three_inputs_from_the_second_block_on():
    stream = resolve("mudd").build(DIM, 6)
    state = stream.expand(normal(1, 2, DIM, dtype=torch.float32))
    found = []
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, 6)):
        x, carry = connection.read(state)
        weights = carry.coefficients.weights
        found.append((len(x) if isinstance(x, tuple) else 1, None if weights is None else tuple(weights.shape)))
        state = connection(state, sublayer)
    assert found == [(1, None), (1, None), (3, (1, 2, 4, 2)), (1, None), (3, (1, 2, 4, 3)), (1, None)]


def test_hidden_widths_are_those_of_the_released_models():
    """Rounded to the multiple of 64 above, four times as wide in the readout: 2.8B has 32 layers of width 2560."""
    with torch.device("meta"):
        stream = resolve("mudd").build(2560, 64)
    widths = [part.average.up.out_features for part in [*stream.connections[2::2], stream.collapse]]
    assert widths == [(4 * (i + 2) // 64 + 1) * 64 for i in range(31)] + [(4 * 33 // 64 + 1) * 64]
    exact = MultiwayDynamicDense(hidden_multiple=1, readout_multiple=1).build(DIM, 4)
    assert exact.connections[2].average.up.out_features == 8
    assert exact.collapse.average.up.out_features == 3


def test_a_given_norm_normalises_all_three_inputs():
    norm = perturbed(nn.RMSNorm(DIM, eps=EPS))
    stream = resolve("mudd").build(DIM, 4, norm=lambda i: norm)
    assert stream.connections[2].others is None
    x, _ = stream.connections[2].read(tuple(normal(1, 2, DIM, seed=i, dtype=torch.float32) for i in range(2)))
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[1], x[2])


def test_the_trimmed_form_averages_the_named_outputs_at_the_named_layers():
    """Four blocks, as the last two layers of a record: the output of block 1 is named, that of block 3 is not."""
    scheme = MultiwayDynamicDense(ways="vr", layers=2, sources=(0, 1), write_gate=True)
    stream = scheme.build(DIM, 8)
    weights = [part.average.static.shape for part in (*stream.connections, stream.collapse) if hasattr(part, "average")
               and part.average is not None]  # fmt: skip
    assert [tuple(shape) for shape in weights] == [(2, 3), (1, 3)]
    assert stream.connections[6].sources == (range(-1, 0), range(0, 2), range(4, 6))
    gates = [name for name, _ in stream.named_parameters() if "gates" in name and "static" not in name]
    assert {name.split(".")[1] for name in gates} == {"6", "7"}
    with pytest.raises(ValueError, match="sources must be numbers"):
        MultiwayDynamicDense(sources=(0, 0))
