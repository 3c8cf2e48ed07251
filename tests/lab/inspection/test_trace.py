import json
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from residua import EDelta, PooledHouseholder
from residua.connections.schemes.deep_delta import DeltaCoefficients
from residua.errors import InputError
from residua.lab.cost.step_memory import _Live
from residua.lab.inspection import Trace, trace
from residua.lab.inspection.measure import measured, norm
from residua.lab.inspection.watch import watching
from residua.ops import delta_operator, delta_write, hyper_mix, hyper_write
from support.tiny_models import passages, prompt, tiny_model
from support.tolerances import assert_close
from support.variants import ALL, DEEP_DELTA, PRESETS

WITHOUT = (  # no linear map of the state but the identity
    *("residual", "siamese", "altup", "denseformer", "mudd"),
    *("attnres", "attnres-block", "attnres-inkling", "mhar", "delta-attnres"),
)
MIXING = (
    *("lambdas", "gated-orthogonal", "orthogonal", "frac"),
    *("hc", "mhc", "mhc-deepseek", "mhc-glm", "krom", "ihc", "gated-residual", "jpmhc", "edelta", "edelta-stream"),
    "wide",
)
EVERYWHERE = {"token_ids", "token_loss", "state_norm", "input_norm", "output_norm", "change_norm"}
DELTA = {
    *("beta", "readout", "target", "erase_norm", "write_norm", "discrepancy_norm", "direction", "alignment"),
    "effective_rank",
}
WRITTEN = {"target", "write_norm", "discrepancy_norm"}  # where beta gates what is written along k
STREAMS = {"h_pre", "h_post", "h_res", "row_error", "column_error", "orthogonality_error"}
BLEND = {"gamma", "angle", "cayley_beta", "h_res", "row_error", "column_error", "orthogonality_error"}
DEPTH = {"determinant", "singular_max", "singular_min", "defect", "singular_values"}
SOURCES = {"depth_weights", "depth_mean", "sources_read"}
DEPTH_READS = ("attnres", "attnres-block", "attnres-inkling", "mhar", "delta-attnres", "denseformer", "mudd")
KEYS = {
    **{name: set() for name in WITHOUT},
    "gated-residual": (STREAMS - {"h_pre"}) | DEPTH,  # its read has a weight for each feature
    **dict.fromkeys(("gated-orthogonal", "orthogonal"), STREAMS - {"h_pre"} | {"gate"} | DEPTH),
    "frac": (STREAMS - {"h_pre"}) | DEPTH,  # a sublayer reads a mixture for each fraction
    "edelta": BLEND | DEPTH,
    "edelta-stream": BLEND | {"h_pre", "h_post"} | DEPTH,
    **dict.fromkeys(("pooled-householder", "gated-delta"), (DELTA - WRITTEN) | DEPTH),
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_trace_of_every_preset_has_the_values_that_apply_to_it(name):
    found = trace(tiny_model(name), prompt(20), sample=6)
    kind = None if name in WITHOUT else "mixing" if name in MIXING else "rank-one"
    own = KEYS.get(name, (STREAMS if kind == "mixing" else DELTA) | DEPTH)
    compressed = {"compress_share"} if getattr(PRESETS[name], "compress", None) else set()
    several = {"stream_similarity"} if PRESETS[name].state_size(0, 1) == 4 else set()
    sources = SOURCES if name in DEPTH_READS else set()
    assert found.values.keys() == EVERYWHERE | own | compressed | several | sources
    columns, reads = len(found.facts["sources"]), max(1, len(found.facts["reads"]))
    assert (columns > 0) == (name in DEPTH_READS)
    assert (found.facts["shortcut"], found.facts["preset"]) == (kind, name)
    assert found.facts["sublayers"] == ["1 attention", "1 mlp", "2 attention", "2 mlp"]
    assert found.facts["sampled"] == [0, 4, 8, 11, 15, 19]
    assert (found.num_sublayers, found.num_tokens) == (4, 20)
    sizes = {"state_norm": (5, 20), "direction": (4, 6, 16), "alignment": (4, 4), "effective_rank": (6,)}
    sizes |= {"token_ids": (20,), "token_loss": (20,), **dict.fromkeys(DEPTH, (4, 6)), "stream_similarity": (5, 20)}
    sizes |= {"depth_weights": (4, 6, reads, columns), "depth_mean": (4, reads, columns)}
    for key, value in found.values.items():
        # Of lambdas' state, x and the embedding are mixed; x in the middle is only kept for the readout.
        n = 4 if "edelta" in name or name == "frac" else found.facts["rows"] - (name == "lambdas")
        sizes["singular_values"] = (6, 4 if kind == "rank-one" else n)
        tail = {"h_res": (n, n), **dict.fromkeys(("readout", "target", "h_pre", "h_post"), (n,))}.get(key, ())
        expected = (4, 4) if key == "compress_share" else sizes.get(key, (4, 20, *tail))
        assert value.shape == expected, key
        assert value.dtype == (torch.int64 if key == "token_ids" else torch.float32), key
        assert (value[:-1] if key == "token_loss" else value).isfinite().all(), key
    json.dumps(found.facts, allow_nan=False)


@pytest.mark.parametrize("name", ALL)
def test_a_trace_has_the_numbers_of_the_model(name):
    """The hidden state to the last bit; the losses, which are computed in pieces, to rounding."""
    model, ids = tiny_model(name), prompt(24)
    with torch.no_grad():
        plain = model(ids[None], labels=ids[None], output_states=True)
        last = model.model(ids[None]).last_hidden_state
        with watching(model.model.stream, lambda passage: None):
            watched = model.model(ids[None]).last_hidden_state
    assert torch.equal(watched, last)
    found = trace(model, ids)
    assert found.facts["loss"] == pytest.approx(plain.loss.item(), rel=1e-12)
    losses = cross_entropy(plain.logits[0, :-1], ids[1:], reduction="none")
    assert_close(found.values["token_loss"][:-1], losses.float())
    assert found.values["token_loss"][-1].isnan()
    states = [norm(state).float() for state in plain.states]
    assert_close(found.values["state_norm"][::2], torch.stack(states))


@pytest.mark.parametrize("name", DEEP_DELTA)
def test_a_delta_write_is_rebuilt_from_its_trace(name):
    for passage in passages(tiny_model(name), prompt(12)):
        assert isinstance(passage.carry.coefficients, DeltaCoefficients)
        found = measured(passage, passage.shortcut())
        streams, after = passage.before[0].reshape(12, -1, 16), passage.after[0].reshape(12, -1, 16)
        beta, k, v = found["beta"], found["direction"], found["target"]
        assert_close(delta_write(streams, k, v, beta), after)
        assert_close(found["readout"], (streams @ k.unsqueeze(-1)).squeeze(-1))
        change = torch.linalg.matrix_norm(after - streams)
        assert_close(found["change_norm"], change)
        assert_close(found["discrepancy_norm"] * beta * k.norm(dim=-1), change)


@pytest.mark.parametrize("name", ["hc", "mhc", "jpmhc", "hc-static-n3", "mhc-lite-n3", "mhc-split", "jpmhc-n2-exact"])
def test_a_mixture_is_rebuilt_from_its_trace(name):
    """If a connection omits a mapping, the trace holds the equivalent matrix."""
    for passage in passages(tiny_model(name), prompt(12)):
        found = measured(passage, passage.shortcut())
        n = found["h_pre"].shape[-1]
        streams, after, y = passage.before[0], passage.after[0], passage.y[0]
        if name == "mhc-split":
            streams, after, y = (x.unflatten(-1, (n, -1)) for x in (streams, after, y))
            written = hyper_mix(streams, found["h_res"]) + found["h_post"].unsqueeze(-1) * y
        else:
            written = hyper_write(streams, y, found["h_res"], found["h_post"])
        assert_close(written, after)
        h = found["h_res"]
        assert_close(found["row_error"], (h.sum(-1) - 1).abs().amax(-1))
        assert_close(found["column_error"], (h.sum(-2) - 1).abs().amax(-1))
        assert_close(found["orthogonality_error"], torch.linalg.matrix_norm(h.mT @ h - torch.eye(n).double(), ord=2))


@pytest.mark.parametrize("name", ["edelta", "edelta-n2", "edelta-stream", "edelta-stream-cumulative"])
def test_a_blend_is_rebuilt_from_its_trace(name):
    for passage in passages(tiny_model(name), prompt(12)):
        found, gamma = measured(passage, passage.shortcut()), passage.carry.coefficients.gamma[0]
        n = found["h_res"].shape[-1]
        rows, g = (x[0].reshape(12, n, -1) for x in (passage.before, passage.carry.residual))
        assert_close(found["h_res"] @ rows, g)
        assert_close(found["gamma"], gamma)
        assert_close(found["orthogonality_error"], 4 * gamma * (1 - gamma))


def test_the_trace_has_the_erasure_of_the_pooled_householder_shortcut():
    for passage in passages(tiny_model("pooled-householder"), prompt(12)):
        found = measured(passage, passage.shortcut())
        erased = (delta_operator(found["direction"], found["beta"]) @ passage.before[0].unsqueeze(-1)).squeeze(-1)
        assert_close(erased, passage.carry.residual[0])
        assert_close(found["erase_norm"], (passage.before[0] - erased).norm(dim=-1), factor=10)


@pytest.mark.parametrize("name", PRESETS)
def test_the_traced_input_norm_is_taken_before_the_norm(name):
    model, ids = tiny_model(name), prompt(12)
    entered = {}
    for connection in model.model.stream.connections:
        connection.norm.register_forward_pre_hook(lambda norm, x: entered.update({norm: x[0]}))
    found = trace(model, ids).values["input_norm"]
    # Of all streams together, where each of them is normalised.
    expected = torch.stack([entered[c.norm][0].flatten(1).norm(dim=-1) for c in model.model.stream.connections])
    assert_close(found, expected.float())


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in WITHOUT])
def test_products_over_depth_are_those_of_dense_operators(name):
    model, ids = tiny_model(name), prompt(10)
    product, found = None, trace(model, ids)
    for i, passage in enumerate(passages(model, ids)):
        seen = measured(passage, passage.shortcut())
        rank_one = "direction" in seen
        shortcut = delta_operator(seen["direction"], seen["beta"]) if rank_one else seen["h_res"]
        product = shortcut if product is None else shortcut @ product
        values = torch.linalg.svdvals(product)
        assert_close(found.values["determinant"][i], torch.linalg.det(product).float())
        assert_close(found.values["singular_max"][i], values[:, 0].float())
        assert_close(found.values["singular_min"][i], values[:, -1].float(), factor=10)
        assert_close(found.values["defect"][i], (values.square() - 1).abs().amax(-1).float())


def everything(model):
    """All of a model that a trace could change."""
    modules = {name: (module.training, sorted(vars(module))) for name, module in model.named_modules()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    parameters = {name: (p.dtype, p.requires_grad, p.grad, p._version) for name, p in model.named_parameters()}
    return modules, hooks, parameters


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_tracing_leaves_the_model_unchanged(name, training):
    model = tiny_model(name).train(training)
    before, weights = everything(model), {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    trace(model, prompt(9))
    assert everything(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


def equal(a: Trace, b: Trace) -> bool:
    same = all(torch.equal(a.values[key].nan_to_num(7), b.values[key].nan_to_num(7)) for key in a.values)
    return same and a.values.keys() == b.values.keys()


def test_a_trace_does_not_depend_on_the_mode_or_on_recomputed_layers():
    model, ids = tiny_model("edelta-stream"), prompt(9)
    expected = trace(model, ids)
    newest = getattr(model, "activation_checkpointing_enable", None)  # the older name warns where both are there
    (newest or model.gradient_checkpointing_enable)()
    assert equal(trace(model.train(), ids), expected)


def test_layers_that_were_compiled_in_place_are_traced_too():
    model, ids = tiny_model("ddl-cc"), prompt(9)
    expected = trace(model, ids)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert equal(trace(model, ids), expected)


@pytest.mark.parametrize("name", ["ddl-tc", "mhc", "edelta", "pooled-householder"])
def test_one_token_and_one_layer_can_be_traced(name):
    found = trace(tiny_model(name, num_hidden_layers=1), [5])
    assert (found.num_sublayers, found.num_tokens, found.facts["sampled"]) == (2, 1, [0])
    assert found.facts["loss"] is None
    assert found.values["token_loss"].isnan().all()
    assert found.values["singular_max"].shape == (2, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_narrow_models_can_be_traced_with_and_without_autocast(name):
    ids = prompt(20)
    exact = trace(tiny_model(name, torch.float32, scale=0.05), ids)
    model = tiny_model(name, torch.bfloat16, scale=0.05)
    narrow = trace(model, ids)
    assert narrow.facts["loss"] == pytest.approx(model(ids[None], labels=ids[None]).loss.item(), rel=1e-5)
    assert narrow.facts["loss"] == pytest.approx(exact.facts["loss"], rel=0.02)
    model = tiny_model(name, torch.float32, scale=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = trace(model, ids)
        own = model(ids[None], labels=ids[None]).loss.item()
    assert cast.facts["loss"] == pytest.approx(own, rel=1e-5)
    for found in (narrow, cast):
        for key in ("beta", "gamma", "h_res"):
            if key in exact.values:
                assert (found.values[key] - exact.values[key]).abs().mean() < 0.02


def test_a_trunk_without_a_head_has_no_losses():
    model, ids = tiny_model("ddl-cc"), prompt(8)
    found = trace(model.model, ids)
    assert found.facts["loss"] is None
    assert found.values["token_loss"].isnan().all()
    assert torch.equal(found.values["beta"], trace(model, ids).values["beta"])


def test_computing_logits_in_pieces_changes_no_number(monkeypatch):
    model, ids = tiny_model("ddl", mup=True), prompt(20)
    whole = trace(model, ids)
    monkeypatch.setattr(sys.modules["residua.lab.inspection.subject"], "LOGITS_AT_A_TIME", 7)
    assert_close(trace(model, ids).values["token_loss"][:-1], whole.values["token_loss"][:-1])
    assert whole.facts["loss"] == pytest.approx(model(ids[None], labels=ids[None]).loss.item(), rel=1e-12)


def test_a_planted_rotation_is_traced():
    """gamma near 1 rotates by the angle that beta_init sets."""
    found = trace(tiny_model(EDelta(gamma_init=0.999999, cayley_init=0.5), scale=0.0), prompt(8))
    assert_close(found.values["gamma"], torch.full((4, 8), 0.999999))
    assert found.values["orthogonality_error"].max() < 1e-5
    assert_close(found.values["cayley_beta"], torch.full((4, 8), 0.5))
    # u and v start orthonormal, up to what the weights of the nets add.
    assert (found.values["angle"] - 2 * torch.arctan(torch.tensor(0.25))).abs().max() < 0.05


def test_mappings_that_a_connection_omits_are_listed():
    found = trace(tiny_model("mhc"), prompt(8))
    assert found.facts["left_out"] == {"h_pre": [0], "h_res": [0, 3]}
    identity = torch.eye(4)
    assert torch.equal(found.values["h_res"][[0, 3]], identity.expand(2, 8, 4, 4))
    assert torch.equal(found.values["h_pre"][0], identity[0].expand(8, 4))
    assert trace(tiny_model("edelta-stream"), prompt(8)).facts["left_out"] == {"h_post": [3]}


def test_the_repr_of_a_trace_is_one_line():
    found = trace(tiny_model("ddl-cc"), prompt(12))
    shown = repr(found)
    assert shown.startswith(f"Trace(ddl-cc, 12 tokens, {found.num_sublayers} sublayers: alignment, beta, ")
    assert shown.count("\n") == 0
    assert len(shown) < 500
    assert all(name in shown for name in found.values)
    own = trace(tiny_model({"preset": "ddl-cc", "beta_init": 0.5}), prompt(3))
    assert repr(own).startswith("Trace(deep_delta, 3 tokens, ")


def test_regimes_have_thresholds_and_need_a_beta():
    found = trace(tiny_model("ddl"), prompt(16))
    beta = found.values["beta"]
    shares = found.regimes(identity=0.9, reflection=1.1)
    assert_close(shares[:, 1], (beta < 0.9).float().mean(1))
    assert_close(shares[:, 3], (beta > 1.1).float().mean(1))
    assert_close(shares.sum(1), torch.ones(4))
    planted = Trace({}, [], {"beta": torch.tensor([[-0.7, -0.2, 1.0, 1.8]])})
    assert planted.regimes().tolist() == [[0.25] * 4], "a negative beta enlarges, a small one is near the identity"
    assert trace(tiny_model(PooledHouseholder()), prompt(4)).regimes().shape == (4, 4)
    with pytest.raises(InputError, match="beta, got "):
        trace(tiny_model("hc"), prompt(4)).regimes()


def test_an_unsupported_model_is_refused():
    with pytest.raises(InputError, match=r"needs a model .*, got Linear"):
        trace(torch.nn.Linear(2, 2), [1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ddl-tc", "edelta-stream"])
def test_memory_grows_with_depth_only_by_the_trace_itself(name):
    """48 sublayers x 2048 tokens: little more is alive at a time than for four sublayers and the trace itself."""
    ids, peaks, sizes = prompt(2048), [], []
    for layers in (2, 24):
        options = {"hidden_size": 32, "num_hidden_layers": layers, "max_position_embeddings": 2048}
        model = tiny_model(name, torch.float32, **options)
        with _Live([]) as living:
            found = trace(model, ids, sample=16)
        peaks.append(living.peak)
        sizes.append(sum(value.nbytes for value in found.values.values()))
    state = 2048 * 4 * 32 * 4
    assert sizes[1] < 48 * state, "a trace is smaller than its states"
    # What is stacked at the end is there twice.
    assert peaks[1] < peaks[0] + 3 * sizes[1]
    assert peaks[1] < 48 * state
