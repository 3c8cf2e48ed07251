"""Tables and foreign text on a terminal."""

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, numbers right-aligned. Nothing is cut or wrapped, so a pipe gets all of it."""
    columns = [[name, "-" * len(name), *map(plain, cells)] for name, cells in zip(map(plain, header), zip(*rows))]
    aligned = []
    for column in columns:
        width = max(map(len, column))
        column[1] = "-" * width
        number = all(cell[0] in "0123456789+-–—±" or cell == "baseline" for cell in column[2:] if cell)
        aligned.append([cell.rjust(width) if number else cell.ljust(width) for cell in column])
    for line in zip(*aligned):
        print("  ".join(line).rstrip())


def plain(text: str, keep: str = "") -> str:
    """Return text in one line that cannot steer a terminal: control characters other than `keep` are written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else " " if c.isspace() else ascii(c)[1:-1] for c in text)
