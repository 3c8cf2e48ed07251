"""What a study is to answer, written down before its runs: comparisons of schemes."""

from dataclasses import dataclass
from typing import Literal, get_args

from residua.errors import check_types, require

Measure = Literal["tokens", "FLOPs", "seconds", "compiled seconds"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


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
    compare: tuple[tuple[str, str], ...]
    at: tuple[Measure, ...] = ("tokens",)
    seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        require(bool(self.compare), "compare", "at least one pair of schemes", self.compare)
        require(bool(self.at), "at", f"some of {', '.join(MEASURES)}", self.at)
        require(len(set(self.seeds)) == len(self.seeds), "seeds", "different integers", self.seeds)
        reason = "tokens, as longer runs of the baselines have no further seeds"
        require(not self.seeds or self.at == ("tokens",), "at", reason, self.at)

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for pair in self.compare for name in pair))
