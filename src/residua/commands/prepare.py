"""The command `residua prepare`."""

from residua.commands.base import Arguments, Parser, add_json, number, print_json, whole
from residua.records.table import cell, print_table

HELP = "turn text into tokens on disk"
EXAMPLES = """\
residua prepare --source stdlib --out data/stdlib
residua prepare --source my-texts/ --out data/mine --vocab-size 8192
residua prepare --source fineweb-edu --sample 100BT --tokenizer gpt2 --out data/fineweb-edu
residua prepare --source hf:OWNER/NAME/CONFIG:train --text-column content --tokenizer gpt2 --out data/theirs"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--source",
        required=True,
        metavar="TEXT",
        help="stdlib (the documentation inside this Python), a file or folder of .txt, .md, .jsonl or .parquet, "
        "fineweb-edu, or hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT], a data set of the hub",
    )
    parser.add_argument(
        "--sample", metavar="10BT|100BT|350BT", help="the part of fineweb-edu, in billions of tokens (default: 10BT)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        metavar="bpe|byte|gpt2|DIR",
        help="trained here, bytes, GPT-2's, a saved one, or hf:OWNER/NAME from the hub (default: bpe)",
    )
    parser.add_argument(
        "--vocab-size",
        type=whole(high=2**24),
        default=2048,
        metavar="N",
        help="entries of a trained tokenizer (default: 2048)",
    )
    parser.add_argument(
        "--text-column", default="text", metavar="NAME", help="of parquet, JSON lines and data sets (default: text)"
    )
    parser.add_argument(
        "--validation-fraction", type=number, metavar="X", help="share of the text held out (default: 0.05)"
    )
    parser.add_argument(
        "--validation-tokens",
        type=whole(),
        metavar="N",
        help="hold out the first N tokens instead (default for fineweb-edu: 100 million)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=whole(),
        default=100_000_000,
        metavar="N",
        help="tokens in a file (default: 100 million)",
    )
    parser.add_argument(
        "--workers",
        type=whole(1, 1024),
        metavar="N",
        help="processes that tokenize (default: one for each core where the text is large)",
    )
    add_json(parser)


def run(arguments: Arguments) -> None:
    from residua.lab.data import prepare

    data = prepare(
        arguments.source,
        arguments.out,
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        validation_fraction=arguments.validation_fraction,
        validation_tokens=arguments.validation_tokens,
        shard_tokens=arguments.shard_tokens,
        text_column=arguments.text_column,
        sample=arguments.sample,
        workers=arguments.workers,
    )
    if arguments.json:
        print_json({"folder": str(data.folder), **data.facts})
        return
    print_table(["what", "value"], [["folder", str(data.folder)], *([k, cell(v)] for k, v in data.facts.items())])
    print(f"train on it with: residua train --config tiny --data.path {arguments.out} --run DIR")
