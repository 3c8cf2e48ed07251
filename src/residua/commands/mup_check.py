"""The command `residua mup-check`."""

from residua.commands.base import Arguments, Parser, add_json, number, print_json, whole
from residua.tables import print_table

HELP = "check that activations and their changes do not depend on the width under muP"
EXAMPLES = """\
residua mup-check
residua mup-check --connection residual --widths 64 128 256 --out mup.png"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--connection", default="ddl-tc", metavar="PRESET", help="the scheme (default: ddl-tc)")
    parser.add_argument(
        "--widths", type=whole(), nargs="+", default=[64, 128, 256, 512], metavar="N", help="multiples of 32"
    )
    parser.add_argument("--steps", type=whole(), default=4, metavar="N", help="steps of Adam (4)")
    parser.add_argument("--lr", type=number, default=0.01, metavar="X", help="at the smallest width (0.01)")
    parser.add_argument("--seeds", type=whole(), default=2, metavar="N", help="runs to average over (2)")
    parser.add_argument("--out", metavar="FILE.png", help="draw a picture")
    add_json(parser)


def run(arguments: Arguments) -> None:
    from residua.mup_check import check, draw, to_json

    found = check(
        arguments.connection,
        widths=arguments.widths,
        steps=arguments.steps,
        lr=arguments.lr,
        seeds=arguments.seeds,
    )
    if arguments.out is not None:
        draw(found, arguments.out)
    if arguments.json:
        print_json(to_json(found))
        return
    widths = list(found[0].change)
    rows = [
        [c.parameterisation, c.site, *(f"{c.change[w]:.4g}" for w in widths), f"{c.slope:+.2f}", c.verdict]
        for c in found
    ]
    print_table(["parameters", "activation", *map(str, widths), "slope", ""], rows)
    print(
        f"\nRoot mean square of the change of each activation in {arguments.steps} steps, by width; slope in log-log."
    )
    if arguments.out is not None:
        print(f"picture: {arguments.out}")
