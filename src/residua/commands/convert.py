"""The command `residua convert`."""

from residua.commands.base import Arguments, Parser
from residua.connections.names import canonical

HELP = "give a pretrained model another residual connection, and write it as a folder"
EXAMPLES = (
    "residua convert models/smollm2 --connection ihc --out models/smollm2-ihc\n"
    "residua convert models/llama --connection ddl-tc --start fresh --out models/llama-ddl"
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with a model of transformers and its tokenizer")
    parser.add_argument("--connection", required=True, metavar="NAME", help="a scheme; residua schemes lists them")
    parser.add_argument(
        "--remote-code",
        action="store_true",
        help="let trust_remote_code=True open it, wherever residua is installed, without import residua",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--start",
        choices=("preserve", "fresh"),
        default="preserve",
        help="preserve: the model computes what it computed before; fresh: connections start as in a new model",
    )


def run(arguments: Arguments) -> None:
    connection = canonical(arguments.connection)  # raises before torch is imported
    from residua.conversion.convert_model import convert
    from residua.lab.experiment import open_model
    from residua.lab.export import add_code, loading, model_folder
    from residua.records.folder import new_folder

    out = new_folder(arguments.out, "--out")
    model, tokenizer = open_model(arguments.model, device="cpu")
    size = model.num_parameters()
    convert(model, connection, start=arguments.start)
    growth = model.num_parameters() - size
    with model_folder(out) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if arguments.remote_code:
            add_code(temporary)
    print(f"{out}: {type(model).__name__} with {connection}, {growth:,} parameters more than {size:,}")
    print(f"load it with: {loading(out, remote_code=arguments.remote_code)}")
