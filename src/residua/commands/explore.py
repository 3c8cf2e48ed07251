"""The command `residua explore`."""

from pathlib import Path
from typing import Any

from residua.commands.base import CheckpointChoice, expect_path
from residua.commands.signature import Output
from residua.errors import InputError, require


def explore(
    paths: tuple[str, ...] = (),
    *,
    out: str | None = None,
    no_page: bool = False,
    json: bool = False,
    prompt: str | None = None,
    tokens: int | None = None,
    checkpoint: CheckpointChoice | None = None,
    data: str | None = None,
) -> Output:
    """Show the connections at work, as tables and as a page to play with.

    Examples:
        residua explore
        residua explore runs/residual runs/ddl runs/ddl-cc-ec --out runs.html
        residua explore runs/ddl --prompt 'The function returns' --no-page
        residua explore runs/ddl --checkpoint best --json

    Args:
        paths (RUN|TRACE|HF_DIR): folders of runs, folders of models (with --prompt), and traces. The trace of a run is
            saved in its folder unless prompt, tokens or data says what to read, and used again if no option below is
            given. Without paths, the page has only simulations
        out (FILE.html): the page to write (default: explorer.html, or none with --json)
        no_page: print tables, and write no page
        json: print JSON instead of a table

    What to read:
        prompt (TEXT): '' for a new document (default: the beginning of the run's validation data)
        tokens: the largest number of tokens (default: the run's train.sequence_length, or the whole prompt)
        checkpoint (STEP|best): the newest by default; best has the lowest validation loss of the kept ones
        data (DIR): the run's prepared data, if they have moved
    """
    page_file = _page_file(out, no_page, json)
    for path in paths:
        expect_path(path, "a run folder or a trace")
    from residua.lab.explorer.collect import Reading, collect, page_of
    from residua.lab.explorer.page import write_page

    reading = Reading(prompt, tokens, checkpoint, data)
    if not paths and (page_file is None or reading.again):
        raise InputError("RUN must be given, unless a page without runs is written")
    sources, comparison = collect(paths, reading)
    page = None if page_file is None else page_of(sources, comparison)
    parts: list[Any] = []
    for source in sources:
        parts += [*([""] if parts else []), *source.parts()]
    if page_file is not None and page is not None:
        parts.append(f"open in a browser: {write_page(page_file, *page)}")
    return Output([source.to_json() for source in sources], parts)


def _page_file(out: str | None, no_page: bool, json: bool) -> Path | None:
    """Return the path of the page to write; None if no page is wanted."""
    if out is not None and no_page:
        raise InputError("--out is not allowed with --no-page")
    if no_page or (json and out is None):
        return None
    from residua.lab.explorer.page import PAGE

    file = Path(out or PAGE)
    require(not file.is_dir() and file.parent.is_dir(), "--out", "a file in a folder that exists", out)
    return file
