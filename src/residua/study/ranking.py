"""Whether a study ranks schemes as others did: Spearman's rank correlation with a bootstrap interval."""

import random
import statistics
from typing import NamedTuple

from residua.runs.statistics import spearman
from residua.study.questions import Published
from residua.study.results import Results, begun

SAMPLES = 4000
LEAST = 4
"""Schemes below which no correlation is said."""


class Ranking(NamedTuple):
    """Spearman's correlation of a study's losses with a published ranking at one size.

    schemes       those that both have, with all seeds of the study
    correlation   None with fewer than LEAST of them, and where all losses of a side are equal
    lower, upper  of the 95 % percentile interval over resampled schemes and seeds
    """

    published: Published
    rung: str
    schemes: tuple[str, ...]
    correlation: float | None
    lower: float | None
    upper: float | None


def rankings(found: Results, *, samples: int = SAMPLES) -> list[Ranking]:
    """Compare every size that has a finished row with every published ranking.

    A resample draws the schemes with replacement, and the seeds, the same for all schemes, as their losses are paired.
    It says how far another choice of schemes or seeds could lead, and nothing of the published runs' own noise.
    """
    return [
        _ranking(found, published, rung, samples)
        for published in found.study.published.values()
        for rung in begun(found.study, found.rows)
    ]


def _ranking(found: Results, published: Published, rung: str, samples: int) -> Ranking:
    losses = {
        row.scheme: dict(row.losses)
        for row in found.rows
        if row.rung == rung and row.scheme in published.differences and row.whole and row.loss is not None
    }
    names, seeds = tuple(losses), list(found.study.seeds_at(rung))
    if len(names) < LEAST:
        return Ranking(published, rung, names, None, None, None)

    def correlation(some: list[str], drawn: list[int]) -> float | None:
        ours = [statistics.fmean(losses[name][seed] for seed in drawn) for name in some]
        return spearman(ours, [published.differences[name] for name in some])

    chance = random.Random(0)
    drawn = [
        value
        for _ in range(samples)
        if (value := correlation(chance.choices(names, k=len(names)), chance.choices(seeds, k=len(seeds)))) is not None
    ]
    whole = correlation(list(names), seeds)
    if whole is None or len(drawn) < samples / 2:
        return Ranking(published, rung, names, whole, None, None)
    drawn.sort()
    lower, upper = drawn[round(0.025 * (len(drawn) - 1))], drawn[round(0.975 * (len(drawn) - 1))]
    return Ranking(published, rung, names, whole, lower, upper)
