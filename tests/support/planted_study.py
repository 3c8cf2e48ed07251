"""Records of a study made by hand: a test knows which differences it must find because it planted them."""

import json
from dataclasses import asdict
from pathlib import Path

from residua.lab.records import jsonlines
from residua.lab.study.definition import read_study
from residua.lab.study.results import results
from support.pages import blocks

DOCUMENT = {
    "title": "Planted",
    "set": {
        "train.batch_size": 2,
        "train.sequence_length": 16,
        "train.checkpoint_every": 5,
        "train.device": "cpu",
        "train.log_every": 5,
        "train.connections_every": 0,
    },
    "tokens_per_parameter": 0.02,
    "evaluations": 2,
    "sizes": {
        "small": {
            "model.num_hidden_layers": 1,
            "model.hidden_size": 16,
            "model.num_attention_heads": 1,
            "model.head_dim": 16,
        },
    },
    "schemes": {"residual": {}, "ddl": {}},
    "baselines": ["residual"],
    "tuning": {
        "over": {"train.lr": [0.004, 0.008], "train.connection_lr_factor": [1.0]},
        "runs": 3,
        "baseline_runs": 3,
    },
    "seeds": [1, 2, 3],
    "longer": [1.5],
}
SMALLEST = {
    **DOCUMENT,
    "tokens_per_parameter": 0.015,
    "tuning": {"over": {"train.lr": [0.008]}, "runs": 1, "baseline_runs": 1, "length": 0.5},
    "seeds": [1, 2],
    "longer": [],
}
"""The document of a study that tests train."""


def study(**changes):
    return read_study({**DOCUMENT, **changes}, "planted")


def repeatable(path):
    """The records of a file by their keys, without what another machine changes."""
    changing = ("seconds", "tokens_per_second", "facts")
    return {row["key"]: {name: row[name] for name in row if name not in changing} for row in jsonlines.read(path)}


def record(scheme, kind, seed, loss, *, steps=100, lr=0.008, size="small", curve=()):
    facts = {"commit": "a" * 40, "torch": "2", "device": "planted", "date": "2026", "parameters": 8000, "data": {}}
    return {
        "key": f"{size} {scheme} {kind} seed={seed} steps={steps} {lr}",
        "kind": kind,
        "size": size,
        "scheme": scheme,
        "connection": scheme,
        "point": {"train.lr": lr},
        "seed": seed,
        "steps": steps,
        "val_loss": loss,
        "loss": loss,
        "tokens": 32 * steps,
        "seconds": 1.0,
        "curve": [list(point) for point in curve],
        "facts": facts,
    }


def cost(scheme, time, flops, size="small", compiled=False, rounds=45, date="2026"):
    return {
        "compiled": compiled,
        "size": size,
        "scheme": scheme,
        "connection": scheme,
        "time_ratio": {"lower": time - 0.01, "median": time, "upper": time + 0.01},
        "seconds": [time] * rounds,
        "flops_per_token": {"products": 0.8 * flops, "elementwise": 0.2 * flops},
        "peak_bytes": 2**20,
        "baseline": "residual",
        "device": "planted",
        "date": date,
    }


def records():
    """ddl is ahead by 0.1, 0.2 and 0.3 at equal tokens; one and a half times the steps lower the residual by 0.3."""
    found = [
        record(name, "tune", 0, loss, lr=lr) for name in ("residual", "ddl") for lr, loss in ((4e-3, 5), (8e-3, 4))
    ]
    for seed, ahead in ((1, 0.1), (2, 0.2), (3, 0.3)):
        base = 4 + 0.01 * seed
        found += [
            record("residual", "report", seed, base, curve=[(50, base + 1), (100, base)]),
            record("ddl", "report", seed, base - ahead, curve=[(50, base + 1 + ahead), (100, base - ahead)]),
            record("residual", "longer", seed, base - 0.3, steps=150),
        ]
    return found


def copied(name):
    """The records of ddl, copied under the name of another scheme."""
    rows = [r for r in records() if r["scheme"] == "ddl"]
    return [{**r, "scheme": name, "connection": name, "key": r["key"].replace("ddl", name)} for r in rows]


def changed(rows, change, **where):
    """The rows; those in which all of `where` holds have other values: `change(row)` returns them."""
    return [{**row, **change(row)} if where.items() <= row.items() else row for row in rows]


def without(rows, **where):
    """The rows, but not those in which all of `where` holds."""
    return [row for row in rows if not where.items() <= row.items()]


def costs():
    return [cost("residual", 1.0, 1000.0), cost("ddl", 1.5, 1000.0 * 1.5**0.5)]


def searched():
    """Return records of a search over all seeds, and its settings.

    One run of the lower rate copies, so that its mean of all labels is the best; the others are worse.
    """
    rates = {0.004: (4.2, [3.9, 2.0, 3.9]), 0.008: (4.0, [3.8, 3.8, 3.8])}
    runs = [
        {
            **record(scheme, "report", seed, loss, lr=rate),
            "split": [[100, 3.5, other]],
            "transition": 60.0 if loss < 3 else None,
        }
        for scheme in ("residual", "ddl")
        for rate, (other, losses) in rates.items()
        for seed, loss in zip((1, 2, 3), losses)
    ]
    return runs, {"over": {"train.lr": [0.004, 0.008]}, "rule": "all seeds", "runs": 2, "baseline_runs": 2}


def planted(runs=None, timed=None, **changes):
    """The results of the study with these changes, of these records and costs or the planted ones."""
    return results(study(**changes), records() if runs is None else runs, costs() if timed is None else timed)


def folder(place, runs=None, known=None):
    """Write the folder of the planted study."""
    place.mkdir(exist_ok=True)
    (place / "study.json").write_text(json.dumps(asdict(study())))
    (place / "settings.json").write_text(json.dumps({"title": "Planted", "data": "f" * 64}))
    kinds = {"records": records() if runs is None else runs, "costs": costs() if known is None else known}
    for name, rows in kinds.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def studies_of_the_page():
    """The files that docs/study.md shows, as texts: a first one, an own scheme, two sizes, a pretrained model."""
    page = (Path(__file__).parents[2] / "docs/study.md").read_text(encoding="utf-8")
    return blocks(page, "yaml")
