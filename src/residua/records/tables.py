"""Tables on a terminal."""

from collections.abc import Sequence

from residua.records.terminal import one_line


def cell(value: object) -> str:
    """Return a value as a table shows it: whole numbers with separators."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, numbers right-aligned. Nothing is cut or wrapped, so a pipe gets all of it."""
    columns = [[name, "-" * len(name), *map(one_line, cells)] for name, cells in zip(map(one_line, header), zip(*rows))]
    aligned = []
    for column in columns:
        width = max(map(len, column))
        column[1] = "-" * width
        number = all(cell[0] in "0123456789+-–—±" or cell == "baseline" for cell in column[2:] if cell)
        aligned.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    for line in zip(*aligned):
        print("  ".join(line).rstrip())
