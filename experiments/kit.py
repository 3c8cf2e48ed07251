"""Our own connections in our own kit: every preset, every index, in stacks of 4, 8 and 12 sublayers of two widths.

The kit must accept what is right. One JSON line for each preset, number of sublayers and width: how many modules were
checked, the stack and every connection, how often each check passed, and the reasons where one did not. Lines that the
record has are kept: delete it to begin again.

    python experiments/kit.py
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.connections import PRESETS, Scheme
from residua.lab.records.provenance import circumstances
from residua.testing import SPECIFICATION, ConnectionAdapter, StreamAdapter
from residua.testing.checks import run
from residua.testing.module import CHECKS

RECORD = Path(__file__).with_name("kit.jsonl")
SUBLAYERS, WIDTHS = (4, 8, 12), (16, 24)


class OurStack(StreamAdapter):
    def __init__(self, scheme: Scheme, dim: int, num_sublayers: int):
        self.scheme, self.dim, self.num_sublayers = scheme, dim, num_sublayers

    def build(self, dim: int, num_sublayers: int) -> nn.Module:
        return self.scheme.build(dim, num_sublayers)

    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return ours

    def forward(self, module: nn.Module, x: Tensor, sublayers: list) -> Tensor:
        return module(x, sublayers)


class OurConnection(ConnectionAdapter):
    def __init__(self, scheme: Scheme, dim: int, num_sublayers: int, index: int):
        self.scheme, self.dim, self.num_sublayers, self.index = scheme, dim, num_sublayers, index

    def build(self, dim: int) -> nn.Module:
        return self.scheme.build(dim, self.num_sublayers).connections[self.index]

    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return ours

    def connect(self, module: nn.Module, state: Any, sublayer: Any) -> Any:
        return module(state, sublayer)


def checked(name: str, count: int, dim: int) -> dict[str, Any]:
    """Return the line of a preset as a stack of `count` sublayers of width `dim`."""
    scheme = PRESETS[name]
    adapters = {"stack": OurStack(scheme, dim, count)}
    adapters |= {f"connection {i}": OurConnection(scheme, dim, count, i) for i in range(count)}
    reports = {part: run(CHECKS, adapter) for part, adapter in adapters.items()}
    failed = {part: report.failed for part, report in reports.items() if report.failed}
    passed = Counter(check for report in reports.values() for check in report.passed)
    not_checked = Counter(reason for report in reports.values() for reason in report.not_checked.values())
    return {
        "preset": name,
        "sublayers": count,
        "dim": dim,
        "modules": len(reports),
        "passed": passed,
        "not_checked": not_checked,
        "failed": failed,
        "specification": SPECIFICATION,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD, help="append the lines to this file")
    out = parser.parse_args().out
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines() if out.exists() else [])
    done = {(line["preset"], line["sublayers"], line["dim"]) for line in lines}
    for count, dim, name in product(SUBLAYERS, WIDTHS, PRESETS):
        if (name, count, dim) not in done:
            line = checked(name, count, dim) | circumstances(torch.device("cpu"))
            with out.open("a", encoding="utf-8") as record:
                record.write(json.dumps(line) + "\n")
            print(f"{name:20} {count:3} {dim:3} {len(line['failed'])} of {line['modules']} modules fail", flush=True)


if __name__ == "__main__":
    main()
