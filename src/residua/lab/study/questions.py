"""What a study is to answer, written down before its runs: comparisons of schemes, and rankings published elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from residua.errors import decoded, fits, require

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

    def __post_init__(self) -> None:
        require(fits(self.ask, str), "ask", "a sentence", self.ask)
        pairs, at, seeds = self.compare, self.at, self.seeds
        pairs_fit = fits(pairs, list | tuple) and len(pairs) > 0 and all(map(_is_pair, pairs))
        require(pairs_fit, "compare", "a list of pairs of schemes", pairs)
        measures_fit = fits(at, list | tuple) and len(at) > 0 and all(measure in MEASURES for measure in at)
        require(measures_fit, "at", f"some of {', '.join(MEASURES)}", at)
        integers = fits(seeds, list | tuple) and all(fits(seed, int) for seed in seeds)
        require(integers and len(set(seeds)) == len(seeds), "seeds", "a list of different integers", seeds)
        reason = "tokens, as longer runs of the baselines have no further seeds"
        require(not seeds or list(at) == ["tokens"], "at", reason, at)

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for pair in self.compare for name in pair))


def read_questions(document: Any, baselines: Sequence[str]) -> dict[str, Question]:
    """The questions of a study's document. Raises InputError if a question is not written as `Question` says."""
    require(isinstance(baselines, list | tuple), "baselines", "a list, of text each", baselines)
    questions = {}
    for name, values in _entries(document, "questions"):
        question = decoded(values, Question, f"questions.{name}")
        second = next((pair[1] for pair in question.compare if pair[1] not in baselines), None)
        reason = f"tokens, as {second} is not a baseline and is trained for one length"
        require(second is None or list(question.at) == ["tokens"], f"questions.{name}.at", reason, question.at)
        questions[name] = question
    return questions


def _entries(document: Any, where: str) -> list[tuple[str, Any]]:
    require(isinstance(document, Mapping), where, "a mapping", document)
    return [
        (str(name), {**values, "name": str(name)} if isinstance(values, Mapping) else values)
        for name, values in document.items()
    ]


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(fits(name, str) for name in pair)
