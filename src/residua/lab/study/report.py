"""The report of a study: Markdown, CSV, a page and a picture."""

import csv
import html
import io
import itertools
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from residua.errors import extra
from residua.files.durable import write_text
from residua.lab.evaluation.comparable import NATS
from residua.lab.evaluation.runs import Run
from residua.lab.records import figures
from residua.lab.records.folder import writable
from residua.lab.records.jsonlines import finite
from residua.lab.records.statistics import Contrast, Estimate
from residua.lab.records.table import Table
from residua.lab.records.terminal import cell_text, markdown_text, printable
from residua.lab.study.forms import Cost
from residua.lab.study.results import (
    ALPHA,
    BELOW,
    FAILED,
    SESSIONS,
    SIGNIFICANT,
    Answer,
    Difference,
    Results,
    SchemeRow,
)
from residua.lab.study.search import loss_of, other_loss_of

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_FILES = ("report.md", "results.csv", "index.html")
TEMPLATE = Path(__file__).parent / "assets" / "page.html"
MEBIBYTE = 2**20


def write_report(results: Results, out: str | Path) -> list[Path]:
    """Write the report, the table, the page and the pictures into `out`; return their paths. Raises InputError."""
    texts = markdown(results), table(results), page(payload(results))
    paths = [Path(out) / name for name in REPORT_FILES]
    with writable(out):
        Path(out).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts):
            write_text(path, text)
        return paths + figures.save({"differences.png": draw(results)}, out)


def markdown(results: Results) -> str:
    """Return the report in Markdown."""
    study, shown = results.study, columns(results)
    lines = [f"# {markdown_text(study.title)}", "", *map(markdown_text, _setting(results)), ""]
    for size in study.sizes:
        if not (rows := _best_first(results, size)):
            continue
        lines += [f"## {markdown_text(size)}", "", *map(markdown_text, _noise(results, size)), ""]
        cells = [[text(row) for text in shown.values()] for row in rows]
        lines += [Table(list(shown), cells).markdown(), ""]
        if points := points_table(rows):
            lines += [EVERY_POINT, "", points.markdown(), ""]
    if results.corrected:
        lines += ["## Primary contrasts", "", primary_table(results).markdown(), ""]
        lines += [BOTH_INTERVALS, ""] if _over_documents(results) else []
    if results.answers:
        lines += ["## Questions", "", ANSWERS, ""]
        for asked in questions(results):
            tables = [asked.table.markdown()] if asked.table else []
            for part in (f"### {markdown_text(asked.ask)}", *tables, *map(markdown_text, asked.remarks)):
                lines += [part, ""]
    return "\n".join([*lines, "## How to read this", "", *map(markdown_text, _reading(results, shown)), ""])


def _best_first(results: Results, size: str) -> list[SchemeRow]:
    """Return the rows of a size, those without a loss last."""
    rows = [row for row in results.rows if row.size == size]
    return sorted(rows, key=lambda row: row.loss.mean if row.loss else math.inf)


EVERY_POINT = (
    "Every point was trained in full with all seeds. A row above is the point with the lowest mean loss on labels that "
    "do not repeat; the same seeds chose it."
)


def points_table(rows: Sequence[SchemeRow]) -> Table | None:
    """Return the mean losses of every point that was trained with all seeds; None if the search used one seed."""

    def mean(losses: Sequence[float]) -> str:
        return estimate_text(Estimate.of(losses), ".4f") if all(map(math.isfinite, losses)) else "diverged"

    cells = [
        [
            _quoted([row.scheme]),
            ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in runs[0].point.items()),
            str(len(runs)),
            mean([*map(other_loss_of, runs)]),
            mean([*map(loss_of, runs)]),
            copying(runs),
        ]
        for row in rows
        for runs in row.points
    ]
    header = ["scheme", "point", "seeds", "labels that do not repeat", "all labels", "learned to copy"]
    return _filled(Table(header, cells)) if cells else None


def _grid(over: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{key} {'/'.join(map(str, values))}" for key, values in over.items())


def _setting(results: Results) -> list[str]:
    study, tuning = results.study, results.study.tuning
    data = next((facts.get("data") or {} for facts in results.facts), {})  # all runs have the same data
    source, *digests = (str(data.get(name)) for name in ("source", "sha256", "fingerprint"))
    versions, torches, devices = (
        sorted({facts.get(name) or "unknown" for facts in results.facts}) for name in ("residua", "torch", "device")
    )
    devices = sorted({*devices, *(row.cost.device for row in results.rows if row.cost)})
    judges = (
        f"the seeds {_list(tuning.finalist_seeds)}"
        if len(tuning.finalist_seeds) > 1
        else f"seed {tuning.finalist_seeds[0]}"
    )
    seen = "once" if study.epochs == 1 else f"{study.epochs} times"
    finals = f" The best {tuning.finalists} were trained in full with {judges} to choose between them."
    named = sum(map(len, study.primary.values()))
    primary = "No primary contrast was named before the runs, so everything is descriptive."
    if named:
        primary = (
            f"Primary contrasts, named before their runs and compared at equal tokens: {len(results.corrected)} of "
            f"{named} finished. p-values are corrected for their number by Holm's method; all else is descriptive."
        )
    lines = [
        f"- {study.tokens_per_parameter:g} tokens a parameter, each seen at most {seen}. Seeds {_list(study.seeds)}"
        + ("." if tuning.every else ", none of which tuned."),
        f"- Tuning: {_grid(tuning.over)}, then neighbours of the best, "
        + (
            "every point in full with all seeds, by the mean loss on labels that do not repeat"
            if tuning.every
            else f"runs of {tuning.length:g} of the full length with seed {tuning.seed}"
        )
        + f", at most {tuning.runs} for a scheme and {tuning.baseline_runs} for a baseline "
        f"({_list(study.baselines)}).{finals if tuning.finalists > 1 else ''}",
        *(
            f"- {size.name}: the settings of {size.tuned}, but {_grid(size.over)}, searched again in full length."
            for size in study.sizes.values()
            if size.over is not None
        ),
        *(
            f"- {name}: {study.tokens_at(name):g} tokens a parameter, seeds {_list(study.seeds_at(name))}."
            for name, size in study.sizes.items()
            if size.tokens_per_parameter is not None or size.seeds is not None
        ),
    ]
    if results.facts:
        lines += [
            f"- Device: {_list(devices)}, one thread a run. residua {_list(versions)}; PyTorch {_list(torches)}.",
            f"- Corpus: {source}, sha256 {digests[0][:16]}, fingerprint {digests[1][:16]}.",
        ]
    lines.append(f"- {primary}")
    if resized := [f"{row.scheme} at {row.size}" for row in results.rows if row.resized]:
        lines.append(
            "- Time, FLOPs and memory are left out where tuning chose another size of model than the one that was "
            f"measured: {_shortened(resized)}."
        )
    elif results.rows and not any(row.costs for row in results.rows):
        lines.append("- Time and memory were not measured; schemes are compared at equal tokens only.")
    if not results.rows:
        lines.append("- Not finished: no scheme has a result yet.")
    elif results.unfinished:
        lines.append(f"- Not finished: {_shortened(results.unfinished)}.")
    if results.strange:
        places = [f"{scheme} ({connection}) at {size}" for size, scheme, connection in results.strange]
        lines.append(f"- Left out, as the study does not have them: records of {_shortened(places)}.")
    return lines


def _versions(results: Results) -> str:
    """Return the versions of residua, each with its commits. A version that pip installed has no commit."""
    commits: dict[str, set[str]] = {}
    for facts in results.facts:
        commits.setdefault(facts.get("residua") or "of an unknown version", set()).update(
            filter(None, [facts.get("commit")])
        )
    listed = (
        name + (f" ({_list(map(_short_commit, sorted(found)))})" if found else "") for name, found in commits.items()
    )
    return _list(sorted(listed))


def _short_commit(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _noise(results: Results, size: str) -> list[str]:
    seeds = len(results.study.seeds_at(size))
    hardly_known = " Two seeds hardly determine it, so its ± is hardly known." if seeds == 2 else ""
    if results.study.sizes[size].noise == "own":
        own = f"Each scheme has the noise of its own {seeds} seeds (Welch's t): some runs go through a transition."
        return [own + hardly_known]
    noise = results.noise(size)
    if noise is None:
        return ["The noise is not measured: fewer than two schemes have all seeds."]
    contrast = noise.contrast([0.0] * seeds, [0.0] * seeds)
    deviation, half_width, detectable = (
        f"{value:.4f}" if value >= 0.0001 else f"{value:.1g}"
        for value in (noise.deviation, contrast.half_width, contrast.detectable)
    )
    text = (
        f"Noise: run-to-run standard deviation {deviation} after scheme and seed effects (degrees of freedom: "
        f"{noise.freedom}). A difference over {seeds} seeds has ± {half_width} for the rows that share it; a study "
        f"like this has 80 % power to detect {detectable}."
    )
    if noise.freedom == 1:
        text += " One degree of freedom hardly determines the deviation, so this ± is hardly known."
    failed = [row.scheme for row in results.rows if row.size == size and row.failed]
    wild = f"{_quoted(failed)}: noise of its own (Welch's t), more than {FAILED:g} times that of the median row."
    wild += hardly_known
    return [text, *([wild] if failed else [])]


CLEAR = "clear of zero after Holm's correction over all primary contrasts"
ANSWERS = (
    "A cell is the loss of the first scheme minus that of the second at one size, in nats per token, with half of its "
    f"95 % interval; **bold** for a primary contrast that is {CLEAR}. Where the interval holds zero, the cell adds the "
    "difference that such a study has 80 % power to detect."
)


OVER_DOCUMENTS = {"": "over documents", "further_": "second text, over documents"}
BOTH_INTERVALS = (
    "The difference, p and **bold** are over seeds. A difference counts only if its interval over seeds and that over "
    "documents both exclude zero."
)


def _over_documents(results: Results) -> dict[str, str]:
    """Return the headings of the columns with intervals over documents that some primary contrast has, by prefix."""
    measured = {prefix for difference in results.corrected.values() for prefix in difference.documents}
    return {prefix: words for prefix, words in OVER_DOCUMENTS.items() if prefix in measured}


def primary_table(results: Results) -> Table:
    """Return the contrasts that were named before their runs, the smallest corrected p first."""
    order = sorted(results.corrected, key=lambda named: results.corrected[named].holm)
    texts = _over_documents(results)
    rows = []
    for size, scheme, to in order:
        difference = results.corrected[size, scheme, to]
        cells = [estimate_text(difference.estimate, "+.4f"), f"{difference.p:.2g}", f"{difference.holm:.2g}"]
        over = [difference.documents.get(prefix) for prefix in texts]
        cells += [estimate_text(contrast, "+.4f") if contrast else "" for contrast in over]
        rows.append([size, f"{_quoted([scheme])} − {_quoted([to])}", *cells])
    header = ["size", "contrast, at equal tokens", "difference", "p", "p after Holm's correction", *texts.values()]
    return Table(header, rows)


class Asked(NamedTuple):
    """A question, the table of its answers by comparison and size, and remarks on unfinished comparisons."""

    ask: str
    table: Table | None
    remarks: Sequence[str]


def questions(results: Results) -> Iterator[Asked]:
    """Yield the answers to each question.

    Remarks on missing runs concern the sizes that have an answer, or all sizes if none has one.
    """
    for question in results.study.questions.values():
        at: dict[str, list[Answer]] = {}
        for answer in results.answers:
            if answer.question.name == question.name:
                at.setdefault(answer.size, []).append(answer)
        sizes = [size for size, answers in at.items() if any(answer.difference for answer in answers)]
        remarks: dict[tuple[str, str], list[str]] = {}  # sizes by the words before and after them
        for size, answers in at.items():
            waiting = dict.fromkeys(name for answer in answers for name in answer.waiting)
            reasons = [(f"Waiting for {_quoted(waiting)}", ".")] if waiting and (size in sizes or not sizes) else []
            missing = dict.fromkeys(answer.missing for answer in answers if answer.missing)
            for reason in (*reasons, *(("No comparison", f": {why}.") for why in missing)):
                remarks.setdefault(reason, []).append(size)
        lines = [
            before + ("" if len(sizes) == len(at) else f" at {', '.join(sizes)}") + after
            for (before, after), sizes in remarks.items()
        ]
        yield Asked(question.ask, _answer_table(at, sizes, len(results.study.seeds)) if sizes else None, lines)


def _answer_table(at: Mapping[str, Sequence[Answer]], sizes: Sequence[str], seeds: int) -> Table:
    """Return a table of the answers to a question, with a column for the measure if there are several."""
    texts = {
        (answer.scheme, answer.to, answer.measure, size): _difference_text(difference, seeds)
        + ("" if difference.seen else f"; would see {difference.estimate.detectable:.4f}")
        for size in sizes
        for answer in at[size]
        if (difference := answer.difference) is not None
    }
    measures = list(dict.fromkeys(measure for *_, measure, _ in texts))
    header = ["comparison", "at equal"] if len(measures) > 1 else [f"comparison, at equal {measures[0]}"]
    rows = []
    for scheme, to, measure in dict.fromkeys(key[:3] for key in texts):
        pair = f"{_quoted([scheme])} − {_quoted([to])}"
        cells = [texts.get((scheme, to, measure, size), "–") for size in sizes]
        rows.append([pair, *([measure] if len(measures) > 1 else []), *cells])
    return Table([*header, *sizes], rows)


def _shortened(texts: Sequence[str]) -> str:
    most = 8
    more = len(texts) - most
    return "; ".join(texts[:most]) + (f"; and {more} more" if more > 0 else "")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name.replace('`', '')}`" for name in names)


def _reading(results: Results, shown: Container[str]) -> list[str]:
    """Return the notes on how to read the report. A note on a column that is not among those `shown` is left out."""
    points = points_table(results.rows)
    headers = [shown, points.header if points else ()]
    factors = sorted({factor for size in results.study.sizes for factor in results.study.longer_at(size)})
    times = " and ".join(f"{factor:g}" for factor in factors)
    equal = (
        f"baselines were also trained for {times} times as many steps; where a scheme's step costs r times the "
        f"baseline's, the baseline counts after r times as many steps, on a curve a + b C^-{ALPHA:g} of the tokens C "
        f"between its runs. No value: r is below {BELOW:g}, or the size has no baseline trained for as long."
    )
    if not times:
        equal = "not compared, as the baselines have no longer runs."
    speed = ", and the effective speed-up: that divided by the step time's ratio" if "step time" in shown else ""
    compiled = " A compiled step goes through `torch.compile`." if "compiled step" in shown else ""
    notes = {
        "- Validation loss: mean ± half of its own 95 % interval over the seeds. That contains what all schemes share "
        "at a seed, so it is not the error of a difference.": True,
        "- A difference is the scheme's last validation loss minus the baseline's, in nats per token, mean ± half of "
        "the 95 % interval (Student's t). Below zero is better. The noise is that which all schemes of a size share; "
        "it is a scheme's own if the study says so, or if the standard deviation of its losses over the seeds is more "
        f"than {FAILED:g} times that of the median row. A difference of such a scheme uses only the noise of its two "
        "rows (Welch's t). "
        f"**Bold**: a primary contrast whose p is below {SIGNIFICANT} after Holm's correction over all primary "
        "contrasts of the study, of all sizes, finished or not. An interval covers other seeds, not another text or "
        "size, and one over documents other held-out documents like these, not other seeds; tuning looked at the same "
        "held-out text.": True,
        "- 80 % power: in four of five such studies the interval would show a true difference of this size.": True,
        f"- Worth: as many times the tokens bring the baseline to the scheme's loss{speed}. Beyond the baseline's "
        "longest runs only the bound is known.": any(f"vs {name}, worth" in shown for name in results.study.baselines),
        "- Learned to copy: how many of the reported runs began to look up earlier pairs of tokens, and when.": any(
            "learned to copy" in header for header in headers
        ),
        f"- Equal FLOPs and seconds: {equal}": any(row.costs for row in results.rows),
        "- (edge): the best value is the smallest or largest that tuning tried before its budget ended; a better one "
        "may lie beyond it.": any(row.edges for row in results.rows),
        "- Step time: of the step that the runs took, in interleaved rounds, process time of one thread on a CPU, the "
        "device's time on a GPU; median and quartiles of the ratio to the first baseline, as timed last. At equal "
        "seconds two are compared by the newest rounds in which both took turns. The intervals contain the error of "
        f"the median, as the quartiles tell it, and {SESSIONS:.0%} from one session of measurements to the next."
        f"{compiled}": bool(compiled) or "step time" in shown,
        "- FLOPs: matrix products, and one for each element of every other operation.": "FLOPs" in shown,
        "- Peak: what a process with the model grows by in two steps.": "peak MiB" in shown,
        f"- Pairs of a size and a scheme without a result: {results.untrained}. Their tuning is not finished, or a run "
        "diverged at every point that it tried.": bool(results.untrained),
        f"- Code of the runs: residua {_versions(results)}.": bool(results.facts),
    }
    return [note for note, needed in notes.items() if needed]


UNFILLED = {"", "–", "baseline"}
"""Cells without a number of their own."""


def _some_filled(cells: Iterable[str]) -> bool:
    """Return whether a cell has a number of its own, other than a count of 0 runs that learned to copy."""
    return any(cell not in UNFILLED and not cell.startswith("0 of ") for cell in cells)


def _filled(table: Table) -> Table:
    """Return a table without the columns that no row fills."""
    columns = [column for column in zip(table.header, *table.rows) if _some_filled(column[1:])]
    header, *rows = zip(*columns)
    return Table(header, rows)


def columns(results: Results) -> dict[str, Callable[[SchemeRow], str]]:
    """Map the heading of each column that some row fills to a function that returns the cell of a row."""

    def flops(row: SchemeRow) -> str:
        base = results.row(row.size, results.study.baselines[0])
        flops, theirs = (side and side.cost and side.cost.flops_per_token for side in (row, base))
        return f"{flops / theirs:.3f}" if flops and theirs else "–"

    def time(row: SchemeRow, of: Callable[[SchemeRow], Cost | None]) -> str:
        base, cost = results.row(row.size, results.study.baselines[0]), of(row)
        return f"{cost.ratio:.3f}" if cost and not (base and base.resized) else "–"

    def peak(row: SchemeRow) -> str:
        return f"{row.cost.peak_bytes / MEBIBYTE:.0f}" if row.cost and row.cost.peak_bytes else "–"

    compared = itertools.product(results.study.baselines, results.measures)
    texts: dict[str, Callable[[SchemeRow], str]] = {
        "scheme": lambda row: _quoted([row.scheme]),
        "validation loss": lambda row: estimate_text(row.loss, ".4f") if row.loss else "diverged",
        **{
            f"vs {name}, equal {measure}": partial(difference_text, baseline=name, measure=measure)
            for name, measure in compared
        },
        **{f"vs {name}, worth": partial(_worth_text, baseline=name) for name in results.study.baselines},
        "learned to copy": lambda row: copying(row.reported.runs),
        "step time": lambda row: time(row, lambda row: row.cost),
        "compiled step": lambda row: time(row, lambda row: row.compiled),
        "FLOPs": flops,
        "peak MiB": peak,
        "parameters": lambda row: f"{row.reported.parameters:,}" if row.reported.parameters else "–",
        "tuned to": lambda row: ", ".join(tuned(row)),
        "tuning runs": lambda row: str(row.tuning_runs),
    }
    return {name: text for name, text in texts.items() if _some_filled(map(text, results.rows))}


def copying(runs: Sequence[Run]) -> str:
    """Return how many runs learned to copy, of those measured, and at which steps: "2 of 3, step 800 to 950"."""
    transitions = [run.transition for run in runs if run.transition is not None]
    steps = [step for step in transitions if math.isfinite(step)]
    ends = " to ".join(dict.fromkeys(f"{step:,.0f}" for step in (min(steps), max(steps)))) if steps else ""
    return f"{len(steps)} of {len(transitions)}{ends and f', step {ends}'}" if transitions else "–"


def tuned(row: SchemeRow) -> list[str]:
    """Return the chosen settings, key by key."""
    return [
        f"{key.rpartition('.')[2]} {value}{' (edge)' if key in row.edges else ''}" for key, value in row.point.items()
    ]


def difference_text(row: SchemeRow, baseline: str, measure: str) -> str:
    """Return the difference of a row to a baseline; a dash if it has no interval."""
    if row.scheme == baseline:
        return "baseline"
    difference = row.difference(baseline, measure)
    if difference is None or difference.estimate is None or difference.estimate.half_width is None:
        return "–"
    return _difference_text(difference, row.seeds)


def _difference_text(difference: Difference, seeds: int) -> str:
    """Return a difference and half of its 95 % interval, bold if it is `clear`.

    seeds: the number of the study's seeds; if the difference is over another number, the text states that number.
    """
    text = estimate_text(difference.estimate, "+.4f")
    text = f"**{text}**" if difference.clear else text
    return text if difference.estimate.count == seeds else f"{text} ({difference.estimate.count} seeds)"


def _worth_text(row: SchemeRow, baseline: str) -> str:
    """Return the multiple of the tokens that a row is worth, and the effective speed-up."""
    difference = row.difference(baseline, "tokens")
    if difference is None or difference.worth is None:
        return "–"
    bound = {math.inf: f"> {difference.longest:.3g}", 0.0: f"< {BELOW:g}"}
    tokens = bound.get(difference.worth, f"{difference.worth:.2f}")
    timed = row.difference(baseline, "seconds")
    if timed is None:
        return f"{tokens} tokens"
    sign, _, limit = tokens.rpartition(" ")
    return f"{tokens} tokens, {sign}{sign and ' '}{float(limit) / timed.cost:.2f} speed"


def estimate_text(estimate: Estimate | Contrast, form: str) -> str:
    """Return a mean and half of its 95 % interval."""
    half = estimate.half_width
    return format(estimate.mean, form) + (f" ± {half:.4f}" if half is not None else " (one seed)")


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def row_values(row: SchemeRow) -> dict[str, Any]:
    """Return the numbers of a row, for the CSV and the page."""
    return {
        "size": row.size,
        "scheme": row.scheme,
        "connection": row.connection,
        "parameters": row.reported.parameters,
        "tokens": row.tokens,
        "seeds": len(row.losses),
        "loss": row.loss and row.loss.mean,
        "loss_half_width": row.loss and row.loss.half_width,
    }


def difference_values(difference: Difference) -> dict[str, Any]:
    """Return the numbers of a difference, for the CSV and the page."""
    estimate = difference.estimate
    return {
        "baseline": difference.baseline,
        "measure": difference.measure,
        "cost": difference.cost,
        "difference": estimate and estimate.mean,
        "half_width": estimate and estimate.half_width,
        "p": difference.p,
        "p_holm": difference.holm,
        "tokens_worth": difference.worth,
    }


def table(results: Results) -> str:
    """Return the rows as CSV: one line for each difference, and one for each baseline itself, without the columns
    that no line fills."""
    lines = [
        {name: cell_text(value) for name, value in (row_values(row) | difference_values(difference)).items()}
        for row in results.rows
        for difference in row.differences or [Difference(row.size, row.scheme, "", "")]
    ]
    text = io.StringIO()
    if lines:
        names = [name for name in lines[0] if any(line[name] not in (None, "") for line in lines)]
        if not any(row.costs for row in results.rows):
            names.remove("cost")  # always 1, at equal tokens
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return printable(text.getvalue())


def payload(results: Results) -> dict[str, Any]:
    """Return the values that the page shows, for `json.dumps`."""
    study, shown = results.study, columns(results)
    values = {
        "title": study.title,
        "sizes": [size for size in study.sizes if any(row.size == size for row in results.rows)],
        "baselines": list(study.baselines),
        "measures": results.measures,
        "setting": [line.removeprefix("- ") for line in _setting(results)],
        "reading": [line.removeprefix("- ").replace("**", "") for line in _reading(results, shown)],
        "about": {size: _noise(results, size) for size in study.sizes},
        "columns": list(shown),
        "rows": [
            _plain_row(row) | {"curves": results.curves(row), "cells": [text(row) for text in shown.values()]}
            for row in results.rows
        ],
        "points": {size: points_table(_best_first(results, size)) for size in study.sizes},
        "points_note": EVERY_POINT,
        "primary": primary_table(results) if results.corrected else None,
        "primary_note": BOTH_INTERVALS if _over_documents(results) else None,
        "filled": FILLED if results.corrected else None,
        "questions": [asked._asdict() for asked in questions(results)],
    }
    return finite(values)


def _plain_row(row: SchemeRow) -> dict[str, Any]:
    reported = {run.key for run in row.reported.runs}
    runs = [("final" if run.kind == "report" and run.key not in reported else run.kind, run) for run in row.runs]
    runs += [("further", run) for run in row.further.runs]
    return {
        **row_values(row),
        "differences": [difference_values(each) | {"clear": each.clear} for each in row.differences],
        "steps": row.steps,
        "runs": [
            {
                "kind": kind,
                "seed": run.seed,
                "steps": run.steps,
                "point": run.point,
                "val_loss": finite(run.loss(NATS)),
                "diverged": run.diverged,
                **{name: run.facts.get(name) for name in ("commit", "torch", "device", "date")},
            }
            for kind, run in runs
        ],
    }


def page(payload: Mapping[str, Any]) -> str:
    """Return the page that shows `payload`: one file that requests nothing and in which every text is inert."""
    data = json.dumps(payload, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e")
    title, parts = (
        html.escape(printable(payload["title"])),
        TEMPLATE.read_text(encoding="utf-8").split("<!-- split -->"),
    )
    return f"{parts[0]}{title}{parts[1]}{data}{parts[2]}"


MEASURE_MARKS = {
    "tokens": (figures.COLOURS[0], "o"),
    "FLOPs": (figures.COLOURS[2], "D"),
    "seconds": (figures.COLOURS[1], "s"),
    "compiled seconds": (figures.COLOURS[3], "^"),
}
"""Colour and mark of each measure."""


FILLED = f"Filled: a primary contrast that is {CLEAR}"


def draw(results: Results) -> Figure | None:
    """Draw the differences to each baseline in a panel of its own, lowest loss on top; None if there are none.

    If there are several sizes, the rows of each size are below its name.
    """
    compared = list(itertools.product(results.study.baselines, results.measures))
    lines: list[SchemeRow | str] = []  # from the bottom up: the rows of a size, then its name
    for size in reversed(results.study.sizes):
        some = [row for row in results.rows if row.size == size and any(row.difference(*pair) for pair in compared)]
        lines += [*sorted(some, key=lambda row: -row.loss.mean if row.loss else -math.inf), *([size] if some else [])]
    rows = {place: line for place, line in enumerate(lines) if not isinstance(line, str)}
    baselines = [
        name for name in results.study.baselines if any(row.difference(name, "tokens") for row in rows.values())
    ]
    if not baselines:
        return None
    if len(lines) == len(rows) + 1:
        lines.pop()
    inches = 2.2 + 4.2 * len(baselines), 0.37 * len(lines) + 0.8
    figure, (panels,) = figures.panels(1, len(baselines), inches, grid="x", sharey=True)
    for panel, baseline in zip(panels, baselines):
        panel.axvline(0, color="#222222", linewidth=1.2)
        for number, measure in enumerate(results.measures):
            (colour, mark), aside = MEASURE_MARKS[measure], 0.2 * ((len(results.measures) - 1) / 2 - number)
            differences = {place + aside: row.difference(baseline, measure) for place, row in rows.items()}
            _marks(panel, differences, colour, mark, f"equal {measure}")
        names = [line if isinstance(line, str) else line.scheme for line in lines]
        panel.set_yticks(range(len(lines)), [*map(figures.as_text, names)])
        for place, label in enumerate(panel.get_yticklabels()):
            label.set(family="monospace", fontsize=8.5, weight="normal" if place in rows else "bold")
        for place in set(range(len(lines))) - set(rows):
            panel.axhline(place + 0.5, color="#999999", linewidth=0.6)
        panel.set_ylim(-0.7, len(lines) - 0.5)
        panel.set_xlabel(f"Loss minus that of {figures.as_text(baseline)} (nats per token)")
    figures.legend(figure, columns=2 * len(baselines), loc="outside upper right")
    if results.corrected:
        figure.supxlabel(FILLED, fontsize=9)
    return figure


def _marks(panel: Axes, differences: Mapping[float, Difference | None], colour: str, marker: str, label: str) -> None:
    """Draw differences with their intervals at places on the y axis; marks that are clear of zero are filled."""
    shown = {y: d for y, d in differences.items() if d and d.estimate and d.estimate.half_width is not None}
    filled = [y for y, difference in shown.items() if difference.clear]
    estimates = {y: difference.estimate for y, difference in shown.items()}
    figures.intervals(panel, estimates, filled=filled, marker=marker, color=colour, label=label)
