"""The results that the explorer shows, lab/explorer/results.json, from the published numbers and our records.

python experiments/explorer_results.py                 exit status 1 if the file says anything else
python experiments/explorer_results.py --write         write it
python experiments/explorer_results.py --references    measure the references at the published sizes first (20 s)

Published numbers, ours and references keep their source in every row and are never averaged; published sizes and ours
are groups of their own, because no number of one can be compared with one of the other.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from residua.lab.geometry.published import README, RESEARCH, published
from residua.lab.geometry.references import references
from residua.lab.geometry.tasks import TASKS, task
from residua.lab.records.provenance import circumstances

HERE = Path(__file__).parent
RESULTS = HERE.parent / "src" / "residua" / "lab" / "explorer" / "results.json"
REFERENCES = HERE / "geometry" / "references.jsonl"

RESEARCH_PAGE = "https://github.com/arash-shahmansoori/edelta/blob/783e727/docs/RESEARCH.md"
SOURCES = {
    "published": {"label": "published", "text": README, "url": "https://arxiv.org/abs/2605.06729"},
    "research": {"label": "published", "text": RESEARCH, "url": RESEARCH_PAGE},
    "quick": {
        "label": "ours",
        "text": "reduced sizes, two seeds: experiments/geometry/quick/tables.md",
        "command": "residua study geometry quick",
    },
    "reflection": {
        "label": "ours",
        "text": "single operators, three seeds: experiments/geometry/reflection/tables.md",
        "command": "residua study geometry reflection",
    },
    "reference": {
        "label": "reference",
        "text": "follows from the task, untrained: experiments/geometry/references.jsonl and the tables of ours",
        "command": "python experiments/explorer_results.py --references --write",
    },
}
# name, title, task, measured, what is asked
VIEWS = (
    ("stability", "Stability", "stability", "loss", "Say again a constant vector that is seen through a little noise."),
    ("gyroscope", "Gyroscope", "gyroscope", "loss", "Go on with a rotation whose plane and angle have to be found."),
    ("norm-deviation", "Norm deviation", "stability", "norm_deviation",
     "How far from 1 the mean norm of the outputs is, on unrelated unit vectors, after training on stability."),
    ("near-pi", "Near π, one plane", "near-pi", "loss", "Apply one fixed rotation by 177.6° in one plane."),
    ("near-pi-multi", "Near π, every plane", "near-pi-multi", "loss",
     "Apply one fixed rotation by 179.9° in every plane: almost −x."),
    ("reflection", "Reflection", "reflection", "cosine", "Learn y = −x from 500 vectors; cosine with −x, 1 is right."),
)  # fmt: skip
MEASURES = {"loss": "mean squared error", "norm_deviation": "deviation of the norm from 1", "cosine": "cosine with −x"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row(name: str, kind: str, source: str, value: Any, causal: bool | None, seeds: int | None, parameters: int | None):
    """One row of the page; a value is (mean, standard deviation or None, ...)."""
    mean, deviation = (None if number is None else float(f"{number:.6g}") for number in value[:2])
    return {"name": name, "kind": kind, "source": source, "mean": mean, "deviation": deviation, "causal": causal,
            "seeds": seeds, "parameters": parameters}  # fmt: skip


def published_rows(name: str, measure: str) -> list[dict[str, Any]]:
    """The published rows and the references at the same sizes."""
    rows = []
    for entry in published(name):
        if entry.get(measure) is None:
            continue
        source = "research" if measure == "norm_deviation" else "published"
        seeds = None if measure == "norm_deviation" else entry["seeds"]  # nothing is said of them there
        rows.append(
            row(entry["label"], "published", source, entry[measure], entry["causal"], seeds, entry.get("parameters"))
        )
    found = [one for one in lines(REFERENCES) if one["task"] == name and one.get(measure) is not None]
    return rows + [
        row(one["label"], "reference", "reference", (one[measure], None), one["causal"], None, None) for one in found
    ]


def our_rows(study: str, name: str, measure: str) -> list[dict[str, Any]]:
    """The rows of a study of ours, with the references of the same data."""
    rows = []
    tables = json.loads((HERE / "geometry" / study / "tables.json").read_text(encoding="utf-8"))
    for entry in tables["tasks"][name]:
        if entry["source"] not in ("ours", "reference") or entry.get(measure) is None:
            continue
        source = study if entry["source"] == "ours" else "reference"
        value = entry[measure]["mean"], entry[measure]["std"]
        rows.append(row(entry["name"], entry["source"], source, value, entry["causal"], entry.get("seeds"),
                        entry.get("parameters")))  # fmt: skip
    return rows


def results() -> dict[str, Any]:
    views = []
    for name, title, asked, measure, what in VIEWS:
        groups = [{"title": "Published sizes", "rows": published_rows(asked, measure)}]
        if asked == "reflection":
            groups.append({"title": "Ours, at the published size", "rows": our_rows("reflection", asked, measure)})
            groups.append({"title": "Ours, whole models, reduced", "rows": our_rows("quick", asked, measure)})
        else:
            groups.append({"title": "Ours, reduced sizes", "rows": our_rows("quick", asked, measure)})
        views.append({"name": name, "title": title, "measure": MEASURES[measure], "log": measure != "cosine",
                      "least": measure != "cosine", "what": what, "groups": groups})  # fmt: skip
    return {"sources": SOURCES, "views": views}


def text() -> str:
    return json.dumps(results(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def measure_references() -> None:
    kept = ("task", "model", "label", "causal", "loss", "cosine")
    found = [{key: one[key] for key in kept if key in one} for name in TASKS for one in references(task(name))]
    shared = {"facts": circumstances(torch.device("cpu"))}
    REFERENCES.write_text("".join(json.dumps(one | shared, ensure_ascii=False) + "\n" for one in found), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--references", action="store_true", help="measure the references first")
    arguments = parser.parse_args()
    if arguments.references:
        measure_references()
    if arguments.write:
        RESULTS.write_text(text(), encoding="utf-8")
    elif RESULTS.read_text(encoding="utf-8") != text():
        print(f"{RESULTS.name} does not say what the records say: {Path(__file__).name} --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
