"""The command `residua train`."""

import os
from pathlib import Path

from residua.commands.base import Arguments, Parser, stopped_by
from residua.errors import InputError

HELP = "train a language model into a run folder, or resume one"
EXAMPLES = """\
residua train --config tiny --run runs/residual
residua train --config tiny --model.connection ddl-cc --train.lr 2e-3 --run runs/ddl-cc
residua train --config tiny --config mine.yaml --run runs/mine
residua train --run runs/ddl-cc --resume
residua train --config tiny --print_config > mine.yaml
torchrun --nproc-per-node 8 --max-restarts 3 -m -- residua train --config small --run runs/small --train.parallel fsdp
"""


def add_arguments(parser: Parser) -> None:
    from residua.lab.training import add_config_arguments

    parser.usage = "residua train --run DIR [--config NAME|FILE.yaml ...] [--resume] [--print_config] [--KEY VALUE ...]"
    parser.add_argument(
        "--run",
        "--run-dir",
        metavar="DIR",
        help="a new folder for the run, or with --resume the folder of one; torchrun takes --run for an option of its "
        "own, unless -m -- stands before residua",
    )
    parser.add_argument("--resume", action="store_true", help="resume the run at its newest checkpoint")
    add_config_arguments(parser)


def run(arguments: Arguments) -> int:
    from residua.lab.training import load_config

    sources = arguments.config
    if sources is None and arguments.resume and arguments.run is not None:
        settings = Path(arguments.run) / "config.yaml"
        if not settings.is_file():
            raise InputError(f"{arguments.run} must be a run to resume, found no config.yaml; start one with --config")
        sources = [str(settings)]
    if sources is None and not arguments.print_config:
        raise InputError("give --config NAME|FILE.yaml for a new run, or --resume; residua train --help explains")
    config = load_config(sources, arguments.overrides)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return 0
    if arguments.run is None:
        raise InputError("give --run DIR, the folder for the run")

    from residua.lab import experiment
    from residua.lab.training.distributed import is_first
    from residua.records.threads import threads

    with threads(1 if config.small and "OMP_NUM_THREADS" not in os.environ else None):
        result = experiment.run(config, arguments.run, resume=arguments.resume)
    if result["interrupted"]:
        return stopped_by(result["signal"])
    if is_first():
        print(
            f"{arguments.run}: step {result['step']}, validation loss {result['val_loss']:.4f}, "
            f"{result['bits_per_byte']:.4f} bits per byte"
        )
    return 0
