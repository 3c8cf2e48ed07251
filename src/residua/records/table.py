"""Results as a table: groups of runs, their estimates over seeds, and text in rows and columns."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from residua.records.statistics import Estimate

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
