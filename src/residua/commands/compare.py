"""The command `residua compare`."""

from importlib import import_module
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.commands.signature import Output
from residua.errors import extra
from residua.lab.records.terminal import one_line

if TYPE_CHECKING:
    from residua.lab.evaluation.compare import Comparison


def compare(runs: tuple[str, ...], *, baseline: str | None = None, out: Path | None = None) -> Output:
    """Compare runs over seeds with a baseline, as a table and as pictures.

    Examples:
        residua compare runs/residual-* runs/ddl-*
        residua compare runs/a runs/b --baseline residual --out figures/

    Args:
        runs (RUN): folders of runs
        baseline: a name from the table, or a scheme (default: the plain residual)
        out (DIR): write the pictures, comparison.md and comparison.json here
    """
    if out is not None:
        with extra("lab"):  # raises before any run is read
            import_module("matplotlib")
    from residua.lab.evaluation.compare import compare

    comparison = compare(runs, baseline=baseline)
    files = []
    if out is not None:
        from residua.files.durable import write_text
        from residua.lab.evaluation.plots import draw

        files = [*draw(comparison, out), out / "comparison.md", out / "comparison.json"]
        write_text(out / "comparison.md", comparison.to_markdown())
        write_text(out / "comparison.json", dumps(comparison.to_json(), indent=2) + "\n")
    return Output(comparison.to_json(), [*compared(comparison), *(f"written: {path}" for path in files)])


def compared(comparison: "Comparison") -> list[Any]:
    """Return the table, the settings in which the runs differ, and the notes of a comparison."""
    settings = map(one_line, comparison.setting_lines())
    notes = (f"note: {one_line(note)}" for note in comparison.notes)
    return [comparison.table(), *settings, *notes]
