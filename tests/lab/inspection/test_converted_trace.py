"""A trace of a converted model is made from its connections alone, like the trace of a residua model."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import CohereConfig

import residua
from residua.conversion.rebuild import is_converted, stream_of
from residua.errors import InputError
from residua.lab.inspection import gate_quantiles, has_gates, trace, warnings
from residua.lab.inspection.subject import Subject
from support.converted_models import IDS, WINDOWED, converted, llama, model_of
from support.tolerances import assert_close

TOKENS = IDS[0].tolist()


def test_the_states_of_the_plain_residual_are_the_hidden_states_of_the_model():
    """The model that was not converted is the oracle."""
    plain = llama().eval()
    output = plain(IDS[:1], output_hidden_states=True)
    found = trace(residua.convert(llama().eval(), "residual"), TOKENS)
    assert found.facts["sublayers"][:3] == ["1 input_layernorm", "1 post_attention_layernorm", "2 input_layernorm"]
    for layer, state in enumerate(output.hidden_states[:-1]):  # the last one is normalised
        assert_close(found.values["state_norm"][2 * layer], state[0].norm(dim=-1).float())
    losses = cross_entropy(output.logits[0, :-1], IDS[0, 1:], reduction="none")
    assert_close(found.values["token_loss"][:-1], losses.float())
    assert found.values["token_loss"][-1].isnan()


@pytest.mark.parametrize("connection", ["hc", "mhc", WINDOWED, "attnres-block", "ddl"])
def test_a_trace_shows_what_every_connection_computes(connection, tmp_path):
    model = converted(connection).eval()
    before = model(IDS).logits
    found = trace(model, TOKENS)
    stream, records = stream_of(model), []
    Subject.of(model).run(IDS[:1], records.append)
    assert [record.connection for record in records] == list(stream.connections)
    for i, record in enumerate(records):
        shortcut = record.connection.shortcut(record.before, record.carry, record.y)
        for name in ("beta", "h_res", "h_pre", "h_post"):
            if name in found.values:
                kept, value = found.values[name], getattr(shortcut, name)
                assert_close(kept[i], value.expand(1, *kept.shape[1:])[0].float())
    assert found.facts["scheme"] == residua.connections.describe(Subject.of(model).scheme)
    assert found.facts["loss"] == pytest.approx(model(IDS[:1], labels=IDS[:1]).loss.item())
    assert type(found).load(found.save(tmp_path / "trace.safetensors")).facts == found.facts
    assert isinstance(warnings(found), list)
    assert torch.equal(model(IDS).logits, before)


def test_gates_are_logged_while_a_converted_model_trains():
    model = converted("ddl").train()
    subject = Subject.of(model)
    assert has_gates(subject.stream, subject.dim)
    found = gate_quantiles(model, IDS)
    beta = torch.cat([trace(model, ids).values["beta"] for ids in IDS], dim=1)
    assert found["beta"]["mean"] == pytest.approx(beta.mean(-1).tolist(), rel=1e-5)


def test_models_that_cannot_be_traced_are_refused():
    with pytest.raises(InputError, match="residua convert"):
        trace(llama(), TOKENS)
    assert not is_converted(llama())
    parallel = residua.convert(model_of(CohereConfig, num_key_value_heads=2), "residual")
    before = parallel(IDS).logits
    with pytest.raises(InputError, match=r"^trace needs one output"):
        trace(parallel, TOKENS)
    assert torch.equal(parallel(IDS).logits, before)
