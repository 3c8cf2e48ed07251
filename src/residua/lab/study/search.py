"""Search for the best values of keys: a grid, then the neighbours of its best point."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from residua.errors import InputError
from residua.lab.training import RunConfig
from residua.records.folder import flatten
from residua.records.jobs import Record

Point = tuple[Any, ...]
"""A value for each key of a search."""
Trial = tuple[Point, int | None]
"""A run: a point, and None in the search itself or the seed with which a finalist is trained."""
FACTOR = 2.0
"""From a point to its neighbours, in both directions."""


@dataclass(frozen=True)
class Search:
    """What is tuned. Keys whose values are all positive numbers are; the others make groups, each tuned by itself.

    When the grid is done, the neighbours of the best point of each group are trained (each number halved and doubled),
    until none of them is better. Then the finalists are trained with further seeds.

    over         the values of every key
    read         the configuration of a point. Raises InputError for a value beyond the range of its key
    budget       how many points of each group are trained at most, beside the grid; None: as many as it takes
    factors      from a point to its neighbours in a key; FACTOR for the keys that are not here
    finalists    how many of the best points of each group are finalists; None: all of them
    seeds        of the finalists
    """

    over: Mapping[str, Sequence[Any]]
    read: Callable[[Mapping[str, Any]], RunConfig]
    budget: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    finalists: int | None = None
    seeds: Sequence[int] = ()

    def wanted(self, losses: Mapping[Trial, float]) -> Iterator[Trial]:
        """Yield the runs that are needed, as far as the losses tell. A loss is infinite where the run diverged."""
        tried = {point: loss for (point, seed), loss in losses.items() if seed is None}
        for points, ranked in self.groups(tried):
            yield from ((point, None) for point in points)
            finite = [point for point in ranked or () if math.isfinite(tried[frozen(point)])]
            yield from itertools.product(finite[: self.finalists], self.seeds)

    def groups(self, losses: Mapping[Point, float]) -> Iterator[tuple[list[Point], list[Point] | None]]:
        """Yield the points of each group that are needed, as far as the losses tell, and the same with the best first,
        None where a loss is missing."""
        groups: dict[Point, list[Point]] = {}
        for point in itertools.product(*self.over.values()):
            groups.setdefault(frozen(self.group(point)), []).append(point)
        for points in groups.values():
            ranked = _ranked(points, losses)
            while ranked is not None and math.isfinite(losses[frozen(ranked[0])]):
                tried = {frozen(point) for point in points}
                new = [point for point in self._beside(ranked[0]) if frozen(point) not in tried]
                new = new[: None if self.budget is None else max(0, self.budget - len(points))]
                if not new:
                    break
                points += new
                ranked = _ranked(points, losses)
            yield points, ranked

    def group(self, point: Point) -> Point:
        """The values that are not tuned."""
        return tuple(value for value, key in zip(point, self.over) if key not in self.numeric)

    @property
    def numeric(self) -> list[str]:
        """The keys that are tuned."""
        return [
            key
            for key, values in self.over.items()
            if all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)
        ]

    def named(self, point: Point) -> dict[str, Any]:
        return dict(zip(self.over, point))

    def _beside(self, point: Point) -> Iterator[Point]:
        for key in self.numeric:
            width = self.factors.get(key, FACTOR)
            for factor in (1 / width, width):
                typed = flatten(asdict(self.read(self.named(point))))[key]
                value = round(typed * factor) if isinstance(typed, int) else float(f"{typed * factor:.6g}")
                other = {**self.named(point), key: value}
                try:
                    self.read(other)
                except InputError:
                    continue
                if value != self.named(point)[key]:
                    yield tuple(other.values())


def _ranked(points: Sequence[Point], losses: Mapping[Point, float]) -> list[Point] | None:
    if not all(frozen(point) in losses for point in points):
        return None
    return sorted(points, key=lambda point: losses[frozen(point)])


def frozen(point: Sequence[Any]) -> Point:
    """Return the point as something that can be compared: a mapping in it, such as a connection, becomes text."""
    return tuple(json.dumps(value) if isinstance(value, dict | list) else value for value in point)


def at_edge(value: float, tried: Iterable[float]) -> bool:
    """Whether a value is the smallest or largest of several: a better one may lie beyond it."""
    tried = set(tried)
    return len(tried) > 1 and value in (min(tried), max(tried))


def loss_of(record: Record) -> float:
    """The last validation loss of a run; infinite where it diverged."""
    return math.inf if record["val_loss"] is None else record["val_loss"]


def chosen_points(
    trials: Iterable[tuple[Any, float]],
    finals: Sequence[tuple[Any, int, float]],
    *,
    finalists: int,
    seeds: Sequence[int],
) -> list[Any]:
    """The points that a search chose: several where losses are equal, none while a finalist is not trained in full.

    trials    points with the losses of their short runs, infinite where one diverged
    finals    the finalists' points, seeds and losses in full
    finalists, seeds    how many finalists there are, and the seeds that decide between them
    """
    best = lowest(trials, finalists)
    if finalists == 1:
        return best
    means = []
    for point in best:
        by_seed = {seed: loss for other, seed, loss in finals if other == point}
        if by_seed.keys() >= {*seeds}:
            means.append((point, math.fsum(by_seed[seed] for seed in seeds) / len(seeds)))
    return lowest(means, 1) if len(means) >= min(finalists, len(best)) else []


def lowest(losses: Iterable[tuple[Any, float]], count: int) -> list[Any]:
    """The points with the `count` lowest losses, the lowest first, and those that tie with the last."""
    ordered = sorted((pair for pair in losses if math.isfinite(pair[1])), key=itemgetter(1))
    return [point for point, loss in ordered if loss <= ordered[:count][-1][1]]
