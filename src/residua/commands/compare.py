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


def compare(
    runs: tuple[str, ...], *, baseline: str | None = None, out: Path | None = None, published: bool = False
) -> Output:
    """Compare runs over seeds with a baseline, as a table and as pictures.

    Examples:
        residua compare runs/residual-* runs/ddl-*
        residua compare runs/a runs/b --baseline residual --out figures/
        residua compare runs/small-ddl-tc --published --out figures/

    Args:
        runs (RUN): folders of runs
        baseline: a name from the table, or a scheme (default: the plain residual)
        out (DIR): write the pictures, comparison.md and comparison.json here
        published: show the DDL paper's losses at the same tokens, and with --out draw its curves beside the runs'
    """
    if out is not None:
        with extra("lab"):  # raises before any run is read
            import_module("matplotlib")
    from residua.lab.evaluation.compare import compare

    comparison = compare(runs, baseline=baseline)
    record, parts, files = comparison.to_json(), compared(comparison), []
    if published:
        record["published"], beside = _published(comparison)
        parts += beside
    if out is not None:
        from residua.files.durable import write_text
        from residua.lab.evaluation.plots import draw, draw_published

        files = [*draw(comparison, out), *(draw_published(comparison, out) if published else [])]
        files += [out / "comparison.md", out / "comparison.json"]
        write_text(out / "comparison.md", comparison.to_markdown())
        write_text(out / "comparison.json", dumps(record, indent=2) + "\n")
    return Output(record, [*parts, *(f"written: {path}" for path in files)])


def _published(comparison: "Comparison") -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the published losses at the tokens of every run, as plain values and as parts to print."""
    from residua.lab.evaluation.compare import published_losses

    rows = published_losses(comparison)
    header = ["run", "tokens", "validation loss", "published there", "residual there", "published curve"]
    cells = [
        [row["run"], f"{row['tokens']:,}"]
        + [_loss(row[key]) for key in ("val_loss", "published_loss", "published_residual_loss")]
        + [row["published"] or "none of this scheme"]
        for row in rows
    ]
    notes = ["note: published losses are of one seed each, on the paper's own validation text"]
    if others := [row["run"] for row in rows if not row["same_size"]]:
        notes.append(
            f"note: no published model has the size of {', '.join(others)}; their losses are shown beside those of 124M"
        )
    return rows, ["", (header, cells), *map(one_line, notes)]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def compared(comparison: "Comparison") -> list[Any]:
    """Return the parts of a comparison to print: the table, the settings in which runs differ, and the notes."""
    settings = [*map(one_line, comparison.setting_lines())]
    heading = ["settings that differ:"] if settings else []
    notes = (f"note: {one_line(note)}" for note in comparison.notes)
    return [comparison.table(), *heading, *settings, *notes]
