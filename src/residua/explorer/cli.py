"""The command `residua explore`."""

import argparse
from pathlib import Path

from residua.errors import InputError
from residua.explorer.collect import MOST_RUNS, collect
from residua.explorer.page import write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `residua explore`."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="RUN|TRACE",
        help=f"run folders and files written by residua analyze, at most {MOST_RUNS}; without any, what can be played "
        "with is on the page alone",
    )
    parser.add_argument(
        "--out", default="explorer.html", metavar="FILE.html", help="the page to write (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises InputError."""
    out = Path(arguments.out)
    if out.is_dir():
        raise InputError(f"--out: expected a file, got the folder {out}; write {out / 'explorer.html'}")
    if not out.parent.is_dir():
        raise InputError(f"--out: expected a file in a folder that is there, got {out}; make {out.parent} first")
    payload, arrays = collect(arguments.paths)
    print(f"open in a browser: {write_page(out, payload, arrays)}")
    return 0
