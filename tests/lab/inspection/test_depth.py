"""What is read over depth, and how alike streams are: each against a second computation from what passed by."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from residua import (
    AttentionResiduals,
    DeltaAttentionResiduals,
    DenseFormer,
    HyperConnections,
    InklingAttentionResiduals,
    MultiwayDynamicDense,
)
from residua.lab.inspection import overview, sublayer_statistics, summary, trace, warnings
from residua.lab.inspection.depth import sources_read
from residua.lab.inspection.measure import stream_similarity
from support.tiny_models import passages, prompt, tiny_model
from support.tolerances import assert_close
from support.variants import PRESETS

LAYERS = {"num_hidden_layers": 3}
TOKENS = 12
READS = {
    "attnres": AttentionResiduals(),
    "attnres-block": AttentionResiduals(block_size=4),
    "mhar": AttentionResiduals(heads=4),
    "inkling": InklingAttentionResiduals(block_size=2, separate_every=2),
    "delta": DeltaAttentionResiduals(block_size=2),
    "delta-null": DeltaAttentionResiduals(null_source=True),
    "denseformer": DenseFormer(),
    "denseformer-dilated": DenseFormer(dilation=2),
    "mudd": MultiwayDynamicDense(ways="r"),
    "mudd-qkvr": MultiwayDynamicDense(),
}


def columns(found, seen, reader):
    """Each column's source as sublayer `reader` finds it, from its name: outputs so far, or the state of a block."""
    sublayers = found.facts["sublayers"]
    blocks = found.facts["scheme"]["scheme"] in ("denseformer", "mudd")
    zero = torch.zeros_like(seen[0].y)
    for name in found.facts["sources"]:
        first, _, last = name.partition(" to ")
        if name == "embedding":
            yield seen[0].before[0]
        elif name == "learned":
            yield zero + seen[reader].connection.null if reader else zero
        else:
            given = range(sublayers.index(first), min(sublayers.index(last or first) + 1, reader))
            yield zero if not given else seen[given[-1]].after[-1] if blocks else sum(seen[i].y for i in given)


@pytest.mark.parametrize("name", READS)
def test_the_input_is_the_sum_of_the_sources_with_the_traced_weights(name):
    """The input of the norm of every sublayer is rebuilt from the names of the columns, outputs and weights."""
    scheme = READS[name]
    model, ids = tiny_model(scheme, **LAYERS), prompt(TOKENS)
    found, seen = trace(model, ids, sample=TOKENS), passages(model, ids)
    weights = found.values["depth_weights"].double()
    count = len(found.facts["sources"])
    assert weights.shape == (6, TOKENS, max(1, len(found.facts["reads"])), count)
    assert_close(found.values["depth_mean"], found.values["depth_weights"].mean(1))
    without = found.facts["left_out"].get("depth_weights", [])
    for i, passage in enumerate(seen):
        if i in without:
            assert not weights[i].any()
            continue
        sources = torch.stack([source[0] for source in columns(found, seen, i)], -2)
        if name == "inkling" and i:
            sources = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        width = 16 // (4 if name == "mhar" else 1)  # of what one read gives
        reads = weights[i] if name == "mhar" else weights[i, :, :1]
        parts = torch.einsum("trs,tsrw->trw", reads, sources.unflatten(-1, (-1, width))).flatten(1)
        before = passage.before[-1][0] if name.startswith("delta") else 0
        assert_close((before + parts).float(), passage.normed[0].float())  # a trace is float32
        if name not in ("denseformer", "denseformer-dilated", "mudd", "mudd-qkvr"):
            assert_close(
                weights[i].sum(-1).float(), torch.ones(TOKENS, reads.shape[1] if name == "mhar" else weights.shape[2])
            )


@pytest.mark.parametrize(
    ("name", "sources", "reads"),
    [
        ("attnres", ["embedding", "1 attention", "1 mlp", "2 attention", "2 mlp", "3 attention"], []),
        ("attnres-block", ["embedding", "1 attention to 2 mlp", "3 attention"], []),
        ("delta-null", ["learned", "embedding", "1 attention", "1 mlp", "2 attention", "2 mlp", "3 attention"], []),
        ("inkling", ["embedding", "1 attention to 1 mlp", "2 attention to 2 mlp", "3 attention"], ["q", "k", "v"]),
        ("mudd-qkvr", ["embedding", "1 attention to 1 mlp", "2 attention to 2 mlp"], ["q", "k", "v", "r"]),
        ("mhar", None, ["head 1", "head 2", "head 3", "head 4"]),
    ],
)
def test_columns_are_named_after_the_writing_sublayer(name, sources, reads):
    found = trace(tiny_model(READS[name], **LAYERS), prompt(TOKENS))
    assert found.facts["reads"] == reads
    assert sources is None or found.facts["sources"] == sources


def test_separate_reads_are_distinguished_and_a_single_read_represents_all():
    found = trace(tiny_model(READS["inkling"], **LAYERS), prompt(TOKENS))
    q, k, v = found.values["depth_mean"][2]  # the attention of every second layer
    assert (q - k).abs().max() > 0.01
    assert (k - v).abs().max() > 1e-4
    q, k, v = found.values["depth_mean"][3]
    assert torch.equal(q, k)
    assert torch.equal(k, v)


def test_the_number_of_effective_sources_is_counted():
    weights = torch.tensor([[[0.25, 0.25, 0.25, 0.25]], [[0.0, 1.0, 0.0, 0.0]], [[-0.5, 0.5, 0.0, 0.0]]])
    assert_close(sources_read(weights), torch.tensor([4.0, 1.0, 2.0]))
    assert_close(sources_read(weights.transpose(0, 1)), torch.tensor([7 / 3]))
    assert sources_read(torch.zeros(2, 1, 4)).tolist() == [1, 1], "as MUDD starts with norms after the reads"


@pytest.mark.parametrize("name", [name for name, scheme in PRESETS.items() if scheme.state_size(0, 1) == 4])
def test_the_similarity_of_streams_is_the_mean_cosine_of_all_pairs(name):
    model, ids = tiny_model(name), prompt(TOKENS)
    found, seen = trace(model, ids).values["stream_similarity"], passages(model, ids)
    assert found.shape == (5, TOKENS)
    for i, passage in enumerate(seen):
        for row, state in ((i, passage.before), (i + 1, passage.after)):
            if isinstance(state, tuple):  # inside a block of AltUp all streams move by as much as the active one
                predicted, active = state
                state = predicted + (active - predicted[..., 0, :]).unsqueeze(-2)
            streams = state[0].unbind(-2)
            pairs = [cosine_similarity(a, b, dim=-1) for a, b in combinations(streams, 2)]
            assert_close(found[row], torch.stack(pairs).mean(0).float())


def test_zero_streams_and_copies_have_defined_similarities():
    x = torch.randn(1, 3, 1, 8, generator=torch.Generator().manual_seed(0))
    assert_close(stream_similarity(x.expand(1, 3, 4, 8)), torch.ones(3))
    assert_close(stream_similarity(torch.cat([x, -x], -2)), -torch.ones(3))
    assert_close(stream_similarity(torch.cat([x, 3 * x, 0 * x], -2)), torch.full((3,), 1 / 3))
    assert stream_similarity(normalize(torch.eye(4)).expand(1, 2, 4, 4)).tolist() == [0, 0]


def test_a_summary_names_the_most_read_sources_and_the_similarity_of_the_streams():
    found = trace(tiny_model(READS["denseformer"], **LAYERS), prompt(TOKENS))
    rows, table = sublayer_statistics(found), summary(found)
    assert [row["most_read"] is None for row in rows] == [True, True, False, True, False, True]
    weights = found.values["depth_mean"][4, 0]
    assert rows[4]["most_read"] == found.facts["sources"][weights.abs().argmax()]
    assert rows[4]["most_read_weight"] == pytest.approx(weights[weights.abs().argmax()].item())
    assert table.rows[4][1:4] == [
        f"{found.values['sources_read'][4].mean():.2f}", rows[4]["most_read"], f"{rows[4]['most_read_weight']:.3f}",
    ]  # fmt: skip
    assert table.rows[1][1:4] == ["1.00", "none", "none"]
    found = trace(tiny_model("hc"), prompt(TOKENS))
    first, last = found.values["stream_similarity"][[0, -1]].mean(1).tolist()
    assert f"streams: mean cosine between two of them {first:.3f} at the start, {last:.3f} at the end" in overview(
        found
    )
    assert sublayer_statistics(found)[2]["stream_similarity"] == pytest.approx(
        found.values["stream_similarity"][2].mean().item()
    )


def test_streams_that_stay_equal_give_a_warning():
    copies = trace(tiny_model(HyperConnections(), scale=0.0), prompt(TOKENS))
    sentence = (
        "the streams are copies of one another before and after every sublayer: together they hold no more than one"
    )
    assert warnings(copies)[-1] == sentence
    parted = copies.values["stream_similarity"].clone()
    parted[3] = 0.999
    assert sentence not in warnings(replace(copies, values=copies.values | {"stream_similarity": parted}))
