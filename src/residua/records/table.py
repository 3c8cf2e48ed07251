"""Results as a table: groups of runs, their estimates over seeds, and text in rows and columns."""

import shutil
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from residua.records.statistics import Estimate
from residua.records.terminal import one_line

Run = TypeVar("Run")


@dataclass(frozen=True)
class Group(Generic[Run]):
    """Runs that differ in their seed alone, in the order of their seeds."""

    name: str
    runs: tuple[Run, ...]

    def estimate(self, quantity: Callable[[Run], float | None]) -> Estimate | None:
        """A quantity over the runs that have it; None where no run has it."""
        values = [value for value in map(quantity, self.runs) if value is not None]
        return Estimate.of(values) if values else None


def grouped(
    runs: Iterable[Run], identity: Callable[[Run], Hashable], seed: Callable[[Run], int]
) -> list[tuple[Run, ...]]:
    """Runs of equal identity together, in the order of their seeds; of several with one seed the last counts."""
    groups: dict[Hashable, dict[int, Run]] = {}
    for run in runs:
        groups.setdefault(identity(run), {})[seed(run)] = run
    return [tuple(group[number] for number in sorted(group)) for group in groups.values()]


class Table(NamedTuple):
    """A header and rows, as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self, numbers: int = 0) -> str:
        """Return the table in Markdown, its last `numbers` columns aligned to the right; a bar in a cell stays text."""
        rule = [*["---"] * (len(self.header) - numbers), *["---:"] * numbers]
        lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (self.header, rule, *self.rows))
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(value: object) -> str:
    """Return a value as a table shows it: whole numbers with separators."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, numbers right-aligned. A pipe gets all of it; a terminal that is too narrow for a row gets
    a paragraph for each row."""
    header, rows = [one_line(name) for name in header], [[one_line(cell) for cell in row] for row in rows]
    lines = _aligned(header, rows)
    if sys.stdout.isatty() and max(map(len, lines)) > shutil.get_terminal_size().columns:
        lines = _stacked(header, rows)
    print("\n".join(lines))


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    aligned = []
    for name, *cells in zip(header, *rows):
        width = max(map(len, (name, *cells)))
        number = all(cell[0] in "0123456789+-–—±" or cell == "baseline" for cell in cells if cell)
        column = [name, "-" * width, *cells]
        aligned.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*aligned)]


def _stacked(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a paragraph for each row: its first cell, and below it the others that are not empty, with their names."""
    width = max(map(len, header))
    lines = []
    for first, *others in rows:
        lines += [first, *(f"  {name:{width}}  {cell}" for name, cell in zip(header[1:], others) if cell), ""]
    return lines[:-1]
