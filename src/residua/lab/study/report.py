"""The report of a study: Markdown, CSV, and plain values for its page."""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from residua.lab.cost.timing import Quartiles
from residua.lab.study.page import page
from residua.lab.study.picture import draw, draw_answers, draw_gates, draw_sizes
from residua.lab.study.questions import Question
from residua.lab.study.results import (
    BELOW,
    COMPILED,
    SIGNIFICANT,
    Answer,
    Difference,
    Results,
    Row,
    begun,
    gates_of,
)
from residua.records.durable import write_text
from residua.records.figures import save
from residua.records.folder import writable
from residua.records.jobs import Record
from residua.records.statistics import Estimate
from residua.records.table import Table

FILES = ("report.md", "results.csv", "index.html")
MEBIBYTE = 2**20


def write_report(found: Results, out: str | Path) -> list[Path]:
    """Write the report, the table, the page and the pictures into `out`; return their paths. Raises InputError."""
    texts = markdown(found), table(found), page(payload(found))
    paths = [Path(out) / name for name in FILES]
    with writable(out):
        Path(out).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts):
            write_text(path, text)
        pictures = {
            "differences.png": draw(found),
            "sizes.png": draw_sizes(found),
            "answers.png": draw_answers(found),
            "gates.png": draw_gates(found),
        }
        return paths + save(pictures, out)


def markdown(found: Results) -> str:
    """The report in Markdown."""
    study = found.study
    lines = [f"# {_text(study.title)}", "", *_setting(found), ""]
    for rung in study.rungs:
        rows = [row for row in found.rows if row.rung == rung]
        if not rows:
            continue
        lines += [f"## {_text(rung)}", "", *_noise(found, rung), ""]
        header = ["scheme", "validation loss"]
        header += [f"vs {name}, equal {measure}" for name in study.baselines for measure in found.measures]
        compiled = ["compiled step"] if COMPILED in found.measures else []
        header += ["step time", *compiled, "FLOPs", "peak MiB", "parameters", "tuned to", "tuning runs"]
        rows.sort(key=lambda row: row.loss.mean if row.loss else math.inf)
        lines += [_table(header, [_cells(found, row) for row in rows]), "", *_ahead(found, rung), ""]
    if found.answers:
        lines += ["## Questions", "", ANSWERS, "", *questions(found), ""]
    if found.audits:
        lines += ["## Gates along training", "", *audited(found), ""]
    return "\n".join([*lines, "## How to read this", "", *_reading(found), ""])


def _grid(over: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{key} {'/'.join(map(str, values))}" for key, values in over.items())


def _setting(found: Results) -> list[str]:
    study, tuning = found.study, found.study.tuning
    corpus = "; ".join(
        f"{_foreign(one.get('source'))}, sha256 {str(one.get('sha256'))[:16]}, "
        f"fingerprint {str(one.get('fingerprint'))[:16]}"
        for one in found.corpora
    )
    judges = f"the seeds {_list(tuning.judges)}" if len(tuning.judges) > 1 else f"seed {tuning.judges[0]}"
    finals = f" The best {tuning.finalists} were trained in full with {judges} to choose between them."
    lines = [
        f"- {study.tokens_per_parameter:g} tokens a parameter, each seen at most once. Seeds {_list(study.seeds)}, "
        "paired; none of them tuned.",
        f"- Tuning: {_grid(tuning.over)}, then neighbours of the best, runs of {tuning.length:g} of the full length "
        f"with seed {tuning.seed}, at most {tuning.runs} for a scheme and {tuning.baseline_runs} for a baseline "
        f"({_list(study.baselines)}).{finals if tuning.finalists > 1 else ''}",
        *(
            f"- {rung.name}: the settings of {rung.tuned}, but {_grid(rung.over)}, searched again in full length."
            for rung in study.rungs.values()
            if rung.over is not None
        ),
        *(
            f"- {name}: {study.tokens_at(name):g} tokens a parameter, seeds {_list(study.seeds_at(name))}."
            for name, rung in study.rungs.items()
            if rung.tokens_per_parameter is not None or rung.seeds is not None
        ),
        f"- Device: {_list(found.devices)}, one thread a run. Code: {_list([_short(one) for one in found.commits])}; "
        f"PyTorch {_list(found.torches)}.",
        *_processors(found),
        f"- Corpus: {_text(corpus)}.",
        f"- {found.comparisons} differences at equal tokens; p-values are corrected by Holm's method for their number.",
    ]
    if found.unfinished:
        lines.append(f"- Not finished, and therefore not or not wholly here: {_text(_shortened(found.unfinished))}.")
    return lines


def _processors(found: Results) -> list[str]:
    """Which rows of a size were trained where, if not all of them on the same device."""
    lines = []
    for rung in begun(found.study, found.rows):
        where: dict[tuple[str, ...], list[str]] = {}
        for row in found.rows:
            if row.rung == rung:
                where.setdefault(row.devices, []).append(row.scheme)
        if len(where) > 1 or len(next(iter(where))) > 1:
            told = "; ".join(f"{_list(devices)}: {_names(schemes)}" for devices, schemes in where.items())
            lines.append(
                f"- {rung} was trained on several devices, which round differently; the intervals hold what that adds. "
                f"{told}."
            )
    return lines


def _short(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _noise(found: Results, rung: str) -> list[str]:
    noise = found.noise(rung)
    if noise is None or noise.deviation is None:
        return ["The noise is not measured: fewer than two seeds of the first baseline are finished."]
    rows = [row for row in found.rows if row.rung == rung]
    seen = [d.estimate.detectable for row in rows for d in row.differences if d.measure == "tokens" and d.estimate]
    seen = [value for value in seen if value is not None]
    name = _names(found.study.baselines[:1])
    text = f"Noise floor: a run of {name} varies by {noise.deviation:.4f} (standard deviation of {noise.count} seeds)."
    if seen:
        middle = statistics.median(seen)
        text += f" Four of five such studies would see a paired difference of {middle:.4f} (median of the rows)."
    return [text]


def _ahead(found: Results, rung: str) -> list[str]:
    """Who is ahead of every baseline at a size."""
    told = {measure: found.ahead(rung, measure) for measure in found.measures}
    names = " and ".join(_names([name]) for name in found.study.baselines)
    parts = [f"equal {measure}: {_names(ahead) or 'none'}" for measure, ahead in told.items() if ahead is not None]
    return [f"Ahead of {names}, clear of zero at {'; at '.join(parts)}."] if parts else []


ANSWERS = (
    "A cell is the loss of the first scheme minus that of the second at one size, in nats per token, with half of its "
    "95 % interval; **bold** where it is clear of zero after the correction for the number of answers. Where the "
    "interval holds zero, no difference is seen; the cell adds the one that four of five such studies would see."
)


def questions(found: Results) -> list[str]:
    """Each question with a table of its answers, a row for a comparison and a column for a size, in Markdown.

    What a question waits for is said of the sizes that have an answer, or if none has, of all together.
    """
    lines = []
    for question in found.study.questions.values():
        lines += [f"### {_text(question.ask)}", ""]
        at = {rung: here for rung, here in _by_size(found, question).items() if here}
        sizes = [rung for rung, here in at.items() if any(answer.difference for answer in here)]
        if sizes:
            lines += [_answers(at, sizes, len(found.study.seeds)), ""]
        waiting: dict[str, list[str]] = {}
        for rung in sizes:
            if names := _names(dict.fromkeys(name for answer in at[rung] for name in answer.waiting)):
                waiting.setdefault(names, []).append(rung)
        for names, rungs in waiting.items():
            lines += [f"Waiting for {names}{_where(rungs, at)}.", ""]
        if not sizes and (
            names := _names(dict.fromkeys(n for here in at.values() for one in here for n in one.waiting))
        ):
            lines += [f"Waiting for {names}.", ""]
        missing: dict[str, list[str]] = {}
        for rung, here in at.items():
            for reason in dict.fromkeys(answer.missing for answer in here if answer.missing):
                missing.setdefault(reason, []).append(rung)
        for reason, rungs in missing.items():
            lines += [f"No comparison{_where(rungs, at)}: {_text(reason)}.", ""]
    return lines[:-1]


def _answers(at: Mapping[str, Sequence[Answer]], sizes: Sequence[str], seeds: int) -> str:
    """A table of the answers to a question; without a column for what is equal where that is one thing."""
    told = {
        (answer.scheme, answer.to, answer.measure, rung): _answer(answer, seeds)
        for rung in sizes
        for answer in at[rung]
        if answer.difference is not None
    }
    measures = list(dict.fromkeys(measure for *_, measure, _ in told))
    one = f"comparison, at equal {measures[0]}"
    header = [*(["comparison", "at equal"] if len(measures) > 1 else [one]), *sizes]
    rows = []
    for scheme, to, measure in dict.fromkeys(key[:3] for key in told):
        pair = f"{_names([scheme])} − {_names([to])}"
        cells = [told.get((scheme, to, measure, rung), "–") for rung in sizes]
        rows.append([pair, *([measure] if len(measures) > 1 else []), *cells])
    return _table(header, rows)


def _where(rungs: Sequence[str], at: Mapping[str, Any]) -> str:
    """Which sizes are spoken of, unless it is all that there are."""
    return "" if len(rungs) == len(at) else f" at {_list(rungs)}"


def _by_size(found: Results, question: Question) -> dict[str, list[Answer]]:
    """The answers to a question at every size of the study; none where no row is finished."""
    own = [answer for answer in found.answers if answer.question.name == question.name]
    return {rung: [answer for answer in own if answer.rung == rung] for rung in found.study.rungs}


MEANS = (
    "Means over the sublayers and over held-out tokens of one run. A gate: mean [5 %, 95 % of the tokens]. Shares "
    "of the tokens by beta: enlarging below -0.5, identity to 0.5, projection to 1.5, reflection above."
)


def audited(found: Results) -> list[str]:
    """What the audited runs' connections did at the first, the middle and the last evaluation, in Markdown."""
    header, rows = audit_table(found)
    rows = [[rung, f"`{scheme.replace('`', '')}`{other}", *cells] for rung, scheme, other, *cells in rows]
    return [MEANS, "", _table(["size", "scheme", *header], rows)]


def audit_table(found: Results) -> tuple[list[str], list[list[str]]]:
    """What was measured, and rows of a size, a scheme, a remark and a text for each of it."""
    gates = {gate: gate for one in found.audits for gate in gates_of(one)}
    columns = gates | {
        name: title for name, title in AUDITED.items() if any(_means(a["points"][-1], name) for a in found.audits)
    }
    rows = []
    for one in found.audits:
        points, seed = one["points"], one.get("seed", found.study.seeds[0])
        other = f", seed {seed}" if seed != found.study.seeds[0] else ""
        other += "" if one["equal"] else ", other bits than its record"
        for point in [points[i] for i in sorted({0, len(points) // 2, len(points) - 1})]:
            cells = [str(point["step"]), *(_measured(point, key) for key in columns)]
            rows.append([one["rung"], one["scheme"], other, *cells])
    return ["step", *columns.values()], rows


AUDITED = {
    "enlarging": "enlarging",
    "identity": "identity",
    "projection": "projection",
    "reflection": "reflection",
    "discrepancy_norm": "discrepancy",
    "erase_norm": "erased",
    "write_norm": "written",
    "distance_from_identity": "|H − I|",
    "output_norm": "|y|",
    "state_norm": "|X|",
}
"""What the table of an audit shows of the `sublayer_statistics`, beside the gates."""


def _means(point: Record, name: str) -> list[float]:
    return [row[name] for row in point["sublayers"] if row.get(name) is not None]


def _measured(point: Record, name: str) -> str:
    values = _means(point, name)
    if not values:
        return "–"
    mean = statistics.fmean(values)
    if name in ("enlarging", "identity", "projection", "reflection"):
        return f"{mean:.0%}"
    ends = [_means(point, f"{name}_{level}") for level in ("q05", "q95")]
    return f"{mean:.3g}" + (f" [{', '.join(f'{statistics.fmean(end):.2f}' for end in ends)}]" if all(ends) else "")


def _shortened(texts: Sequence[str]) -> str:
    most = 8
    more = len(texts) - most
    return _foreign("; ".join(texts[:most])) + (f"; and {more} more" if more > 0 else "")


def _answer(answer: Answer, seeds: int) -> str:
    """A difference, with its number of seeds where it is not the study's, and what it would take to see one."""
    difference = answer.difference
    estimate = difference.estimate
    text = estimate_text(estimate, "+.4f")
    text = f"**{text}**" if difference.clear else text
    text += f" ({estimate.count} seeds)" if estimate.count != seeds else ""
    return text if difference.seen or estimate.detectable is None else f"{text}; would see {estimate.detectable:.4f}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{_text(name).replace('`', '')}`" for name in names)


def _reading(found: Results) -> list[str]:
    factors = sorted({factor for rung in found.study.rungs for factor in found.study.longer_at(rung)})
    times = " and ".join(f"{factor:g}" for factor in factors)
    equal = (
        f"baselines were also trained for {times} times as many steps; where a scheme's step costs r times the "
        "baseline's, the baseline counts after r times as many steps, linear in their logarithm between its runs. "
        f"A dash: r is below {BELOW:g}, or the size has no baseline trained for as long."
    )
    if not times:
        equal = "not compared, as the baselines have no longer runs."
    return [
        "- A difference is the scheme's last validation loss minus the baseline's with the same seed, in nats per "
        "token, mean ± half of the 95 % interval (Student's t over the seeds). Below zero is better. "
        f"**Bold**: Holm's corrected p is below {SIGNIFICANT}. An interval covers other seeds, not another text "
        "or size; tuning looked at the same held-out text.",
        "- The correction counts all rows of all sizes here, at equal tokens, FLOPs and so on each by itself, and the "
        "answers to questions by themselves. Rows and questions that join later raise the number, and can take the "
        "bold from a difference that has it.",
        "- What four of five such studies would see is the true difference that their intervals would show; after "
        "the correction it takes a larger one.",
        f"- Equal FLOPs and seconds: {equal}",
        "- Tuned to: (edge) marks the smallest or largest value that was tried, where the budget ended; a better one "
        "may lie beyond it. (alone) marks a key of which the budget left no other value to try.",
        "- Step time: in interleaved rounds, process time of one thread on a CPU, the device's time on a GPU; median "
        "and quartiles of the ratio to the first baseline, as timed last. At equal seconds two are compared by the "
        "newest rounds in which both took turns. The intervals contain the error of the "
        "median too, as the quartiles tell it; a quieter machine (--measure) makes it smaller. "
        "A compiled step goes through `torch.compile`; the runs took the other.",
        "- FLOPs: matrix products, and one for each element of every other operation.",
        "- Peak: what a process with the model grows by in two steps.",
    ]


def _cells(found: Results, row: Row) -> list[str]:
    cost = row.cost
    cells = [f"`{row.scheme.replace('`', '')}`", estimate_text(row.loss, ".4f") if row.loss else "diverged"]
    for baseline in found.study.baselines:
        cells += [difference_text(row, baseline, measure) for measure in found.measures]
    base = found.row(row.rung, found.study.baselines[0])
    return [
        *cells,
        _ratio(row.cost),
        *([_ratio(row.compiled)] if COMPILED in found.measures else []),
        f"{row.flops / base.flops:.3f}" if row.flops and base and base.flops else "–",
        f"{cost['peak_bytes'] / MEBIBYTE:.0f}" if cost and cost.get("peak_bytes") else "–",
        f"{row.parameters:,}" if row.parameters else "–",
        ", ".join(map(_foreign, tuned(row))),
        str(row.tuning_runs),
    ]


def tuned(row: Row) -> list[str]:
    """What tuning chose, key by key."""
    marks = dict.fromkeys(row.edges, " (edge)") | dict.fromkeys(row.alone, " (alone)")
    return [f"{key.rpartition('.')[2]} {value}{marks.get(key, '')}" for key, value in row.point.items()]


def _ratio(cost: Record | None) -> str:
    ratio = cost and cost["time_ratio"]
    return f"{Quartiles(*map(ratio.get, Quartiles._fields)):.3f}" if ratio else "–"


def difference_text(row: Row, baseline: str, measure: str) -> str:
    """A difference and half of its 95 % interval, bold where it is clear of zero after the correction; or a dash.

    With the number of seeds that both have, where these are not all.
    """
    if row.scheme == baseline:
        return "baseline"
    difference = row.difference(baseline, measure)
    if difference is None or difference.estimate is None or difference.estimate.half_width is None:
        return "–"
    count = difference.estimate.count
    text = estimate_text(difference.estimate, "+.4f") + (f" ({count} seeds)" if count < row.seeds else "")
    return f"**{text}**" if difference.clear else text


def estimate_text(estimate: Estimate, form: str) -> str:
    """A mean and half of its 95 % interval."""
    half = estimate.half_width
    return format(estimate.mean, form) + (f" ± {half:.4f}" if half is not None else " (one seed)")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return Table([*map(_text, header)], [[*map(_text, cells)] for cells in rows]).markdown()


def _text(value: Any) -> str:
    """A text in one line, of which Markdown makes no tag."""
    return " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")


def _foreign(value: Any) -> str:
    """A text that anybody may have written: no picture and no link either."""
    return str(value).replace("\\", "\\\\").replace("[", "\\[")


def _list(values: Sequence[Any]) -> str:
    return ", ".join(_text(_foreign(value)) for value in values)


def table(found: Results) -> str:
    """The rows as CSV: one line for each difference, and one for each baseline itself."""
    text = io.StringIO()
    header = ["rung", "scheme", "connection", "parameters", "tokens", "seeds", "loss", "loss_half_width", "baseline",
              "measure", "cost", "difference", "half_width", "p", "p_holm"]  # fmt: skip
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in found.rows:
        loss = row.loss
        own = [row.rung, row.scheme, row.connection, row.parameters, row.tokens, len(row.losses), loss and loss.mean]
        own.append(loss and loss.half_width)
        for d in row.differences or [Difference("", "", 1.0, None)]:
            e = d.estimate
            cells = [*own, d.baseline, d.measure, d.cost, e and e.mean, e and e.half_width, d.p, d.holm]
            writer.writerow([_inert(cell) for cell in cells])
    return text.getvalue()


def _inert(cell: Any) -> Any:
    """Keep a spreadsheet from taking somebody's text for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" else cell


def payload(found: Results) -> dict[str, Any]:
    """What the page shows, as plain values."""
    study = found.study
    header, gates = audit_table(found)
    return {
        "title": study.title,
        "seeds": len(study.seeds),
        "rungs": [rung for rung in study.rungs if any(row.rung == rung for row in found.rows)],
        "baselines": list(study.baselines),
        "measures": found.measures,
        "setting": [line.removeprefix("- ") for line in _setting(found)],
        "reading": [line.removeprefix("- ").replace("**", "") for line in _reading(found)],
        "questions": [_plain_question(found, question) for question in study.questions.values()],
        "gates": {"about": MEANS, "header": header, "rows": gates},
        "ahead": {rung: " ".join(_ahead(found, rung)).replace("`", "") for rung in study.rungs},
        "noise": {rung: " ".join(_noise(found, rung)).replace("`", "") for rung in study.rungs},
        "rows": [_plain_row(found, row) for row in found.rows],
    }


def _plain_row(found: Results, row: Row) -> dict[str, Any]:
    cost, loss, base = row.cost, row.loss, found.row(row.rung, found.study.baselines[0])
    return {
        "rung": row.rung,
        "scheme": row.scheme,
        "connection": row.connection,
        "point": dict(row.point),
        "tuned": tuned(row),
        "loss": loss and [loss.mean, loss.half_width],
        "seeds": len(row.losses),
        "whole": row.whole,
        "parameters": row.parameters,
        "tokens": row.tokens,
        "steps": row.steps,
        "tuning_runs": row.tuning_runs,
        "time": cost and cost["time_ratio"],
        "compiled": row.compiled and row.compiled["time_ratio"],
        "flops": row.flops / base.flops if row.flops and base and base.flops else None,
        "peak": cost and cost.get("peak_bytes"),
        "differences": [
            {
                "baseline": d.baseline,
                "measure": d.measure,
                "cost": d.cost,
                "mean": d.estimate and d.estimate.mean,
                "half": d.estimate and d.estimate.half_width,
                "seeds": d.estimate and d.estimate.count,
                "p": d.p,
                "holm": d.holm,
            }
            for d in row.differences
        ],
        "curves": row.curves,
        "runs": [
            {
                **{name: run.get(name) for name in ("kind", "seed", "steps", "point", "val_loss", "seconds")},
                "diverged": run.get("diverged"),
                **{name: (run.get("facts") or {}).get(name) for name in ("commit", "torch", "device", "date")},
            }
            for run in [*row.runs, *({**run, "kind": "further"} for run in row.further)]
        ],
    }


def _plain_question(found: Results, question: Question) -> dict[str, Any]:
    at = _by_size(found, question)
    return {
        "ask": question.ask.replace("`", ""),
        "answers": [
            {
                "rung": answer.rung,
                "scheme": answer.scheme,
                "to": answer.to,
                "measure": answer.measure,
                "seeds": answer.difference.estimate.count,
                "mean": answer.difference.estimate.mean,
                "half": answer.difference.estimate.half_width,
                "clear": answer.difference.clear,
                "verdict": answer.verdict,
            }
            for here in at.values()
            for answer in here
            if answer.difference and answer.difference.estimate
        ],
        "waiting": {rung: sorted({name for one in there for name in one.waiting}) for rung, there in at.items()},
        "missing": {rung: sorted({one.missing for one in there if one.missing}) for rung, there in at.items()},
    }
