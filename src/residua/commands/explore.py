"""The command `residua explore`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.commands.base import Arguments, Parser, add_checkpoint, add_data, add_json, print_json, whole
from residua.errors import InputError
from residua.records.table import print_table
from residua.records.terminal import one_line

if TYPE_CHECKING:
    from residua.lab.explorer.collect import Source

HELP = "see what connections do: tables, and a page to play, inspect trained ones and compare"
EXAMPLES = """\
residua explore
residua explore runs/residual runs/ddl runs/ddl-cc-ec --out runs.html
residua explore runs/ddl --prompt 'The function returns' --no-page
residua explore runs/ddl --all-checkpoints --json"""
PAGE = "explorer.html"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="RUN|TRACE|HF_DIR",
        help="folders of runs, of models (with --prompt, the first time), and traces, which are kept in them and not "
        "made again unless options say what to read; without any, the page has its simulations alone",
    )
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--out", metavar="FILE.html", help=f"the page to write (default: {PAGE}; none with --json)")
    page.add_argument("--no-page", action="store_true", help="print tables, and write no page")
    checkpoints = parser.add_mutually_exclusive_group()
    add_checkpoint(checkpoints)
    checkpoints.add_argument("--all-checkpoints", action="store_true", help="every checkpoint, one trace each")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the text to read; '' for a new document (default: the beginning of the run's validation data)",
    )
    add_data(parser)
    parser.add_argument(
        "--tokens",
        type=whole(),
        metavar="N",
        help="at most so many (default: the run's train.sequence_length, or the prompt)",
    )
    add_json(parser)


def run(arguments: Arguments) -> None:
    from residua.lab.explorer.collect import Reading, collect, page_of
    from residua.lab.explorer.page import write_page

    out = None if arguments.no_page or (arguments.json and arguments.out is None) else Path(arguments.out or PAGE)
    if out is None and not arguments.paths:
        raise InputError("RUN must be given, unless a page is written")
    if out is not None and out.is_dir():
        raise InputError(f"--out must be a file, got the folder {out}; write {out / PAGE}")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out must be a file in a folder that is there, got {out}; make {out.parent} first")
    reading = Reading(
        arguments.prompt, arguments.tokens, arguments.checkpoint, arguments.all_checkpoints, arguments.data
    )
    if reading.again and not arguments.paths:
        raise InputError("RUN must be given with --prompt, --data, --tokens and checkpoints")
    sources, comparison = collect(arguments.paths, reading)
    page = None if out is None else page_of(sources, comparison)
    traces = [trace for source in sources for trace in (*source.earlier, source)]
    if arguments.json:
        print_json([_record(source) for source in traces])
    else:
        for number, source in enumerate(traces):
            print("\n" * (number > 0), end="")
            _print(source)
    if out is not None and page is not None:
        page_file = write_page(out, *page)
        if not arguments.json:
            print(f"open in a browser: {page_file}")


def _record(source: "Source") -> dict[str, Any]:
    from residua.lab.inspection import sublayer_statistics, warnings

    return {
        "trace": source.file and str(source.file),
        **source.trace.facts,
        "warnings": warnings(source.trace),
        "sublayers": sublayer_statistics(source.trace),
    }


def _print(source: "Source") -> None:
    from residua.lab.inspection import overview, summary, warnings

    first, *lines = overview(source.trace)
    print(one_line(first))
    print_table(*summary(source.trace))
    for line in lines:
        print(one_line(line))
    for warning in warnings(source.trace):
        print(f"warning: {one_line(warning)}")
    if source.file is not None:
        print(f"trace: {source.file}")
