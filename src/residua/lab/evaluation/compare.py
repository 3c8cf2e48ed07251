"""Compare runs: the loss that each reached, and its difference to a baseline at the same step, tokens or seconds.

Loss curves of two schemes look the same in a plot; a difference becomes visible only if it is taken over several seeds.
Runs that differ only in `train.seed` form a row. If a row and the baseline have common seeds, differences are taken
seed by seed, which cancels the noise that both share (the order of the data). If losses were not measured in the same
way, there is no difference, or only a difference in bits per byte: `comparable.judged` decides.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from textwrap import wrap
from typing import Any

from residua.connections.names import label
from residua.errors import InputError, did_you_mean
from residua.lab.evaluation.comparable import Unit, Verdict, judged
from residua.lab.evaluation.published import PublishedModel, models, size_of
from residua.lab.evaluation.runs import Axis, Row, Run
from residua.lab.records import table
from residua.lab.records.jsonlines import finite
from residua.lab.records.statistics import Estimate
from residua.lab.records.terminal import markdown_text

AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
BASELINE_CONNECTION = "residual"
NO_SETTING = "–"
WIDTH = 80
STAR = " *"
MOVES_NO_LOSS = {
    f"train.{name}" for name in ("checkpoint_every", "evaluate_every", "log_every", "keep_best", "keep_checkpoints")
}
"""Settings that do not affect the loss."""


def published_beside(comparison: "Comparison") -> list[PublishedModel]:
    """Return the published models with a curve, for the runs' schemes and the plain residual, at the runs' sizes.

    A run without a published model of its size is compared with the models of 124M.
    """
    found = {}
    for run in comparison.runs:
        size = size_of(run.settings) or "small"
        for preset in (BASELINE_CONNECTION, run.connection):
            model = models().get((size, preset))
            if model is not None and model.curve:
                found[size, preset] = model
    return list(found.values())


def published_losses(comparison: "Comparison") -> list[dict[str, Any]]:
    """Return the last validation loss of every run and the published losses at the same tokens, as plain values."""
    losses = []
    for run in (run for run in comparison.runs if run.validation):
        last, size = run.validation[-1], size_of(run.settings) or "small"
        own, plain = (
            models().get((size, preset), PublishedModel(size, preset)) for preset in (run.connection, "residual")
        )
        losses.append(
            {
                "run": run.folder.name,
                "tokens": last.tokens,
                "val_loss": last.loss if math.isfinite(last.loss) else None,
                "published": own.title if own.curve else None,
                "published_loss": own.loss_at(last.tokens / 1e9),
                "published_residual_loss": plain.loss_at(last.tokens / 1e9),
                "same_size": size_of(run.settings) is not None,
            }
        )
    return losses


@dataclass(frozen=True)
class Comparison:
    """Rows of runs, and the row that is the baseline. left_out: a sentence on each run that is in no row."""

    rows: tuple[Row, ...]
    baseline: Row | None
    left_out: tuple[str, ...] = ()

    def against(self, baseline: str | None) -> "Comparison":
        """Return the same runs compared with another baseline.

        baseline: the name of a row; None for the first row with the plain residual. Raises InputError for an unknown
        name.
        """
        if baseline is None:
            return replace(self, baseline=self._plain_residual)
        rows = {row.name: row for row in self.rows}
        named = [rows[baseline]] if baseline in rows else self._of_scheme(label(baseline))
        if len(named) != 1:
            listed, nearest = ", ".join(rows), did_you_mean(baseline, rows)
            raise InputError(f"the baseline must be one of {listed}; got {baseline}{nearest}")
        return replace(self, baseline=named[0])

    @property
    def runs(self) -> list[Run]:
        """The runs of all rows."""
        return [run for row in self.rows for run in row.runs]

    def _of_scheme(self, name: str) -> list[Row]:
        return [row for row in self.rows if row.connection == name]

    def verdict(self, row: Row) -> Verdict:
        """Return whether a row can be compared with the baseline, or with the first row if there is no baseline."""
        return judged(row.measure, (self.baseline or self.rows[0]).measure)

    @cached_property
    def unit(self) -> Unit:
        """The unit of all differences: bits per byte if tokenizers differ and are lossless."""
        units = [self.verdict(row).unit for row in self.rows]
        return "bits per byte" if "bits per byte" in units else "nats per token"

    @property
    def _plain_residual(self) -> Row | None:
        return next((row for row in self.rows if row.connection == BASELINE_CONNECTION), None)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """The caveats for a reader: first the runs that were left out, then the limits of the comparison."""
        return (*self.left_out, *_notes(self))

    @cached_property
    def settings(self) -> dict[str, dict[str, list[str]]]:
        """The settings that differ between rows and can affect a loss: for each key, the names of the rows by value."""
        alike = {row.connection: row for row in self.rows}
        runs = {row.name: row.runs[0] for row in self.rows}
        keys = dict.fromkeys(key for run in runs.values() for key in sorted(run.settings))
        if all(row.name == name for name, row in alike.items()) and len(alike) == len(runs):
            keys.pop("model.connection")
        values: dict[str, dict[str, list[str]]] = {}
        for key in keys.keys() - MOVES_NO_LOSS:
            for name, run in runs.items():
                value = run.connection if key == "model.connection" else _short(run.settings.get(key, NO_SETTING))
                values.setdefault(key, {}).setdefault(value, []).append(name)
        return {key: values[key] for key in sorted(values) if len(values[key]) > 1}

    def setting_lines(self) -> list[str]:
        """Return `settings` as lines with the values and their rows, wrapped if they are long."""
        lines = []
        for key, values in self.settings.items():
            lines += wrap(
                f"{key}: {_listed(values)}",
                WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        return lines

    @property
    def colours(self) -> dict[str, int]:
        """The colour number of each row, the same in all pictures and for every baseline.

        The first row with the plain residual has 0, the others count from 1.
        """
        plain = self._plain_residual
        others = [row.name for row in self.rows if row is not plain]
        return ({plain.name: 0} if plain else {}) | {name: number for number, name in enumerate(others, start=1)}

    @property
    def speeds_differ(self) -> bool:
        """Whether a row takes over 5 % more seconds than the baseline.

        At equal seconds its runs are then at an earlier point of their learning-rate schedule.
        """
        if self.baseline is None or self.baseline.seconds is None:
            return False
        most = max(row.seconds.mean for row in self.rows if row.seconds is not None)
        return most > 1.05 * self.baseline.seconds.mean

    def differences(self, row: Row, axis: Axis = "tokens") -> dict[float, Estimate]:
        """Return the validation loss of `row` minus the baseline's, in `unit`, keyed by position on `axis`.

        See `Row.minus`. Empty for the baseline itself, without a baseline, and if the losses cannot be compared.
        """
        if self.baseline is None or row is self.baseline or self.verdict(row).unit is None:
            return {}
        return row.minus(self.baseline, axis, self.unit)

    def final_difference(self, row: Row) -> tuple[float, Estimate] | None:
        """Return the last number of tokens that both row and baseline reached, and the difference there; or None."""
        return max(self.differences(row).items(), default=None)

    def table(self) -> table.Table:
        """Return a table with a line for each row. A star marks losses of stopped or unequally long runs."""
        versus = f"vs {self.baseline.name}" if self.baseline else "difference"
        loss = "validation loss" if self.unit == "nats per token" else self.unit
        header = ["run", "seed", loss, versus, "parameters", "tokens/s", "seconds"]
        cells = [
            [
                row.name,
                f"seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}",
                _estimate_text(row.loss(self.unit), ".4f") + STAR * bool(row.loss(self.unit) and row.stopped),
                "baseline" if row is self.baseline else self._versus(row),
                "–" if row.parameters is None else f"{row.parameters:,}",
                _estimate_text(row.tokens_per_second, ",.0f", spread=False),
                _estimate_text(row.seconds, ",.1f", spread=False),
            ]
            for row in self.rows
        ]
        return table.Table(header, cells)

    def _versus(self, row: Row) -> str:
        final = self.final_difference(row)
        return "–" if final is None else _estimate_text(final[1], "+.4f") + STAR * (len(self.ends(row)) > 1)

    def ends(self, row: Row) -> set[int]:
        """Return the tokens at which the compared runs of a row and the baseline end; empty without a comparison."""
        if self.final_difference(row) is None:
            return set()
        return {run.validation[-1].tokens for side in row.shared(self.baseline) for run in side.values()}

    def to_markdown(self) -> str:
        """Return the table in Markdown, with the settings and the notes below it."""
        settings = [markdown_text(f"- {key}: {_listed(values)}") for key, values in self.settings.items()]
        below = ["\nSettings that differ:\n\n" + "\n".join(settings)] if settings else []
        notes = (f"\n{markdown_text(note)}" for note in self.notes)
        return "\n".join([self.table().markdown(5), *below, *notes]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain values for `json.dumps`; None for numbers that are missing or not finite."""
        rows = [
            {
                "name": row.name,
                "seeds": list(row.seeds),
                "folders": [str(run.folder) for run in row.runs],
                "val_loss": _plain(row.loss("nats per token")),
                "bits_per_byte": _plain(row.loss("bits per byte")),
                "stopped": [list(run.stopped or ()) for run in row.stopped],
                "difference": _at(self.final_difference(row)),
                "parameters": row.parameters,
                "tokens": row.tokens,
                "tokens_per_second": _plain(row.tokens_per_second),
                "seconds": _plain(row.seconds),
                "differences": {axis: [*map(_at, self.differences(row, axis).items())] for axis in AXES},
            }
            for row in self.rows
        ]
        return {
            "baseline": self.baseline and self.baseline.name,
            "unit": self.unit,
            "groups": rows,
            "settings": self.settings,
            "notes": list(self.notes),
        }


def compare(folders: Iterable[str | Path], *, baseline: str | None = None) -> Comparison:
    """Compare the runs in `folders`.

    Args:
        folders: run folders, in the order of their rows in the table; duplicates count once.
        baseline: the name of a row as in the table, or a scheme that only one row has; None for the first row with the
            plain residual.

    Raises:
        InputError: no folder is given, a folder has no run, or the baseline is not one of the rows.
    """
    unique = {Path(folder).resolve(): Path(folder) for folder in reversed(list(folders))}
    runs = [Run.read(folder) for folder in reversed(unique.values())]
    if not runs:
        raise InputError("give at least one run folder to compare, got none")
    rows, left_out = _grouped(runs)
    return Comparison(tuple(rows), None, tuple(left_out)).against(baseline)


def _grouped(runs: Sequence[Run]) -> tuple[list[Row], list[str]]:
    """Group runs with equal settings into rows, named after their schemes if these differ, otherwise after folders.

    Of runs with equal settings and seed, the longest counts. The second result has a sentence on each run left out.
    """
    members: dict[str, dict[int, Run]] = {}
    left_out = []
    for run in runs:
        settings = {**run.settings, "model.connection": run.connection}
        same = members.setdefault(json.dumps(settings, sort_keys=True, default=str), {})
        other = same.setdefault(run.seed, run)
        if other is run:
            continue
        if _reached(run) > _reached(other):
            same[run.seed], run, other = run, other, run
        reason = f", which came to step {_reached(other)[1]}" if _reached(other) > _reached(run) else ""
        left_out.append(f"{run.folder} repeats {other.folder}{reason} (same settings, same seed {run.seed}): left out.")
    sets = [tuple(same[seed] for seed in sorted(same)) for same in members.values()]
    return list(map(Row, _names(sets), sets)), left_out


def _reached(run: Run) -> tuple[int, int]:
    """Return the step of the last validation, and the last step."""
    return max((point.step for point in run.validation), default=0), run.steps


def _names(sets: Sequence[tuple[Run, ...]]) -> list[str]:
    """Return a name for each set of runs: its scheme if all schemes differ, otherwise its folder."""
    schemes = [runs[0].connection for runs in sets]
    if len({*schemes}) == len(sets):
        return schemes
    names: list[str] = []
    for depth in range(1, 1 + max(len(run.folder.resolve().parts) for runs in sets for run in runs)):
        names = [_common_name([Path(*run.folder.resolve().parts[-depth:]).as_posix() for run in runs]) for runs in sets]
        if len({*names}) == len(sets):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]  # several rows in one folder


def _common_name(folders: Sequence[str]) -> str:
    """Return the common prefix of the names of folders, without the number of the seed."""
    first, *others = folders
    common = "".join(letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*folders)))
    if any(folder[len(common) :][:1].isdigit() for folder in folders):
        common = common.rstrip("0123456789")
    return common.rstrip("-_./") or first if others else first


def _short(value: Any) -> str:
    """Format a setting in short form: numbers with 6 digits, fingerprints with 12 characters."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text[:12] if len(text) == 64 else text


def _listed(values: Mapping[str, Sequence[str]]) -> str:
    """Format values with the rows that have them: "0.001 (a, b); 0.002 (c)"."""
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in values.items())


def _notes(comparison: Comparison) -> list[str]:
    """Return the caveats about the numbers in a table."""
    notes = []
    baseline = comparison.baseline
    if baseline is None and len(comparison.rows) > 1:
        notes.append("No run with the plain residual, so there are no differences: name a baseline.")
    if baseline is not None and len(comparison.rows) > 1 and all(len(row.runs) == 1 for row in comparison.rows):
        notes.append("One seed each: the noise in the differences is not measured.")
    if frozen := [row.name for row in comparison.rows if row.runs[0].settings.get("model.freeze_base")]:
        notes.append(f"{', '.join(frozen)}: parameters counts only those that are trained (model.freeze_base).")
    if comparison.unit == "bits per byte":
        notes.append("The tokenizers differ, so the losses are in bits per byte of the same held-out text.")
    other = (baseline or comparison.rows[0]).name
    for row in comparison.rows:
        verdict = comparison.verdict(row)
        notes += [f"{row.name} cannot be compared with {other}: {reason}." for reason in verdict.reasons]
        if verdict.unit is not None and comparison.baseline is not None:
            notes += [f"{row.name} and {other} differ in {mark}." for mark in verdict.marks if "arithmetic" in mark]
        notes += [*_notes_of_runs(row), *_notes_of_difference(comparison, row)]
    return notes


def _notes_of_runs(row: Row) -> Iterator[str]:
    missing = [str(run.folder) for run in row.runs if not run.validation]
    if missing:
        yield f"{row.name}: no validation loss in {', '.join(missing)}."
    for run in row.stopped:
        last, planned = run.stopped
        yield f"{row.name}: {run.folder.name} ended at step {last} of {planned}, stopped or still under way."
    diverged = [
        run.seed for run in row.runs if any(not math.isfinite(p.loss) for p in (*run.training, *run.validation))
    ]
    if diverged:
        yield f"{row.name}: the loss is not finite with seed {', '.join(map(str, diverged))}."


def _notes_of_difference(comparison: Comparison, row: Row) -> Iterator[str]:
    baseline, final = comparison.baseline, comparison.final_difference(row)
    if baseline is None or row is baseline:
        return
    sides = row.shared(baseline)
    if final is None:
        if all(sides) and comparison.verdict(row).unit is not None:
            yield (
                f"{row.name}: no difference, as the tokens at which it and {baseline.name} were evaluated do not "
                "overlap; evaluate more often with train.evaluate_every."
            )
        return
    if len(comparison.ends(row)) > 1:
        yield (
            f"{row.name}: the difference is taken at {final[0]:,.0f} tokens, where the shortest run ends; "
            "a longer run was still at a higher learning rate there."
        )
    seeds = max(len(row.runs), len(baseline.runs))
    count = final[1].count
    if count == 0:
        yield f"{row.name} and {baseline.name} share no seed: the means are compared."
    elif count < seeds:
        yield f"{row.name}: the difference is over the {count} of {seeds} seeds that are shared."


def _estimate_text(value: Estimate | None, form: str, *, spread: bool = True) -> str:
    if value is None:
        return "–"
    mean = format(value.mean, form)
    return mean if value.deviation is None or not spread else f"{mean} ± {value.deviation:{form.lstrip('+')}}"


def _plain(value: Estimate | None) -> dict[str, float | None] | None:
    return None if value is None else finite(value._asdict())


def _at(point: tuple[float, Estimate] | None) -> dict[str, float | None] | None:
    """Return an estimate and its position on an axis as plain values; None for None."""
    return None if point is None else finite({"at": point[0], **point[1]._asdict()})
