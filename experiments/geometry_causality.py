"""Whether the models of arXiv 2605.06729 see later inputs: the authors' own code, and ours, at the published sizes.

Each model is built with its own start and measured as a copy in float64: in four sequences the last input changes and
nothing else, and the record has the largest change of an earlier output, over the largest output. One JSON line for
each model, task and seed.

    python experiments/geometry_causality.py                  clone the authors' repository into runs/compliance
    python experiments/geometry_causality.py --code FOLDER    take this copy of it
"""

import argparse
import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from residua.lab.geometry.measure import causality
from residua.lab.geometry.models import match
from residua.lab.geometry.study import FULL
from residua.lab.records.provenance import circumstances

RECORD = Path(__file__).parent / "geometry" / "causality.jsonl"
REPOSITORY, COMMIT = "arash-shahmansoori/edelta", "783e727"
TASKS, SEEDS = ("gyroscope", "stability"), (42, 123, 456)
# The authors' name, the options of their training script that build it as published, their file, and our row.
MODELS = (
    ("GPT", "--model_type gpt2", "baseline_gpt.py", "residual"),
    ("DDL", "--model_type ddl", "ddl.py", "pooled-householder-sequence"),
    ("mHC", "--model_type mhc", "mhc.py", "mhc-split"),
    ("JPmHC", "--model_type jpmhc", "jpmhc.py", "jpmhc"),
    ("EΔ-MHC-Geo", "--model_type edelta", "edelta_hybrid.py", "edelta-sequence"),
    ("EΔ-Stream", "--model_type edelta_stream --n_embd 512", "edelta_stream.py", "edelta-stream:context=sequence"),
)


class Predictions(nn.Module):
    """The authors' model without the loss that it returns beside its predictions."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


def theirs(options: str, features: int, positions: int, seed: int) -> nn.Module:
    from src.training.train_continuous import create_model, get_args

    with patch.object(sys, "argv", ["train", "--match_proposed_params", *options.split()]):
        arguments = get_args()
    torch.manual_seed(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        return Predictions(create_model(arguments, features, positions))


def ours(name: str, features: int, length: int, seed: int) -> nn.Module:
    sizes = {"dim": FULL.dim, "layers": FULL.layers, "heads": FULL.heads}
    architecture = match(name, features=features, length=length, **sizes)
    torch.manual_seed(seed)
    return architecture.build()


def lines(code: Path) -> Iterator[dict[str, Any]]:
    for name, options, file, row in MODELS:
        digest = hashlib.sha256((code / "src" / "models" / file).read_bytes()).hexdigest()
        for task_name in TASKS:
            task = FULL.task(task_name)
            for seed in SEEDS:
                sizes = {"task": task_name, "features": task.dim, "inputs": task.length, "seed": seed}
                source = {"repository": REPOSITORY, "commit": COMMIT, "file": file, "sha256": digest}
                model = theirs(options, task.dim, task.length + 1, seed)
                yield {"whose": "authors", "model": name, **sizes, **measured(model, sizes), "source": source}
                model = ours(row, task.dim, task.length, seed)
                yield {"whose": "ours", "model": row, "published": name, **sizes, **measured(model, sizes)}


def measured(model: nn.Module, sizes: dict[str, Any]) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, **causality(model, sizes["features"], sizes["inputs"])._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, help=f"a copy of {REPOSITORY} at {COMMIT}")
    parser.add_argument("--out", type=Path, default=RECORD, help="write the lines to this file")
    arguments = parser.parse_args()
    code = arguments.code or clone()
    sys.path.insert(0, str(code))
    facts = circumstances(torch.device("cpu"))
    with arguments.out.open("w", encoding="utf-8") as record:
        for line in lines(code):
            record.write(json.dumps(line | facts, ensure_ascii=False) + "\n")
            print(f"{line['whose']:8} {line['model']:32} {line['task']:10} {line['causality_change']:.3g}", flush=True)


def clone() -> Path:
    from benchmarks.compliance import Implementation, cloned

    return cloned(Implementation("edelta", REPOSITORY, "src", "", "edelta", commit=COMMIT, paths=("src",)))


if __name__ == "__main__":
    main()
