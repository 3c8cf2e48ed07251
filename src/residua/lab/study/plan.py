"""Plan the runs of a study, which follow from its sizes, schemes and tuning budgets.

A run is identified by its resolved configuration. The remaining runs are a pure function of the finished ones.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from residua.connections.names import recorded
from residua.conversion.configuration import ConvertedConfig
from residua.errors import InputError, extra, require
from residua.lab.cost.counts import parameters
from residua.lab.data import PreparedData
from residua.lab.evaluation.comparable import Measurement, decides_measure, judged
from residua.lab.experiment import build_model, model_config
from residua.lab.jobs.pool import Record
from residua.lab.records.folder import FREE_KEYS, flatten
from residua.lab.study.definition import Entry, Study
from residua.lab.study.forms import RunKind
from residua.lab.study.search import Search, loss_of, losses_in, other_loss_of, values_of
from residua.lab.training import BaseModelConfig, RunConfig, load_config
from residua.lab.training.base_model import base_sha256
from residua.lab.training.config import KEYS
from residua.models import ResiduaConfig

with extra("lab"):
    from transformers import PreTrainedConfig


class PlannedRun(NamedTuple):
    """One run of a study: its purpose, and the settings that determine its results."""

    kind: RunKind
    size: str
    scheme: str
    point: Mapping[str, Any]
    config: RunConfig

    @property
    def identity(self) -> str:
        """A digest of all settings that affect the results. Keys with their default values do not change it."""
        settings = {
            key: recorded(value) if key == "model.connection" else value
            for key, value in flatten(asdict(self.config)).items()
            if key not in _IRRELEVANT and value != KEYS[key].default
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        train = self.config.train
        return f"{self.size} {self.scheme} {self.kind} seed={train.seed} steps={train.steps} {self.identity}"

    @property
    def title(self) -> str:
        point = [f"{key.rpartition('.')[2]}={value}" for key, value in self.point.items()]
        return " ".join([self.size, self.scheme, self.kind, *point, f"seed={self.config.train.seed}"])


class RunCount(NamedTuple):
    """The largest number of runs with the same scheme, size and length, and the steps and evaluations of each."""

    size: str
    scheme: str
    runs: int
    steps: int
    evaluations: int = 1


_IRRELEVANT = (FREE_KEYS - {"train.evaluate_every"}) | {"data.source", "data.tokenizer", "data.validation_fraction"}
# `train.evaluate_every` is in the identity because the curve is part of a record. Data are compared by fingerprint.


class Plan:
    """The runs of a study on the prepared data in the folder `data`.

    sizes: the sizes at which runs are reported; the study's other sizes are only tuned. None for all sizes.

    misfits: for each size and scheme, the reason why the scheme cannot be built at this size, such as heads that do not
    divide the width. Such a scheme has no runs at this size, nor at sizes that take their settings from this size.

    Raises:
        InputError: the data have too few tokens, a size cannot be used, or a scheme cannot be built at any size.
    """

    def __init__(self, study: Study, data: str | Path, sizes: Sequence[str] | None = None):
        study = self.study = _pinned(study)
        self.sizes = [name for name in study.sizes if sizes is None or name in sizes]
        self.data = str(data)
        self.prepared = PreparedData.open(data)
        self._rated = cache(self._has_parameters)
        self._configs: dict[tuple[str, str, str], RunConfig] = {}
        self._bases: dict[str, PreTrainedConfig] = {}
        self._done: dict[tuple[str, str], tuple[list[PlannedRun], dict[str, Any] | None]] = {}
        self.steps: dict[str, int] = {}
        self.step_tokens: dict[str, int] = {}
        for size in study.sizes.values():
            try:
                config = self.config(size.name, study.baselines[0])
            except InputError as error:
                raise InputError(f"sizes.{size.name}: {error}") from error
            self.step_tokens[size.name] = per_step = config.train.tokens_per_step
            self.steps[size.name] = max(1, round(study.tokens_at(size.name) * self._count(config) / per_step))
            longest = max([1.0, *(study.longer_at(size.name) if size.name in self.sizes else ())])
            needed = round(longest * self.steps[size.name]) * per_step + 2 * config.train.sequence_length
            if needed > study.epochs * len(self.prepared.train):
                often = "twice" if study.epochs == 1 else f"more than {study.epochs} times"
                raise InputError(
                    f"sizes.{size.name}: needs {needed:,} tokens so that none is seen {often}, {self.data} has "
                    f"{len(self.prepared.train):,}; give more text or leave this size out with --sizes"
                )
        self.misfits: dict[tuple[str, str], InputError] = {}
        for entry in study.schemes.values():  # check every configuration before the first run takes hours
            errors = {(name, entry.name): error for name in study.sizes if (error := self._misfit(name, entry.name))}
            if len(errors) == len(study.sizes):
                raise next(iter(errors.values()))
            self.misfits |= errors
        self._expect_comparable()
        self.search(next(size.name for size in study.sizes.values() if size.tuned is None), study.baselines[0], {})

    @property
    def facts(self) -> Mapping[str, Any]:
        """The metadata of the data, with their fingerprint and the hash of the text."""
        return self.prepared.facts

    def schemes_at(self, size: str) -> list[str]:
        """Return the schemes that can be built at a size and at all sizes from which its settings come."""
        places = {size, *self.study.searches(size)}
        return [name for name in self.study.schemes if not any((place, name) in self.misfits for place in places)]

    def runs(self, finished: Mapping[Any, Record]) -> Iterator[PlannedRun]:
        """Yield all runs that the study needs, as far as the finished runs determine them, the most useful first."""
        study = self.study
        for size in study.sizes:
            chosen = {}
            for scheme in self.schemes_at(size):
                if size in study.searches(size):
                    yield from self.search(size, scheme, finished)[0]
                if size in self.sizes and (point := self.chosen(size, scheme, finished)) is not None:
                    chosen[scheme] = point
                    if not self._reports_every_point(size):
                        yield from self.reported(size, scheme, point)
            for name, factor in itertools.product(study.baselines, study.longer_at(size)):
                if name in chosen:
                    yield from self.reported(size, name, chosen[name], factor)
            for name, point in chosen.items():
                yield from self.reported(size, name, point, seeds=study.further_seeds(size, name))

    def _reports_every_point(self, size: str) -> bool:
        """Return whether the runs of a search at this size are also reported."""
        return self.study.tuning_at(size).every and size in self.study.searches(size)

    def recorded(self, record: Record) -> PlannedRun:
        """Rebuild the run behind a record. The two have different keys if the settings of the study have changed.

        The run need not be among `runs`. If a study grows, for example by seeds for its finalists, it may choose other
        points, and keeps the runs of its earlier choice.
        """
        return self.run(*(record[name] for name in ("kind", "size", "scheme", "point", "seed", "steps")))

    def lengths(self, kind: RunKind, size: str) -> set[int]:
        """Return the steps that a run of this kind may have at a size."""
        factors = {"tune": [self.study.tuning_at(size).length], "longer": self.study.longer_at(size)}.get(kind, [1.0])
        return {max(1, round(factor * self.steps[size])) for factor in factors}

    @property
    def most(self) -> int:
        """The largest number of runs that the study can need."""
        return sum(part.runs for part in self.at_most())

    def at_most(self) -> Iterator[RunCount]:
        """Yield the numbers of runs in the worst case over all results of the search."""
        study = self.study
        for size, scheme in itertools.product(study.sizes, study.schemes):
            if scheme not in self.schemes_at(size):
                continue
            steps, baseline = self.steps[size], scheme in study.baselines
            if size in study.searches(size):
                tuning = study.tuning_at(size)
                budget = study.budget(scheme) * (len(study.seeds_at(size)) if tuning.every else 1)
                points = study.evaluations if tuning.every else 1
                yield RunCount(size, scheme, budget, max(1, round(tuning.length * steps)), points)
                if tuning.finalists > 1:
                    yield RunCount(size, scheme, tuning.finalists * len(tuning.finalist_seeds), steps)
            if size in self.sizes:
                seeds = len(study.seeds_at(size))
                further = len(study.further_seeds(size, scheme))
                reported = further + (0 if self._reports_every_point(size) else seeds)
                yield RunCount(size, scheme, reported, steps, study.evaluations)
                for factor in study.longer_at(size) if baseline else ():
                    yield RunCount(size, scheme, seeds, round(factor * steps), study.evaluations)

    def _expect_comparable(self) -> None:
        """Raise InputError if losses that would be ranked are not measured in the same way, or not at equal tokens."""
        overs = {"tuning.over": self.study.tuning.over} | {
            f"sizes.{s.name}.over": s.over for s in self.study.sizes.values()
        }
        for place, over in overs.items():
            for key in filter(decides_measure, over or ()):
                raise InputError(f"{place} must have no key that decides how a loss is measured, got {key}")
            for key in filter(("train.batch_size", "train.gradient_accumulation").__contains__, over or ()):
                raise InputError(
                    f"{place} must have no key that decides the tokens of a step, because all runs of a size have "
                    f"equal steps, got {key}; give it under set or a size"
                )
        for size, scheme in itertools.product(self.study.sizes, self.study.schemes):
            first = self.study.baselines[0]
            if {(size, scheme), (size, first)} & self.misfits.keys():
                continue
            config = self.config(size, scheme)
            ours, theirs = (flatten(asdict(each)) for each in (config, self.config(size, first)))
            tokens = config.train.tokens_per_step
            if reasons := judged(Measurement.of(ours, {}), Measurement.of(theirs, {})).reasons:
                raise InputError(
                    f"schemes.{scheme} must be comparable with {first} at {size}, but they have {'; '.join(reasons)}"
                )
            place = f"schemes.{scheme}: the tokens of a step at {size}"
            expected = f"{self.step_tokens[size]}, as those of {first}, because both train for equal steps"
            require(tokens == self.step_tokens[size], place, expected, tokens)

    def _misfit(self, size: str, scheme: str) -> InputError | None:
        """Return the reason why a scheme cannot be built at a size; None if it can."""
        try:
            config = self.config(size, scheme)
            if isinstance(config.model, BaseModelConfig):
                self.model(config)
        except InputError as error:
            return InputError(f"schemes.{scheme}: {error}")
        return None

    def search(
        self, size: str, scheme: str, finished: Mapping[Any, Record]
    ) -> tuple[list[PlannedRun], dict[str, Any] | None]:
        """Return the tuning runs of a scheme at a size that has a search, and the best point.

        The runs are known as far as finished runs determine them. The best point is None until all runs are finished,
        and if all diverged.
        """
        if (size, scheme) in self._done:
            return self._done[size, scheme]
        study, tuning = self.study, self.study.tuning_at(size)
        before = study.searches(size)[:-1]
        start = self.chosen(before[-1], scheme, finished) if before else {}
        if start is None:
            return [], None
        rated = self._rated(size, scheme)
        over = {key: values for key, values in tuning.over.items() if key != "train.connection_lr_factor" or rated}
        expected = f"a key for {scheme} too, which has no parameters of its own, such as train.lr"
        require(bool(over or before), "tuning.over", expected, dict(tuning.over))
        search = Search(
            over,
            values_of(partial(self.config, size, scheme)),
            start,
            budget=study.budget(scheme),
            factors=tuning.factors,
            finalists=tuning.finalists,
            seeds=study.seeds_at(size) if tuning.every else tuning.finalist_seeds if tuning.finalists > 1 else (),
            every=tuning.every,
        )
        ended = losses_in(finished, other_loss_of if tuning.every else loss_of)
        runs, best = search.walk(partial(self._trial, size, scheme), ended)
        if all(run.key in finished for run in runs):
            self._done[size, scheme] = runs, best
        return runs, best

    def chosen(self, size: str, scheme: str, finished: Mapping[Any, Record]) -> dict[str, Any] | None:
        """Return the best point of a scheme; None while its tuning is unfinished, and if all of its runs diverged."""
        return self.search(self.study.searches(size)[-1], scheme, finished)[1]

    def reported(
        self,
        size: str,
        scheme: str,
        point: Mapping[str, Any],
        longer: float | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[PlannedRun]:
        """Yield the runs at a point, for the study's seeds or `seeds`, with `longer` times as many steps if given."""
        kind: RunKind = "longer" if longer else "report"
        steps = round((longer or 1.0) * self.steps[size])
        for seed in self.study.seeds_at(size) if seeds is None else seeds:
            yield self.run(kind, size, scheme, point, seed, steps)

    def run(self, kind: RunKind, size: str, scheme: str, point: Mapping[str, Any], seed: int, steps: int) -> PlannedRun:
        # The curve of a tuning run is not shown.
        evaluations = 1 if kind in ("tune", "final") else self.study.evaluations
        return PlannedRun(kind, size, scheme, point, self.config(size, scheme, point, seed, steps, evaluations))

    def _trial(self, size: str, scheme: str, point: Mapping[str, Any], seed: int | None) -> PlannedRun:
        """Return the run of the search at a point; if a seed is given, the run of a finalist."""
        tuning, steps = self.study.tuning_at(size), self.steps[size]
        if seed is not None:
            return self.run("report" if tuning.every else "final", size, scheme, point, seed, steps)
        return self.run("tune", size, scheme, point, tuning.seed, max(1, round(tuning.length * steps)))

    def config(
        self,
        size: str,
        scheme: str,
        point: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
        steps: int = 1,
        evaluations: int = 1,
    ) -> RunConfig:
        """Return the configuration of a scheme at a size."""
        place = size, scheme, repr(dict(point))
        if place not in self._configs:
            self._configs[place] = self._read(size, scheme, point)
        config = self._configs[place]
        train = replace(
            config.train,
            seed=seed,
            steps=steps,
            warmup_steps=int(self.study.warmup * steps),
            evaluate_every=max(1, math.ceil(steps / evaluations)),
        )
        return replace(config, train=train)

    def _read(self, size: str, scheme: str, point: Mapping[str, Any]) -> RunConfig:
        entry = self.study.schemes[scheme]
        width = {} if entry.parameters_of is None else {"model.intermediate_size": self._matched(size, entry)}
        return load_config(self.study.config, {**self._shared(size, entry), **width, **point})

    def _shared(self, size: str, entry: Entry) -> dict[str, Any]:
        keys = self.study.keys_at(size, entry.name)
        return {**keys, "data.path": self.data, "train.tensorboard": False, "train.keep_checkpoints": 1}

    def model(self, config: RunConfig) -> PreTrainedConfig:
        """Return the configuration of the model of a run. Raises InputError if the base cannot be used."""
        if not isinstance(config.model, BaseModelConfig):
            return model_config(config)
        settings = repr(config.model)
        if settings not in self._bases:
            saved = build_model(config, self.prepared.tokenizer()).config.to_json_string()  # includes the conversion
            self._bases[settings] = ConvertedConfig.from_dict(json.loads(saved))
        return self._bases[settings]

    def _has_parameters(self, size: str, scheme: str) -> bool:
        """Return whether a scheme has its own parameters, for which a separate learning rate makes sense."""
        width = self.model(self.config(size, scheme)).get_text_config().hidden_size
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 1, "head_dim": 2}
        small = partial(ResiduaConfig, vocab_size=64, **sizes)
        own, none = (small(connection=name) for name in (self.study.schemes[scheme].connection, "residual"))
        return parameters(own)["connections"] != parameters(none)["connections"]

    def _count(self, config: RunConfig) -> int:
        return parameters(self.model(config))["total"]

    def _matched(self, size: str, entry: Entry) -> int:
        """Return the MLP width at which a scheme is closest to the number of parameters of `entry.parameters_of`."""
        other = self.config(size, entry.parameters_of)
        place = f"schemes.{entry.name}.parameters_of"
        require(not isinstance(other.model, BaseModelConfig), place, "null with model.base", entry.parameters_of)
        plain = self.model(load_config(self.study.config, self._shared(size, entry)))
        width = plain.intermediate_size
        wider = ResiduaConfig(**{**plain.to_dict(), "intermediate_size": width + 1})
        counts = [parameters(model)["total"] for model in (plain, wider)]
        return width + round((self._count(other) - counts[0]) / (counts[1] - counts[0]))


def _pinned(study: Study) -> Study:
    """Return the study with the digest of every base added next to its path, so that no row mixes two models."""
    given = load_config(study.config, study.set).model
    base = {"model.base": given.base} if isinstance(given, BaseModelConfig) else {}

    def pin(keys: Mapping[str, Any]) -> Mapping[str, Any]:
        path = keys.get("model.base")
        if path is None or keys.get("model.base_sha256") is not None:
            return keys
        return {**keys, "model.base_sha256": base_sha256(Path(str(path)))}

    return replace(
        study,
        set=pin({**base, **study.set}),
        sizes={name: replace(size, keys=pin(size.keys)) for name, size in study.sizes.items()},
        schemes={name: replace(entry, keys=pin(entry.keys)) for name, entry in study.schemes.items()},
    )
