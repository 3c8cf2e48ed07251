"""The command `residua compare`."""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from residua.commands.base import Arguments, Parser, add_json, print_json
from residua.errors import extra
from residua.records.table import print_table
from residua.records.terminal import one_line

if TYPE_CHECKING:
    from residua.lab.evaluation.compare import Comparison

HELP = "compare runs over seeds with a baseline, as a table and as pictures"
EXAMPLES = """\
residua compare runs/residual-* runs/ddl-*
residua compare runs/a runs/b --baseline 'residual train.lr=0.002' --out figures/"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--baseline", metavar="NAME", help="a name from the table (default: the plain residual)")
    parser.add_argument("--out", metavar="DIR", help="write the pictures, comparison.md and comparison.json here")
    add_json(parser)


def run(arguments: Arguments) -> None:
    if arguments.out is not None:
        with extra("lab"):  # raises before any run is read
            import_module("matplotlib")
    from residua.lab.evaluation.compare import compare

    comparison = compare(arguments.runs, baseline=arguments.baseline)
    files = []
    if arguments.out is not None:
        from residua.lab.evaluation.plots import draw
        from residua.records.durable import write_text

        out = Path(arguments.out)
        files = [*draw(comparison, out), out / "comparison.md", out / "comparison.json"]
        write_text(out / "comparison.md", comparison.to_markdown())
        write_text(out / "comparison.json", json.dumps(comparison.to_json(), indent=2) + "\n")
    if arguments.json:
        print_json(comparison.to_json())
        return
    print_comparison(comparison)
    for path in files:
        print(f"written: {path}")


def print_comparison(comparison: "Comparison") -> None:
    print_table(*comparison.table())
    for note in comparison.notes:
        print(f"note: {one_line(note)}")
