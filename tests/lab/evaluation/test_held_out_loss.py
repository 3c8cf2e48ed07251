import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from residua.errors import InputError
from residua.lab.evaluation.loss import COPYING, document_losses, held_out_loss, repeated, transition
from support.pages import RESBENCH, records

VOCABULARY = 7


class Bigram(nn.Module):
    """Logits that depend on the last token alone; counts its calls and records the mode it was called in."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)
        self.modes = []

    def forward(self, input_ids, use_cache):
        assert not use_cache
        self.modes.append((self.training, torch.is_grad_enabled()))
        return SimpleNamespace(logits=self.dropout(self.table(input_ids)))


def text(length, seed=0):
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def test_the_mean_over_tokens_does_not_depend_on_how_batches_are_cut():
    model, tokens = Bigram(), text(31)
    whole = [(tokens[None, :-1], tokens[None, 1:])]
    cut = [(tokens[None, a:b], tokens[None, a + 1 : b + 1]) for a, b in ((0, 4), (4, 25), (25, 30))]
    expected = nn.functional.cross_entropy(model.table.weight[tokens[:-1]].double(), tokens[1:]).item()
    for batches in (whole, cut):
        result = held_out_loss(model, batches)
        assert result["val_loss"] == pytest.approx(expected, rel=1e-6)
        assert result["tokens"] == 30
        assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert "bits_per_byte" not in result


def test_ignored_labels_count_neither_as_loss_nor_as_tokens():
    model, tokens = Bigram(), text(11)
    inputs = torch.cat([tokens[:-1], torch.zeros(5, dtype=torch.int64)])[None]
    labels = torch.cat([tokens[1:], torch.full((5,), -100)])[None]
    padded = held_out_loss(model, [(inputs, labels)])
    assert padded == pytest.approx(held_out_loss(model, [(tokens[None, :-1], tokens[None, 1:])]))


def test_bits_per_byte_is_the_total_over_the_bytes():
    model, tokens = Bigram(), text(21)
    result = held_out_loss(model, [(tokens[None, :-1], tokens[None, 1:])], bytes=50)
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] * 20 / math.log(2) / 50)


def test_every_module_returns_to_its_mode_even_after_an_error():
    model = Bigram().train()
    model.dropout.eval()
    tokens = text(5)

    def batches():
        yield tokens[None, :-1], tokens[None, 1:]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="disk"):
        held_out_loss(model, batches())
    assert model.modes == [(False, False)]
    assert model.training
    assert model.table.training
    assert not model.dropout.training


def test_a_diverged_model_is_reported_instead_of_raising():
    model, tokens = Bigram(), text(5)
    with torch.no_grad():
        model.table.weight.zero_()[:, 0] = 1e5
    batches = [(tokens[None, :-1], torch.full((1, 4), 1))]
    assert held_out_loss(model, batches)["perplexity"] == math.inf
    with torch.no_grad():
        model.table.weight.fill_(math.nan)
    assert math.isnan(held_out_loss(model, batches)["val_loss"])


def test_low_precision_logits_are_summed_in_high_precision():
    model, tokens = Bigram(), text(4097)
    exact = held_out_loss(model.bfloat16().float(), [(tokens[None, :-1], tokens[None, 1:])])["val_loss"]
    model.bfloat16()
    assert held_out_loss(model, [(tokens[None, :-1], tokens[None, 1:])])["val_loss"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("batches", [[], [(torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), -100))]])
def test_a_text_without_labels_is_an_input_error(batches):
    with pytest.raises(InputError, match="no label"):
        held_out_loss(Bigram(), batches)


def test_a_label_is_repeated_if_its_pair_occurs_earlier_in_the_same_row():
    tokens = text(400).reshape(8, 50)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[2, 5:9] = labels[:, 40:] = -100
    pairs = [list(zip(one.tolist(), two.tolist())) for one, two in zip(inputs, labels)]
    expected = [[b != -100 and (a, b) in row[:t] for t, (a, b) in enumerate(row)] for row in pairs]
    assert repeated(inputs, labels).tolist() == expected
    assert any(map(any, expected))


@pytest.mark.parametrize("cuts", [(0, 60), (0, 7, 8, 33, 60)])
def test_the_loss_of_a_document_is_that_of_the_document_by_itself(cuts):
    """A separator is the last label of the document that it ends, and the input of the next one's first label."""
    model, tokens, end = Bigram(), text(61), 3
    batches = [(tokens[None, a:b], tokens[None, a + 1 : b + 1]) for a, b in pairwise(cuts)]
    bounds = sorted({0, *(place for place in range(1, 61) if tokens[place] == end), 60})
    assert len(bounds) > 5
    result = document_losses(model, batches, end)
    for (first, last), labels, nats in zip(pairwise(bounds), result["labels"], result["nats"], strict=True):
        alone = held_out_loss(model, [(tokens[None, first:last], tokens[None, first + 1 : last + 1])])
        assert labels == alone["tokens"]
        assert nats == pytest.approx(alone["val_loss"] * labels, abs=1e-4)
    assert sum(result["nats"]) / 60 == pytest.approx(held_out_loss(model, batches)["val_loss"], abs=1e-5)


def test_the_losses_on_repeated_and_other_labels_average_to_the_total():
    model, tokens = Bigram(), text(61)
    inputs, labels = tokens[None, :-1], tokens[None, 1:]
    batches = [(inputs[:, :40], labels[:, :40]), (inputs[:, 40:], labels[:, 40:])]
    result = held_out_loss(model, batches)
    again = [repeated(*batch) for batch in batches]
    for name, wanted in (("repeated_loss", True), ("other_loss", False)):
        part = [(one, two.where(mask == wanted, -100)) for (one, two), mask in zip(batches, again)]
        assert result[name] == pytest.approx(held_out_loss(model, part)["val_loss"], rel=1e-12)
    share = result["repeated_share"]
    assert share == sum(int(mask.sum()) for mask in again) / 60
    assert share * result["repeated_loss"] + (1 - share) * result["other_loss"] == pytest.approx(result["val_loss"])


def test_without_labels_of_both_kinds_the_losses_are_not_split():
    result = held_out_loss(Bigram(), [(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]]))])
    assert "repeated_loss" not in result


@pytest.mark.parametrize(
    ("points", "step"),
    [
        ([(100, 4.2, 4.6), (200, 3.5, 4.4)], None),
        ([(100, 4.2, 4.7), (200, 2.2, 4.7), (300, 2.0, 4.5)], 150.0),
        ([(100, 1.0, 4.0)], 100.0),
    ],
)
def test_the_transition_is_where_repeated_labels_become_much_easier(points, step):
    assert transition(points) == (step if step is None else pytest.approx(step))


def test_the_bound_of_the_transition_lies_between_the_runs_that_copy_and_those_that_do_not():
    """By eye in docs/resbench-repeats.png: the baselines do not copy at their end, the other four do."""
    ends = {row["scheme"]: row["points"][-1] for row in records("main/repeats.jsonl", RESBENCH / "records")}
    leads = {scheme: point["other"] - point["repeated"] for scheme, point in ends.items()}
    copying = {scheme for scheme, lead in leads.items() if lead > COPYING}
    assert leads.keys() - copying == {"residual", "lambdas"}
    assert max(leads[name] for name in leads.keys() - copying) < 0.9
    assert min(leads[name] for name in copying) > 1.8
