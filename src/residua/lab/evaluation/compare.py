"""Compare runs: the loss that each reached, and its difference to a baseline at the same step, tokens or seconds.

Two loss curves look the same in a plot; schemes differ visibly only in the difference of their losses over several
seeds. Runs that differ only in `train.seed` form a group. If a group and the baseline share seeds, the differences are
taken seed by seed, which removes the noise that both share (the order of the data).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from residua.errors import InputError, did_you_mean, extra
from residua.lab.evaluation.records import Run
from residua.records import table
from residua.records.jsonlines import finite
from residua.records.statistics import Estimate, paired

with extra("lab"):
    import numpy

Axis = Literal["step", "tokens", "seconds"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
BASELINE_CONNECTION = "residual"


class Difference(NamedTuple):
    """Loss minus the baseline's loss at one point of an axis; `count` pairs of seeds, or 0 if no seed is shared."""

    at: float
    mean: float
    deviation: float | None
    count: int

    @property
    def clear(self) -> bool:
        """Whether the 95 % confidence interval over pairs of seeds (Student's t) excludes 0; False for one pair."""
        half = Estimate(self.mean, self.deviation, self.count).half_width
        return half is not None and abs(self.mean) > half


class Group(table.Group[Run]):
    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def validation_loss(self) -> Estimate | None:
        """The last validation loss, over the runs that have one."""
        return self.estimate(lambda run: run.validation[-1].loss if run.validation else None)

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

    @property
    def tokens_per_second(self) -> Estimate | None:
        return self.estimate(lambda run: run.tokens_per_second)

    @property
    def seconds(self) -> Estimate | None:
        return self.estimate(lambda run: run.end.seconds if run.end else None)

    @property
    def tokens(self) -> int | None:
        """Training tokens of the shortest run, None before the first logged step."""
        return min((run.end.tokens for run in self.runs if run.end), default=None)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, and the group that the others are compared with. `left_out` names runs that are in no group."""

    groups: tuple[Group, ...]
    baseline: Group | None
    left_out: tuple[str, ...] = ()

    def against(self, baseline: str | None) -> "Comparison":
        """Return the same runs compared with another baseline: the name of a group, or None for the first with the
        plain residual. Raises InputError for an unknown name.
        """
        groups = {group.name: group for group in self.groups}
        if baseline is not None and baseline not in groups:
            listed, nearest = ", ".join(groups), did_you_mean(baseline, groups)
            raise InputError(f"the baseline must be one of {listed}; got {baseline}{nearest}")
        return replace(self, baseline=self._plain_residual if baseline is None else groups[baseline])

    @property
    def _plain_residual(self) -> Group | None:
        return next((group for group in self.groups if group.runs[0].connection == BASELINE_CONNECTION), None)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the numbers."""
        return (*self.left_out, *_notes(self))

    @property
    def colours(self) -> dict[str, int]:
        """The colour number of every group, the same in all pictures and for every baseline: 0 for the first plain
        residual, from 1 for the others.
        """
        plain = self._plain_residual
        others = [group.name for group in self.groups if group is not plain]
        return ({plain.name: 0} if plain else {}) | {name: number for number, name in enumerate(others, start=1)}

    @property
    def speeds_differ(self) -> bool:
        """Whether a group takes over 5 % more seconds than the baseline, so that at equal seconds its runs are seen at
        an earlier point of their learning rate's schedule.
        """
        if self.baseline is None or self.baseline.seconds is None:
            return False
        most = max(group.seconds.mean for group in self.groups if group.seconds is not None)
        return most > 1.05 * self.baseline.seconds.mean

    def differences(self, group: Group, axis: Axis = "tokens") -> list[Difference]:
        """Return the validation loss of `group` minus the baseline's along `axis`.

        There is one at every point where a run was evaluated and which the curves of all runs cover; the others are
        interpolated there. Empty for the baseline itself, without a baseline, and if the curves do not overlap.
        """
        if self.baseline is None or group is self.baseline:
            return []
        sides = [
            {seed: list(zip(*((getattr(point, axis), point.loss) for point in run.validation))) for seed, run in runs}
            for runs in map(dict.items, _matched(group, self.baseline))
        ]
        if not all(sides):
            return []
        axes = [at for side in sides for at, _ in side.values()]
        first, last = max(at[0] for at in axes), min(at[-1] for at in axes)
        points = sorted({value for at in axes for value in at if first <= value <= last})
        losses = (zip(*(numpy.interp(points, *curve).tolist() for curve in side.values())) for side in sides)
        pairs = zip(*([dict(zip(side, values)) for values in columns] for side, columns in zip(sides, losses)))
        return [Difference(at, *_difference(ours, theirs)) for at, (ours, theirs) in zip(points, pairs)]

    def final_difference(self, group: Group) -> Difference | None:
        """Return the difference at the last number of tokens that both the group and the baseline reached."""
        differences = self.differences(group, "tokens")
        return differences[-1] if differences else None

    def table(self) -> table.Table:
        """Return a row for each group."""
        versus = f"vs {self.baseline.name}" if self.baseline else "difference"
        header = ["run", "seed(s)", "validation loss", versus, "parameters", "tokens/s", "seconds"]
        rows = [
            [
                group.name,
                f"seed{'s' if len(group.seeds) > 1 else ''} {', '.join(map(str, group.seeds))}",
                _text(group.validation_loss, ".4f"),
                "baseline" if group is self.baseline else _text(self.final_difference(group), "+.4f"),
                "–" if group.parameters is None else f"{group.parameters:,}",
                _text(group.tokens_per_second, ",.0f", spread=False),
                _text(group.seconds, ",.1f", spread=False),
            ]
            for group in self.groups
        ]
        return table.Table(header, rows)

    def to_markdown(self) -> str:
        """Return the table in Markdown, with the notes below it."""
        return "\n".join([self.table().markdown(5), *(f"\n{note}" for note in self.notes)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values for `json.dumps`; None for numbers that are missing or not finite."""
        groups = [
            {
                "name": group.name,
                "seeds": list(group.seeds),
                "folders": [str(run.folder) for run in group.runs],
                "val_loss": _plain(group.validation_loss),
                "difference": _plain(self.final_difference(group)),
                "parameters": group.parameters,
                "tokens": group.tokens,
                "tokens_per_second": _plain(group.tokens_per_second),
                "seconds": _plain(group.seconds),
                "differences": {axis: [_plain(d) for d in self.differences(group, axis)] for axis in AXES},
            }
            for group in self.groups
        ]
        return {"baseline": self.baseline and self.baseline.name, "groups": groups, "notes": list(self.notes)}


def compare(folders: Iterable[str | Path], *, baseline: str | None = None) -> Comparison:
    """Compare the runs in `folders`.

    Args:
        folders: run folders, in the order of their groups in the table; duplicates count once.
        baseline: the name of a group as in the table; None for the first with the plain residual.

    Raises:
        InputError: there is no folder, a folder has no run, or the baseline is not one of the groups.
    """
    unique = {Path(folder).resolve(): Path(folder) for folder in reversed(list(folders))}
    runs = [Run.read(folder) for folder in reversed(unique.values())]
    if not runs:
        raise InputError("give at least one run folder to compare, got none")
    groups, left_out = _group(runs)
    return Comparison(tuple(groups), None, tuple(left_out)).against(baseline)


def _group(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Group runs with equal settings, and give each group the shortest name that distinguishes it from the others.

    Of runs with the same settings and seed, the one that came furthest counts.
    """
    members: dict[str, dict[int, Run]] = {}
    left_out = []
    for run in runs:
        group = members.setdefault(json.dumps(run.settings, sort_keys=True, default=str), {})
        other = group.setdefault(run.seed, run)
        if other is run:
            continue
        if _reached(run) > _reached(other):
            group[run.seed], run, other = run, other, run
        reason = f", which came to step {_reached(other)[1]}" if _reached(other) > _reached(run) else ""
        left_out.append(f"{run.folder} repeats {other.folder}{reason} (same settings, same seed {run.seed}): left out.")
    sets = [tuple(group[seed] for seed in sorted(group)) for group in members.values()]
    return [Group(_name(some[0], [other[0] for other in sets]), some) for some in sets], left_out


def _reached(run: Run) -> tuple[int, int]:
    """Return the step of the last validation, and the last step."""
    return max((point.step for point in run.validation), default=0), run.end.step if run.end else 0


def _name(run: Run, all_runs: Sequence[Run]) -> str:
    same_connection = [other for other in all_runs if other.connection == run.connection]
    keys = sorted({key for other in same_connection for key in other.settings})
    differing = [key for key in keys if len({repr(other.settings.get(key)) for other in same_connection}) > 1]
    return " ".join([run.connection, *(f"{key}={_short(run.settings.get(key))}" for key in differing)])


def _short(value: Any) -> str:
    """Return a setting for use in a name: numbers with 6 digits, and 12 characters of a fingerprint."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text[:12] if len(text) == 64 else text


def _notes(comparison: Comparison) -> list[str]:
    """Return caveats about the numbers of a table."""
    notes = []
    baseline = comparison.baseline
    if baseline is None and len(comparison.groups) > 1:
        notes.append("No run with the plain residual, so there are no differences: name a baseline.")
    if baseline is not None and len(comparison.groups) > 1 and all(len(group.runs) == 1 for group in comparison.groups):
        notes.append("One seed each: the noise in the differences is not measured.")
    contexts = {group.name: group.runs[0].context for group in comparison.groups}
    if len(set(contexts.values()) - {None}) > 1:
        measured = ", ".join(f"{name} with {context}" for name, context in contexts.items() if context is not None)
        notes.append(
            f"The validation losses were measured with contexts of other lengths ({measured} tokens), and a longer one "
            "lowers the loss: they cannot be compared."
        )
    for group in comparison.groups:
        notes += [*_notes_of_runs(group), *_notes_of_difference(comparison, group)]
    return notes


def _notes_of_runs(group: Group) -> Iterator[str]:
    missing = [str(run.folder) for run in group.runs if not run.validation]
    if missing:
        yield f"{group.name}: no validation loss in {', '.join(missing)}."
    diverged = [
        run.seed for run in group.runs if any(not math.isfinite(p.loss) for p in (*run.training, *run.validation))
    ]
    if diverged:
        yield f"{group.name}: the loss is not finite with seed {', '.join(map(str, diverged))}."


def _notes_of_difference(comparison: Comparison, group: Group) -> Iterator[str]:
    baseline, difference = comparison.baseline, comparison.final_difference(group)
    if baseline is None or group is baseline:
        return
    sides = _matched(group, baseline)
    if difference is None:
        if all(sides):
            yield (
                f"{group.name}: no difference, as the tokens at which it and {baseline.name} were evaluated do not "
                "overlap; evaluate more often with train.evaluate_every."
            )
        return
    if group.runs[0].settings.get("data") != baseline.runs[0].settings.get("data"):
        yield f"{group.name} and {baseline.name} saw different data: their losses cannot be compared."
    ends = {run.validation[-1].tokens for side in sides for run in side.values()}
    if len(ends) > 1:
        yield (
            f"{group.name}: the difference is taken at {difference.at:,.0f} tokens, where the shortest run ends; "
            "a longer run was still at a higher learning rate there."
        )
    seeds = max(len(group.runs), len(baseline.runs))
    if difference.count == 0:
        yield f"{group.name} and {baseline.name} share no seed: the means are compared."
    elif difference.count < seeds:
        yield f"{group.name}: the difference is over the {difference.count} of {seeds} seeds that are shared."


def _matched(group: Group, baseline: Group) -> tuple[dict[int, Run], dict[int, Run]]:
    """Return the evaluated runs of both by seed: only shared seeds, or all if none is shared."""
    ours, theirs = ({run.seed: run for run in some.runs if run.validation} for some in (group, baseline))
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return ours, theirs
    return {seed: ours[seed] for seed in shared}, {seed: theirs[seed] for seed in shared}


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Return the difference over the shared seeds, or that of the means, with a count of 0, if none is shared."""
    if pairs := paired(ours, theirs):
        return pairs
    left, right = Estimate.of(ours.values()), Estimate.of(theirs.values())
    single = left.deviation is None or right.deviation is None
    return Estimate(left.mean - right.mean, None if single else math.hypot(left.deviation, right.deviation), 0)


def _text(value: Estimate | Difference | None, form: str, *, spread: bool = True) -> str:
    if value is None:
        return "–"
    mean = format(value.mean, form)
    return mean if value.deviation is None or not spread else f"{mean} ± {value.deviation:{form.lstrip('+')}}"


def _plain(value: Estimate | Difference | None) -> dict[str, float | None] | None:
    return None if value is None else finite(value._asdict())
