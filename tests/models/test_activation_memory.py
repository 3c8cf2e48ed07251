"""What the backward pass keeps: counted tensor by tensor, so that a copy too many fails here."""

from functools import cache

import pytest
import torch

from residua.connections.families import pooled as context
from residua.connections.schemes import edelta, pooled_householder
from residua.lab.cost.measured_memory import storages_kept
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.ops import norm
from support.lanes import some
from support.tiny_models import prompt, tiny_model

LAYERS, DIM, TOKENS = 8, 64, 512


@cache
def kept(
    connection: str,
    dtype: torch.dtype = torch.float32,
    *,
    autocast: bool = False,
    shard=None,
    padded: int = 0,
) -> float:
    """Vectors of width dim, in the model's dtype, that one token keeps in one layer (parameters not counted)."""
    torch.manual_seed(0)
    model = ResiduaForCausalLM(
        ResiduaConfig(
            vocab_size=16,
            hidden_size=DIM,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            connection=connection,
        )
    )
    model.to(dtype).train()

    if shard is not None:  # then weights are gathered for a layer and freed after it: no bytes are counted for them
        for module in (*model.model.layers, model):
            shard(module)
    # Of sharded weights, the shards: the whole ones are freed, and what is kept may get their addresses.
    held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    mask = torch.arange(TOKENS).ge(padded).long()[None] if padded else None

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", enabled=autocast):
            return model(ids, attention_mask=mask).logits

    return storages_kept(forward, held) / (TOKENS * DIM * LAYERS * dtype.itemsize)


def plain(dtype: torch.dtype = torch.float32) -> float:
    return kept("residual", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ddl-cc", "ddl-tc"])
def test_four_channels_keep_little_more_memory_than_one(name, dtype):
    """Two raw directions and half a state (one in four, of two) for each layer, and numbers per token."""
    extra = kept(name, dtype) - plain(dtype)
    numbers = 2 * (2 * 4 + 4) * 4 / dtype.itemsize / DIM  # of float32, as a share of a vector this short
    assert extra <= 4.5 + numbers
    everything = kept(f"{name}:recompute=none", dtype) - plain(dtype)
    assert everything == pytest.approx(extra + 6, abs=0.5), "three of four states more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_channel_keeps_only_the_directions(dtype):
    extra = kept("ddl", dtype) - plain(dtype)
    assert 2 <= extra <= 2 + 2 * 6 * 4 / dtype.itemsize / DIM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "numbers"),
    some(
        [
            ("hc", 82),
            ("mhc", 96),
            ("mhc-deepseek", 128),
            ("krom", 80),
            ("ihc", 48),
            ("jpmhc", 104),
            ("edelta-stream", 240),
        ],
        {("hc", 82), ("mhc", 96), ("edelta-stream", 240)}.__contains__,
    ),
)
def test_four_mixed_streams_keep_little_more_memory_than_one(name, numbers, dtype):
    """For each layer these are two outputs of sublayers, half a state and some float32 numbers per token, as for a
    delta write."""
    extra = kept(name, dtype) - plain(dtype)
    assert extra <= 4.1 + 2 * numbers * 4 / dtype.itemsize / DIM
    everything = kept(f"{name}:recompute=none", dtype) - plain(dtype)
    assert everything >= extra + 5.5, "three of four states more"


@pytest.mark.parametrize("connection", ["frac:num_fractions=4", "mhc:layout=split"])
def test_fractions_of_a_state_are_recomputed(connection):
    assert kept(f"{connection},recompute=none") - kept(connection) == pytest.approx(1.5), "three states of four"


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        # The output of each of the two sublayers of a layer, and a few numbers for each token.
        ("residual:write_gate=true", FLOAT32, 2 + 2 * 6 / DIM),
        # The states alone. PyTorch's norm keeps two vectors where the sum of two norms is recomputed.
        ("siamese", FLOAT32, 0.2),
        ("siamese", BFLOAT16, 2.1),
        # Half a state, the active stream twice, 64 features of LAuReL, the projections at both ends of all layers.
        ("altup", FLOAT32, 1 + 64 / DIM + 2 * 3 / LAYERS + 60 / DIM),
        # Hidden features and, for each sublayer, a raw direction or an output; PyTorch's norm keeps two vectors more.
        ("pooled-householder", FLOAT32, 1.25),
        ("edelta", FLOAT32, 2.75),
        # Half a state, two outputs and twice 320 features, less the inputs of two norms, which a gated read recomputes.
        ("gated-residual", FLOAT32, 2 + 2.5 / 8 + 0.5),
        # Sources, one for each sublayer or block. PyTorch's norm keeps two vectors where a read is recomputed.
        ("attnres-block", FLOAT32, -1.5),
        ("attnres", FLOAT32, -1),
        ("mhar", FLOAT32, 0),
        ("delta-attnres", FLOAT32, 0.75),
        ("denseformer", FLOAT32, -0.9),
        ("mudd", FLOAT32, 2.25),
    ],
)
def test_a_layer_keeps_at_most_the_stated_number_of_extra_vectors(name, dtype, most):
    assert kept(name, dtype) - plain(dtype) <= most
    if name == "altup":
        assert kept(f"{name}:recompute=none") >= kept(name) + 12


def losses_and_gradients(connection) -> list[torch.Tensor]:
    """Padding, and a bfloat16 state under autocast, included."""
    found = []
    for autocast in (False, True):
        model = tiny_model(dtype=FLOAT32, connection=connection, state_dtype="bfloat16" if autocast else None)
        ids, mask = prompt(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
        with torch.autocast("cpu", dtype=BFLOAT16, enabled=autocast):
            loss = model.train()(ids, labels=ids, attention_mask=mask).loss
        found += [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    return found


@pytest.mark.parametrize(
    "scheme", ["hc", "frac", "mhc", "mhc-glm", "krom", "ihc", "gated-residual", "jpmhc", "edelta-stream", "altup"]
)
def test_replay_changes_no_bit(scheme):
    replayed, whole = (losses_and_gradients({"preset": scheme, "recompute": kind}) for kind in ("replay", "none"))
    assert all(map(torch.equal, replayed, whole))


@pytest.mark.parametrize("scheme", ["pooled-householder", "edelta", {"preset": "edelta", "context": "cumulative"}])
def test_recomputing_results_changes_no_bit(scheme, monkeypatch):
    derived = losses_and_gradients(scheme)
    for module in (edelta, pooled_householder, context, norm):
        monkeypatch.setattr(module, "derive", lambda function, *inputs: function(*inputs))
    assert all(map(torch.equal, derived, losses_and_gradients(scheme)))


def test_longer_chains_keep_less_memory():
    extra = [kept(f"ddl-cc:recompute_every={m}") for m in (1, 2, 4, 8)]
    assert extra[0] == kept("ddl-cc:recompute=none")
    assert extra == sorted(extra, reverse=True)
    assert extra[0] - extra[3] == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize("name", ["ddl-cc", "altup:laurel_rank=2", "gated-residual:gate_rank=2"])
def test_sharded_layers_do_not_cut_the_chain(alone, name):
    """FSDP2 marks the inputs of every layer with a node of its own, between the writes of two layers."""
    from torch.distributed.fsdp import fully_shard

    extra = kept(name) - plain()
    # Gathered weights of connections are counted: 0.15 vectors of each token here.
    assert kept(name, shard=fully_shard) - kept("residual", shard=fully_shard) == pytest.approx(extra, abs=0.2)


@pytest.mark.parametrize("name", ["ddl-cc", "ddl-tc", "ddl-ec"])
def test_padding_keeps_no_additional_state(name):
    """A mask hides tokens from the convolutions; no masked copy of a state is kept for it."""
    extra = kept(name, padded=3) - kept("residual", padded=3)
    assert extra == pytest.approx(kept(name) - plain(), abs=0.1)
