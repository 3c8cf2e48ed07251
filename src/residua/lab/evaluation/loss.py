"""The loss on held-out text, in nats per token and bits per byte: of all labels, of repeated pairs, and by document."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from residua.errors import InputError
from residua.lab.records.jsonlines import OVERFLOWS
from residua.models.cache import documents_apart
from residua.models.evaluating import evaluating

IGNORED_LABEL = -100
COPYING = 1.5
"""A model looks up earlier pairs if its loss on repeated labels is lower than on all others by at least this many nats.

At the end of the runs in resbench/records/main/repeats.jsonl, this difference is 1.9 or more for models that do so, and
0.8 for all other models."""


def repeated(inputs: Tensor, labels: Tensor, end_of_text: int | None = None) -> Tensor:
    """Return whether the pair (inputs[t], labels[t]) also occurs earlier in its row: (batch, seq), boolean.

    end_of_text: the token before each document; if given, the pair must occur earlier in the same document.

    The label of such a pair can be predicted by looking up the token that followed an earlier occurrence of the input,
    as induction heads do (Olsson et al. 2022, arXiv 2209.11895). Ignored labels are never repeated.
    """
    valid = labels != IGNORED_LABEL
    pairs = inputs * (2 + int(labels.max())) + (labels + 1).where(valid, 0)
    if end_of_text is not None:
        pairs += (inputs == end_of_text).cumsum(1) * (1 + pairs.max())
    ordered, places = pairs.sort(dim=-1, stable=True)  # stable: the first of equal pairs stays first
    again = torch.zeros_like(valid)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(valid).scatter_(1, places, again) & valid


def transition(points: Sequence[tuple[int, float, float]]) -> float | None:
    """Return the step at which a model began to look up earlier pairs of tokens; None if it never did.

    At this step, the loss on other labels minus that on repeated labels first reaches `COPYING`. The step is linearly
    interpolated between evaluations. points: (step, loss on repeated labels, loss on other labels).
    """
    before: tuple[int, float] | None = None
    for step, again, other in points:
        lead = other - again
        if lead >= COPYING:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (COPYING - before[1]) / (lead - before[1])
        before = step, lead
    return None


def shard_batches(batches: Iterable[tuple[Tensor, Tensor]], rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every `size`-th batch, starting at `rank`: the shard of one process among several.

    All shards have the same length, because the ranks of a sharded model must run it together. A shard without a batch
    of its own gets another rank's batch, with all labels ignored.
    """
    remaining = iter(batches)
    while found := list(islice(remaining, size)):
        if rank < len(found):
            yield found[rank]
        else:
            inputs, labels = found[0]
            yield inputs, torch.full_like(labels, IGNORED_LABEL)


def held_out_loss(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    bytes: int | None = None,
    end_of_text: int | None = None,
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> dict[str, float]:
    """Return the mean cross-entropy of a causal language model over all labels of `batches`.

    Args:
        model: called as `model(input_ids=inputs, use_cache=False)`; its result has `logits` (batch, seq, vocab_size).
        batches: pairs (inputs, labels) of int64 tensors (batch, seq); `labels[:, t]` is the token after
            `inputs[:, t]` (already aligned), or -100 if there is none.
        bytes: the length of the same text in UTF-8 bytes, for the loss in bits per byte, which can be compared
            between tokenizers, unlike the loss per token.
        end_of_text: the token before each document, for document masks; `model` then also gets `documents_apart`.
        gather: if several processes measure their shards of the batches (`shard_batches`), a function from the value of
            this process to the values of all.

    Returns:
        `val_loss` (nats per token), `perplexity` (its exponential), `bits_per_byte` (only with `bytes`) and `tokens`
        (the number of labels). If there are repeated and other labels, also `repeated_loss` and `other_loss`, the
        losses on labels that are `repeated` and on all others, and `repeated_share`, the fraction of repeated labels.

        All tokens have the same weight, however they are split into batches. The sum over the batches is rounded once,
        in float64, so that it does not depend on the number of processes.

    Raises:
        InputError: `batches` has no labels.
    """
    measured = []  # for each batch: the nats and the number of all labels, and those of repeated labels
    with evaluating(model):
        for inputs, labels, losses in _label_losses(model, batches, end_of_text):
            again = repeated(inputs, labels, end_of_text)
            nats = (some.sum(dtype=torch.float64).item() for some in (losses, losses[again]))
            measured.append((*nats, int((labels != IGNORED_LABEL).sum()), int(again.sum())))
    columns = list(zip(*(batch for share in gather(measured) for batch in share)))
    tokens, repeated_tokens = (sum(column) for column in columns[2:] or ((), ()))
    if tokens == 0:
        raise InputError("the held-out text must have at least 2 tokens, got no label to predict: hold out more text")

    nats, repeated_nats = map(_total, columns[:2])
    loss = nats / tokens
    result = {"val_loss": loss, "perplexity": _exponential(loss)}
    if bytes is not None:
        result["bits_per_byte"] = nats / math.log(2) / bytes
    if 0 < repeated_tokens < tokens:
        result["repeated_loss"] = repeated_nats / repeated_tokens
        result["other_loss"] = (nats - repeated_nats) / (tokens - repeated_tokens)
        result["repeated_share"] = repeated_tokens / tokens
    return result | {"tokens": tokens}


def document_losses(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], separator: int, *, masked: bool = False
) -> dict[str, list[Any]]:
    """Return `labels`, the number of labels of each document, and `nats`, the sum of its losses, to four decimals.

    Args:
        model: as for `held_out_loss`.
        batches: the text in order, as `HeldOutBatches` yields it.
        separator: the token after each document, which counts as the document's last label.
        masked: whether the model was trained with document masks.
    """
    documents, nats, before = [], [], 0
    with evaluating(model):
        for inputs, labels, losses in _label_losses(model, batches, separator if masked else None):
            number = before + (inputs == separator).flatten().cumsum(0)
            before = int(number[-1])
            valid = (labels != IGNORED_LABEL).flatten()
            documents.append(number[valid].cpu())
            nats.append(losses.flatten()[valid].double().cpu())
    number = torch.cat(documents)
    sums = torch.bincount(number, torch.cat(nats)).tolist()
    return {"labels": torch.bincount(number).tolist(), "nats": [round(total, 4) for total in sums]}


def _label_losses(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], end_of_text: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs, labels and the loss of each label (0 if it is ignored): (batch, seq), on the model's device."""
    device = next(model.parameters()).device
    for pair in batches:
        inputs, labels = (side.to(device) for side in pair)
        logits = model(**{"input_ids": inputs, "use_cache": False} | documents_apart(inputs, end_of_text)).logits
        losses = cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="none",
        )
        yield inputs, labels, losses.view_as(labels)


def _total(numbers: Sequence[float]) -> float:
    """Return the sum, rounded only once; if a number is not finite, the plain sum."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def _exponential(loss: float) -> float:
    """Return exp(loss), or infinity if it is too large for the records of a run, so that a diverged run has one."""
    return math.inf if loss >= math.log(OVERFLOWS) else math.exp(loss)
