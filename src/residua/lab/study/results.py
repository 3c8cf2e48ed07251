"""Compare the schemes of a study by its records: losses, noise, and differences at equal tokens, FLOPs and seconds.

Results depend only on the records, so the report can be made again without the data and the code of the runs.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from residua.connections.names import today
from residua.errors import InputError, fits, require, shown
from residua.lab.evaluation.comparable import NATS, judged
from residua.lab.evaluation.runs import Row, Run
from residua.lab.jobs.pool import Record
from residua.lab.records import jsonlines
from residua.lab.records.folder import read_object
from residua.lab.records.statistics import Contrast, Estimate, Noise, holm, over_documents, welch
from residua.lab.records.table import grouped
from residua.lab.study.definition import MEASURES, Question, Study, read_folder
from residua.lab.study.forms import Cost, RunRecord, check_records, read_cost_records
from residua.lab.study.search import Search, at_edge, loss_of, other_loss_of, values_of, winners
from residua.lab.training import load_config
from residua.lab.training.config import typed_values

BELOW = 0.9
"""If a scheme's step costs less than a baseline's, the baseline's loss is extrapolated to fewer tokens than those
of its shortest runs, down to this share of them. Beyond its longest runs there is no comparison."""
ALPHA = 0.5
"""Between runs of two lengths, a baseline's loss is interpolated as a + b C^-ALPHA in its tokens C. A straight line in
log C would lie above the convex curve, in favour of every scheme."""
SESSIONS = 0.02
"""The relative standard error of a ratio of step times from one session of measurements to the next."""
FAILED = 3.0
"""If the standard deviation of a row's losses over seeds is more than this many times that of the median row, for
example because a run failed, the row keeps its own noise and does not count for the pooled noise of its size."""
FEWEST_ROUNDS = 9
"""With fewer rounds of time measurements the error of the median is unknown, and times are not compared."""
COMPILED = "compiled seconds"
SIGNIFICANT = 0.05
"""The p below which a difference is `seen`, and the corrected p below which it is `clear`."""
Made = TypeVar("Made")


@dataclass
class Difference:
    """The loss of a scheme minus that of another scheme, at one size and at equal tokens, FLOPs or seconds.

    cost       the cost of a step relative to the baseline's, and so the point on the baseline's curve to compare with
    estimate   the difference over the seeds; None if the baseline's runs are not long enough. At equal seconds its
               error includes the error of the timing, which is common to all seeds: the error of the ratio, times the
               slope of the baseline's loss over the logarithm of the steps
    worth      the multiple of the scheme's tokens at which the baseline reaches the scheme's loss; infinite beyond the
               baseline's longest runs, 0 below the share BELOW. None if those are no better than its shortest runs
    longest    the length of the baseline's longest runs, as a multiple of the scheme's; 1 without longer runs
    holm       p corrected for the number of primary contrasts, including those without runs; None for other contrasts
    documents  by text, the difference at equal tokens with the error from the choice of held-out documents: "" is the
               study's text, "further_" is a second text; empty if this was not measured
    """

    size: str
    scheme: str
    baseline: str
    measure: str
    cost: float = 1.0
    estimate: Contrast | None = None
    worth: float | None = None
    longest: float = 1.0
    holm: float | None = None
    documents: Mapping[str, Contrast] = field(default_factory=dict)

    @property
    def contrast(self) -> tuple[Any, ...]:
        """The key of the contrast: the size, the set of the two schemes, and the number of seeds."""
        return self.size, frozenset((self.scheme, self.baseline)), self.estimate and self.estimate.count

    def reversed(self) -> "Difference":
        """Return the difference at equal tokens in the other order, which has no `worth`."""
        estimate = self.estimate and self.estimate._replace(mean=-self.estimate.mean)
        documents = {text: contrast._replace(mean=-contrast.mean) for text, contrast in self.documents.items()}
        return Difference(self.size, self.baseline, self.scheme, "tokens", estimate=estimate, documents=documents)

    @property
    def p(self) -> float | None:
        """The p-value of a difference of zero."""
        return self.estimate and self.estimate.p_value

    @property
    def seen(self) -> bool:
        """Whether the interval excludes zero, without a correction for the number of differences."""
        return self.p is not None and self.p < SIGNIFICANT

    @property
    def clear(self) -> bool:
        """Whether the difference is significant after the correction; False if the contrast is not primary."""
        return self.holm is not None and self.holm < SIGNIFICANT


@dataclass
class SchemeRow:
    """One scheme at one size: its runs, and its differences to the baselines.

    point       the point that was chosen by tuning
    seeds       the number of the study's seeds at this size
    searches    the runs of each search by its size, including `reported` if every point is trained with all seeds
    reported    the runs at `point` with the study's seeds
    further     the runs with seeds that only a question adds
    longer      the longer runs at `point`; empty if the scheme is not a baseline
    costs       the costs of a step, in the order of their measurement; only those of a model with as many parameters
                as that of the reported runs
    resized     whether costs were left out, because tuning chose another size of the model than the measured one
    noise       the pooled noise of a run at this size; None if this row has its own noise
    failed      whether the losses vary far more than those of other rows
    """

    size: str
    scheme: str
    connection: str
    point: Mapping[str, Any]
    seeds: int
    searches: Mapping[str, Sequence[Run]]
    reported: Row
    further: Row
    longer: Sequence[Run]
    costs: Sequence[Cost]
    resized: bool = False
    differences: list[Difference] = field(default_factory=list)
    noise: Noise | None = None
    failed: bool = False

    @property
    def steps(self) -> int:
        return self.reported.runs[0].steps

    @property
    def tokens(self) -> int | None:
        return self.reported.tokens or None

    @property
    def losses(self) -> dict[int, float | None]:
        """The last validation losses by seed; None for a run that diverged."""
        return self.reported.losses(NATS)

    @property
    def tuning(self) -> list[Run]:
        """The runs of all searches."""
        return [run for runs in self.searches.values() for run in runs]

    @property
    def runs(self) -> list[Run]:
        return list({run.key: run for run in [*self.tuning, *self.reported.runs, *self.longer]}.values())

    @property
    def tuning_runs(self) -> int:
        """The number of points that the searches tried."""
        return sum(run.kind == "tune" for run in self.tuning) + sum(map(len, map(_points, self.searches.values())))

    @property
    def points(self) -> list[tuple[Run, ...]]:
        """The runs of each point at this size, if the choice is by the mean over all seeds; otherwise empty."""
        return _points(self.searches.get(self.size, ()))

    @property
    def transitions(self) -> list[float | None]:
        """The steps at which reported runs began to copy, see `loss.transition`; None for a run that never began.

        Runs in which this was not measured are left out.
        """
        steps = (run.transition for run in self.reported.runs if run.transition is not None)
        return [step if math.isfinite(step) else None for step in steps]

    @property
    def cost(self) -> Cost | None:
        """The cost of a step as the runs take it, from the last measurement; None if there is none."""
        return next(reversed(self.timed(False)), None)

    @property
    def compiled(self) -> Cost | None:
        """The cost of a step through `torch.compile`, from the last measurement; None if there is none."""
        return next(reversed(self.timed(True)), None)

    def timed(self, compiled: bool) -> list[Cost]:
        return [cost for cost in self.costs if cost.compiled is compiled]

    @property
    def loss(self) -> Estimate | None:
        """The last validation loss over the seeds; None if a run diverged."""
        return self.reported.whole_loss(NATS)

    @property
    def all_losses(self) -> Mapping[int, float | None]:
        """The losses by seed, for the study's seeds and further ones."""
        return {**self.losses, **self.further.losses(NATS)}

    @property
    def whole(self) -> bool:
        """Whether the runs of all seeds of the study are finished."""
        return len(self.losses) == self.seeds

    @property
    def edges(self) -> list[str]:
        """The tuned keys whose best value is the smallest or largest that the last search tried within its budget."""
        edges = []
        for key, best in self.point.items():
            tried = ({run.point[key] for run in runs if run.kind != "final"} for runs in self.searches.values())
            searched = [values for values in tried if len(values) > 1]
            if searched and at_edge(best, searched[-1]):
                edges.append(key)
        return edges

    def difference(self, baseline: str, measure: str) -> Difference | None:
        return next((d for d in self.differences if (d.baseline, d.measure) == (baseline, measure)), None)


def _points(runs: Iterable[Run]) -> list[tuple[Run, ...]]:
    """Return the runs of each point of a search in which all seeds train every point; otherwise none."""
    reports = (run for run in runs if run.kind == "report")
    return grouped(reports, lambda run: tuple(sorted(run.point.items())), lambda run: run.seed)


class Answer(NamedTuple):
    """The answer to one comparison of a question at one size.

    difference   the loss of `scheme` minus the loss of `to`
    waiting      those of the two schemes whose runs are unfinished
    missing      the reason why there is no difference although both are finished; otherwise None
    """

    question: Question
    size: str
    scheme: str
    to: str
    measure: str
    difference: Difference | None
    waiting: Sequence[str] = ()
    missing: str | None = None


@dataclass(frozen=True)
class Results:
    """The results of a study: rows by size and scheme, answers, and corrected primary contrasts by size and pair.

    strange     the sizes, schemes and connections of records that do not count, because the study does not have them
    """

    study: Study
    rows: Sequence[SchemeRow]
    answers: Sequence[Answer]
    corrected: Mapping[tuple[str, str, str], Difference]
    strange: Collection[tuple[str, str, str]] = ()

    def row(self, size: str, scheme: str) -> SchemeRow | None:
        return next((row for row in self.rows if (row.size, row.scheme) == (size, scheme)), None)

    @property
    def unfinished(self) -> list[str]:
        """The rows that lack some of their seeds, in words."""
        return [
            f"{row.scheme} at {row.size}: {len(row.losses)} of {row.seeds} seeds" for row in self.rows if not row.whole
        ]

    @property
    def untrained(self) -> int:
        """The number of pairs (size, scheme) of the study without a row."""
        places = itertools.product(self.study.sizes, self.study.schemes)
        return sum(self.row(*place) is None for place in places)

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        """The facts of all runs behind the rows."""
        return [run.facts for row in self.rows for run in [*row.runs, *row.further.runs] if run.facts]

    @property
    def measures(self) -> list[str]:
        """The measures at which rows are compared: equal tokens, and those at which some row has a difference."""
        differences = (difference for row in self.rows for difference in row.differences)
        measured = {"tokens", *(difference.measure for difference in differences if difference.estimate is not None)}
        return [measure for measure in MEASURES if measure in measured]

    def curves(self, row: SchemeRow) -> dict[str, list[tuple[int, float, float | None]]]:
        """Return (step, difference, half of its 95 % interval) along the reported runs, by baseline."""
        bases = {name: self.row(row.size, name) for name in self.study.baselines}
        return {
            name: [
                (int(step), difference.mean, difference.half_width)
                for step, difference in row.reported.minus(base.reported, "step", NATS).items()
                if difference.count and math.isfinite(difference.mean)
            ]
            for name, base in bases.items()
            if base is not None and base is not row
        }

    def noise(self, size: str) -> Noise | None:
        """Return the pooled noise of a single run at a size; None if each scheme has its own."""
        return next((row.noise for row in self.rows if row.size == size and row.noise), None)


def read_runs(path: Path, data: str) -> list[Record]:
    """Return the records of a study's runs in a file, each key once. Raises InputError as `checked_runs` does."""
    return checked_runs(jsonlines.read(path), path, data)


def checked_runs(rows: Sequence[Record], path: Path, data: str) -> list[Record]:
    """Return the records of a study's runs, each key once.

    path: their file, for errors. data: the fingerprint of the study's data.

    Raises:
        InputError: a record is not one of a study, or its run used other data; or the records come from several
            studies, as they differ in what the study fixes.
    """
    check_records(rows, path, RunRecord, RunRecord.__required_keys__, "records of a study's runs")
    losses: dict[Any, tuple[str, float | None]] = {}
    fixed: dict[Any, tuple[Any, str]] = {}
    for row in rows:
        facts, key = row.get("facts") or {}, row["key"]
        fingerprint = (facts.get("data") or {}).get("fingerprint", data)
        name = f"{path}: the fingerprint of the data of the run {shown(key)}"
        require(fingerprint == data, name, f"{data}, the study's", fingerprint)
        begins = f"{row['size']} {row['scheme']} {row['kind']} seed={row['seed']} steps={row['steps']} "
        require(key.startswith(begins), f"{path}: the key of a run", f"{begins!r} and a digest, as its fields say", key)
        point, place = tuple(sorted(row["point"].items())), _place(row)
        numbers = all(fits(value, float) and math.isfinite(value) for _, value in point)
        require(numbers, f"{path}: point of {shown(key)}", "numbers by key", row["point"])
        ours = key, row["val_loss"]
        before = losses.setdefault((*place, row["kind"], row["seed"], row["steps"], point), ours)
        expected = f"{shown(before)}, as in its first record (keep one of the two lines)"
        require(ours == before, f"{path}: key and val_loss of a run with two records", expected, ours)
        for what, of, value in (
            ("the tuned keys", place, sorted(row["point"])),
            ("the number of parameters", (*place, point), facts.get("parameters")),
            ("the steps", row["size"], row["steps"] if row["kind"] == "report" else None),
        ):
            if value is not None:
                first, other = fixed.setdefault((what, of), (value, key))
                expected = f"{shown(first)}, as of {shown(other)} (remove the lines of another study)"
                require(value == first, f"{path}: {what} of {shown(key)}", expected, value)
    return list({row["key"]: row for row in rows}.values())


def read_fingerprint(folder: Path, study: Study) -> str:
    """Return the fingerprint of the data of a study's runs. Raises InputError if settings.json is not the study's."""
    path = folder / "settings.json"
    settings = read_object(path)
    title, data = settings.get("title"), settings.get("data")
    require(title == study.title, f"{path}: title", f"{study.title!r}, as in study.json beside it", title)
    require(fits(data, str), f"{path}: data", "the fingerprint of the data", data)
    return str(data)


def read_costs(path: Path, study: Study, runs: Iterable[Record]) -> list[Record]:
    """Return the records of a study's costs. Raises InputError if one is wrong, or measured beside another baseline, or
    on a model with another number of parameters than the runs have."""
    rows = read_cost_records(path)
    trained: dict[tuple[str, str, str], set[int | None]] = {}
    for run in runs:
        trained.setdefault(_place(run), set()).add((run.get("facts") or {}).get("parameters"))
    for row in rows:
        of, base = f"of {shown(row['scheme'])} at {shown(row['size'])}", study.baselines[0]
        require(row["baseline"] == base, f"{path}: baseline {of}", f"{base}, the study's first", row["baseline"])
        ours, theirs = row.get("parameters"), trained.get(_place(row), set())
        if ours is not None and len(theirs) == 1 and None not in theirs:  # several if a tuned setting changes the model
            expected = f"{shown(*theirs)}, as of its runs (remove the lines of another study)"
            require(ours in theirs, f"{path}: parameters {of}", expected, ours)
    return rows


def read_results(folder: str | Path) -> Results:
    """Return the results in a study's folder. This needs neither the data nor the folder's lock.

    Raises InputError if the folder has no study, or a field of a record is missing or wrong, or records contradict each
    other or the study.
    """
    folder = Path(folder)
    study = read_folder(folder)
    runs = read_runs(folder / "records.jsonl", read_fingerprint(folder, study))
    return results(study, runs, read_costs(folder / "costs.jsonl", study, runs))


def results(study: Study, records: Sequence[Record], costs: Sequence[Record]) -> Results:
    """Return the results of a study from the records of its runs and costs; of records with equal keys the last counts.

    A record is ignored, and named in `Results.strange`, if the study does not have its size or scheme, or now uses its
    scheme's name for another connection.
    """
    last = {record["key"]: record for record in records}.values()
    runs = _by_connection(study, last, lambda place, record: Run.of(record, study.measure_at(*place)))
    strange = {_place(record) for record in (*last, *costs) if not _belongs(study, record)}
    measured = _by_connection(study, costs, lambda place, record: Cost.of(record))
    places = itertools.product(study.sizes, study.schemes)
    rows = {place: row for place in places if (row := _row(study, *place, runs, measured.get(place, [])))}
    for size in study.sizes:
        _share_noise([row for row in rows.values() if row.size == size], study.sizes[size].noise == "pooled")
    for row, baseline in itertools.product(rows.values(), study.baselines):
        base = rows.get((row.size, baseline))
        if (
            base is not None
            and base is not row
            and judged(row.reported.measure, base.reported.measure).unit is not None
        ):
            row.differences += _differences(row, base)
    answers = _answers(study, rows)
    return Results(study, list(rows.values()), answers, _primary(study, rows, answers), sorted(strange))


def _by_connection(
    study: Study, records: Iterable[Record], read: Callable[[tuple[str, str], Record], Made]
) -> dict[tuple[str, str], list[Made]]:
    """Convert records with `read`, and group them by size and scheme. Records of other connections are left out."""
    groups: dict[tuple[str, str], list[Made]] = {}
    for record in records:
        if _belongs(study, record):
            place = record["size"], record["scheme"]
            groups.setdefault(place, []).append(read(place, record))
    return groups


def _place(record: Record) -> tuple[str, str, str]:
    return record["size"], record["scheme"], today(record["connection"])


def _belongs(study: Study, record: Record) -> bool:
    """Return whether the study has a record's size, and its scheme with the same connection."""
    size, scheme, connection = _place(record)
    return size in study.sizes and scheme in study.schemes and study.schemes[scheme].connection == connection


def _primary(
    study: Study, rows: Mapping[tuple[str, str], SchemeRow], answers: Sequence[Answer]
) -> dict[tuple[str, str, str], Difference]:
    """Return the primary contrasts of finished rows, over all seeds including a question's, with corrected p-values.

    The contrast of the same two schemes in rows and answers, in either order and over the same number of seeds, gets
    the same corrected p-value.
    """
    asked = [each.difference for each in answers if each.difference and each.measure == "tokens"]
    either_order = [*(each.reversed() for each in asked), *asked]
    either_order.sort(key=lambda each: each.estimate.count if each.estimate else 0)  # the last one with a key stays
    over_all_seeds = {(each.size, each.scheme, each.baseline): each for each in either_order}
    primary = {}
    for place in ((size, *pair) for size, pairs in study.primary.items() for pair in pairs):
        sides = [rows.get((place[0], name)) for name in place[1:]]
        if all(side is not None and side.whole for side in sides):
            difference = over_all_seeds.get(place) or _differences(*sides)[0]
            if difference.p is not None and all(side.loss is not None for side in sides):
                primary[place] = difference
    elsewhere = [*asked, *(each for row in rows.values() for each in row.differences if each.measure == "tokens")]
    contrasts = [difference.contrast for difference in primary.values()]
    waiting = [1.0] * (sum(map(len, study.primary.values())) - len(primary))
    corrected = dict(zip(contrasts, holm([*(difference.p for difference in primary.values()), *waiting])))
    for each in (*primary.values(), *elsewhere):
        each.holm = corrected.get(each.contrast)
    return primary


def _share_noise(rows: Sequence[SchemeRow], pooled: bool) -> None:
    """Give the rows of a size the noise pooled over its finished rows, except rows whose losses vary far more."""
    whole = [row for row in rows if pooled and row.whole and row.loss is not None]
    middle = statistics.median(row.loss.deviation for row in whole) if whole else 0.0
    for row in whole:
        row.failed = row.loss.deviation > FAILED * middle
    noise = Noise.of([row.losses for row in whole if not row.failed])
    for row in rows:
        row.noise = None if row.failed else noise


def _row(
    study: Study,
    size: str,
    name: str,
    runs: Mapping[tuple[str, str], Sequence[Run]],
    costs: Sequence[Cost],
) -> SchemeRow | None:
    """Return the row of a scheme at a size; None if it has no reported run."""
    seeds, searches = study.seeds_at(size), {}
    best: list[Any] = [{}]
    for start in study.searches(size):
        searches[start], best = _searched(study, start, name, runs.get((start, name), []), best)
    trained = [run for run in runs.get((size, name), []) if run.kind in ("report", "longer")]
    point = next((run.point for run in trained if run.point in best and run.seed in seeds), None)
    chosen = [run for run in trained if run.point == point]
    reported = {run.seed: run for run in chosen if run.kind == "report"}
    if not reported.keys() & {*seeds}:
        return None
    further = study.further_seeds(size, name)
    final = Row(name, tuple(reported[seed] for seed in sorted(reported) if seed in seeds))
    same = [
        cost for cost in costs if None in (cost.parameters, final.parameters) or cost.parameters == final.parameters
    ]
    return SchemeRow(
        size,
        name,
        study.schemes[name].connection,
        point,
        len(seeds),
        searches,
        final,
        Row(name, tuple(run for seed, run in reported.items() if seed in further)),
        [run for run in chosen if run.kind == "longer" and name in study.baselines],
        same,
        len(same) < len(costs),
    )


def _answers(study: Study, rows: Mapping[tuple[str, str], SchemeRow]) -> list[Answer]:
    """Return the answers to all questions at all sizes that have a finished row."""
    finished = {row.size for row in rows.values() if row.whole}
    sizes = [size for size in study.sizes if size in finished] or list(study.sizes)[:1]
    return [
        answer
        for question, size in itertools.product(study.questions.values(), sizes)
        for scheme, to in question.compare
        for answer in _answers_of_pair(question, size, scheme, to, rows)
    ]


def _answers_of_pair(
    question: Question, size: str, scheme: str, to: str, rows: Mapping[tuple[str, str], SchemeRow]
) -> Iterator[Answer]:
    """Yield the answers on two schemes at a size, for every measure of a question, with uncorrected p-values."""
    row, base = rows.get((size, scheme)), rows.get((size, to))
    waiting = [name for name, side in ((scheme, row), (to, base)) if side is None or not side.whole]
    if row is None or base is None or waiting:
        yield from (Answer(question, size, scheme, to, measure, None, waiting) for measure in question.at)
        return
    further = question.seeds if all({*question.seeds} <= side.all_losses.keys() for side in (row, base)) else ()
    differences = {difference.measure: difference for difference in _differences(row, base, further)}
    for measure in question.at:
        difference, missing = differences.get(measure), None
        if difference is None:
            missing = _not_measured(measure, row, base)
        elif difference.estimate is None or difference.estimate.count < len({*row.losses, *further}):
            missing = f"{to} has no runs {difference.cost:.2f} times as long as {scheme}, or one diverged"
        yield Answer(question, size, scheme, to, measure, None if missing else difference, waiting, missing)


def _not_measured(measure: str, row: SchemeRow, base: SchemeRow) -> str:
    scheme, to = row.scheme, base.scheme
    if resized := [side.scheme for side in (row, base) if side.resized]:
        return f"tuning chose another size of model for {' and '.join(resized)} than the one that was measured"
    if measure == "FLOPs":
        return f"{scheme} or {to} has no costs"
    steps, option = ("compiled steps", " --compiled") if measure == COMPILED else ("steps", "")
    return f"{steps} of {scheme} and {to} were not timed in the same rounds (--measure{option})"


def _contrast(
    row: SchemeRow, base: SchemeRow, ours: Mapping[int, float], theirs: Mapping[int, float]
) -> Contrast | None:
    """Compare two rows over their common seeds, with the pooled noise of the size or with their own."""
    shared = sorted(ours.keys() & theirs.keys())
    sides = [[losses[seed] for seed in shared] for losses in (ours, theirs)]
    if not shared:
        return None
    return welch(*sides) if row.noise is None or base.noise is None else row.noise.contrast(*sides)


def _searched(
    study: Study, size: str, name: str, runs: Sequence[Run], start: Sequence[Mapping[str, Any]]
) -> tuple[list[Run], list[Any]]:
    """Return the runs of a scheme's search that have the study's tuning length, and the points that it may have chosen.

    start: the points from which the search may have begun, as far as the previous search determines them.
    """
    tuning, moved = study.tuning_at(size), study.sizes[size].over or study.tuning.over
    begins = [{key: value for key, value in point.items() if key not in moved} for point in start]
    begun = [run for run in runs if {key: value for key, value in run.point.items() if key not in moved} in begins]
    if tuning.every:
        seeds = study.seeds_at(size)
        reports = [run for run in begun if run.kind == "report" and run.seed in seeds]
        return reports, _best_over_seeds(study, size, name, begins, reports)
    length = {max(1, round(tuning.length * run.steps)) for run in runs if run.kind == "report"}
    tuned = [run for run in begun if run.kind == "tune" and (not length or run.steps in length)]
    searched = [*tuned, *(run for run in runs if run.kind == "final")]
    ends = ((run.point, run.seed if run.kind == "final" else None, loss_of(run)) for run in searched)
    return searched, winners(ends, tuning.finalists, tuning.finalist_seeds)


def _best_over_seeds(
    study: Study, size: str, name: str, begins: Iterable[Mapping[str, Any]], reports: Sequence[Run]
) -> list[dict[str, Any]]:
    """Return the best point of each search in which all seeds train every point; none of a search that is unfinished.

    A search that seems unfinished may lack only neighbours whose values fit each key, but not the whole configuration.
    The plan has no runs of these. They are found where the configuration of the scheme can be read.

    begins: the keys that a search does not move, one mapping for each search
    """
    tuning, keys = study.tuning_at(size), study.keys_at(size, name)
    losses = {(frozenset(run.point.items()), run.seed): other_loss_of(run) for run in reports}
    over = {key: values for key, values in tuning.over.items() if any(key in run.point for run in reports)}
    alone = partial(typed_values, place="tuning.over")
    whole = values_of(lambda point: load_config(study.config, {**keys, **point}))

    def best_from(begin: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
        limits = study.budget(name), tuning.factors
        search = Search(over, read, begin, *limits, seeds=study.seeds_at(size), every=True)
        return search.walk(lambda point, seed: (frozenset(point.items()), seed), losses.get)[1]

    best = []
    for begin in begins:
        point = best_from(begin, alone)
        if point is None and losses:
            with suppress(InputError):  # the file of the configuration or the package of the scheme may be missing
                point = best_from(begin, whole)
        best.append(point)
    return [point for point in best if point is not None]


def _differences(row: SchemeRow, base: SchemeRow, further: Sequence[int] = ()) -> list[Difference]:
    """Return the differences of two rows: first at equal tokens, including further seeds, then at other measures."""
    seeds = {*row.losses, *further}
    ours = {seed: loss for seed, loss in row.all_losses.items() if seed in seeds and loss is not None}
    losses: dict[int, dict[int, float]] = {}  # the baseline's losses by seed and steps
    for run in [*base.reported.runs, *base.longer, *(run for run in base.further.runs if run.seed in further)]:
        if math.isfinite(loss_of(run)):
            losses.setdefault(run.seed, {})[run.steps] = loss_of(run)
    differences = []
    for measure, (cost, error) in _relative_costs(row, base).items():
        at = {seed: _at(by_steps, row.steps * cost) for seed, by_steps in losses.items()}
        theirs = {seed: loss for seed, (loss, _) in at.items() if loss is not None}
        # If the costs differ, take all seeds or none, because longer runs of the baseline may be unfinished.
        whole = len(ours) == len(seeds) and (cost == 1 or ours.keys() <= theirs.keys())
        estimate = _contrast(row, base, ours, theirs) if whole else None
        if error and estimate is not None:
            slope = statistics.fmean(at[seed][1] for seed in ours.keys() & theirs.keys())
            estimate = estimate.shared(slope * error)
        worth, longest = _worth(row, losses) if measure == "tokens" and estimate is not None else (None, 1.0)
        documents = _over_documents(row, base) if measure == "tokens" else {}
        differences.append(
            Difference(row.size, row.scheme, base.scheme, measure, cost, estimate, worth, longest, documents=documents)
        )
    return differences


def _over_documents(row: SchemeRow, base: SchemeRow) -> dict[str, Contrast]:
    """Return `Difference.documents`; empty unless all reported runs have losses by document, of the same documents."""
    contrasts = {}
    for prefix in ("", "further_"):
        sides = [[run.documents.get(prefix) for run in side.reported.runs] for side in (row, base)]
        first, *others = [losses and losses.labels for side in sides for losses in side]
        if first is not None and all(labels == first for labels in others):
            contrast = over_documents(*([losses.nats for losses in side] for side in sides), first)
            contrasts |= {prefix: contrast} if contrast else {}
    return contrasts


def _relative_costs(row: SchemeRow, base: SchemeRow) -> dict[str, tuple[float, float]]:
    """Return, by measure, the cost of a step relative to a baseline's, and the standard error of its logarithm."""
    costs = {"tokens": (1.0, 0.0)}
    if row.cost is not None and base.cost is not None:
        costs["FLOPs"] = row.cost.flops_per_token / base.cost.flops_per_token, 0.0
    for measure, compiled in (("seconds", False), (COMPILED, True)):
        if timed := _timed_together(row, base, compiled):
            ours, theirs = timed
            ratio = ours.ratio.median / theirs.ratio.median
            costs[measure] = ratio, math.hypot(ours.error, theirs.error, SESSIONS)
    return costs


def _worth(row: SchemeRow, losses: Mapping[int, Mapping[int, float]]) -> tuple[float | None, float]:
    """Return `Difference.worth` and `Difference.longest` of a row; losses: the baseline's, by seed and steps."""
    seeds = [seed for seed in row.losses if seed in losses]
    lengths = sorted(set.intersection(*(set(losses[seed]) for seed in seeds))) if seeds else []
    if len(lengths) < 2 or row.loss is None:
        return None, 1.0
    means = [statistics.fmean(losses[seed][steps] for seed in seeds) for steps in lengths]
    loss, longest = statistics.fmean(row.losses[seed] for seed in seeds), lengths[-1] / row.steps
    lowest = means.index(min(means))
    if not lowest:
        return None, longest
    if loss < means[lowest]:
        return math.inf, longest
    # The neighbours between which the baseline first reaches the loss; before its shortest runs, these and the best.
    high = next(i for i, mean in enumerate(means) if mean <= loss)
    low, high = (high - 1, high) if high else (0, lowest)
    share = (loss - means[low]) / (means[high] - means[low])
    power = lengths[low] ** -ALPHA + share * (lengths[high] ** -ALPHA - lengths[low] ** -ALPHA)
    times = power ** (-1 / ALPHA) / row.steps
    return times if times >= BELOW else 0.0, longest


def _timed_together(row: SchemeRow, base: SchemeRow, compiled: bool) -> tuple[Cost, Cost] | None:
    """Return the costs of two rows from the newest rounds in which both took turns; None if there are none.

    In such rounds changes in the speed of the machine cancel. They would not cancel between rounds of different hours.
    """
    theirs = {cost.session: cost for cost in base.timed(compiled)}
    for ours in reversed(row.timed(compiled)):
        if ours.session in theirs and ours.rounds >= FEWEST_ROUNDS:
            return ours, theirs[ours.session]
    return None


def _at(losses: Mapping[int, float], steps: float) -> tuple[float | None, float]:
    """Return the loss after `steps` steps, and its slope over the logarithm of the steps.

    The loss is interpolated between finished runs. It is None beyond the longest one and below `BELOW` of the shortest.
    """
    lengths = sorted(losses)
    if len(lengths) < 2:
        return losses.get(steps), 0.0
    upper = next((i for i in range(1, len(lengths)) if lengths[i] >= steps), len(lengths) - 1)
    low, high = lengths[upper - 1], lengths[upper]
    factor = (losses[high] - losses[low]) / (high**-ALPHA - low**-ALPHA)
    slope = -ALPHA * factor * steps**-ALPHA
    if steps in losses:
        return losses[int(steps)], slope
    inside = BELOW * lengths[0] <= steps <= lengths[-1]
    return losses[low] + factor * (steps**-ALPHA - low**-ALPHA) if inside else None, slope
