"""Fill the sentences of sentences.md with numbers, once the records bear out their words.

pages.py writes them into the pages. An assertion that fails stands for words that are no longer so.
"""

import json
import math
import statistics
from collections.abc import Iterable
from functools import cache
from typing import Any

import reproduction
import retrofit_results
from tables import GEOMETRY, HERE, geometry, records, tuned

from residua.connections.names import label

CONTROL = "residual:expand=conv"
"""The plain residual with DDL's convolution of the embedding."""
NUMBERS = "Ten", "Eleven", "Twelve", "Thirteen", "Fourteen", "Fifteen", "Sixteen"


def span(values: Iterable[float], form: str) -> str:
    """Return the smallest and the largest, or one number if they read alike."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (found[0], found[-1])))


def percent(ratios: Iterable[float]) -> str:
    """Return by how much the ratios are above 1, in per cent."""
    return span((100 * (ratio - 1) for ratio in ratios), ".0f")


def interval(values: list[float]) -> str:
    mean, half = reproduction.interval(values)
    return f"{mean:+.3f} ± {half:.3f}"


def steps() -> dict[str, Any]:
    """Time of a training step."""
    found = [row for row in records("bench-steps.jsonl") if "recompute=none" not in row["scheme"]]
    times = {row["scheme"]: row["time_ratio"]["median"] for row in found if not row["train"]["compile"]}
    assert times.pop("residual") == 1
    few = [ratio for ratio in times.values() if ratio < 1.4]
    assert len(few) > 0.8 * len(times)
    return {
        "step_least": f"{100 * (min(times.values()) - 1):.0f}",
        "step_most": f"{100 * (max(times.values()) - 1):.0f}",
        "step_few": len(few),
        "step_schemes": len(times),
        "step_four": percent(times[name] for name in ("ddl-cc", "ddl-tc", "ddl-cc-ec", "ddl-ec")),
        "times_wide": span((times[name] for name in times if name.startswith("ddl")), ".2f"),
    }


def rough_gradients() -> dict[str, Any]:
    """Gradients under autocast to bfloat16."""
    found = records("bfloat16-gradients.jsonl")
    errors: dict[str, list[float]] = {}
    for row in found:
        errors.setdefault(row["scheme"], []).append(100 * row["error"])
    means = {scheme: statistics.fmean(each) for scheme, each in errors.items()}
    assert max(means[name] for name in ("residual", "hc", "mhc", "ddl-v")) < min(
        min(errors[name]) for name in ("ddl", "ddl-cc", "ddl-tc")
    )
    assert all(1.7 < means[name] / means["residual"] < 2.4 for name in ("ddl", "ddl-cc", "ddl-tc"))
    (model,) = {json.dumps(row["model"]): row["model"] for row in found}.values()
    return {
        "rough_layers": model["num_hidden_layers"],
        "rough_width": model["hidden_size"],
        "rough_seeds": {3: "three"}[len({row["seed"] for row in found})],
        "rough_residual": span(errors["residual"], ".1f"),
        "rough_ddl": span(errors["ddl"], ".1f"),
        "rough_four": span([*errors["ddl-tc"], *errors["ddl-cc"]], ".1f"),
        "rough_value": span(errors["ddl-v"], ".1f"),
        "rough_streams": span([*errors["hc"], *errors["mhc"]], ".1f"),
    }


def converted() -> dict[str, Any]:
    """What a token of a converted model takes, in Transformers and in vLLM."""
    found = records("bench-generate-converted.jsonl")
    times = {row["preset"]: row["ratio"]["median"] for row in found}
    assert times.pop("unconverted") == 1
    assert min(times, key=lambda name: times[name]) == "residual"
    schemes = {name: ratio for name, ratio in times.items() if name != "residual"}
    few = [ratio for ratio in schemes.values() if ratio < 1.35]
    assert len(few) > len(schemes) / 2
    settings = found[0]["settings"]
    served = [row for row in records("serving-convolutions.jsonl") if row["preset"].endswith("tc")]
    ratios = [row["ratio"]["median"] for row in served]
    return {
        "token_least": f"{100 * (times['residual'] - 1):.0f}",
        "token_most": f"{100 * (max(times.values()) - 1):.0f}",
        "token_few": percent(few),
        "token_number": len(few),
        "token_schemes": len(schemes),
        "token_layers": settings["layers"],
        "token_width": settings["dim"],
        "served_least": f"{min(ratios):.1f}",
        "served_most": f"{max(ratios):.1f}",
    }


def retrofit() -> dict[str, Any]:
    """The pretrained model."""
    read = retrofit_results.read()
    found, run = retrofit_results.rows(read), next(row for row in read if row["kind"] == "train")
    trained = {mode: [row for row in found if (row.mode, row.steps) == (mode, 32) and row.tokens]
               for mode in ("all", "connections")}  # fmt: skip
    for measure in ("tokens", "seconds"):
        better, _, _ = retrofit_results.sides(trained["all"], measure)
        assert not better
    better, worse, unresolved = retrofit_results.sides(trained["connections"], "tokens")
    assert (better, unresolved) == ([], ["mhc"])
    assert worse
    times = [row.step_time["median"] for row in trained["all"]]
    return {
        "retrofit_steps": run["steps"],
        "retrofit_tokens": f"{run['tokens']:,}",
        "retrofit_least": f"{min(times):.2f}",
        "retrofit_most": f"{max(times):.2f}",
    }


def demo() -> dict[str, Any]:
    """The demo and the sweep over its recipes."""
    told = json.loads((HERE / "demo.json").read_text(encoding="utf-8"))
    groups = {label(group["name"]): group for group in told["groups"]}
    control = groups["residual+tc"]["difference"]["mean"] / groups["ddl-tc"]["difference"]["mean"]
    assert 0.5 < control < 1
    best = {scheme: (point, statistics.fmean(losses)) for scheme, (point, losses) in tuned().items()}
    losses: dict[tuple[Any, ...], list[float]] = {}
    for row in records("tune-tiny.jsonl"):
        point = row["scheme"], row["lr"], row["embedding_init_std"], row["hidden_init_std_factor"]
        losses.setdefault(point, []).append(row["val_loss"])
    points = {point: statistics.fmean(found) for point, found in losses.items() if len(found) == 3}

    def best_with(scheme: str, place: int, value: float) -> str:
        return f"{min(loss for point, loss in points.items() if point[0] == scheme and point[place] == value):.3f}"

    scales: dict[float, float] = {}
    for row in records("tune-tiny.jsonl"):
        if (row["scheme"], row["hidden_init_std_factor"], row["seed"]) == ("residual", 0.5, 0):
            scale = row["embedding_init_std"]
            scales[scale] = min(row["val_loss"], scales.get(scale, math.inf))
    lead = best["residual"][1] - best["ddl-cc-ec"][1]
    assert scales[0.03] - scales[0.12] > lead
    return {
        "demo_share": f"{100 * control:.0f}",
        "demo_passes": f"{groups['ddl-tc']['tokens'] / told['facts']['data']['train_tokens']:.1f}",
        "sweep_share": f"{100 * (best['residual'][1] - best['ddl-cc'][1]) / lead:.0f}",
        "sweep_scale": f"{scales[0.03] - scales[0.12]:.2f}",
        "sweep_ddl": f"{best['ddl'][1]:.3f}",
        "sweep_ddl_here": best_with("ddl", 2, 0.12),
        "sweep_ec": f"{best['ddl-cc-ec'][1]:.3f}",
        "sweep_ec_here": best_with("ddl-cc-ec", 3, 0.5),
    }


@cache
def reproduced() -> dict[str, reproduction.Result]:
    """The scaled-down reproduction, by scheme."""
    return {row.variant: row for row in reproduction.results()}


def side(values: list[float]) -> str:
    mean, half = reproduction.interval(values)
    return "ahead" if mean + half < 0 else "behind" if mean - half > 0 else "level"


def beyond(scheme: str) -> list[float]:
    """Return the loss of a scheme minus the control's, seed by seed."""
    return [ours - theirs for ours, theirs in zip(reproduced()[scheme].losses, reproduced()[CONTROL].losses)]


def reproduction_says() -> dict[str, Any]:
    rows = {name: row for name, row in reproduced().items() if name != "residual"}
    without = "ddl", "ddl-cc", "ddl:beta_init=0.5", "ddl:v_activation=linear"
    values = "ddl-v", "ddl-tc-v"
    sides = {name: side(row.at_tokens) for name, row in rows.items()}
    assert {sides[name] for name in rows.keys() - {*without, *values}} == {"ahead"}
    assert [sides[name] for name in without] == ["level", "level", "ahead", "level"]
    assert min(statistics.fmean(rows[name].at_tokens) for name in values) > 0.2
    assert "ahead" not in {side(beyond(name)) for name in without}
    assert {name for name, row in rows.items() if side(row.at_seconds) == "ahead"} == {CONTROL}
    assert f"{rows[CONTROL].step_ratio:.2f}" == "1.00"
    means = {name: statistics.fmean(row.losses) for name, row in rows.items()}
    assert all(means[f"{name}:beta_init=0.5"] < means[name] for name in ("ddl", "ddl-tc"))
    leads = {name: -statistics.fmean(row.at_tokens) for name, row in rows.items()}
    return {
        "control": interval(rows[CONTROL].at_tokens),
        "control_of_ec": f"{100 * leads[CONTROL] / leads['ddl-ec']:.0f}",
        "control_of_conv": f"{100 * leads[CONTROL] / leads['ddl:expand=conv']:.0f}",
        "times_narrow": span((row.step_ratio for name, row in rows.items() if name.startswith("ddl")), ".1f"),
        "reproduced": NUMBERS[len(rows) - 10],
    }


def geometry_says() -> dict[str, Any]:
    """The findings on the geometric tasks."""
    found = {task: {row["name"]: row for row in geometry("quick", task, "ours")} for task in GEOMETRY}
    errors = {task: {name: row["loss"]["mean"] for name, row in rows.items()} for task, rows in found.items()}
    none = "zero-layer"
    for task in ("stability", "near-pi", "near-pi-multi"):
        assert min(errors[task], key=lambda name: errors[task][name]) == none
    ours = {name: (row["loss"]["mean"], row["loss"]["std"]) for name, row in found["gyroscope"].items()}
    plain, noise = ours["residual"]
    apart = {name: (mean - plain) / (spread + noise) for name, (mean, spread) in ours.items() if name != "residual"}
    assert max(apart["ddl-cc"], apart["ddl"]) < -1 < 1 < min(each for name, each in apart.items() if "edelta" in name)
    assert all(abs(apart[name]) < 1 for name in ("mhc", "jpmhc", "pooled-householder"))
    (reference,) = {row["loss"]["mean"] for row in geometry("quick", "gyroscope", "reference")
                    if row["name"] == "rotation from two points"}  # fmt: skip
    assert min(errors["gyroscope"].values()) > 10 * reference
    assert all(rows["mhc"] <= rows["residual"] for rows in errors.values())
    assert all(rows["edelta-token"] < rows["edelta-sequence"] for rows in errors.values())
    runs = [run for run in records("geometry/quick/records.jsonl") if run["gates"] and "gamma" in run["gates"]]
    operators = {row["name"]: row for source in ("ours", "published")
                 for row in geometry("reflection", "reflection", source)}  # fmt: skip
    cosines = {name: row["cosine"]["mean"] for name, row in operators.items() if row["cosine"]}
    edelta = "EDelta hybrid, gate logit from {}, penalty {}"
    ends = {name: row["gamma"]["mean"] for name, row in operators.items() if row.get("gamma")}
    published = ends["EDelta, sequence (“EΔ-MHC-Geo”)"]
    near = {name for name, end in ends.items() if abs(end - published) < 0.01 and name.startswith("EDelta hybrid")}
    assert near == {edelta.format(-1.5, 0.5)}
    assert f"{cosines['one linear map']:.3f}" == "1.000"
    whole = min(row["cosine"]["mean"] for row in geometry("quick", "reflection", "ours") if row["name"] != none)
    return {
        "geometry_none": f"{found['gyroscope'][none]['parameters']:,}",
        "geometry_others": span((row["parameters"] for name, row in found["gyroscope"].items() if name != none), ","),
        "geometry_split": f"{errors['stability']['mhc-split'] / errors['stability']['mhc']:.0f}",
        "gamma_up": span((run["gates"]["gamma"][-1][1] for run in runs), ".2f"),
        "cosine_whole": f"{math.floor(1000 * whole) / 1000:.3f}",  # "at least"
        "gamma_published": f"{published:.2f}",
        "gamma_ours": f"{ends[edelta.format(-1.5, 0.5)]:.2f}",
        "cosine_plane": f"{cosines['exact Cayley rotation of a single plane']:.2f}",
        "cosine_exact": f"{cosines['exact Cayley of the same W']:.2f}",
        "cosine_published": f"{cosines['JPmHC (“JPmHC”)']:.2f}",
        "cosine_truncated": f"{cosines['truncated Cayley from Y = I, published as JPmHC']:.2f}",
    }


@cache
def numbers() -> dict[str, Any]:
    parts = steps, rough_gradients, converted, retrofit, demo, reproduction_says, geometry_says
    return {name: value for part in parts for name, value in part().items()}


def filled(field: str) -> str:
    """Return what a pair of braces stands for: a number by name, or `beyond` a scheme."""
    scheme = field.removeprefix("beyond ")
    return str(numbers()[field]) if scheme == field else interval(beyond(scheme))
