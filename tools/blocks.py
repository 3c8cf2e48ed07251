"""Write tables and sentences that are made from records into pages.

A page has each of them between two markers: `<!-- NAME: SCRIPT -->` and `<!-- /NAME -->`.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 140
Blocks = Mapping[str, Callable[[], str]]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def filled(page: str, script: str, blocks: Blocks) -> str:
    """Return the text of a page with everything between the markers of a script made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, made in blocks.items():
        pattern = rf"(<!-- {name}: {script} -->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda match: f"{match[1]}{made()}\n{match[2]}", text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise SystemExit(f"{page} must have the markers of {name} once, found them {count} times")
    return text


def update(script: str, pages: Mapping[str, Blocks], *, write: bool) -> int:
    """Write the pages of a script, or say which differ from the records; return the exit status."""
    status = 0
    for page, blocks in pages.items():
        path, made = ROOT / page, filled(page, script, blocks)
        if write:
            path.write_text(made, encoding="utf-8")
        elif made != path.read_text(encoding="utf-8"):
            print(f"{page} differs from the records; run python {script} --write", file=sys.stderr)
            status = 1
    return status


def templates(path: Path) -> dict[tuple[str, str], str]:
    """Return the sections of a file of sentences by page and name: `## PAGE NAME`, then text with numbers in braces."""
    text = path.read_text(encoding="utf-8")
    sections = re.split(r"^## (\S+) (\S+)\n", text, flags=re.MULTILINE)[1:]
    return {(page, name): body.strip() for page, name, body in zip(sections[::3], sections[1::3], sections[2::3])}


def pages_of(path: Path, number: Callable[[str], str]) -> dict[str, Blocks]:
    """Return the blocks of the pages for which `path` has sentences.

    number: returns what a pair of braces stands for
    """
    pages: dict[str, dict[str, Callable[[], str]]] = {}
    for (page, name), text in templates(path).items():
        pages.setdefault(page, {})[name] = partial(sentences, text, number)
    return pages


def sentences(text: str, number: Callable[[str], str]) -> str:
    """Return a section, its numbers filled in, wrapped anew: an item of a list, nested or not, under its first word."""
    text = re.sub(r"\{([^{}]+)\}", lambda field: number(field[1]), text)
    return "\n\n".join(
        part if part.startswith("|") else "\n".join(wrapped(item) for item in re.split(r"\n(?= *- |\d+\. )", part))
        for part in text.split("\n\n")
    )


def wrapped(text: str) -> str:
    begin = re.match(r"( *)(- |\d+\. )?", text)
    indents = {"initial_indent": begin[1], "subsequent_indent": " " * len(begin[0])}
    words = " ".join(text.split()).replace(" ± ", "\0±\0").replace(" %", "\0%")  # stay in one line
    return "\n".join(textwrap.wrap(words, WIDTH, **indents, break_long_words=False, break_on_hyphens=False)).replace(
        "\0", " "
    )
