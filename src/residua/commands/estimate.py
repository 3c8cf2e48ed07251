"""The command `residua estimate`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from residua.commands.base import Arguments, Parser, add_json, print_json, whole
from residua.errors import InputError
from residua.tables import print_table

if TYPE_CHECKING:
    from residua.estimate import Estimate

HELP = "what a run will cost: parameters, FLOPs, memory per GPU"
EXAMPLES = """\
residua estimate --config small --model.connection ddl-tc --gpus 4 --gpu h200
residua estimate --config medium --gpus 8 --train.parallel fsdp --json"""
GIB = 2**30


def add_arguments(parser: Parser) -> None:
    from residua.training import add_config_arguments

    parser.usage = (
        "residua estimate --config NAME|FILE.yaml [--gpus N] [--gpu NAME] [--json] [--print_config] [--KEY VALUE ...]"
    )
    parser.add_argument("--gpus", type=whole(high=2**20), default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument("--gpu", default="h200", metavar="NAME", help="h200, h100, b200, a100 or rtx4090 (h200)")
    add_json(parser)
    add_config_arguments(parser)


def run(arguments: Arguments) -> None:
    from residua.training import load_config

    if arguments.config is None and not arguments.print_config:
        raise InputError("expected --config NAME|FILE.yaml, the run to estimate; residua estimate --help explains")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return

    from residua.estimate import estimate
    from residua.experiment import expected_vocabulary

    vocab_size = expected_vocabulary(config)
    found = estimate(config, vocab_size=vocab_size, gpu=arguments.gpu, gpus=arguments.gpus)
    if arguments.json:
        print_json(asdict(found))
    else:
        _print(found)


def _print(found: "Estimate") -> None:
    print_table(["parameters", ""], [[name, f"{count:,}"] for name, count in found.parameters.items()])
    print()
    print_table(["MFLOP per token", ""], [[name, f"{x / 1e6:,.1f}"] for name, x in found.flops_per_token.items()])
    print()
    ways = list(found.memory)
    header = ["GiB per GPU", *(f"states: {way}" for way in ways)]
    rows = [[part, *(f"{found.memory[way][part] / GIB:.2f}" for way in ways)] for part in found.memory[ways[0]]]
    rows.append(["largest batch_size", *(f"{found.largest_batch_size[way]}" for way in ways)])
    print_table(header, rows)
    print()
    print(f"{found.tokens / 1e9:.3g} billion tokens, {found.tokens * sum(found.flops_per_token.values()):.3g} FLOPs")
    print()
    for line in found.assumptions:
        print(f"assumed: {line}")
    if all(found.memory[way]["total"] > found.gpu_memory for way in ways):
        print(f"note: this does not fit into {found.gpu_memory / GIB:.0f} GiB; lower train.batch_size")
