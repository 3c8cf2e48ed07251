"""Search for the best values of keys: a grid, then the neighbours of its best point. Decide which point wins."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from residua.errors import InputError
from residua.lab.evaluation.comparable import NATS, Measurement
from residua.lab.evaluation.runs import Run
from residua.lab.jobs.pool import Record
from residua.lab.records.folder import flatten
from residua.lab.training import RunConfig

Point = tuple[float, ...]
"""A number for each key of a search."""
Attempt = tuple[Point, int | None]
"""A point, and the seed of a finalist, or of any run if all seeds train every point; otherwise None."""
Planned = TypeVar("Planned")
"""A run to be made, with the `key` of its record."""
FACTOR = 2.0
"""The factor from a point to its neighbours, in both directions."""


@dataclass(frozen=True)
class Search:
    """A search over the values of keys.

    After the grid, it trains the neighbours of the best point (by default, each number halved and doubled) until none
    of them is better. Then it trains the finalists with the seeds that decide between them.

    over         the values of every key in the grid
    read         a function from a point with all of its keys to their values as the configuration has them, by key.
                 Raises InputError for a value that is out of range
    start        the values of further keys, the same for all points
    budget       the largest number of points to train, unless the grid has more; None for no limit
    factors      the factor between a point and its neighbours, by key; FACTOR for all other keys
    finalists    the number of best points that become finalists; None for all points
    seeds        the seeds of the finalists; if empty, the best point of the search wins
    every        whether every point is trained with all seeds, and the lowest mean wins
    """

    over: Mapping[str, Sequence[float]]
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    start: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    finalists: int | None = None
    seeds: Sequence[int] = ()
    every: bool = False

    def walk(
        self,
        run_of: Callable[[Mapping[str, Any], int | None], Planned],
        ended: Callable[[Planned], float | None],
    ) -> tuple[list[Planned], dict[str, Any] | None]:
        """Return the runs that are needed, as far as the finished runs determine them, and the best point.

        The best point is None before all runs are finished, and if all diverged.

        run_of: a function from a point and a seed (None for the search itself) to the run
        ended: a function from a run to the loss by which points are compared, infinite if it diverged; None if the run
            is not finished
        """
        runs: dict[Attempt, Planned] = {}
        losses: dict[Attempt, float] = {}

        def trained(attempts: Iterable[Attempt]) -> bool:
            for point, seed in attempts:
                runs[point, seed] = run_of(self.named(point), seed)
                loss = ended(runs[point, seed])
                if loss is not None:
                    losses[point, seed] = loss
            return len(losses) == len(runs)

        first: Sequence[int | None] = self.seeds if self.every else (None,)

        def searched(point: Point) -> float:
            return math.fsum(losses[point, seed] for seed in first) / len(first)

        points = new = list(dict.fromkeys(itertools.product(*self.over.values())))
        while new:
            if not trained(itertools.product(new, first)):
                return list(runs.values()), None
            ranked = sorted(points, key=searched)
            finite = [point for point in ranked if math.isfinite(searched(point))]
            room = None if self.budget is None else max(0, self.budget - len(points))
            beside = (point for best in finite[:1] for point in self._beside(best) if not _among(point, points))
            new = list(itertools.islice(beside, room))
            points = points + new
        done = self.every or trained(itertools.product(finite[: self.finalists], self.seeds))
        finalists = None if self.every else (self.finalists or len(points)) if self.seeds else 1
        best = winners(((*attempt, loss) for attempt, loss in losses.items()), finalists, self.seeds) if done else []
        return list(runs.values()), self.named(best[0]) if best else None

    def named(self, point: Point) -> dict[str, Any]:
        """Return a point with all of its keys."""
        return {**self.start, **dict(zip(self.over, point))}

    def _beside(self, point: Point) -> Iterator[Point]:
        for place, key in enumerate(self.over):
            width = self.factors.get(key, FACTOR)
            for factor in (1 / width, width):
                typed = self.read(self.named(point))[key]
                value = round(typed * factor) if isinstance(typed, int) else float(f"{typed * factor:.6g}")
                neighbour = (*point[:place], value, *point[place + 1 :])
                try:
                    self.read(self.named(neighbour))
                except InputError:
                    continue
                if neighbour != point:
                    yield neighbour


def values_of(config: Callable[[Mapping[str, Any]], RunConfig]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return `Search.read` for a function from a point to the configuration of its runs."""
    return lambda point: flatten(asdict(config(point)))


def _among(point: Point, others: Iterable[Point]) -> bool:
    """Return whether a point equals one of the others, up to the rounding of neighbours."""
    return any(all(map(partial(math.isclose, rel_tol=1e-4), point, other)) for other in others)


def winners(runs: Iterable[tuple[Any, int | None, float]], finalists: int | None, seeds: Sequence[int]) -> list[Any]:
    """Return the points that won a search: several if losses are equal, none while runs of finalists are missing.

    runs        points with seeds and losses, infinite if a run diverged; the seed is None in the search itself
    finalists   the number of finalists; None if all points are finalists
    seeds       the seeds whose mean loss decides between several finalists
    """
    runs = list(runs)
    if finalists is None:
        best = [point for place, (point, *_) in enumerate(runs) if all(point != other[0] for other in runs[:place])]
        finalists = len(best)
    else:
        best = _lowest(((point, loss) for point, seed, loss in runs if seed is None), finalists)
        if finalists == 1:
            return best
    means = []
    for point in best:
        by_seed = {seed: loss for other, seed, loss in runs if other == point and seed is not None}
        if by_seed.keys() >= {*seeds}:
            means.append((point, math.fsum(by_seed[seed] for seed in seeds) / len(seeds)))
    return _lowest(means, 1) if len(means) >= min(finalists, len(best)) else []


def _lowest(losses: Iterable[tuple[Any, float]], count: int) -> list[Any]:
    """Return the points with the `count` lowest losses, lowest first, including points that tie with the last."""
    ordered = sorted((pair for pair in losses if math.isfinite(pair[1])), key=itemgetter(1))
    return [point for point, loss in ordered if loss <= ordered[:count][-1][1]]


def at_edge(value: float, tried: Iterable[float]) -> bool:
    """Return whether a value is the smallest or largest of those tried, so that a better one may lie beyond it."""
    tried = set(tried)
    return len(tried) > 1 and value in (min(tried), max(tried))


def loss_of(run: Run) -> float:
    """Return the last validation loss of a run; infinite if it diverged."""
    loss = run.loss(NATS)
    return loss if loss is not None and math.isfinite(loss) else math.inf


def losses_in(finished: Mapping[Any, Record], loss: Callable[[Run], float] = loss_of) -> Callable[[Any], float | None]:
    """Return a function from a planned run to the loss in its record; None if it has no record."""

    def ended(run: Any) -> float | None:
        record = finished.get(run.key)
        return None if record is None else loss(Run.of(record, Measurement()))

    return ended


def other_loss_of(run: Run) -> float:
    """Return the last validation loss of a run on labels that do not repeat; infinite if it diverged.

    Raises InputError if the record lacks this loss, as records of early versions do.
    """
    if math.isinf(loss_of(run)):
        return math.inf
    if not run.other or run.other[-1].step != run.steps:
        raise InputError(
            f"the record of the run {run.key} must hold its last loss on labels that do not repeat, found none: an "
            "early version of residua wrote it; run the study in a new folder"
        )
    return run.other[-1].loss
