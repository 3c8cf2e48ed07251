"""What a study is to answer, written down before its runs: comparisons of schemes, and rankings published elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from residua.errors import InputError, did_you_mean, fits, require

MEASURES = ("tokens", "FLOPs", "seconds", "compiled seconds")


@dataclass(frozen=True)
class Question:
    """One question, which a study answers with a difference at each size for every comparison.

    ask       in words
    compare   pairs of schemes: the loss of the first minus that of the second
    at        equal "tokens", "FLOPs", "seconds" or "compiled seconds", of a step through `torch.compile`; for all but
              tokens the second of each pair must be a baseline
    seeds     further ones, beside those of the study, of the schemes that it compares; only at equal tokens
    """

    name: str
    ask: str
    compare: Sequence[Sequence[str]]
    at: Sequence[str] = ("tokens",)
    seeds: Sequence[int] = ()

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for pair in self.compare for name in pair))


@dataclass(frozen=True)
class Published:
    """A ranking that somebody else published.

    source        where it stands, and how it was made
    differences   loss minus the plain residual's, by our name of the scheme; 0 for the residual itself
    """

    name: str
    source: str
    differences: Mapping[str, float]


def read_questions(document: Any, baselines: Sequence[str]) -> dict[str, Question]:
    """The questions of a study's document. Raises InputError for what is none."""
    require(isinstance(baselines, list | tuple), "baselines", "a list, of text each", baselines)
    found = {}
    for name, values in _entries(document, "questions"):
        where = f"questions.{name}"
        values = {"at": ["tokens"], "seeds": [], **_keys(values, Question, where)}
        require(fits(values.get("ask"), str), f"{where}.ask", "a sentence", values.get("ask"))
        pairs = values.get("compare")
        good = isinstance(pairs, list | tuple) and len(pairs) > 0 and all(_is_pair(pair) for pair in pairs)
        require(good, f"{where}.compare", "a list of pairs of schemes", pairs)
        at = values["at"]
        good = isinstance(at, list | tuple) and len(at) > 0 and all(one in MEASURES for one in at)
        require(good, f"{where}.at", f"some of {', '.join(MEASURES)}", at)
        second = next((pair[1] for pair in pairs if pair[1] not in baselines), None)
        more = second is None or list(at) == ["tokens"]
        require(more, f"{where}.at", f"tokens, as {second} is no baseline and is trained for one length", at)
        seeds = values["seeds"]
        good = (
            isinstance(seeds, list | tuple) and all(fits(seed, int) for seed in seeds) and len(set(seeds)) == len(seeds)
        )
        require(good, f"{where}.seeds", "a list of different integers", seeds)
        alone = not seeds or list(at) == ["tokens"]
        require(alone, f"{where}.at", "tokens, as longer runs of the baselines have no further seeds", at)
        found[name] = Question(name, values["ask"], tuple(map(tuple, pairs)), tuple(at), tuple(seeds))
    return found


def read_published(document: Any) -> dict[str, Published]:
    """The published rankings of a study's document. Raises InputError for what is none."""
    found = {}
    for name, values in _entries(document, "published"):
        where = f"published.{name}"
        values = _keys(values, Published, where)
        require(fits(values.get("source"), str), f"{where}.source", "where it was published", values.get("source"))
        differences = values.get("differences")
        known = isinstance(differences, Mapping)
        good = known and all(fits(value, float) and math.isfinite(value) for value in differences.values())
        require(good, f"{where}.differences", "a number for each scheme", differences)
        found[name] = Published(name, values["source"], {str(key): value for key, value in differences.items()})
    return found


def _entries(document: Any, where: str) -> list[tuple[str, Any]]:
    require(isinstance(document, Mapping), where, "a mapping", document)
    return [(str(name), values) for name, values in document.items()]


def _keys(values: Any, kind: type, where: str) -> dict[str, Any]:
    require(isinstance(values, Mapping), where, "a mapping", values)
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            raise InputError(
                f"{where}: unknown key {name}{did_you_mean(str(name), known)}; it has {', '.join(known[1:])}"
            )
    return dict(values)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(fits(name, str) for name in pair)
