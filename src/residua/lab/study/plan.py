"""What a study trains: schemes at several sizes, a tuning budget for each, and the runs that follow from it.

A run is identified by its resolved configuration. What a study still needs is a pure function of the finished runs.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from residua.connections.names import canonical
from residua.conversion.base_model import base_sha256
from residua.conversion.configuration import ConvertedConfig
from residua.errors import Count, InputError, Range, check_types, decoded, did_you_mean, extra, fits, require
from residua.lab.cost.counts import parameters
from residua.lab.data import PreparedData
from residua.lab.experiment import build_model, model_config
from residua.lab.study.questions import Question
from residua.lab.study.search import Point, Search, chosen_points
from residua.lab.training import BaseModelConfig, RunConfig, load_config
from residua.lab.training.config import KEYS
from residua.models import ResiduaConfig
from residua.records.folder import FREE_KEYS, flatten
from residua.records.jobs import Record
from residua.records.reading import parse_yaml, read_text

with extra("lab"):
    from transformers import PreTrainedConfig

Kind = Literal["tune", "final", "report", "longer"]
BY_THE_STUDY = ("train.seed", "train.steps", "train.warmup_steps", "train.evaluate_every", "model.connection")
"""Keys that a study sets itself."""


def _distinct(least: int, expected: str) -> Range:
    return Range(expected, lambda values: len(set(values)) == len(values) >= least)


Seeds = Annotated[tuple[int, ...], _distinct(2, "at least 2 different ones")]


@dataclass(frozen=True)
class Entry:
    """One scheme of a study.

    connection      a preset's name, with options if wanted: "residual:expand=conv"
    keys            further keys of the configuration that it needs
    parameters_of   another scheme: the MLPs are widened until both have as many parameters
    """

    name: str
    connection: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    parameters_of: str | None = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class Rung:
    """One size.

    tuned                  the rung whose settings count here too; None: this one is tuned by itself
    over                   keys that are searched again from there, in runs of full length: tuning.over in small. None:
                           no search
    longer                 in place of the study's; without longer runs there is no comparison at equal FLOPs or seconds
    tokens_per_parameter   in place of the study's
    seeds                  some of the study's in place of all, where runs are long; questions then add none
    noise                  "pooled" if the runs of all schemes vary alike over the seeds, "own" where that is not
                           expected, as when some runs go through a transition and others do not
    """

    name: str
    keys: Mapping[str, Any]
    tuned: str | None = None
    longer: tuple[float, ...] | None = None
    over: Mapping[str, Sequence[Any]] | None = None
    tokens_per_parameter: float | None = None
    seeds: Seeds | None = None
    noise: Literal["pooled", "own"] = "pooled"

    def __post_init__(self) -> None:
        check_types(self)
        _check_amounts(self)
        require(self.over is None or self.tuned is not None, "tuned", "a size, beside `over`", None)
        if self.over is not None:
            _check_over(self.over)


@dataclass(frozen=True)
class Tuning:
    """The budget of every scheme, which stands in the report.

    over             the values of every tuned key: the grid that a search begins with
    runs             of each scheme at most; the search goes from the best point of the grid to its neighbours
    baseline_runs    of each baseline at most
    factors          from a point to its neighbours, by key; 2 for keys that are not here
    length           of a tuning run, as a fraction of a reported one
    finalists        how many of the best points are then trained in full, as short runs favour high learning rates; the
                     best of them is reported. 1: the best point of the search is
    seed             of the search, which no reported run has
    final_seeds      of the finalists, which no reported run has either: one seed cannot tell points that are close.
                     Their means are compared. Empty: `seed` alone
    """

    over: Mapping[str, Sequence[Any]]
    runs: int
    baseline_runs: int
    factors: Mapping[str, float] = field(default_factory=dict)
    length: float = 1.0
    finalists: int = 1
    seed: int = 0
    final_seeds: Annotated[tuple[int, ...], _distinct(0, "each seed once")] = ()

    @property
    def judges(self) -> tuple[int, ...]:
        """The seeds of the finalists."""
        return self.final_seeds or (self.seed,)

    def __post_init__(self) -> None:
        check_types(self)
        _check_over(self.over)
        above = all(fits(factor, float) and 1 < factor < math.inf for factor in self.factors.values())
        require(above, "factors", "a number above 1 for each key", self.factors)
        grid = math.prod(len(values) for values in self.over.values())
        require(self.runs >= grid, "runs", f"at least the {grid} points of the grid", self.runs)
        require(self.baseline_runs >= self.runs, "baseline_runs", "at least tuning.runs", self.baseline_runs)
        require(0 < self.length <= 1, "length", "a number above 0, 1 at most", self.length)
        most = 1 if self.length == 1 else self.runs
        why = "1, as tuning runs are as long as reported ones" if self.length == 1 else "1 to tuning.runs"
        require(1 <= self.finalists <= most, "finalists", why, self.finalists)


class Run(NamedTuple):
    """One run of a study: what it is for, and everything that decides its numbers."""

    kind: Kind
    rung: str
    scheme: str
    point: Mapping[str, Any]
    config: RunConfig

    @property
    def identity(self) -> str:
        """A digest of all settings that numbers depend on. Keys with their defaults add nothing."""
        settings = {
            key: value
            for key, value in flatten(asdict(self.config)).items()
            if key not in _IRRELEVANT and value != KEYS[key].default
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        train = self.config.train
        return f"{self.rung} {self.scheme} {self.kind} seed={train.seed} steps={train.steps} {self.identity}"


class Part(NamedTuple):
    """Runs of one scheme at one size that are equally long: how many at most, and their steps."""

    rung: str
    scheme: str
    runs: int
    steps: int


_IRRELEVANT = (FREE_KEYS - {"train.evaluate_every"}) | {"data.source", "data.tokenizer", "data.validation_fraction"}
# The curve is part of a record; the data are compared by their fingerprint.


@dataclass(frozen=True)
class Study:
    """A study as its file describes it.

    title                  what it is called
    config, set            the training configuration that all runs share, and keys that differ from it
    tokens_per_parameter   of every run, counted on the first baseline at that size
    epochs                 how often a run may see the data at most
    rungs, schemes         sizes and schemes by name, in the order of the runs
    baselines              the schemes that the others are compared with, the plainest first
    tuning                 the budget
    seeds                  of the reported runs; none of them tuned anything
    longer                 times as many tokens for further runs of the baselines, for the comparison at equal seconds
    warmup                 share of the steps
    evaluations            points of a learning curve
    questions              what the study is to answer, by name; a study of some schemes keeps all of them
    primary                the contrasts at equal tokens that were named before their runs, pairs of schemes by size;
                           p-values are corrected for their number, and everything else is descriptive

    Raises:
        InputError: a value cannot be used.
    """

    title: str
    rungs: Annotated[Mapping[str, Rung], Range("at least one", bool)]
    schemes: Mapping[str, Entry]
    tuning: Tuning
    config: str | tuple[str, ...] = "tiny"
    set: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_parameter: float = 20.0
    epochs: Count = 1
    baselines: Annotated[tuple[str, ...], _distinct(1, "at least one, each once")] = ("residual",)
    seeds: Seeds = (1, 2, 3, 4, 5)
    longer: tuple[float, ...] = ()
    warmup: float = 0.1
    evaluations: Count = 10
    questions: Mapping[str, Question] = field(default_factory=dict)
    primary: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        _check_amounts(self)
        require(0 <= self.warmup < 1, "warmup", "a number from 0, below 1", self.warmup)
        self._check_schemes()
        self._check_questions()
        for rung in self.rungs.values():
            self._check_rung(rung)
        parts = (*self.schemes.values(), *self.rungs.values())
        for key in [*self.set, *(key for part in parts for key in part.keys), *self.tuning.over]:
            require(key not in BY_THE_STUDY, key, "a key that a study does not set by itself", key)

    def _check_schemes(self) -> None:
        for name in self.baselines:
            require(name in self.schemes, "baselines", f"some of the schemes ({', '.join(self.schemes)})", name)
        unmatched = [name for name, entry in self.schemes.items() if entry.parameters_of is None]
        expected = f"a scheme that is matched to no other ({', '.join(unmatched) or 'none is there'})"
        for entry in self.schemes.values():
            good = entry.parameters_of in (None, *unmatched)
            require(good, f"schemes.{entry.name}.parameters_of", expected, entry.parameters_of)

    def _check_questions(self) -> None:
        chose = {self.tuning.seed, *self.tuning.judges}
        tuners = f"those that tune ({', '.join(map(str, sorted(chose)))})"
        require(not chose & {*self.seeds}, "seeds", f"others than {tuners}", self.seeds)
        for name, question in self.questions.items():
            free = not {*self.seeds, *chose} & {*question.seeds}
            require(free, f"questions.{name}.seeds", f"others than seeds and {tuners}", question.seeds)
            second = next((pair[1] for pair in question.compare if pair[1] not in self.baselines), None)
            reason = f"tokens, as {second} is not a baseline and is trained for one length"
            require(second is None or question.at == ("tokens",), f"questions.{name}.at", reason, question.at)
        for size, pairs in self.primary.items():
            good = fits(pairs, list | tuple) and all(fits(pair, list | tuple) and len(pair) == 2 for pair in pairs)
            require(good, f"primary.{size}", "a list of pairs of schemes", pairs)
            alike = len({frozenset(pair) for pair in pairs}) == len(pairs)
            require(alike, f"primary.{size}", "each pair once", pairs)

    def _check_rung(self, rung: Rung) -> None:
        place, again = f"rungs.{rung.name}", rung.over is not None
        expected = f"some of the study's ({', '.join(map(str, self.seeds))})"
        require({*(rung.seeds or ())} <= {*self.seeds}, f"{place}.seeds", expected, rung.seeds)
        sizes = [name for name, r in self.rungs.items() if r.tuned is None or (r.over is not None and not again)]
        expected = f"a size that is tuned by itself ({', '.join(sizes) or 'none is there'})"
        require(rung.tuned in (None, *sizes), f"{place}.tuned", expected, rung.tuned)
        expected = f"keys of tuning.over ({', '.join(self.tuning.over)})"
        require({*(rung.over or ())} <= self.tuning.over.keys(), f"{place}.over", expected, rung.over)
        self.tuning_at(rung.name)  # checks the budget

    def longer_at(self, rung: str) -> Sequence[float]:
        """How many times as many tokens the further runs of the baselines have at a rung."""
        own = self.rungs[rung].longer
        return self.longer if own is None else own

    def tokens_at(self, rung: str) -> float:
        """Tokens a parameter of the runs at a rung."""
        own = self.rungs[rung].tokens_per_parameter
        return self.tokens_per_parameter if own is None else own

    def seeds_at(self, rung: str) -> Sequence[int]:
        """The seeds of the reported runs at a rung."""
        own = self.rungs[rung].seeds
        return self.seeds if own is None else own

    def searches(self, rung: str) -> list[str]:
        """The rungs whose searches give the settings of one, in their order: each starts where the last ended."""
        one = self.rungs[rung]
        before = [] if one.tuned is None else self.searches(one.tuned)
        return [*before, rung] if one.tuned is None or one.over is not None else before

    def tuning_at(self, rung: str) -> Tuning:
        """The budget of a scheme in the search of a rung."""
        over = self.rungs[rung].over
        return self.tuning if over is None else replace(self.tuning, over=over, length=1.0, finalists=1, final_seeds=())

    def further_seeds(self, rung: str, scheme: str) -> list[int]:
        """Further seeds of a scheme: of the questions that compare it with others, if the study has all of these.

        None at a rung that has seeds of its own.
        """
        if self.rungs[rung].seeds is not None:
            return []
        asked = [q for q in self.questions.values() if scheme in q.schemes and set(q.schemes) <= self.schemes.keys()]
        return sorted({seed for question in asked for seed in question.seeds})

    def data(self, path: str | None) -> str:
        """The prepared data of all runs: `path`, or else those of the configuration. Raises InputError for none."""
        folder = path or load_config(self.config, self.set).data.path
        require(folder is not None, "--data", "a folder that residua prepare made", None)
        return folder

    def only(
        self,
        schemes: Sequence[str] | None = None,
        rungs: Sequence[str] | None = None,
        questions: Sequence[str] | None = None,
    ) -> "Study":
        """Return this study with some of its schemes, beside the baselines, and some of its rungs.

        A scheme that the file does not have, such as a registered one, joins with its name; `questions` add the schemes
        that they compare. Raises InputError for an unknown rung or question.
        """
        for name in questions or ():
            known = ", ".join(self.questions) or "none are there"
            require(name in self.questions, "--questions", f"some of {known}{did_you_mean(name, self.questions)}", name)
            schemes = [*(schemes or ()), *self.questions[name].schemes]
        for name in rungs or ():
            require(
                name in self.rungs, "--rungs", f"some of {', '.join(self.rungs)}{did_you_mean(name, self.rungs)}", name
            )
        chosen = dict(self.schemes)
        if schemes is not None:
            matched = [chosen[name].parameters_of for name in schemes if name in chosen]
            wanted = dict.fromkeys([*self.baselines, *schemes, *filter(None, matched)])
            order = [*[name for name in self.schemes if name in wanted], *[n for n in wanted if n not in self.schemes]]
            chosen = {name: self.schemes.get(name) or Entry(name, canonical(name)) for name in order}
        needed = {one for name in rungs or self.rungs for one in (name, *self.searches(name))}
        return replace(self, schemes=chosen, rungs={name: rung for name, rung in self.rungs.items() if name in needed})


class Plan:
    """The runs of a study on prepared data. `data` is their folder.

    rungs: the sizes at which runs are reported; at others of the study only those that tune. None for all of them.

    `misfits` says why a scheme cannot be built at a size, such as heads that do not divide its width, by size and
    scheme. It has no runs there, nor at sizes that take their settings from there.

    Raises:
        InputError: the data have too few tokens, a size cannot be used, or a scheme at no size.
    """

    def __init__(self, study: Study, data: str | Path, rungs: Sequence[str] | None = None):
        study = self.study = _pinned(study)
        self.rungs = [name for name in study.rungs if rungs is None or name in rungs]
        self.data = str(data)
        self.prepared = PreparedData.open(data)
        self._intermediate: dict[tuple[str, str], int] = {}
        self._known: dict[tuple, RunConfig] = {}
        self._bases: dict[str, PreTrainedConfig] = {}
        self._with_parameters: dict[str, bool] = {}
        self._done: dict[tuple[str, str], tuple[list[Run], dict[str, Any] | None]] = {}
        self.steps: dict[str, int] = {}
        self.step_tokens: dict[str, int] = {}
        first = study.schemes[study.baselines[0]]
        for rung in study.rungs.values():
            config = self._config(rung, first, {}, 0, 1)
            train = config.train
            per_step = train.batch_size * train.gradient_accumulation * train.sequence_length
            self.step_tokens[rung.name] = per_step
            self.steps[rung.name] = max(1, round(study.tokens_at(rung.name) * self._count(config) / per_step))
            longest = max([1.0, *(study.longer_at(rung.name) if rung.name in self.rungs else ())])
            needed = round(longest * self.steps[rung.name]) * per_step + 2 * train.sequence_length
            if needed > study.epochs * len(self.prepared.train):
                often = "twice" if study.epochs == 1 else f"more than {study.epochs} times"
                raise InputError(
                    f"rungs.{rung.name}: needs {needed:,} tokens so that none is seen {often}, {self.data} has "
                    f"{len(self.prepared.train):,}; give more text or leave this rung out with --rungs"
                )
        self.misfits: dict[tuple[str, str], InputError] = {}
        for entry in study.schemes.values():  # every configuration is checked before hours are spent on the first
            errors = {(name, entry.name): error for name in study.rungs if (error := self._misfit(name, entry))}
            if len(errors) == len(study.rungs):
                raise next(iter(errors.values()))
            self.misfits |= errors
        self.tuning(next(rung.name for rung in study.rungs.values() if rung.tuned is None), study.baselines[0], {})

    @property
    def facts(self) -> Mapping[str, Any]:
        """The metadata of the data, with their fingerprint and the hash of the text."""
        return self.prepared.facts

    def schemes_at(self, rung: str) -> list[str]:
        """The schemes that have runs at a size: it can be built there, and where its settings come from."""
        sizes = {rung, *self.study.searches(rung)}
        return [name for name in self.study.schemes if not any((size, name) in self.misfits for size in sizes)]

    def runs(self, finished: Mapping[Any, Record]) -> Iterator[Run]:
        """All runs that the study needs, as far as the finished ones tell, in the order of their worth."""
        for rung in self.study.rungs.values():
            chosen = {}
            for scheme in self.schemes_at(rung.name):
                if rung.name in self.study.searches(rung.name):
                    yield from self.tuning(rung.name, scheme, finished)
                if rung.name in self.rungs:
                    chosen[scheme] = self.chosen(rung.name, scheme, finished)
                if chosen.get(scheme) is not None:
                    yield from self.reported(rung.name, scheme, chosen[scheme])
            for name in self.study.baselines:
                if chosen.get(name) is not None:
                    for factor in self.study.longer_at(rung.name):
                        yield from self.reported(rung.name, name, chosen[name], factor)
            for name, point in chosen.items():
                if point is not None:
                    yield from self.reported(rung.name, name, point, seeds=self.study.further_seeds(rung.name, name))

    def other_points(self, finished: Mapping[Any, Record]) -> Iterator[Run]:
        """The finished runs of points that the search tried and did not choose.

        A study that grows may choose anew, as when more seeds compare the finalists; the runs of its earlier choice
        stay, and say what the choice is worth.
        """
        study = self.study
        ended = [(r["rung"], r["scheme"], r["point"]) for r in finished.values() if r["kind"] in ("report", "longer")]
        for rung, scheme in itertools.product(self.rungs, study.schemes):
            if scheme not in self.schemes_at(rung):
                continue
            point = self.chosen(rung, scheme, finished)
            tried = [run.point for run in self.tuning(study.searches(rung)[-1], scheme, finished)]
            others = {json.dumps(o): o for o in tried if o != point and (rung, scheme, o) in ended}.values()
            seeds = [*study.seeds_at(rung), *study.further_seeds(rung, scheme)]
            factors = (None, *(study.longer_at(rung) if scheme in study.baselines else ()))
            for other, factor in itertools.product(others, factors):
                yield from (run for run in self.reported(rung, scheme, other, factor, seeds) if run.key in finished)

    @property
    def most(self) -> int:
        """How many runs there can be at most."""
        return sum(part.runs for part in self.at_most())

    def at_most(self) -> Iterator[Part]:
        """All runs that there can be, whatever the search finds."""
        study = self.study
        for rung, scheme in itertools.product(study.rungs, study.schemes):
            if scheme not in self.schemes_at(rung):
                continue
            steps, baseline = self.steps[rung], scheme in study.baselines
            if rung in study.searches(rung):
                tuning = study.tuning_at(rung)
                budget = tuning.baseline_runs if baseline else tuning.runs
                yield Part(rung, scheme, budget, max(1, round(tuning.length * steps)))
                if tuning.finalists > 1:
                    yield Part(rung, scheme, tuning.finalists * len(tuning.judges), steps)
            if rung in self.rungs:
                seeds = len(study.seeds_at(rung))
                yield Part(rung, scheme, seeds + len(study.further_seeds(rung, scheme)), steps)
                for factor in study.longer_at(rung) if baseline else ():
                    yield Part(rung, scheme, seeds, round(factor * steps))

    def _misfit(self, rung: str, entry: Entry) -> InputError | None:
        """Why a scheme cannot be built at a size; None where it can."""
        try:
            config = self._config(self.study.rungs[rung], entry, {}, 0, 1)
        except InputError as error:
            return error
        if isinstance(config.model, BaseModelConfig):
            try:
                self.model(config)
            except InputError as error:
                return InputError(f"schemes.{entry.name}: {error}")
        return None

    def tuning(self, rung: str, scheme: str, finished: Mapping[Any, Record]) -> list[Run]:
        """The tuning runs of a scheme at a rung that has a search, as far as the finished ones tell."""
        return self._search(rung, scheme, finished)[0]

    def chosen(self, rung: str, scheme: str, finished: Mapping[Any, Record]) -> dict[str, Any] | None:
        """The best point of a scheme; None while its tuning is not finished, and where all of it diverged."""
        return self._search(self.study.searches(rung)[-1], scheme, finished)[1]

    def reported(
        self,
        rung: str,
        scheme: str,
        point: Mapping[str, Any],
        longer: float | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[Run]:
        """The runs of all seeds at a point, or of other `seeds`, with `longer` times as many steps if given."""
        steps = round((longer or 1.0) * self.steps[rung])
        entry = self.study.schemes[scheme]
        for seed in self.study.seeds_at(rung) if seeds is None else seeds:
            config = self._config(self.study.rungs[rung], entry, point, seed, steps)
            yield Run("longer" if longer else "report", rung, scheme, point, config)

    def _search(
        self, rung: str, scheme: str, finished: Mapping[Any, Record]
    ) -> tuple[list[Run], dict[str, Any] | None]:
        """The tuning runs of a scheme, and its best point once all of them are finished."""
        if (rung, scheme) in self._done:
            return self._done[rung, scheme]
        start: dict[str, Any] | None = {}
        for before in self.study.searches(rung)[:-1]:
            start = self.chosen(before, scheme, finished)
        if start is None:
            return [], None
        tuning, search = self.study.tuning_at(rung), self._started(rung, scheme, start)
        losses: dict[Point, float] = {}
        while True:  # a step of the search follows from the losses of the steps before
            ((points, ranked),) = search.groups(losses)
            full = {point: {**start, **search.named(point)} for point in points}
            runs = [self._tuning_run(rung, scheme, full[point]) for point in points]
            new = {
                point: math.inf if record["val_loss"] is None else record["val_loss"]
                for point, run in zip(points, runs)
                if point not in losses and (record := finished.get(run.key))
            }
            if not new:
                break
            losses |= new
        best = [point for point in ranked or () if math.isfinite(losses[point])]
        trials = [(full[point], losses[point]) for point in best[: tuning.finalists]]
        finals = [(point, seed) for point, _ in trials for seed in tuning.judges if tuning.finalists > 1]
        again = [self._tuning_run(rung, scheme, *final) for final in finals]
        ended = [(*final, finished[run.key]["val_loss"]) for final, run in zip(finals, again) if run.key in finished]
        done = len(losses) == len(runs) and len(ended) == len(finals)
        chosen = chosen_points(trials, ended, finalists=tuning.finalists, seeds=tuning.judges) if done else []
        searched = [*runs, *again], chosen[0] if chosen else None
        if done:
            self._done[rung, scheme] = searched
        return searched

    def _started(self, rung: str, scheme: str, start: Mapping[str, Any]) -> Search:
        """The search for the best point of a scheme. start: settings that an earlier search found."""
        study, tuning, entry = self.study, self.study.tuning_at(rung), self.study.schemes[scheme]
        if entry.connection not in self._with_parameters:
            self._with_parameters[entry.connection] = _has_parameters(entry.connection)
        own = self._with_parameters[entry.connection]
        over = {key: values for key, values in tuning.over.items() if key != "train.connection_lr_factor" or own}
        expected = f"a key for {scheme} too, which has no parameters of its own, such as train.lr"
        require(bool(over), "tuning.over", expected, dict(tuning.over))
        return Search(
            over,
            lambda point: self._config(study.rungs[rung], entry, {**start, **point}, 0, 1),
            budget=tuning.baseline_runs if scheme in study.baselines else tuning.runs,
            factors=tuning.factors,
        )

    def _tuning_run(self, rung: str, scheme: str, point: Mapping[str, Any], judge: int | None = None) -> Run:
        """A run of the search, or the run of a finalist with the seed `judge`."""
        tuning = self.study.tuning_at(rung)
        short = max(1, round(tuning.length * self.steps[rung]))
        seed, steps = (tuning.seed, short) if judge is None else (judge, self.steps[rung])
        # Evaluated once: nobody looks at the curve of a tuning run.
        config = self._config(self.study.rungs[rung], self.study.schemes[scheme], point, seed, steps, 1)
        return Run("tune" if judge is None else "final", rung, scheme, point, config)

    def _shared(self, rung: Rung, entry: Entry) -> dict[str, Any]:
        keys = {**self.study.set, **rung.keys, **entry.keys, "model.connection": entry.connection}
        if entry.parameters_of is not None:
            keys["model.intermediate_size"] = self._matched(rung, entry)
        return {**keys, "data.path": self.data, "train.tensorboard": False, "train.keep_checkpoints": 1}

    def _config(
        self,
        rung: Rung,
        entry: Entry,
        point: Mapping[str, Any],
        seed: int,
        steps: int,
        evaluations: int | None = None,
    ) -> RunConfig:
        settings = rung.name, entry.name, entry.parameters_of, json.dumps(dict(point))
        if settings not in self._known:
            self._known[settings] = load_config(self.study.config, {**self._shared(rung, entry), **point})
        config = self._known[settings]
        train = replace(
            config.train,
            seed=seed,
            steps=steps,
            warmup_steps=int(self.study.warmup * steps),
            evaluate_every=max(1, math.ceil(steps / (evaluations or self.study.evaluations))),
        )
        return replace(config, train=train)

    def model(self, config: RunConfig) -> PreTrainedConfig:
        """The configuration of the model of a run. Raises InputError for a base that cannot be used."""
        if isinstance(config.model, BaseModelConfig):
            return self._converted(config)
        return model_config(config)

    def config(self, rung: str, scheme: str) -> RunConfig:
        """A configuration of a scheme at a rung, of one step: for what does not depend on learning rates."""
        return self._config(self.study.rungs[rung], self.study.schemes[scheme], {}, 0, 1)

    def _converted(self, config: RunConfig) -> PreTrainedConfig:
        known = json.dumps(asdict(config.model), sort_keys=True)
        if known not in self._bases:
            saved = build_model(config, self.prepared).config.to_json_string()  # says how it was converted
            self._bases[known] = ConvertedConfig.from_dict(json.loads(saved))
        return self._bases[known]

    def _count(self, config: RunConfig) -> int:
        return parameters(self.model(config))["total"]

    def _matched(self, rung: Rung, entry: Entry) -> int:
        """The MLP width with which a scheme comes nearest to the parameters of the one that it is matched to."""
        if (rung.name, entry.name) not in self._intermediate:
            other = self._config(rung, self.study.schemes[entry.parameters_of], {}, 0, 1)
            place = f"schemes.{entry.name}.parameters_of"
            require(not isinstance(other.model, BaseModelConfig), place, "none beside model.base", entry.parameters_of)
            target = self._count(other)
            plain = self.model(self._config(rung, replace(entry, parameters_of=None), {}, 0, 1))
            width = plain.intermediate_size
            wider = ResiduaConfig(**{**plain.to_dict(), "intermediate_size": width + 1})
            counts = [parameters(model)["total"] for model in (plain, wider)]
            self._intermediate[rung.name, entry.name] = width + round((target - counts[0]) / (counts[1] - counts[0]))
        return self._intermediate[rung.name, entry.name]


def _has_parameters(connection: str) -> bool:
    """Whether a scheme has parameters of its own, so that they can have a learning rate of their own."""
    small = partial(ResiduaConfig, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=1)
    sizes = [parameters(small(connection=name))["connections"] for name in (connection, "residual")]
    return sizes[0] != sizes[1]


def load_study(source: str) -> Study:
    """Read a study: "resbench", or a YAML file.

    Raises:
        InputError: there is no such file, or a key or value in it cannot be used; one line that names it.
    """
    known = "resbench"
    if source == known:
        text = (resources.files("residua.lab.study") / f"{known}.yaml").read_text(encoding="utf-8")
    elif Path(source).is_file():
        text = read_text(source, "YAML")
    else:
        raise InputError(f"the study must be {known} or a YAML file, got {source!r}{did_you_mean(source, [known])}")
    study = read_study(parse_yaml(text, source), source)
    # Here and not for a folder, whose report needs no package that brings a scheme.
    entries = {name: replace(entry, connection=canonical(entry.connection)) for name, entry in study.schemes.items()}
    study = replace(study, schemes=entries)
    compared = {f"questions.{question.name}.compare": question.schemes for question in study.questions.values()}
    for size, pairs in study.primary.items():
        require(size in study.rungs, "primary", f"sizes ({', '.join(study.rungs)})", size)
        compared[f"primary.{size}"] = tuple(name for pair in pairs for name in pair)
    for where, name in ((where, name) for where, names in compared.items() for name in names):
        expected = f"some of the schemes ({', '.join(study.schemes)}{did_you_mean(name, study.schemes)})"
        require(name in study.schemes, where, expected, name)
    return study


def read_study(document: Any, source: str) -> Study:
    """The study in a document: of a file, or of a folder, where the keys of each part stand by themselves."""
    require(isinstance(document, Mapping), source, "a mapping of keys to values", document)
    sections: dict[str, type] = {"rungs": Rung, "schemes": Entry, "questions": Question}
    values = dict(document)
    try:
        for section, kind in sections.items():
            if section in values:
                parts = values[section] or {}
                require(isinstance(parts, Mapping), section, "a mapping", parts)
                values[section] = {str(name): _part(str(name), part, kind, section) for name, part in parts.items()}
        if "tuning" in values:
            values["tuning"] = decoded(values["tuning"], Tuning, "tuning")
        return decoded(values, Study)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _part(name: str, document: Any, kind: type, section: str) -> Any:
    """A size, a scheme or a question, whose keys with a dot are those of a configuration."""
    where = f"{section}.{name}"
    require(isinstance(document, Mapping | None), where, "a mapping", document)
    values = {"name": name, **(document or {})}
    if kind is not Question:
        keys = {key: values.pop(key) for key in list(values) if "." in str(key)}
        values["keys"] = {**(values.get("keys") or {}), **keys}
    if kind is Entry:
        values.setdefault("connection", name)
    return decoded(values, kind, where)


def _pinned(study: Study) -> Study:
    """The study with the digest of every base beside its path, so that no row mixes two models."""
    given = load_config(study.config, study.set).model
    known: dict[str, Any] = {"model.base": given.base} if isinstance(given, BaseModelConfig) else {}

    def pin(keys: Mapping[str, Any]) -> Mapping[str, Any]:
        base = keys.get("model.base")
        if base is None or keys.get("model.base_sha256") is not None:
            return keys
        require(isinstance(base, str), "model.base", "a folder with a model of transformers", base)
        return {**keys, "model.base_sha256": base_sha256(Path(base))}

    return replace(
        study,
        set=pin({**known, **study.set}),
        rungs={name: replace(rung, keys=pin(rung.keys)) for name, rung in study.rungs.items()},
        schemes={name: replace(entry, keys=pin(entry.keys)) for name, entry in study.schemes.items()},
    )


def _check_over(over: Mapping[str, Any]) -> None:
    """Check the values of keys that a search begins with: it counts points of numbers, between which it walks."""
    require(bool(over), "over", "values for at least one key", over)
    for key, values in over.items():
        numbers = isinstance(values, list | tuple) and all(fits(one, float) and 0 < one < math.inf for one in values)
        require(numbers and bool(values), f"over.{key}", "a list of numbers above 0", values)


def _check_amounts(part: Study | Rung) -> None:
    factors, tokens = part.longer or (), part.tokens_per_parameter
    require(all(1 < factor < math.inf for factor in factors), "longer", "a list of numbers above 1", part.longer)
    require(tokens is None or 0 < tokens < math.inf, "tokens_per_parameter", "a number above 0", tokens)
