"""Decide whether two validation losses can be compared: directly, only in bits per byte, or not.

Everything that ranks losses uses this module: `compare`, the explorer, the demo, `study tune` and `study run`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from residua.lab.records.folder import LOSSLESS

Unit = Literal["nats per token", "bits per byte"]
NATS: Unit = "nats per token"
MEASURE_KEYS = ("train.sequence_length", "train.document_masks", "train.precision")
"""The keys that determine how a loss is measured, in addition to the keys of the data."""


def decides_measure(key: str) -> bool:
    """Return whether a key of the configuration determines how a loss is measured, and not only how low it is."""
    return key in MEASURE_KEYS or key.startswith("data.")


class Measurement(NamedTuple):
    """How a validation loss was measured; None for unknown facts.

    text        digest of the held-out text
    tokenizer   fingerprint of the tokenizer
    lossless    whether the tokens reproduce the text, so that bits per byte count all bytes of the text
    window      the number of tokens in a sequence
    masks       whether documents were masked from each other
    precision   the precision of the arithmetic
    tokens      the number of planned training tokens
    """

    text: Any = None
    tokenizer: str | None = None
    lossless: bool = False
    window: int | None = None
    masks: bool = False
    precision: str | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], data: Mapping[str, Any]) -> "Measurement":
        """Return how the losses of a run are measured, from its settings by dotted key and the facts of its data."""
        text = data.get("fingerprint")
        if data.get("sha256") is not None:  # the text's digest does not depend on the tokenizer
            text = data["sha256"], data.get("validation_fraction"), data.get("split", "documents")
        lost = data.get("lost_share")
        window = settings.get("train.sequence_length")
        factors = [settings.get(f"train.{name}") for name in ("steps", "batch_size")]
        factors += [window, settings.get("train.gradient_accumulation", 1)]
        known = all(isinstance(factor, int) for factor in factors)
        return cls(
            text,
            data.get("tokenizer_fingerprint"),
            data.get("tokenizer") in LOSSLESS if lost is None else lost == 0,
            window,
            bool(settings.get("train.document_masks", False)),
            settings.get("train.precision"),
            math.prod(factors) if known else None,
        )


class Verdict(NamedTuple):
    """Whether two losses can be compared.

    unit      the unit in which they can be compared; None if they cannot
    reasons   why they cannot be compared
    marks     further differences that affect the losses, which a reader must know
    """

    unit: Unit | None
    reasons: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def judged(ours: Measurement, theirs: Measurement) -> Verdict:
    """Decide whether the losses of two runs can be compared. Unknown facts count as equal."""

    def differ(name: str) -> bool:
        values = [getattr(side, name) for side in (ours, theirs)]
        return None not in values and values[0] != values[1]

    reasons, other_tokenizer = [], differ("tokenizer")
    if differ("window"):
        reasons.append(
            f"contexts of different lengths ({ours.window} and {theirs.window} tokens): a longer one lowers the loss"
        )
    if differ("masks"):
        reasons.append("one validation with document masks and one without: a masked document has less context")
    if differ("text"):
        reasons.append("different held-out texts")
    elif other_tokenizer and not (ours.lossless and theirs.lossless):
        reasons.append("different tokenizers, and one of them may lose text, so bits per byte mislead")
    marks = [f"{ours.precision} and {theirs.precision} arithmetic"] if differ("precision") else []
    marks += [f"{ours.tokens:,} and {theirs.tokens:,} training tokens"] if differ("tokens") else []
    unit: Unit = "bits per byte" if other_tokenizer else "nats per token"
    return Verdict(None if reasons else unit, tuple(reasons), tuple(marks))


def common_unit(measures: Iterable[Measurement]) -> Verdict:
    """Return the verdict on several losses: the unit in which all of them can be ranked, and all reasons and marks."""
    first, *others = [*measures] or [Measurement()]
    verdicts = [judged(other, first) for other in others]
    units = {verdict.unit for verdict in verdicts}
    unit: Unit | None = "bits per byte" if "bits per byte" in units else "nats per token"
    return Verdict(
        None if None in units else unit,
        tuple(dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)),
        tuple(dict.fromkeys(mark for verdict in verdicts for mark in verdict.marks)),
    )
