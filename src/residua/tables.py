"""Tables on a terminal."""

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns side by side, those of numbers to the right. Nothing is cut or wrapped, so that it can go into a pipe."""
    columns = [[name, "-" * len(name), *cells] for name, cells in zip(header, zip(*rows))]
    aligned = []
    for column in columns:
        width = max(map(len, column))
        column[1] = "-" * width
        number = all(cell[0] in "0123456789+-–—±" or cell == "baseline" for cell in column[2:] if cell)
        aligned.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    for line in zip(*aligned):
        print("  ".join(line).rstrip())
