"""The auxiliary loss of a scheme is trained with, reported, and kept out of every evaluation."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from residua.lab.inspection.watch import watching
from residua.models.transformer import total_penalty
from support.tiny_models import left_padded, prompt, tiny_model
from support.tolerances import assert_close


def language_loss(out, ids) -> torch.Tensor:
    return cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("name", ["edelta", "edelta-stream"])
def test_training_adds_the_penalty_of_every_connection(name):
    model, ids = tiny_model(name), prompt(2, 6)
    records = []
    with torch.no_grad(), watching(model.model.stream, records.append):
        model(ids)
    penalty = sum(record.connection.penalty(record.carry.coefficients).mean() for record in records)
    out = model.train()(ids, labels=ids)
    assert penalty > 0.01
    assert_close(out.penalty, penalty)
    assert_close(out.loss, language_loss(out, ids) + penalty)


@pytest.mark.parametrize("name", ["edelta", "edelta-stream"])
def test_padding_adds_nothing_to_the_penalty(name):
    model, ids = tiny_model(name).train(), prompt(1, 6)
    padded, mask = left_padded([prompt(16, seed=1), ids[0]])
    alone = [model(row, labels=row) for row in (padded[:1], ids)]
    labels = padded.masked_fill(mask == 0, -100)
    labels[1, 10] = -100  # the first token, which nothing but padding would predict
    out = model(padded, attention_mask=mask, labels=labels)
    assert_close(out.penalty, (16 * alone[0].penalty + 6 * alone[1].penalty) / 22)
    by_pair = (torch.ones(16, 16).tril().bool() & mask[:, None, None].bool()) & mask[:, None, :, None].bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert_close(model(padded, attention_mask=by_pair, position_ids=positions).penalty, out.penalty)
    out = model(padded[1:], attention_mask=mask[1:], labels=labels[1:])
    assert_close(out.penalty, alone[1].penalty)
    assert_close(out.loss, alone[1].loss)


def test_a_scalar_penalty_is_added_unchanged():
    """A scheme may have a penalty of its weights, which does not depend on tokens."""
    mask, scalar = torch.tensor([[False, True], [True, True]]), torch.tensor(0.3)
    tokens = torch.tensor([[9.0, 1.0], [2.0, 3.0]])
    assert total_penalty([], mask) is None
    assert torch.equal(total_penalty([scalar], mask), scalar)
    assert torch.equal(total_penalty([scalar], None), scalar)
    assert_close(total_penalty([scalar, tokens, torch.tensor([[1.0], [4.0]])], mask), torch.tensor(0.3 + 2 + 3))


def test_evaluation_adds_no_penalty():
    model, ids = tiny_model("edelta"), prompt(2, 6)
    out = model(ids, labels=ids)
    assert out.penalty is None
    assert_close(out.loss, language_loss(out, ids))
    assert tiny_model("ddl").train()(ids, labels=ids).penalty is None


def test_micro_batches_are_weighted_by_their_tokens():
    """Two rows of different length, together and one by one: the shares of language loss and penalty add up."""
    model, rows = tiny_model("edelta").train(), [prompt(1, 6, seed=1), prompt(1, 3, seed=2)]
    count = 5 + 2
    alone = [model(row, labels=row) for row in rows]
    shares = [model(row, labels=row, num_items_in_batch=count).loss for row in rows]
    assert_close(sum(shares), (5 * alone[0].loss + 2 * alone[1].loss) / count)


def test_the_gates_get_their_gradient_from_the_penalty():
    model, ids = tiny_model("edelta").train(), prompt(2, 6)
    model(ids, labels=ids).penalty.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("gamma" in name and grad.abs().max() > 0 for name, grad in gradients.items())


def test_a_mask_of_one_row_stands_for_the_whole_batch():
    model, ids = tiny_model("edelta").train(), prompt(4, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    added = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    expected = model(ids, labels=ids)
    for mask in (causal.expand(4, 1, 6, 6), causal[None, None], added[None, None], torch.ones(1, 6)):
        found = model(ids, labels=ids, attention_mask=mask)
        torch.testing.assert_close((found.penalty, found.loss), (expected.penalty, expected.loss))
