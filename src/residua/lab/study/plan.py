"""What a study trains: schemes at several sizes, a tuning budget for each, and the runs that follow from it.

A run is identified by its resolved configuration. What a study still needs is a pure function of the finished runs.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from residua.connections.names import canonical
from residua.conversion.base_model import base_sha256
from residua.conversion.configuration import ConvertedConfig
from residua.errors import (
    Count,
    InputError,
    Positive,
    Range,
    check_types,
    decoded,
    did_you_mean,
    extra,
    fits,
    require,
    shown,
)
from residua.lab.cost.counts import parameters
from residua.lab.data import PreparedData
from residua.lab.experiment import build_model, model_config
from residua.lab.study.questions import Question
from residua.lab.study.search import Search, Trial, chosen_points, loss_of
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


def _are_numbers(values: Any) -> bool:
    numbers = isinstance(values, list | tuple) and all(fits(value, float) and 0 < value < math.inf for value in values)
    return numbers and bool(values)


def _are_pairs(pairs: Any) -> bool:
    listed = fits(pairs, list | tuple) and all(fits(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    return listed and len({frozenset(pair) for pair in pairs}) == len(pairs)


Seeds = Annotated[tuple[int, ...], _distinct(2, "at least 2 different ones")]
Factors = Annotated[
    tuple[float, ...], Range("a list of numbers above 1", lambda factors: all(1 < x < math.inf for x in factors))
]
Over = Annotated[
    Mapping[str, Sequence[Any]],
    Range("values for at least one key", bool),
    Range("a list of numbers above 0 for each key", lambda over: all(map(_are_numbers, over.values()))),
]


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
class Size:
    """One size.

    tuned                  the size whose settings count here too; None: this one is tuned by itself
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
    longer: Factors | None = None
    over: Over | None = None
    tokens_per_parameter: Positive | None = None
    seeds: Seeds | None = None
    noise: Literal["pooled", "own"] = "pooled"

    def __post_init__(self) -> None:
        check_types(self)
        require(self.over is None or self.tuned is not None, "tuned", "a size, beside `over`", None)


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

    over: Over
    runs: int
    baseline_runs: int
    factors: Annotated[
        Mapping[str, float],
        Range("a number above 1 for each key", lambda factors: all(fits(x, float) and x > 1 for x in factors.values())),
    ] = field(default_factory=dict)
    length: Annotated[float, Range("a number above 0, 1 at most", lambda length: 0 < length <= 1)] = 1.0
    finalists: int = 1
    seed: int = 0
    final_seeds: Annotated[tuple[int, ...], _distinct(0, "each seed once")] = ()

    @property
    def finalist_seeds(self) -> tuple[int, ...]:
        return self.final_seeds or (self.seed,)

    def __post_init__(self) -> None:
        check_types(self)
        grid = math.prod(len(values) for values in self.over.values())
        require(self.runs >= grid, "runs", f"at least the {grid} points of the grid", self.runs)
        require(self.baseline_runs >= self.runs, "baseline_runs", "at least tuning.runs", self.baseline_runs)
        most = 1 if self.length == 1 else self.runs
        why = "1, as tuning runs are as long as reported ones" if self.length == 1 else "1 to tuning.runs"
        require(1 <= self.finalists <= most, "finalists", why, self.finalists)


class Run(NamedTuple):
    """One run of a study: what it is for, and everything that decides its numbers."""

    kind: Kind
    size: str
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
        return f"{self.size} {self.scheme} {self.kind} seed={train.seed} steps={train.steps} {self.identity}"


class Part(NamedTuple):
    """Runs of one scheme at one size that are equally long: how many at most, and their steps."""

    size: str
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
    rungs: Annotated[Mapping[str, Size], Range("at least one", bool)]
    schemes: Mapping[str, Entry]
    tuning: Tuning
    config: str | tuple[str, ...] = "tiny"
    set: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_parameter: Positive = 20.0
    epochs: Count = 1
    baselines: Annotated[tuple[str, ...], _distinct(1, "at least one, each once")] = ("residual",)
    seeds: Seeds = (1, 2, 3, 4, 5)
    longer: Factors = ()
    warmup: Annotated[float, Range("a number from 0, below 1", lambda share: 0 <= share < 1)] = 0.1
    evaluations: Count = 10
    questions: Mapping[str, Question] = field(default_factory=dict)
    primary: Annotated[
        Mapping[str, Sequence[Sequence[str]]],
        Range(
            "a list of pairs of schemes for each size, each pair once",
            lambda sizes: all(map(_are_pairs, sizes.values())),
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_names("baselines", self.baselines, self.schemes)
        unmatched = [name for name, entry in self.schemes.items() if entry.parameters_of is None]
        for name, entry in self.schemes.items():
            check_names(f"schemes.{name}.parameters_of", filter(None, [entry.parameters_of]), unmatched)
        self._check_questions()
        for size in self.rungs.values():
            self._check_size(size)
        parts = (*self.schemes.values(), *self.rungs.values())
        for key in [*self.set, *(key for part in parts for key in part.keys), *self.tuning.over]:
            require(key not in BY_THE_STUDY, key, "a key that a study does not set by itself", key)

    def _check_questions(self) -> None:
        tuners = {self.tuning.seed, *self.tuning.finalist_seeds}
        listed = f"those that tune ({', '.join(map(str, sorted(tuners)))})"
        require(not tuners & {*self.seeds}, "seeds", f"others than {listed}", self.seeds)
        for name, question in self.questions.items():
            new = not {*self.seeds, *tuners} & {*question.seeds}
            require(new, f"questions.{name}.seeds", f"others than the study's and {listed}", question.seeds)
            second = next((pair[1] for pair in question.compare if pair[1] not in self.baselines), None)
            reason = f"tokens, as {second} is not a baseline and is trained for one length"
            require(second is None or question.at == ("tokens",), f"questions.{name}.at", reason, question.at)

    def _check_size(self, size: Size) -> None:
        place, again = f"rungs.{size.name}", size.over is not None
        check_names(f"{place}.seeds", size.seeds, self.seeds)
        sizes = [name for name, r in self.rungs.items() if r.tuned is None or (r.over is not None and not again)]
        expected = f"a size that is tuned by itself ({', '.join(sizes) or 'none is there'})"
        require(size.tuned in (None, *sizes), f"{place}.tuned", expected, size.tuned)
        check_names(f"{place}.over", size.over, self.tuning.over)
        self.tuning_at(size.name)  # checks the budget

    def longer_at(self, size: str) -> Sequence[float]:
        """How many times as many tokens the further runs of the baselines have at a size."""
        own = self.rungs[size].longer
        return self.longer if own is None else own

    def tokens_at(self, size: str) -> float:
        """Tokens a parameter of the runs at a size."""
        own = self.rungs[size].tokens_per_parameter
        return self.tokens_per_parameter if own is None else own

    def seeds_at(self, size: str) -> Sequence[int]:
        """The seeds of the reported runs at a size."""
        own = self.rungs[size].seeds
        return self.seeds if own is None else own

    def searches(self, size: str) -> list[str]:
        """The sizes whose searches give the settings of one, in their order: each starts where the last ended."""
        one = self.rungs[size]
        before = [] if one.tuned is None else self.searches(one.tuned)
        return [*before, size] if one.tuned is None or one.over is not None else before

    def tuning_at(self, size: str) -> Tuning:
        """The budget of a scheme in the search of a size."""
        over = self.rungs[size].over
        return self.tuning if over is None else replace(self.tuning, over=over, length=1.0, finalists=1, final_seeds=())

    def further_seeds(self, size: str, scheme: str) -> list[int]:
        """Further seeds of a scheme: of the questions that compare it with others, if the study has all of these.

        None at a size that has seeds of its own.
        """
        if self.rungs[size].seeds is not None:
            return []
        asked = [q for q in self.questions.values() if scheme in q.schemes and set(q.schemes) <= self.schemes.keys()]
        return sorted({seed for question in asked for seed in question.seeds})

    def data(self, path: str | None) -> str:
        """The prepared data of all runs: `path`, or else those of the configuration. Raises InputError for none."""
        folder = path or load_config(self.config, self.set).data.path
        require(folder is not None, "--data", "a folder that residua prepare made", None)
        return folder

    def only(self, schemes: Sequence[str] | None = None, rungs: Sequence[str] | None = None) -> "Study":
        """Return this study with some of its schemes, beside the baselines, and some of its sizes.

        A scheme that the file does not have, such as a registered one, joins with its name. Raises InputError for an
        unknown size.
        """
        check_names("--rungs", rungs, self.rungs)
        chosen = dict(self.schemes)
        if schemes is not None:
            matched = [chosen[name].parameters_of for name in schemes if name in chosen]
            wanted = dict.fromkeys([*self.baselines, *schemes, *filter(None, matched)])
            order = [*[name for name in self.schemes if name in wanted], *[n for n in wanted if n not in self.schemes]]
            chosen = {name: self.schemes.get(name) or Entry(name, canonical(name)) for name in order}
        needed = {one for name in rungs or self.rungs for one in (name, *self.searches(name))}
        return replace(self, schemes=chosen, rungs={name: size for name, size in self.rungs.items() if name in needed})


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
        self._settings, self._has_parameters = cache(self._read), cache(_has_parameters)
        self._bases: dict[str, PreTrainedConfig] = {}
        self._done: dict[tuple[str, str], tuple[list[Run], dict[str, Any] | None]] = {}
        self.steps: dict[str, int] = {}
        self.step_tokens: dict[str, int] = {}
        for size in study.rungs.values():
            config = self.config(size.name, study.baselines[0])
            train = config.train
            per_step = train.batch_size * train.gradient_accumulation * train.sequence_length
            self.step_tokens[size.name] = per_step
            self.steps[size.name] = max(1, round(study.tokens_at(size.name) * self._count(config) / per_step))
            longest = max([1.0, *(study.longer_at(size.name) if size.name in self.rungs else ())])
            needed = round(longest * self.steps[size.name]) * per_step + 2 * train.sequence_length
            if needed > study.epochs * len(self.prepared.train):
                often = "twice" if study.epochs == 1 else f"more than {study.epochs} times"
                raise InputError(
                    f"rungs.{size.name}: needs {needed:,} tokens so that none is seen {often}, {self.data} has "
                    f"{len(self.prepared.train):,}; give more text or leave this size out with --rungs"
                )
        self.misfits: dict[tuple[str, str], InputError] = {}
        for entry in study.schemes.values():  # every configuration is checked before hours are spent on the first
            errors = {(name, entry.name): error for name in study.rungs if (error := self._misfit(name, entry.name))}
            if len(errors) == len(study.rungs):
                raise next(iter(errors.values()))
            self.misfits |= errors
        self.tuning(next(size.name for size in study.rungs.values() if size.tuned is None), study.baselines[0], {})

    @property
    def facts(self) -> Mapping[str, Any]:
        """The metadata of the data, with their fingerprint and the hash of the text."""
        return self.prepared.facts

    def schemes_at(self, size: str) -> list[str]:
        """The schemes that have runs at a size: it can be built there, and where its settings come from."""
        places = {size, *self.study.searches(size)}
        return [name for name in self.study.schemes if not any((place, name) in self.misfits for place in places)]

    def runs(self, finished: Mapping[Any, Record]) -> Iterator[Run]:
        """All runs that the study needs, as far as the finished ones tell, in the order of their worth."""
        study = self.study
        for size in study.rungs:
            chosen = {}
            for scheme in self.schemes_at(size):
                if size in study.searches(size):
                    yield from self.tuning(size, scheme, finished)
                if size in self.rungs and (point := self.chosen(size, scheme, finished)) is not None:
                    chosen[scheme] = point
                    yield from self.reported(size, scheme, point)
            for name, factor in itertools.product(study.baselines, study.longer_at(size)):
                if name in chosen:
                    yield from self.reported(size, name, chosen[name], factor)
            for name, point in chosen.items():
                yield from self.reported(size, name, point, seeds=study.further_seeds(size, name))

    def recorded(self, record: Record) -> Run:
        """The run of a record, whose key is another if the study has other settings.

        It need not be one of `runs`: a study that grows may choose anew, as when more seeds compare the finalists, and
        the runs of its earlier choice stay.
        """
        return self.run(*(record[name] for name in ("kind", "rung", "scheme", "point", "seed", "steps")))

    @property
    def most(self) -> int:
        """How many runs there can be at most."""
        return sum(part.runs for part in self.at_most())

    def at_most(self) -> Iterator[Part]:
        """All runs that there can be, whatever the search finds."""
        study = self.study
        for size, scheme in itertools.product(study.rungs, study.schemes):
            if scheme not in self.schemes_at(size):
                continue
            steps, baseline = self.steps[size], scheme in study.baselines
            if size in study.searches(size):
                tuning = study.tuning_at(size)
                budget = tuning.baseline_runs if baseline else tuning.runs
                yield Part(size, scheme, budget, max(1, round(tuning.length * steps)))
                if tuning.finalists > 1:
                    yield Part(size, scheme, tuning.finalists * len(tuning.finalist_seeds), steps)
            if size in self.rungs:
                seeds = len(study.seeds_at(size))
                yield Part(size, scheme, seeds + len(study.further_seeds(size, scheme)), steps)
                for factor in study.longer_at(size) if baseline else ():
                    yield Part(size, scheme, seeds, round(factor * steps))

    def _misfit(self, size: str, scheme: str) -> InputError | None:
        """Why a scheme cannot be built at a size; None where it can."""
        try:
            config = self.config(size, scheme)
            if isinstance(config.model, BaseModelConfig):
                self.model(config)
        except InputError as error:
            return InputError(f"schemes.{scheme}: {error}")
        return None

    def tuning(self, size: str, scheme: str, finished: Mapping[Any, Record]) -> list[Run]:
        """The tuning runs of a scheme at a size that has a search, as far as the finished ones tell."""
        return self._search(size, scheme, finished)[0]

    def chosen(self, size: str, scheme: str, finished: Mapping[Any, Record]) -> dict[str, Any] | None:
        """The best point of a scheme; None while its tuning is not finished, and where all of it diverged."""
        return self._search(self.study.searches(size)[-1], scheme, finished)[1]

    def reported(
        self,
        size: str,
        scheme: str,
        point: Mapping[str, Any],
        longer: float | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[Run]:
        """The runs of all seeds at a point, or of other `seeds`, with `longer` times as many steps if given."""
        kind: Kind = "longer" if longer else "report"
        steps = round((longer or 1.0) * self.steps[size])
        for seed in self.study.seeds_at(size) if seeds is None else seeds:
            yield self.run(kind, size, scheme, point, seed, steps)

    def run(self, kind: Kind, size: str, scheme: str, point: Mapping[str, Any], seed: int, steps: int) -> Run:
        # Nobody looks at the curve of a run that tunes.
        evaluations = 1 if kind in ("tune", "final") else self.study.evaluations
        return Run(kind, size, scheme, point, self.config(size, scheme, point, seed, steps, evaluations))

    def _search(
        self, size: str, scheme: str, finished: Mapping[Any, Record]
    ) -> tuple[list[Run], dict[str, Any] | None]:
        """The tuning runs of a scheme, and its best point once all of them are finished."""
        if (size, scheme) in self._done:
            return self._done[size, scheme]
        before = self.study.searches(size)[:-1]
        start = self.chosen(before[-1], scheme, finished) if before else {}
        if start is None:
            return [], None
        tuning, search = self.study.tuning_at(size), self._started(size, scheme, start)
        losses: dict[Trial, float] = {}
        while True:  # a step of the search follows from the losses of the steps before
            runs = {
                (point, seed): self._trial(size, scheme, start, search.named(point), seed)
                for point, seed in search.wanted(losses)
            }
            known = {trial: loss_of(finished[run.key]) for trial, run in runs.items() if run.key in finished}
            if known == losses:
                break
            losses = known
        if len(losses) < len(runs):
            return [*runs.values()], None
        trials = ((point, loss) for (point, seed), loss in losses.items() if seed is None)
        finals = [(point, seed, loss) for (point, seed), loss in losses.items() if seed is not None]
        best = chosen_points(trials, finals, finalists=tuning.finalists, seeds=tuning.finalist_seeds)
        self._done[size, scheme] = [*runs.values()], {**start, **search.named(best[0])} if best else None
        return self._done[size, scheme]

    def _started(self, size: str, scheme: str, start: Mapping[str, Any]) -> Search:
        """The search for the best point of a scheme. start: settings that an earlier search found."""
        study, tuning = self.study, self.study.tuning_at(size)
        own = self._has_parameters(study.schemes[scheme].connection)
        over = {key: values for key, values in tuning.over.items() if key != "train.connection_lr_factor" or own}
        expected = f"a key for {scheme} too, which has no parameters of its own, such as train.lr"
        require(bool(over), "tuning.over", expected, dict(tuning.over))
        return Search(
            over,
            lambda point: self.config(size, scheme, {**start, **point}),
            budget=tuning.baseline_runs if scheme in study.baselines else tuning.runs,
            factors=tuning.factors,
            finalists=tuning.finalists,
            seeds=tuning.finalist_seeds if tuning.finalists > 1 else (),
        )

    def _trial(
        self, size: str, scheme: str, start: Mapping[str, Any], point: Mapping[str, Any], seed: int | None
    ) -> Run:
        """A run of the search, or the run of a finalist with a seed."""
        tuning, steps, full = self.study.tuning_at(size), self.steps[size], {**start, **point}
        if seed is not None:
            return self.run("final", size, scheme, full, seed, steps)
        return self.run("tune", size, scheme, full, tuning.seed, max(1, round(tuning.length * steps)))

    def config(
        self,
        size: str,
        scheme: str,
        point: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
        steps: int = 1,
        evaluations: int = 1,
    ) -> RunConfig:
        """The configuration of a scheme at a size."""
        config = self._settings(size, scheme, json.dumps(dict(point)))
        train = replace(
            config.train,
            seed=seed,
            steps=steps,
            warmup_steps=int(self.study.warmup * steps),
            evaluate_every=max(1, math.ceil(steps / evaluations)),
        )
        return replace(config, train=train)

    def _read(self, size: str, scheme: str, point: str) -> RunConfig:
        entry = self.study.schemes[scheme]
        width = {} if entry.parameters_of is None else {"model.intermediate_size": self._matched(size, entry)}
        return load_config(self.study.config, {**self._shared(size, entry), **width, **json.loads(point)})

    def _shared(self, size: str, entry: Entry) -> dict[str, Any]:
        keys = {**self.study.set, **self.study.rungs[size].keys, **entry.keys, "model.connection": entry.connection}
        return {**keys, "data.path": self.data, "train.tensorboard": False, "train.keep_checkpoints": 1}

    def model(self, config: RunConfig) -> PreTrainedConfig:
        """The configuration of the model of a run. Raises InputError for a base that cannot be used."""
        if isinstance(config.model, BaseModelConfig):
            return self._converted(config)
        return model_config(config)

    def _converted(self, config: RunConfig) -> PreTrainedConfig:
        known = json.dumps(asdict(config.model), sort_keys=True)
        if known not in self._bases:
            saved = build_model(config, self.prepared).config.to_json_string()  # says how it was converted
            self._bases[known] = ConvertedConfig.from_dict(json.loads(saved))
        return self._bases[known]

    def _count(self, config: RunConfig) -> int:
        return parameters(self.model(config))["total"]

    def _matched(self, size: str, entry: Entry) -> int:
        """The MLP width with which a scheme comes nearest to the parameters of the one that it is matched to."""
        other = self.config(size, entry.parameters_of)
        place = f"schemes.{entry.name}.parameters_of"
        require(not isinstance(other.model, BaseModelConfig), place, "none beside model.base", entry.parameters_of)
        plain = self.model(load_config(self.study.config, self._shared(size, entry)))
        width = plain.intermediate_size
        wider = ResiduaConfig(**{**plain.to_dict(), "intermediate_size": width + 1})
        counts = [parameters(model)["total"] for model in (plain, wider)]
        return width + round((self._count(other) - counts[0]) / (counts[1] - counts[0]))


def _has_parameters(connection: str) -> bool:
    """Whether a scheme has parameters of its own, so that they can have a learning rate of their own."""
    small = partial(ResiduaConfig, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=1)
    counts = [parameters(small(connection=name))["connections"] for name in (connection, "residual")]
    return counts[0] != counts[1]


def load_study(source: str) -> Study:
    """Read a study: "resbench", or a YAML file.

    Raises:
        InputError: there is no such file, or a key or value in it cannot be used; one line that names it.
    """
    if source == "resbench":
        text = (resources.files("residua.lab.study") / "resbench.yaml").read_text(encoding="utf-8")
    elif Path(source).is_file():
        text = read_text(source, "YAML")
    else:
        nearest = did_you_mean(source, ["resbench"])
        raise InputError(f"the study must be resbench or a YAML file, got {source!r}{nearest}")
    study = read_study(parse_yaml(text, source), source)
    # Here and not for a folder, whose report needs no package that brings a scheme.
    entries = {name: replace(entry, connection=canonical(entry.connection)) for name, entry in study.schemes.items()}
    for name, question in study.questions.items():
        check_names(f"questions.{name}.compare", question.schemes, entries)
    check_names("primary", study.primary, study.rungs)
    for size, pairs in study.primary.items():
        check_names(f"primary.{size}", itertools.chain(*pairs), entries)
    return replace(study, schemes=entries)


def check_names(place: str, names: Iterable[Any] | None, choices: Iterable[Any]) -> None:
    """Raise InputError for the first of `names` that is not among the choices."""
    choices = [*choices]
    for name in names or ():
        if name not in choices:
            listed = [*map(str, choices)]
            some = f"some of {', '.join(listed) or 'none'}"
            raise InputError(f"{place} must be {some}, got {shown(name)}{did_you_mean(name, listed)}")


def read_study(document: Any, source: str) -> Study:
    """The study in a document: of a file, or of a folder, where the keys of each part stand by themselves."""
    require(isinstance(document, Mapping), source, "a mapping of keys to values", document)
    sections: dict[str, type] = {"rungs": Size, "schemes": Entry, "questions": Question}
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
    base = {"model.base": given.base} if isinstance(given, BaseModelConfig) else {}

    def pin(keys: Mapping[str, Any]) -> Mapping[str, Any]:
        path = keys.get("model.base")
        if path is None or keys.get("model.base_sha256") is not None:
            return keys
        require(isinstance(path, str), "model.base", "a folder with a model of transformers", path)
        return {**keys, "model.base_sha256": base_sha256(Path(path))}

    return replace(
        study,
        set=pin({**base, **study.set}),
        rungs={name: replace(size, keys=pin(size.keys)) for name, size in study.rungs.items()},
        schemes={name: replace(entry, keys=pin(entry.keys)) for name, entry in study.schemes.items()},
    )
