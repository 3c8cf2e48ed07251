"""Make the tables of the pages from the records in this folder. pages.py writes them into the pages."""

import csv
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import reproduction
import retrofit_results

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "tools"), str(HERE.parent / "docs")]

import scheme_pages  # noqa: E402
from blocks import markdown, wrapped  # noqa: E402

from residua.connections import names  # noqa: E402
from residua.connections.explained import added, meanings, state  # noqa: E402
from residua.connections.parts.options import named  # noqa: E402
from residua.connections.registry import PRESETS, SCHEMES, resolve  # noqa: E402
from residua.errors import types_of  # noqa: E402


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


CONTROLS = {"ddl-cc": "ddl-cc-ec"}
"""Schemes that were not tuned but ran at the best point of another."""


def tuned() -> dict[str, tuple[tuple[float, ...], list[float]]]:
    """Return the best point of every scheme over three seeds: (lr, embedding, hidden) and the losses by seed."""
    points: dict[str, dict[tuple[float, ...], dict[int, float]]] = {}
    for row in records("tune-tiny.jsonl"):
        point = row["lr"], row["embedding_init_std"], row["hidden_init_std_factor"]
        points.setdefault(row["scheme"], {}).setdefault(point, {})[row["seed"]] = row["val_loss"]
    best = {}
    for scheme, found in points.items():
        whole = {point: [losses[s] for s in sorted(losses)] for point, losses in found.items() if len(losses) == 3}
        point = min(whole, key=lambda point: statistics.mean(whole[point]))
        best[scheme] = (point, whole[point])
    return best


def sweep_table() -> str:
    best = tuned()
    counts: dict[str, int] = {}
    for row in records("tune-tiny.jsonl"):
        counts[row["scheme"]] = counts.get(row["scheme"], 0) + 1
    baseline = best["residual"][1]
    rows = []
    for scheme, ((lr, embedding, hidden), losses) in best.items():
        paired = [loss - base for loss, base in zip(losses, baseline, strict=True)]
        versus = f"{statistics.mean(paired):+.3f} ± {statistics.stdev(paired):.3f}"
        loss = f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}"
        name = f"`{scheme}`" + (f", a control at the settings of `{CONTROLS[scheme]}`" if scheme in CONTROLS else "")
        rows.append([name, str(counts[scheme]), f"{lr:g}", f"{embedding:g}", f"{hidden:g}", loss,
                     "baseline" if scheme == "residual" else versus])  # fmt: skip
    header = ["scheme", "runs of the sweep", "learning rate", "embedding std", "hidden factor", "validation loss",
              "difference, seed by seed"]  # fmt: skip
    return markdown(header, rows)


def demo_table() -> str:
    from residua.connections.names import label

    record = json.loads((HERE / "demo.json").read_text(encoding="utf-8"))
    rows = []
    for group in record["groups"]:
        difference = group["difference"]["mean"] if group["name"] != record["baseline"] else None
        rows.append(
            [
                f"`{label(group['name'])}`",
                f"{group['val_loss']['mean']:.4f}",
                "baseline" if difference is None else f"{difference:+.4f}",
                f"{group['parameters']:,}",
                f"{group['tokens_per_second']['mean']:,.0f}",
                f"{group['seconds']['mean']:.0f}",
            ]
        )
    return markdown(["scheme", "validation loss", "difference", "parameters", "tokens/s", "seconds"], rows)


def draw_demo() -> None:
    """Draw the differences of demo.json as `residua compare` does, docs/demo-difference.png."""
    from residua.connections.names import label
    from residua.lab.records import figures

    record = json.loads((HERE / "demo.json").read_text(encoding="utf-8"))
    axes = {
        "step": "Training step",
        "seconds": "Wall-clock time of the training steps (seconds)\nA slower run is seen earlier in its schedule",
    }
    figure, (panels,) = figures.panels(1, 2, (10, 4), dpi=150, sharey=True)
    for panel, (axis, words) in zip(panels, axes.items()):
        panel.axhline(0, color="#222222", linewidth=1.2, label=f"{label(record['baseline'])} (baseline)")
        schemes = [group for group in record["groups"] if group["name"] != record["baseline"]]
        for number, group in enumerate(schemes):
            points = [(point["at"], point["mean"]) for point in group["differences"][axis]]
            figures.curve(panel, points, **figures.line_style(number), label=label(group["name"]))
        panel.set(xlabel=words, xlim=(0, None))
    panels[0].set_ylabel("Validation loss minus the baseline's\n(nats per token, below 0 is better)")
    panels[1].set_title("One seed: the noise is not measured.", loc="right", fontsize=8, color="#555555")
    figures.legend(figure)
    figures.save({"demo-difference.png": figure}, HERE.parent / "docs")


def quartiles(record: dict[str, Any]) -> str:
    return "1" if record["preset"] == record.get("baseline") else spread(record["ratio"], ".3f")


def spread(ratio: dict[str, Any], form: str) -> str:
    """The median of a ratio between its quartiles."""
    from residua.lab.cost.timing import Quartiles

    return f"{Quartiles(**ratio):{form}}"


def speed_table(*, replay: bool = True) -> str:
    """Give the time of a step, eager and compiled, and the vectors that it keeps, as `residua cost step` measured them.

    replay: of schemes as they are; else of those that keep all states, which no step was compiled with
    """
    from residua.connections.names import label

    found = records("bench-steps.jsonl")
    compiled = {record["scheme"]: record for record in found if record["train"]["compile"]}
    rows = []
    for record in found:
        name = record["scheme"]
        if record["train"]["compile"] or replay == name.endswith("recompute=none"):
            continue
        both = [step_ratio(compiled[name]) if name in compiled else ""] if replay else []
        rows.append([f"`{label(name)}`", step_ratio(record), *both, kept_above(record, found)])
    header = ["scheme", "times `residual` [quartiles]", *["both compiled"] * replay, "vectors kept above it"]
    return markdown(header, rows)


def step_ratio(record: dict[str, Any]) -> str:
    return "1" if record["scheme"] == record["baseline"] else spread(record["time_ratio"], ".3f")


def kept_above(record: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Vectors beyond those of the plain residual, for each token and layer."""
    base = next(row for row in found if row["scheme"] == record["baseline"])
    return "0" if record is base else f"{record['vectors'] - base['vectors']:+.2f}"


def generation_table() -> str:
    """Give every width and batch size a column, compiled or not, in the order of the records."""
    cells: dict[str, dict[str, str]] = {}
    presets: dict[str, None] = {}
    for record in records("bench-generate-cpu.jsonl"):
        compiled = ", compiled" if record["settings"]["compile"] else ""
        where = f"width {record['settings']['dim']}, batch {record['batch_size']}{compiled}"
        milliseconds = f"{record['median_seconds_per_token'] * 1000:.2f} ms"
        cell = milliseconds if record["preset"] == record["baseline"] else quartiles(record)
        cells.setdefault(where, {})[record["preset"]] = cell
        presets[record["preset"]] = None
    header = ["preset", *cells]
    rows = [[f"`{preset}`", *(found.get(preset, "") for found in cells.values())] for preset in presets]
    return markdown(header, rows)


def serving_table(name: str) -> str:
    rows = []
    for record in records(name):
        preset = record["preset"] if record["preset"].startswith("unconverted") else f"`{record['preset']}`"
        rows.append([preset, f"{record['median_tokens_per_second']:.0f}", quartiles(record)])
    return markdown(["SmolLM2-135M in vLLM", "tokens per second", "time, ratio to unconverted [quartiles]"], rows)


def memory_converted_table() -> str:
    found = records("bench-steps-converted.jsonl")
    rows = [[f"`{record['scheme']}`", kept_above(record, found)] for record in found]
    return markdown(["scheme", "vectors kept above `residual`"], rows)


def memory_depth_table() -> str:
    """Give what schemes over depth keep, and its floor: whole vectors of a layer, less the four of PyTorch's norms."""
    found = records("bench-steps-depth.jsonl")
    rows = []
    for record in found:
        model, peak = record["model"], record["peak_bytes"]
        begins = (model["num_hidden_layers"] - 1) / model["num_hidden_layers"]  # the layers that read averages
        floor = 3 + 2 * begins + 64 / model["hidden_size"] if record["scheme"] == "mudd" else 2.0
        peaks = [f"{peak / 2**20:.0f}", f"{peak / found[0]['peak_bytes']:.3f}"]
        name = f"`{record['scheme']}`"
        rows.append([name, kept_above(record, found), f"{floor - 4:+.2f}", *peaks, step_ratio(record)])
    header = ["scheme", "vectors kept above `residual`", "floor", "peak, MiB", "peak, ratio", "step, ratio [quartiles]"]
    return markdown(header, rows)


def state_dtype_table() -> str:
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for row in records("state-dtype.jsonl"):
        losses.setdefault(row["recipe"], {}).setdefault(row["state_dtype"], {})[row["seed"]] = row["val_loss"]
    rows = []
    for recipe, found in losses.items():
        wide, narrow = found["float32"], found["bfloat16"]
        assert wide.keys() == narrow.keys(), recipe
        paired = [narrow[seed] - wide[seed] for seed in sorted(wide)]
        means = [f"{statistics.mean(x.values()):.3f} ± {statistics.stdev(x.values()):.3f}" for x in (wide, narrow)]
        rows.append([f"`{recipe}`", *means, f"{statistics.mean(paired):+.3f} ± {statistics.stdev(paired):.3f}"])
    return markdown(["recipe", "float32 state", "bfloat16 state", "difference, seed by seed"], rows)


def kernels_table() -> str:
    """Give the most that a kernel takes under any of its options: registers, bytes of stack, bytes of shared memory."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in records("kernel-resources.jsonl"):
        found.setdefault(row["kernel"], {}).setdefault(row["width"], []).append(row)

    def most(cases: list[dict[str, Any]]) -> str:
        return ", ".join(f"{max(row[kind] for row in cases):,}" for kind in ("registers", "stack", "shared_memory"))

    rows = [[f"`{kernel}`", *map(most, cells.values())] for kernel, cells in found.items()]
    return markdown(["kernel", *(f"width {width:,}" for width in next(iter(found.values())))], rows)


def kernel_times_table() -> str:
    """Give what a GPU took for an operation, forward and backward; two numbers where it was measured twice."""
    times: dict[tuple[str, int], dict[str, dict[str, None]]] = {}
    for record in records("bench-ops-gpu.jsonl"):
        if (record["dtype"], record["pass"]) == ("bfloat16", "forward+backward"):
            cells = times.setdefault((record["operation"], record["dim"]), {})
            cells.setdefault(record["implementation"], {})[f"{1e6 * record['median_seconds']:,.0f}"] = None
    ways = {"reference": "definition, µs", "compiled": "compiled, µs", "triton": "kernel, µs"}
    rows = [
        [f"`{operation}`", f"{dim:,}", *(" / ".join(cells.get(way, ["–"])) for way in ways)]
        for (operation, dim), cells in times.items()
    ]
    return markdown(["operation", "width", *ways.values()], rows)


def connections_table() -> str:
    """Time our connections without their sublayer."""
    times: dict[str, dict[tuple[str, str], float]] = {}
    for record in records("bench-ops-cpu.jsonl"):
        name = record["operation"].removeprefix("connection:")
        if name != record["operation"] and record["runs"] == "reference":
            times.setdefault(name, {})[record["dtype"], record["pass"]] = 1000 * record["median_seconds"]
    kinds = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("forward", "forward+backward")]
    rows = [[f"`{name}`", *(f"{found[kind]:.1f}" for kind in kinds)] for name, found in times.items()]
    head = [f"{dtype}: {words}, ms" for dtype in ("float32", "bfloat16") for words in ("forward", "with backward")]
    return markdown(["connection", *head], rows)


def peers_table() -> str:
    """Give the time and memory of the packages that compute the paper's scheme, beside ours."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in records("bench-peers-cpu.jsonl"):
        who = f"{record['package']} {record['version']}", record["name"]
        found.setdefault(who, {})[record["settings"]["precision"]] = record
    rows = []
    for (package, name), by in found.items():
        wide, narrow = by["float32"], by["bfloat16"]
        if wide["agrees"]:
            kept = wide["kept_vectors"]
            cells = [quartiles(wide), quartiles(narrow), f"{kept['theirs']:.1f}, ours {kept['ours']:.1f}"]
            rows.append([package, f"`{name}`", f"`{wide['preset']}`", *cells])
    times = ["time over ours, float32 [quartiles]", "under bfloat16 autocast"]
    return markdown(["package", "name", "scheme", *times, "kept, d-vectors"], rows)


GEOMETRY = {
    "gyroscope": "gyroscope",
    "stability": "stability",
    "near-pi": "near π, one plane",
    "near-pi-multi": "near π, every plane",
}


def geometry(study: str, task: str, *sources: str) -> list[dict[str, Any]]:
    """Return the rows of a task in a geometry study that come from `sources`."""
    found = json.loads((HERE / "geometry" / study / "tables.json").read_text(encoding="utf-8"))["tasks"]
    return [row for row in found[task] if row["source"] in sources]


def plus_minus(value: dict[str, float | None] | None, style: str) -> str:
    if value is None:
        return "–"
    mean, std = value["mean"], value["std"]
    return f"{mean:{style}}" if std is None else f"{mean:{style}} ± {std:{'.0e' if style.endswith('e') else style}}"


def sequences_table(*sources: str) -> str:
    """Give each model a row and each task a column: mean squared errors on full sequences."""
    cells: dict[str, dict[str, str]] = {}
    causal: dict[str, bool] = {}
    for task in GEOMETRY:
        for row in geometry("quick", task, *sources):
            if "position 0" in row["name"]:
                continue
            cells.setdefault(row["name"], {})[task] = plus_minus(row.get("loss"), ".2e")
            causal[row["name"]] = row["causal"]
    names = sorted(cells, key=lambda name: (not causal[name], name)) if "ours" in sources else list(cells)
    rows = [[f"`{name}`" if "ours" in sources else name, "yes" if causal[name] else "no",
             *(cells[name].get(task, "–") for task in GEOMETRY)] for name in names]  # fmt: skip
    return markdown(["model", "causal", *GEOMETRY.values()], rows)


def seeds_of(study: str, key: Callable[[dict[str, Any]], Any], value: str) -> dict[Any, list[float]]:
    """Return a value of the runs of a geometry study, in the order of their seeds, by what `key` returns of a run."""
    found: dict[Any, list[float]] = {}
    for run in sorted(records(f"geometry/{study}/records.jsonl"), key=lambda run: run["seed"]):
        found.setdefault(key(run), []).append(run[value])
    return found


def over_seeds(values: list[float], style: str) -> str:
    """Return the mean of a value over seeds, with its standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return plus_minus({"mean": statistics.mean(values), "std": deviation}, style)


def published_losses_table() -> str:
    """Give the published losses, and how far the authors' own code sees into the future."""
    changes: dict[tuple[str, str], list[float]] = {}
    rows: dict[str, str] = {}
    for line in records("geometry/causality.jsonl"):
        changes.setdefault((line["whose"], line["model"]), []).append(line["causality_change"])
        if line["whose"] == "ours":
            rows[line["published"]] = line["model"]
    exact = [name for name in rows if not any(changes["authors", name])]
    assert not any(change for name in exact for change in changes["ours", rows[name]])
    trained: dict[str, list[float]] = {}
    for run in records("geometry/quick/records.jsonl"):
        if run["kind"] == "run" and run["causality_change"]:
            trained.setdefault(run["model"], []).append(run["causality_change"])

    def between(values: list[float]) -> str:
        percents = (100 * min(values), 100 * max(values))
        return " to ".join(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in percents) + " %"

    seen = [name for name in rows if name not in exact]
    theirs = ", ".join(f"{between(changes['authors', name])} in “{name}”" for name in seen)
    ours = ", ".join(f"{between(changes['ours', rows[name]])} in `{rows[name]}`" for name in seen)
    ended = ", ".join(f"{between(trained[name])} in `{name}`" for name in map(rows.get, seen) if name in trained)
    never = f"{', '.join(f'“{name}”' for name in exact[:-1])} and “{exact[-1]}”"
    words = wrapped(
        "Causality was measured on the authors' code, before training, at the sizes of the gyroscope and of stability, "
        f"three seeds each: only the last input changes, and earlier outputs change by {theirs}, in parts of the "
        f"largest output. In {never} they change by exactly 0. Our rows start otherwise and change by {ours}; after "
        f"training at the reduced sizes by {ended}."
    )
    return f"{sequences_table('published')}\n\n{words}"


def full_references_table() -> str:
    """Give the references and the network without layers at the published sizes, beside the best published model."""
    from residua.lab.geometry.published import LOSSES

    losses: dict[str, dict[str, float]] = {}
    for row in records("geometry/references.jsonl"):
        if row["task"] in GEOMETRY and "floor" not in row["model"]:
            losses.setdefault(row["label"], {})[row["task"]] = row["loss"]
    lines = [[label, *(f"{found[task]:.2e}" if task in found else "–" for task in GEOMETRY)]
             for label, found in losses.items()]  # fmt: skip
    runs = [run for run in records("geometry/full/records.jsonl") if run["model"] == "zero-layer"]
    trained = {task: [run["loss"] for run in runs if run["task"] == task] for task in GEOMETRY}
    parameters = sorted(run["parameters"] for run in runs if run["task"] in GEOMETRY)
    counts = {len(values) for values in trained.values()}
    name = f"no layers, {parameters[0]:,} to {parameters[-1]:,} parameters, trained, {counts.pop()} seeds"
    assert not counts
    lines.append([name, *(over_seeds(trained[task], ".2e") for task in GEOMETRY)])
    best = {task: min(loss.mean for loss in published) for task, published in LOSSES.items()}
    lines.append(["best published model", *(f"{best[task]:.2e}" for task in GEOMETRY)])
    better = {"stability": "copy x_t", "near-pi-multi": "negate: −x_t", "gyroscope": "rotation from two points"}
    assert all(losses[label][task] < best[task] for task, label in better.items())
    ahead = [f"{GEOMETRY[task]} ({best[task] / statistics.mean(trained[task]):.1f} times)"
             for task in GEOMETRY if max(trained[task]) < best[task]]  # fmt: skip
    words = wrapped(
        "No published model is as good as a copy of its input on stability, as −x on near π in every plane, or as the "
        "rotation through two points on the gyroscope. With every seed, the network without layers has a lower error "
        f"than the best published model, of 1.8 million parameters, on {', '.join(ahead[:-1])} and {ahead[-1]}."
    )
    return f"{markdown(['reference', *GEOMETRY.values()], lines)}\n\n{words}"


EDELTA = "edelta-sequence:gamma_init={},penalty={}"


def penalty_table() -> str:
    """Give EDelta's losses on the gyroscope by penalty, published and ours, and say what its default has elsewhere."""
    from residua.lab.geometry.published import GYROSCOPE_EARLIER, LOSSES, PAPER_MODELS, PENALTY, PENALTY_DEFAULT
    from residua.lab.records.statistics import Estimate

    default = dict(zip(PAPER_MODELS, LOSSES["gyroscope"]))["edelta-sequence"]
    ours: dict[float, dict[int, tuple[float, float]]] = {weight: {} for weight in PENALTY}
    for run in records("geometry/gates/records.jsonl"):
        if run["task"] == "gyroscope":
            weight = next(weight for weight in PENALTY if run["model"] == EDELTA.format(0.5, f"{weight:g}"))
            ours[weight][run["seed"]] = run["loss"], run["gates"]["gamma"][-1][1]
    lines = []
    for weight, (loss, ends) in PENALTY.items():
        own = ["–", "–"]
        if ours[weight]:
            losses, gates = (list(values) for values in zip(*ours[weight].values()))
            own = [over_seeds(losses, ".2e"), ", ".join(f"{gamma:.2f}" for gamma in gates)]
        lines.append([f"{weight:g}", f"{Decimal(str(loss)):e}", ends, *own])
    none, chosen = PENALTY[0.0][0], PENALTY[PENALTY_DEFAULT][0]
    assert none - chosen < default.deviation
    assert none < default.mean
    without, with_it = ours[0.0], ours[PENALTY_DEFAULT]
    paired = [without[seed][0] / with_it[seed][0] - 1 for seed in without if seed in with_it]
    difference = Estimate.of(100 * part for part in paired)
    words = wrapped(
        f"**Is the error {100 * (none / chosen - 1):.0f} % larger without the penalty, as the ablation says?** It has "
        f"one seed, and the default has three values in the authors' documents: {chosen:.2e} here, "
        f"{GYROSCOPE_EARLIER:.2e} in the main table of docs/RESEARCH.md, and {default.mean:.2e} ± "
        f"{default.deviation:.1e} over {default.count} seeds in the README. The difference of the ablation, "
        f"{none - chosen:.1e}, is below that deviation, and its loss without penalty below that mean. Our error "
        f"without penalty differs from that with the default by {difference.mean:+.1f} ± {difference.half_width:.1f} % "
        f"(95 % interval, {len(paired)} seeds in pairs, reduced sizes)."
    )
    heads = [
        "penalty λ",
        "published loss, 1 seed",
        "published γ at the end",
        "our loss",
        "our mean γ of 4 sublayers, by seed",
    ]
    return f"{markdown(heads, lines)}\n\n{words}"


def starts_table() -> str:
    """Give EDelta's losses on near pi by the gate's start, published and ours."""
    from residua.lab.geometry.published import STARTS

    losses = seeds_of("gates", lambda run: (run["task"], run["model"]), "loss")
    gates = seeds_of("gates", lambda run: (run["task"], run["model"]), "gates")
    lines = []
    for task, starts in STARTS.items():
        for bias, (loss, end) in starts.items():
            start = round(1 / (1 + math.exp(-bias)), 2)
            key = task, EDELTA.format(f"{start:g}", 0.5)
            theirs, own = [f"{loss:.2e}", f"{end.mean:g} ± {end.deviation:g}"], ["–", "–"]
            if key in losses:
                last = [gate["gamma"][-1][1] for gate in gates[key]]
                own = [over_seeds(losses[key], ".2e"), ", ".join(f"{gamma:.2f}" for gamma in last)]
            lines.append([GEOMETRY[task], f"{start:.2f}", *theirs, *own])
    heads = [
        "task",
        "γ at the start",
        "published loss",
        "published γ at the end",
        "our loss",
        "our mean γ of 4 sublayers, by seed",
    ]
    return markdown(heads, lines)


def vectors_table() -> str:
    """Give the cosine with -x of operators by the number of training vectors."""
    from residua.lab.geometry.operators import OPERATORS
    from residua.lab.geometry.published import COSINES

    columns = {
        "jpmhc": "JPmHC toy, truncated from I",
        "jpmhc-exact": "its exact Cayley map",
        "householder": "pooled Householder",
        "hybrid": "EDelta hybrid",
        "linear": "one linear map",
    }
    names = {OPERATORS[name].label: name for name in columns}
    found: dict[tuple[str, int], list[float]] = {}
    for study in ("vectors", "reflection"):
        for (label, number), cosines in seeds_of(study, lambda run: (run["label"], run["num_train"]), "cosine").items():
            found[names.get(label.removesuffix(f", {number} vectors"), label), number] = cosines
    lines = []
    for number, theirs in COSINES.items():
        own = [over_seeds(found[name, number], ".2f") if (name, number) in found else "–" for name in columns]
        lines.append([str(number), *own, *(f"{cosine:g}" for cosine in theirs)])
    exact = [cosine for number in COSINES for cosine in found.get(("jpmhc-exact", number), [])]
    assert max(cosine for number in COSINES for cosine in found["jpmhc", number]) < 0 < min(exact)
    heads = ["vectors", *columns.values(), "published “DDL”", "published “EΔ-MHC-Geo”"]
    words = wrapped(
        "Cosine with −x by the number of training vectors, ours with up to three seeds (one where there is no "
        "deviation), published with one. The truncated map's is negative at every number in every seed, the exact "
        "map's nowhere."
    )
    return f"{words}\n\n{markdown(heads, lines)}"


def reflection_table() -> str:
    rows = []
    for row in geometry("reflection", "reflection", "ours", "published"):
        style = ".3f" if row["source"] == "ours" else "g"  # no more digits than were published
        numbers = [plus_minus(row.get(key), style) for key in ("cosine", "beta", "gamma")]
        parameters = f"{row['parameters']:,}" if "parameters" in row else "–"
        rows.append([row["source"], row["name"], parameters, *numbers])
    return markdown(["source", "operator", "parameters", "cosine with -x", "beta", "gamma"], rows)


def memory_small_table() -> str:
    """Give peaks as ratios to the plain residual with a state of the same dtype."""
    totals = {
        (row["config"].removeprefix("small-"), row["state_dtype"], kind): part["total"]
        for row in records("memory-small.jsonl")
        for kind, part in row["memory"].items()
    }
    rows = []
    for preset in ("ddl", "ddl-cc", "ddl-tc"):
        for kind in [kind for name, dtype, kind in totals if (name, dtype) == (preset, "float32")]:
            ratios = [totals[preset, d, kind] / totals["residual", d, "all"] for d in ("bfloat16", "float32")]
            name = f"`{preset}:recompute=none`" if kind == "none" else f"`{preset}`"
            rows.append([name, *(f"{ratio:.3f}" for ratio in ratios)])
    return markdown(["preset", "bfloat16 state", "float32 state"], rows)


def results_table() -> str:
    rows = []
    for row in reproduction.results():
        cells = [
            f"{mean:+.3f} ± {half:.3f}" for mean, half in map(reproduction.interval, (row.at_tokens, row.at_seconds))
        ]
        if row.variant == "residual":
            cells = ["baseline", "baseline"]
        losses = f"{statistics.mean(row.losses):.3f} ± {statistics.stdev(row.losses):.3f}"
        rows.append([f"`{row.variant}`", f"{row.lr:g}", losses, cells[0], f"{row.step_ratio:.2f}", cells[1],
                     f"{row.parameters:,}"])  # fmt: skip
    return markdown(
        ["scheme", "learning rate", "validation loss", "difference, same tokens", "time of a step",
         "difference, same seconds", "parameters"],
        rows,
    )  # fmt: skip


PUBLISHED_LOSSES = {
    "ddl": ((2.84817 - 2.85426), (2.60388 - 2.60532)),
    "ddl-tc": ((2.83545 - 2.85426), (2.59267 - 2.60532)),
    "ddl-cc": ((2.8321 - 2.8543), (2.5790 - 2.6053)),
    "ddl-ec": ((2.8299 - 2.8543), (2.5905 - 2.6053)),
    "ddl-cc-ec": ((2.8329 - 2.8543), (2.5758 - 2.6053)),
}
"""Validation loss minus the baseline's of the same table at 124M and at 353M: arXiv 2601.00417v2, v3 below `ddl-tc`."""


def paper_table() -> str:
    """Give every row of the paper's tables the published differences and ours, in columns of their own."""
    from residua.connections.names import in_the_paper
    from residua.lab.evaluation.published import rows as published

    ours = {row.variant: row for row in reproduction.results()}
    averages = {size: {row.preset: row.average for row in published(size, 0)} for size in ("small", "medium")}
    lines = []
    for preset, losses in PUBLISHED_LOSSES.items():
        gains = [f"{averages[size][preset] - averages[size]['residual']:+.2f}" for size in averages]
        cells = [reproduction.interval(one) for one in (ours[preset].at_tokens, ours[preset].at_seconds)]
        lines.append(
            [f"`{preset}`", in_the_paper(preset), " / ".join(f"{loss:+.3f}" for loss in losses), " / ".join(gains)]
            + [f"{mean:+.3f} ± {half:.3f}" for mean, half in cells]
        )  # fmt: skip
    header = [
        "minus the plain residual",
        "in the paper since v3",
        "published: validation loss, 124M / 353M",
        "published: mean of eight tasks, 0-shot",
    ]
    return markdown([*header, "ours at 0.64M: loss, same tokens", "ours: loss, same seconds"], lines)


def published_runs_table() -> str:
    """Give the paper's final losses and costs, with the hours that its speeds imply."""
    from residua.connections.names import in_the_paper
    from residua.lab.evaluation.published import PARAMETERS, models

    rows = []
    for size, parameters in PARAMETERS.items():
        of_size = [model for (its_size, _), model in models().items() if its_size == size and model.loss is not None]
        (plain,) = (model for model in of_size if model.preset == "residual")
        for model in of_size:
            cells = ["–"] * 4
            if model.hours is not None:
                speed = model.train_tokens_per_second
                cells = [f"{speed / 1000:,.1f} ({speed / plain.train_tokens_per_second:.2f})"]
                cells += [f"{model.hours:.1f}", f"{model.inference_tokens_per_second / 1000:,.1f}"]
                cells += [f"{model.peak_gigabytes:.2f} GB"]
            name = in_the_paper(model.preset) or "Baseline"
            rows.append([parameters, f"`{model.preset}`", name, f"{model.loss:.4f}", f"{model.perplexity:.4f}", *cells])
    header = ["size", "preset", "in the paper", "validation loss", "perplexity", "training, thousand tokens/s (of the"]
    header[-1] += " baseline)"
    return markdown([*header, "hours for 49 billion tokens", "inference, thousand tokens/s", "peak memory"], rows)


def published_curves_table() -> str:
    """Give the published losses along training: the plain residual's, and those of the others minus it."""
    from residua.lab.evaluation.published import PARAMETERS, models

    places = (5, 10, 20, 30, 40, 49.15)
    rows = []
    for (size, preset), model in models().items():
        if model.curve:
            plain = models()[size, "residual"]
            losses = [model.loss_at(at) for at in places]
            if preset == "residual":
                cells = [f"{loss:.3f}" for loss in losses]
            else:
                cells = [f"{loss - plain.loss_at(at):+.4f}" for loss, at in zip(losses, places)]
            rows.append([PARAMETERS[size], f"`{preset}`", *cells])
    return markdown(["size", "minus `residual`, at billions of tokens", *map(str, places)], rows)


def preserved_table() -> str:
    """The presets that preserve the model."""
    rows = []
    for record in retrofit_results.read():
        if record["kind"] == "preserve" and record["preserves"]:
            rows.append(
                [
                    f"`{record['scheme']}`",
                    f"{record['change_float64']:.0e}" if record["change_float64"] else "0",
                    f"{record['change']:.0e}" if record["change"] else "0",
                    f"{record['loss'] - record['loss_before']:+.0e}" if record["change"] else "0",
                    "equal" if record["same_text"] else "differs",
                ]
            )
    header = ["preset", "logits, float64", "logits, float32", "loss, float32", "greedy text"]
    return markdown(header, rows)


def largest_logit() -> str:
    """Close the sentence on the sizes that the changes compare with."""
    rows = [row for row in retrofit_results.read() if row["kind"] == "preserve"]
    (largest,) = {row["largest_logit"] for row in rows}
    (rounding,) = {row["rounding"] for row in rows}
    return f"{largest:.0f}, and float32 itself is {rounding:.0e} away from float64."


def refused_table() -> str:
    """The presets that do not, with their reasons; presets with the same reason in one row."""
    from residua.connections import resolve

    reasons: dict[str, list[str]] = {}
    for record in retrofit_results.read():
        if record["kind"] == "preserve" and not record["preserves"]:
            try:
                resolve(record["scheme"]).preserving()
                words = record["reason"]
            except ValueError as error:  # as the scheme says it today
                words = str(error)
            reason = words.partition("; start='fresh'")[0].partition(": ")[2]
            reasons.setdefault(reason, []).append(f"`{record['scheme']}`")
    return markdown(["presets", "reason"], [[", ".join(names), reason] for reason, names in reasons.items()])


def retrofit_table(mode: str) -> str:
    """Continued training: each scheme beside the plain model of its mode."""
    rows = []
    for row in retrofit_results.rows(retrofit_results.read()):
        if row.mode == mode:
            time = row.step_time
            rows.append(
                [
                    str(row.steps),
                    {"norms": "gains of the norms", "residual": "plain"}.get(row.scheme, f"`{row.scheme}`"),
                    f"{row.parameters:,}",
                    f"{row.connection_lr or row.lr:g}",
                    str(row.seeds),
                    f"{row.loss.mean:.4f}",
                    *map(difference, (row.tokens, row.documents, row.seconds)),
                    spread(time, ".2f") if time else "–",
                ]
            )
    header = ["steps", "trained", "parameters", "learning rate", "seeds", "loss", "difference, over seeds",
              "over documents", "at equal seconds", "step time"]  # fmt: skip
    return markdown(header, rows)


def verdict_table() -> str:
    """Which schemes are clear of zero over seeds, after the correction for their number."""
    rows = []
    for mode, name in (("connections", "only the connections"), ("all", "all weights")):
        found = [row for row in retrofit_results.rows(retrofit_results.read()) if row.mode == mode and row.tokens]
        for steps in sorted({row.steps for row in found}):
            own = [row for row in found if row.steps == steps]
            for measure in ("tokens", "seconds"):
                sides = retrofit_results.sides(own, measure)
                cells = [", ".join(f"`{scheme}`" for scheme in side) or "–" for side in sides]
                rows.append([name, str(steps), str(min(row.seeds for row in own)), measure, *cells])
    picture = "![Differences of the loss to the plain model, with intervals over documents](retrofit-difference.png)"
    header = ["trained", "steps", "seeds", "at equal", "better", "worse", "not resolved"]
    return f"{markdown(header, rows)}\n\n{picture}"


def learned_table() -> str:
    """What the connections of the trained models do on a prompt."""
    rows = []
    for one in retrofit_results.learned():
        sublayers = one["sublayers"]
        if one["sources"]:
            last, count = sublayers[-1], len(one["sources"])
            told = f"the last sublayer reads {last['sources_read']:.2f} of {count} sources in effect, "
            told += f"the one most read with weight {last['most_read_weight']:.3f} (even: {1 / count:.3f})"
        else:
            low, high = min(row["beta_q05"] for row in sublayers), max(row["beta_q95"] for row in sublayers)
            kept = min(row["identity"] for row in sublayers)
            told = f"90 % of the gates of every sublayer lie in [{low:.2f}, {high:.2f}] of {tuple(one['beta_range'])}; "
            reflecting = max(row["reflection"] for row in sublayers)
            few = f"at least {kept:.0%} of the tokens keep the state, at most {reflecting:.0%} reflect"
            told += "every token keeps the state" if kept == 1 else few
        name = one["preset"] or one["run"].removeprefix("smollm2-")
        rows.append([f"`{name}`", one["read"], f"{one['loss']:.4f}", told])
    return markdown(["scheme", "text", "loss", "what it learned"], rows)


def difference(found: Any) -> str:
    if found is None:
        return "–"
    half = found.half_width
    return f"{found.mean:+.4f}" if half is None else f"{found.mean:+.4f} ± {half:.4f}"


def published_table() -> str:
    """The published numbers on residuals at scale: docs/field.csv, where each has its source."""
    with (HERE.parent / "docs" / "field.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["where"] == "its authors":
            assert row["gain"] == "{:+.3f} / {:+.3f} loss".format(*PUBLISHED_LOSSES[row["preset"]])
    columns = ("size", "tokens", "gain", "speedup", "speedup in time", "step", "seeds")
    lines = [
        [
            row["scheme"] + (f" (`{row['preset']}`)" if row["preset"] else ""),
            f"[{row['where']}]({row['source']}), {row['date']}",
            *(row[column] for column in columns),
        ]
        for row in rows
    ]
    header = ["scheme", "where", "size", "tokens", "gain", "speed-up", "speed-up in time", "step", "seeds"]
    return markdown(header, lines)


def presets_table(family: str) -> str:
    """Return the rows of the presets of a family. Their words are those on the page; a new preset has its title."""
    page = (HERE.parent / "docs" / "schemes.md").read_text(encoding="utf-8")
    written = {}
    for block in re.findall(r"(?s)<!-- [a-z-]+: experiments/pages.py -->\n\| preset \|.*?<!-- /", page):
        written |= dict(re.findall(r"(?m)^\| `([^`]+)` \| (.*?) \| [^|]* \| [^|]* \|$", block))
    kinds = {SCHEMES[name] for name in scheme_pages.families().get(family, ())}
    rows = []
    for name in dict.fromkeys([*written, *PRESETS]):
        scheme = resolve(name)
        if type(scheme) in kinds:
            words = written.get(name, f"{type(scheme).title}: {scheme.source}")
            counts = dict.fromkeys(f"{count:,}" for count in added(scheme).values())
            rows.append([f"`{name}`", words, state(scheme), " / ".join(counts)])
    header = ["preset", "description", "state per token", "parameters added at 124M / 353M"]
    return markdown(header, rows) if rows else ""


def more_presets() -> str:
    """Return a section of the presets of new schemes, which are in no family yet; "" if there are none."""
    rows = presets_table("More")
    return f"## More\n\n{rows}" if rows else ""


SHARED = {  # an option that several schemes have, its meaning, and that of each value
    "start": (
        "how the connections begin",
        {
            "published": "as the paper, or its public code, begins; of `edelta-stream` only u, v and k",
            "residual": "exactly as x + F(x); `krom` and `gated-residual` also need `head=mean`, `mhc-glm` "
            "`gate_eps=0.0`, `siamese` `normalised_input=false,head=stream`",
            "mirrored": "as x + F(x) in the mean of the streams, which differ at once; `hc` also needs `head=mean`",
            "prefer": "each sublayer reads one stream more than the others, by weights that sum to 1.24",
            "average": "compressors average the channels, and gates are `beta_init` for every token",
            "authors": "as the authors' first code draws compressors and gates",
            "rewrite": 'as their current code does; its models have `output_init="depth"` too',
        },
    ),
    "expand": (
        "how the embedding becomes the state",
        {
            "repeat": "each channel or stream is the embedding",
            "conv": "each is a causal convolution of it over the tokens",
            "smear": "the embedding plus a gated copy of that of the token before",
            "lss": "each is the embedding times learned gains, from noise around 0.6",
            "gains": "the same, from 1",
            "projections": "the first is the embedding, the others are linear maps of it; linear maps read out too",
        },
    ),
    "head": (
        "how the state becomes the output, the readout",
        {
            "sum": "the sum of the streams",
            "mean": "their mean",
            "sigmoid": "weights of its own, from all streams",
            "gated": "a gated read of its own, normalised",
            "norms": "the sum of both streams, each normalised",
            "stream": "the sum of the normalised stream and the plain one",
        },
    ),
    "gate": (
        "how much of an output's part along the state is left out",
        {
            "none": "nothing",
            "token": "a share for each token, tanh of a linear map, from 0",
            "static": "one share for all tokens, from 0",
            "one": "all of it: the orthogonal update",
        },
    ),
}


def shared_options_table() -> str:
    """Return one row for each value of an option that several schemes have, with the schemes that take it."""
    takes: dict[tuple[str, str], list[str]] = {}
    first = {type(scheme): name for name, scheme in reversed(PRESETS.items())}
    for kind, preset in reversed(first.items()):
        for option in SHARED.keys() & types_of(kind).keys():
            for value in get_args(types_of(kind)[option]):
                takes.setdefault((option, value), []).append(f"`{preset}`")
    rows = []
    for option, (words, choices) in SHARED.items():
        for value, meaning in choices.items():
            rows.append([f"`{option}`: {words}", f"`{value}`", meaning, ", ".join(takes.pop((option, value)))])
            words = ""
    assert not takes, f"SHARED must explain {takes}"
    return markdown(
        ["option", "value", "meaning", "schemes"], [[cell.removesuffix(": ") for cell in row] for row in rows]
    )


def renamed_options_table() -> str:
    """Return one row for each option, or value of one, that earlier versions wrote otherwise."""
    first = {named(text)[0]: preset for preset, text in reversed(names.PRESETS.items())}
    rows = [
        [f"`{earlier}`", f"`{today}`", ", ".join(f"`{first[scheme]}`" for scheme in schemes)]
        for earlier, today, schemes in names.RENAMED
    ]
    return markdown(["earlier", "now", "schemes"], rows)


def study_keys_table() -> str:
    """Return one row for each key of a study's file, from the docstrings of its parts."""
    from residua.lab.study.definition import Entry, Question, Size, Study, Tuning

    parts = {"the file": Study, "a size": Size, "a scheme": Entry, "`tuning`": Tuning, "a question": Question}
    rows = []
    for title, kind in parts.items():
        defaults = {field.name: field for field in fields(kind)}
        for key, words in meanings(kind).items():
            field = defaults[key]
            made = field.default if field.default_factory is MISSING else field.default_factory()
            shown = "" if made is MISSING else f"`{json.dumps(made)}`"
            name = "a key of `residua train`" if key == "keys" else f"`{key}`"
            rows.append([title, name, words, shown])
    return markdown(["of", "key", "meaning", "default"], rows)


ENGINES = {
    "trainers": (
        "python tools/engine_tests.py trainers",
        "Trainer, accelerate, FSDP2, Fabric and TRL's SFT on two processes: losses of one",
    ),
    "torchtitan": ("make titan", "losses, gradient norms, starts, checkpoints and folders on one and two processes"),
    "vllm": ("make vllm", "greedy tokens are those of `generate`"),
    "slurm": ("make slurm", "errors, kills, requeues and outages; a study's records, bit for bit those of one machine"),
}
"""The command that makes the record of each engine, and what its tests compare."""
UNNAMED = ("accounts", "datasets", "numpy", "tokenizers")


def engines_table() -> str:
    """Return the last record of each engine, and of each way in which Slurm keeps accounts."""
    rows = []
    for engine, (command, compared) in ENGINES.items():
        last = {record["versions"].get("accounts"): record for record in records(f"{engine}.jsonl")}
        for accounts, record in last.items():
            named = {name: v for name, v in sorted(record["versions"].items()) if name not in UNNAMED}
            kept = {None: "", "accounting_storage/none": " without accounts"}.get(accounts, " with accounts")
            versions = ", ".join(f"{name} {v}" + kept * (name == "slurm") for name, v in named.items())
            others = "".join(f"; {outcome}: {name}" for name, outcome in record["others"].items())
            passed = f"{record['passed']} of {len(record['tests'])}{others}"
            rows.append([compared, versions, f"`{command}`", passed])
    return markdown(["compared", "with", "command", "passed"], rows)
