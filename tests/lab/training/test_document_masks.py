"""With document masks, the documents of a sequence are read as if each were alone."""

import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

import residua
from residua.errors import InputError
from residua.lab.evaluation.loss import document_losses, held_out_loss, repeated
from residua.lab.experiment import evaluate, open_run, run, trace_model
from residua.lab.records import jsonlines
from residua.lab.training.base_model import expect_documents_apart
from residua.lab.training.step import next_token_loss
from support.converted_models import converted
from support.families import tiny
from support.tiny_models import tiny_model
from support.tiny_runs import options, run_config

END = 3


def packed():
    """Rows of three documents, each begun by the end of the one before it, and where these stand."""
    tokens = torch.randint(4, 32, (2, 25), generator=torch.Generator().manual_seed(1))
    borders = [(0, 7, 16), (0, 2, 21)]
    for row, starts in zip(tokens, borders, strict=True):
        row[list(starts)] = END
    return tokens, [(*starts, 24) for starts in borders]


@pytest.mark.parametrize(
    "model", ["residual", "ddl-tc", "ddl-ec", "attnres", "mhc", "converted residual", "converted lambdas+conv"]
)
def test_the_loss_is_that_of_the_separate_documents(model):
    kind, _, scheme = model.rpartition(" ")
    model = converted(scheme) if kind else tiny_model(scheme, dtype=torch.float64)
    tokens, borders = packed()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    total = 0.0
    for row, places in zip(tokens, borders, strict=True):
        for start, end in pairwise(places):
            logits = model(input_ids=row[None, start:end], use_cache=False).logits[0]
            total += cross_entropy(logits, row[start + 1 : end + 1], reduction="sum").item()
    masked = held_out_loss(model, [(inputs, labels)], end_of_text=END)
    assert masked["val_loss"] == pytest.approx(total / labels.numel(), rel=1e-9)
    assert abs(held_out_loss(model, [(inputs, labels)])["val_loss"] - masked["val_loss"]) > 1e-4
    by_document = document_losses(model, [(inputs, labels)], END, masked=True)
    assert sum(by_document["nats"]) == pytest.approx(total, abs=1e-3)
    loss, _ = next_token_loss(model.train(), inputs, labels, end_of_text=END)
    assert loss.item() == pytest.approx(total / labels.numel(), rel=1e-6)


@pytest.mark.parametrize(("family", "reads"), [("llama", False), ("gpt2", False), ("opt", True), ("bloom", True)])
def test_a_base_that_would_read_across_documents_is_refused(family, reads):
    """The attention of OPT separates nothing by positions, and BLOOM takes none."""
    for model in (tiny(family), residua.convert(tiny(family), "residual+tc" if family == "opt" else "hc")):
        with pytest.raises(InputError, match=r"train\.document_masks must be false .*") if reads else nullcontext():
            expect_documents_apart(model)


def test_a_pair_in_an_earlier_document_does_not_count_as_repeated():
    row = torch.tensor([[5, 6, END, 5, 6, 7, 5, 6, END, 5, 6]])
    inputs, labels = row[:, :-1], row[:, 1:]
    assert repeated(inputs, labels).nonzero()[:, 1].tolist() == [3, 6, 7, 8, 9]
    assert repeated(inputs, labels, END).nonzero()[:, 1].tolist() == [6]


@pytest.mark.parametrize("connection", ["lambdas+conv", "ddl-tc"])
def test_a_run_trains_and_is_evaluated_with_document_masks(connection, data, tmp_path):
    """The loss of its first step is that of the untrained model on the documents, and differs from that of a run
    without masks."""
    model = {"connection": connection, "max_position_embeddings": 256}
    settings = {"steps": 2, "evaluate_every": 1, "lr": 1e-12, "connections_every": 1, "sequence_length": 100}
    losses = {}
    for masks in (False, True):
        changes = options(data, model=model, document_masks=masks, **settings)
        run(run_config(changes), tmp_path / str(masks), progress=False)
        losses[masks] = jsonlines.read(tmp_path / str(masks) / "metrics.jsonl")[0]
    assert losses[True]["loss"] != losses[False]["loss"]
    assert losses[True]["val_loss"] != losses[False]["val_loss"]

    opened = open_run(tmp_path / "True")
    assert evaluate(opened)["val_loss"] == pytest.approx(losses[True]["val_loss"], rel=1e-6)
    tokens = trace_model(opened, tokens=200).values["token_ids"].tolist()
    assert tokens.index(opened.data.eos_token_id) == len(tokens) - 1, "one document"
    assert math.isfinite(losses[True]["grad_norm"])
