"""The command `residua demo`."""

import shlex
import textwrap

from residua.commands.base import INTERRUPTED, Arguments, Parser, fail, whole
from residua.commands.compare import print_comparison

HELP = "train the plain residual, ddl-tc and its control side by side and compare them"
EXAMPLES = "residua demo\nresidua demo --steps 50 --out runs/quick"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="folder of the runs (default: runs/demo)")
    parser.add_argument(
        "--steps", type=whole(), metavar="N", help="training steps of each run (default: as in the recipes)"
    )


def run(arguments: Arguments) -> int:
    try:
        from residua.lab.demo import demonstrate

        result = demonstrate(arguments.out, steps=arguments.steps)
    except KeyboardInterrupt:
        steps = [] if arguments.steps is None else ["--steps", str(arguments.steps)]
        command = shlex.join(["residua", "demo", "--out", arguments.out, *steps])
        return fail(f"interrupted; resume with: {command}", INTERRUPTED)
    print_comparison(result.comparison)
    for path in result.pictures:
        print(f"picture: {path}")
    print(f"open in a browser: {result.page}")
    for name, text in result.texts.items():
        print(f"\n{name} writes:")
        print("\n".join(f"  {line}" for line in textwrap.wrap(text, 100)[:3]))
    return 0
