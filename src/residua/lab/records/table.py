"""Results as a table: runs grouped by an identity, and text in rows and columns."""

import shutil
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from residua.lab.records.terminal import markdown_text, one_line

Member = TypeVar("Member")


def grouped(
    runs: Iterable[Member], identity: Callable[[Member], Hashable], seed: Callable[[Member], int]
) -> list[tuple[Member, ...]]:
    """Group runs of equal identity, sorted by seed; of runs with the same seed only the last counts."""
    groups: dict[Hashable, dict[int, Member]] = {}
    for run in runs:
        groups.setdefault(identity(run), {})[seed(run)] = run
    return [tuple(group[number] for number in sorted(group)) for group in groups.values()]


class Table(NamedTuple):
    """A header and rows, as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self, numbers: int = 0) -> str:
        """Return the table in Markdown, with its last `numbers` columns aligned right and markup in cells escaped."""
        rule = [*["---"] * (len(self.header) - numbers), *["---:"] * numbers]
        lines = (
            [markdown_text(cell).replace("|", "\\|") for cell in cells] for cells in (self.header, rule, *self.rows)
        )
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(value: object) -> str:
    """Format a value for a table: whole numbers with thousands separators."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, with numbers right-aligned.

    A pipe gets all columns side by side. On a narrow terminal they are split into tables that repeat the first column.
    """
    header, rows = [one_line(name) for name in header], [[one_line(cell) for cell in row] for row in rows]
    first, *others = _aligned(header, rows)
    tables = [[first]]
    for column in others:
        width = sum(len(cells[0]) + 2 for cells in tables[-1]) + len(column[0])
        if sys.stdout.isatty() and width > shutil.get_terminal_size().columns and len(tables[-1]) > 1:
            tables.append([first])
        tables[-1].append(column)
    print("\n\n".join("\n".join("  ".join(line).rstrip() for line in zip(*columns)) for columns in tables))


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the columns, each with its name, a rule and its cells, padded to the same width."""
    columns = []
    for name, *cells in zip(header, *rows):
        width = max(map(len, (name, *cells)))
        number = all(cell[0] in "0123456789+-–—±" or cell == "baseline" for cell in cells if cell)
        column = [name, "-" * width, *cells]
        columns.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    return columns
