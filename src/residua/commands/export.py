"""The command `residua export`."""

from residua.commands.base import Arguments, Parser, add_run

HELP = "write a run as a Hugging Face folder: weights, tokenizer, model card"
EXAMPLES = "residua export runs/ddl exported/ddl\nresidua export runs/ddl exported/ddl --remote-code"


def add_arguments(parser: Parser) -> None:
    add_run(parser)
    parser.add_argument("out", metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--remote-code",
        action="store_true",
        help="add the model's code: it then loads where residua is not installed (converted models: not imported)",
    )


def run(arguments: Arguments) -> None:
    from residua.lab.export import export, loading

    folder = export(arguments.run, arguments.out, checkpoint=arguments.checkpoint, remote_code=arguments.remote_code)
    print(f"load it with: {loading(folder, remote_code=arguments.remote_code)}")
