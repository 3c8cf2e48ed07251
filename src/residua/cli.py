"""The command `residua`: a table of commands, each a few lines around the library.

Modules that take long to import are imported by the command that uses them, so that `residua --help` is quick.
"""

import argparse
import importlib
import json
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from residua import __version__
from residua.errors import InputError, ReportedElsewhere, RunError, extra
from residua.tables import print_table

Arguments = argparse.Namespace
INTERRUPTED = 130


class Command(NamedTuple):
    """One row of the table: what the overview and `--help` say, the arguments, and what is done with them.

    `run` returns an exit status, None for 0.
    """

    help: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 for a failure at run time, 2 for bad input, 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        status = _dispatch(argv) or 0
        sys.stdout.flush()
        return status
    except InputError as error:
        return _fail(error, 2)
    except ReportedElsewhere as error:
        return error.status
    except ModuleNotFoundError as error:
        return _fail(_with_what_suffices(str(error), argv[0]), 1)
    except RunError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        # The reader of our output, such as `head`, has had enough. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _dispatch(argv: list[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"residua {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise InputError(f"there is no command {name}{_nearest(name, COMMANDS)}; residua --help lists them")
    command = COMMANDS[name]
    parser = _Parser(
        prog=f"residua {name}",
        description=command.help,
        epilog="examples:\n" + textwrap.indent(command.examples, "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    try:
        arguments, unknown = parser.parse_known_args(rest)
    except _HelpShown:
        return 0
    if unknown:
        parser.refuse(unknown[0])
    return command.run(arguments)


class _HelpShown(Exception):
    """argparse has printed what `--help` asked for."""


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process, and that knows what a misspelt option was meant to be."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; {self.prog} --help shows what there is")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown

    def refuse(self, argument: str) -> NoReturn:
        """Raise InputError for an argument that no option takes, with the nearest option."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        option = argument.partition("=")[0]
        known = {name: name for name in self._option_string_actions}
        # `--lr` for `--train.lr`
        known = {f"--{name.rpartition('.')[2]}": name for name in known if "." in name} | known
        self.error(f"unknown option {option}{_nearest(option, known)}")


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, known, n=1)
    if not close:
        return ""
    meant = known[close[0]]
    return f"; did you mean {meant if isinstance(meant, str) else close[0]}?"


def _fail(error: object, status: int) -> int:
    print(f"residua: {error}", file=sys.stderr)
    return status


SUFFICIENT = {"prepare": "data", "explore": "explore", "geometry": "plots", "demo": "lab"}
"""The extra with all that a command imports, where that is not `train`."""


def _with_what_suffices(message: str, command: str) -> str:
    """A hint at one extra for the whole command: that of the module alone would lead from one hint to the next."""
    enough = SUFFICIENT.get(command, "train")
    included = "models|data|train|plots|explore" if enough == "lab" else "models|data|train"
    return re.sub(rf"residua\[({included})\]", f"residua[{enough}]", message)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: residua COMMAND [options]",
            "",
            "Residual connections for PyTorch, and the laboratory around them.",
            "",
            "commands:",
            *lines,
            "",
            "residua COMMAND --help explains a command; residua --version prints the version.",
        ]
    )


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_checkpoint(parser: Any) -> None:
    parser.add_argument(
        "--checkpoint",
        type=_step,
        metavar="STEP",
        help="the checkpoint of this step, or best: of those that are kept the one with the lowest validation loss "
        "(default: the newest)",
    )


def _step(text: str) -> int | str:
    if text == "best" or text.isdecimal():
        return text if text == "best" else int(text)
    raise argparse.ArgumentTypeError(f"expected the number of a step or best, got {text!r}")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, made by residua train")
    _add_checkpoint(parser)


def _schemes(arguments: Arguments) -> None:
    import torch

    from residua.connections import PRESETS, Scheme

    try:
        from residua.models import SIZES
    except ModuleNotFoundError as error:
        sizes, missing = {}, str(error)
    else:
        sizes, missing = {name: SIZES[name] for name in ("small", "medium")}, ""

    def parameters(scheme: Scheme, size: str) -> int:
        with torch.device("meta"):
            stream = scheme.build(sizes[size]["hidden_size"], 2 * sizes[size]["num_hidden_layers"])
        return sum(parameter.numel() for parameter in stream.parameters())

    plain = {size: parameters(PRESETS["residual"], size) for size in sizes}
    records = []
    for name, scheme in PRESETS.items():
        standard = type(scheme)()
        records.append(
            {
                "name": name,
                "equation": scheme.equation,
                "options": {
                    field.name: getattr(scheme, field.name)
                    for field in fields(scheme)
                    if getattr(scheme, field.name) != getattr(standard, field.name)
                },
                "paper": scheme.paper,
                "state_per_token": f"{scheme.state_rows if scheme.state_rows > 1 else ''}d",
                "parameters_added": {size: parameters(scheme, size) - plain[size] for size in plain} or None,
            }
        )
    if arguments.json:
        _print_json(records)
        return
    rows = [
        [
            record["name"],
            record["equation"],
            record["state_per_token"],
            *(f"{count:+,}" for count in (record["parameters_added"] or {}).values()),
            record["paper"],
            " ".join(f"{key}={value}" for key, value in record["options"].items()),
        ]
        for record in records
    ]
    print_table(["name", "equation", "state", *plain, "paper", "options"], rows)
    columns = f"; {' and '.join(plain)}: parameters beyond those of the plain residual" if plain else ""
    print(f"\nstate: values per token, d the width{columns}.")
    if missing:
        print(f"note: the parameters that a scheme adds are left out: {missing}")


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--vocab-size", type=int, default=2048, metavar="N", help="entries of a trained tokenizer (default: 2048)"
    )
    parser.add_argument(
        "--text-column", default="text", metavar="NAME", help="of parquet, JSON lines and data sets (default: text)"
    )
    parser.add_argument(
        "--validation-fraction", type=float, metavar="X", help="share of the text held out (default: 0.05)"
    )
    parser.add_argument(
        "--validation-tokens",
        type=int,
        metavar="N",
        help="hold out the first N tokens instead (default for fineweb-edu: 100 million)",
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens in a file (default: 100 million)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that tokenize (default: one a core for a large text)"
    )
    _add_json(parser)


def _prepare(arguments: Arguments) -> None:
    from residua.data import prepare

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
        _print_json({"folder": str(data.folder), **data.facts})
        return
    print_table(["what", "value"], [["folder", str(data.folder)], *([k, _cell(v)] for k, v in data.facts.items())])
    print(f"train on it with: residua train --config tiny --data.path {arguments.out} --run DIR")


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    from residua.training import add_config_arguments

    parser.usage = "residua train --run DIR [--config NAME|FILE.yaml] [--resume] [--print_config] [--KEY VALUE ...]"
    parser.add_argument(
        "--run",
        "--run-dir",
        metavar="DIR",
        help="a new folder for the run, or with --resume the folder of one; behind torchrun, which takes --run for an "
        "option of its own, write --run-dir",
    )
    parser.add_argument("--resume", action="store_true", help="go on at the newest checkpoint of the run")
    add_config_arguments(parser)


def _train(arguments: Arguments) -> int:
    from residua.training import load_config

    source = arguments.config
    if source is None and arguments.resume and arguments.run is not None:
        source = str(Path(arguments.run) / "config.yaml")
        if not Path(source).is_file():
            raise InputError(
                f"{arguments.run}: expected a run to resume, found no config.yaml; start one with --config"
            )
    if source is None and not arguments.print_config:
        raise InputError("expected --config NAME|FILE.yaml for a new run, or --resume; residua train --help explains")
    config = load_config(source, arguments.overrides)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return 0
    if arguments.run is None:
        raise InputError("expected --run DIR, the folder for the run")

    from residua.experiment import run
    from residua.training.distributed import is_first

    result = run(config, arguments.run, resume=arguments.resume)
    if result["interrupted"]:
        return INTERRUPTED
    if not is_first():
        return 0
    print(
        f"{arguments.run}: step {result['step']}, validation loss {result['val_loss']:.4f}, "
        f"{result['bits_per_byte']:.4f} bits per byte"
    )
    return 0


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
    from residua.training import add_config_arguments

    parser.usage = (
        "residua estimate --config NAME|FILE.yaml [--gpus N] [--gpu NAME] [--json] [--print_config] [--KEY VALUE ...]"
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument("--gpu", default="h200", metavar="NAME", help="h200, h100, b200, a100 or rtx4090 (h200)")
    _add_json(parser)
    add_config_arguments(parser)


def _estimate(arguments: Arguments) -> None:
    from residua.training import load_config

    if arguments.config is None and not arguments.print_config:
        raise InputError("expected --config NAME|FILE.yaml, the run to estimate; residua estimate --help explains")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return

    from residua.estimate import estimate
    from residua.experiment import expected_vocabulary

    found = estimate(
        config,
        vocab_size=expected_vocabulary(config),
        gpu=arguments.gpu,
        gpus=arguments.gpus,
    )
    if arguments.json:
        _print_json(found.to_json())
        return
    gib = 2**30
    print_table(["parameters", ""], [[name, f"{count:,}"] for name, count in found.parameters.items()])
    print()
    print_table(["MFLOP per token", ""], [[name, f"{x / 1e6:,.1f}"] for name, x in found.flops_per_token.items()])
    print()
    print_table(["kB per token", ""], [[name, f"{x / 1e3:,.0f}"] for name, x in found.bytes_per_token.items()])
    print()
    ways = list(found.memory)
    header = ["GiB per GPU", *(f"states: {way}" for way in ways)]
    rows = [[part, *(f"{found.memory[way][part] / gib:.2f}" for way in ways)] for part in found.memory[ways[0]]]
    rows.append(["largest batch_size", *(f"{found.largest_batch_size[way]}" for way in ways)])
    print_table(header, rows)
    print()
    speed = [[name, f"{rate:,.0f}", f"{found.days[name]:.2f}"] for name, rate in found.tokens_per_second.items()]
    print_table([f"{found.tokens / 1e9:.3g} billion tokens", "tokens/s", "days"], speed)
    print()
    for line in found.assumptions:
        print(f"assumed: {line}")
    fits = [way for way in ways if found.memory[way]["total"] <= found.gpu_memory]
    if not fits:
        print(f"note: this does not fit into {found.gpu_memory / gib:.0f} GiB; lower train.batch_size")


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|HF_DIR", help="folder of a run, or with --tasks of a transformers model")
    _add_checkpoint(parser)
    group = parser.add_argument_group("tasks, by lm-evaluation-harness")
    group.add_argument(
        "--tasks", metavar="paper|NAME,NAME", help="the paper's eight or any others, in place of the validation loss"
    )
    group.add_argument("--num-fewshot", type=int, default=0, metavar="N", help="solved examples in the prompt (0)")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="changes speed and no result (8)")
    group.add_argument("--include-path", metavar="DIR", help="a folder of local task files; needs no network")
    group.add_argument("--limit", type=int, metavar="N", help="only the first documents of each task")
    group.add_argument(
        "--published", choices=("small", "medium"), help="show the paper's rows of this size (default: if it matches)"
    )
    _add_json(parser)


def _evaluate(arguments: Arguments) -> None:
    if arguments.tasks is not None:
        _evaluate_tasks(arguments)
        return
    from residua.experiment import evaluate, open_run

    folder = Path(arguments.run)
    if (folder / "config.json").is_file() and not (folder / "config.yaml").is_file():
        raise InputError(f"{folder}: this model has no validation text of its own; give --tasks paper")
    opened = open_run(arguments.run, arguments.checkpoint)
    result = {"step": opened.step, **evaluate(opened)}
    if arguments.json:
        _print_json({key: value if math.isfinite(value) else None for key, value in result.items()})
        return
    names = {
        "step": "step",
        "val_loss": "validation loss (nats per token)",
        "perplexity": "perplexity",
        "bits_per_byte": "bits per byte",
        "tokens": "held-out tokens",
    }
    cells = {key: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for key, value in result.items()}
    print_table(["what", arguments.run], [[name, cells[key]] for key, name in names.items()])


def _evaluate_tasks(arguments: Arguments) -> None:
    from residua.evaluation.harness import PAPER, score
    from residua.evaluation.published import TASKS, rows
    from residua.experiment import open_model, open_run
    from residua.models import SIZES

    if (Path(arguments.run) / "config.yaml").is_file():
        opened = open_run(arguments.run, arguments.checkpoint)
        model, tokenizer, bfloat16 = opened.model, opened.tokenizer, opened.config.train.precision == "bfloat16"
    else:
        if arguments.checkpoint is not None:
            raise InputError(f"--checkpoint: expected a run folder, got {arguments.run}")
        (model, tokenizer), bfloat16 = open_model(arguments.run), False
    names = arguments.tasks.split(",")
    found = score(
        model,
        tokenizer,
        name=Path(arguments.run).name,
        tasks=names,
        num_fewshot=arguments.num_fewshot,
        batch_size=arguments.batch_size,
        include_path=arguments.include_path,
        limit=arguments.limit,
        bfloat16=bfloat16,
    )
    size = arguments.published
    if size is None:
        shape = ("num_hidden_layers", "hidden_size")
        alike = (
            name
            for name in ("small", "medium")
            if all(getattr(model.config, field, None) == SIZES[name][field] for field in shape)
        )
        size = next(alike, None)
    comparable = size is not None and (names == [PAPER] or set(names) <= TASKS.keys())
    published = rows(size, arguments.num_fewshot) if comparable else []
    if arguments.json:
        _print_json(found.to_json(published))
        return
    print_table(*found.table(published))
    versions = ", ".join(f"{result.task} {result.version}" for result in found.scores)
    metrics = ", ".join(f"{result.task} {result.metric}" for result in found.scores)
    print(f"\n{arguments.num_fewshot}-shot, percent; ours: {metrics}; the paper does not name its metrics")
    print(f"lm_eval {found.harness}; task versions: {versions}")
    if arguments.limit is not None:
        print(f"note: only the first {arguments.limit} documents of each task: not to be compared with anything")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, made by residua train")
    parser.add_argument("out", metavar="DIR", help="a new or empty folder")
    _add_checkpoint(parser)
    parser.add_argument(
        "--remote-code", action="store_true", help="add the model's code: it then loads where residua is not installed"
    )


def _export(arguments: Arguments) -> None:
    from residua.export import export

    folder = export(arguments.run, arguments.out, checkpoint=arguments.checkpoint, remote_code=arguments.remote_code)
    option = ", trust_remote_code=True" if arguments.remote_code else ""
    print(f"load it with: AutoModelForCausalLM.from_pretrained({str(folder)!r}{option})")


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to go on from; '' for a new document")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="(default: 200, or what fits the context)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="lower is more predictable (0.8)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="sample from this probability mass (0.95)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K most probable (0: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (0)")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")


def _generate(arguments: Arguments) -> None:
    if not arguments.greedy and not arguments.temperature > 0:
        raise InputError(
            f"--temperature: expected a number above 0, got {arguments.temperature:g}; for the most probable text use "
            "--greedy"
        )
    from residua.evaluation.generate import complete
    from residua.experiment import open_run

    opened = open_run(arguments.run, arguments.checkpoint)
    shown = False

    def show(piece: str) -> None:
        nonlocal shown
        # The prompt waits for the first piece, so that an input that cannot be used prints nothing but its error.
        print(piece if shown else arguments.prompt + piece, end="", flush=True)
        shown = True

    complete(
        opened.model,
        opened.tokenizer,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        greedy=arguments.greedy,
        seed=arguments.seed,
        on_text=show,
    )
    print("" if shown else arguments.prompt)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--baseline", metavar="NAME", help="a name from the table (default: the plain residual)")
    parser.add_argument("--out", metavar="DIR", help="write the pictures, comparison.md and comparison.json here")
    _add_json(parser)


def _compare(arguments: Arguments) -> None:
    if arguments.out is not None:
        with extra("plots"):  # first, for its hint is at an extra with all the rest
            importlib.import_module("matplotlib")
    from residua.evaluation.compare import compare

    comparison = compare(arguments.runs, baseline=arguments.baseline)
    written = []
    if arguments.out is not None:
        from residua.evaluation.plots import draw

        out = Path(arguments.out)
        written = [*draw(comparison, out), out / "comparison.md", out / "comparison.json"]
        (out / "comparison.md").write_text(comparison.to_markdown(), encoding="utf-8")
        (out / "comparison.json").write_text(json.dumps(comparison.to_json(), indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        _print_json(comparison.to_json())
        return
    _print_comparison(comparison)
    for path in written:
        print(f"written: {path}")


def _print_comparison(comparison: Any) -> None:
    print_table(*comparison.table())
    for note in comparison.notes:
        print(f"note: {note}")


def _analyze_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|HF_DIR", help="folder of a run, or of an exported model (with --prompt)")
    checkpoints = parser.add_mutually_exclusive_group()
    _add_checkpoint(checkpoints)
    checkpoints.add_argument("--all-checkpoints", action="store_true", help="every checkpoint, one trace each")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text to read; '' for a new document")
    text.add_argument("--data", action="store_true", help="read the beginning of the run's validation data (default)")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="at most so many (default: the run's train.sequence_length, or the prompt)",
    )
    _add_json(parser)


def _analyze(arguments: Arguments) -> None:
    from residua.analysis import archive, figures, warnings

    folder = Path(arguments.run)
    found = []
    for trace in _traces(arguments):
        found.append((trace, trace.save(archive.place(folder, trace.facts["checkpoint"]))))
    if arguments.json:
        _print_json(
            [
                {"trace": str(path), **trace.facts, "warnings": warnings(trace), "sublayers": figures(trace)}
                for trace, path in found
            ]
        )
        return
    for number, (trace, path) in enumerate(found):
        print("\n" * (number > 0), end="")
        _print_trace(trace)
        print(f"trace: {path}")


def _traces(arguments: Arguments) -> Iterator[Any]:
    from residua.experiment import open_model, open_run, trace_prompt, trace_run
    from residua.training.checkpoint import saved_steps

    folder = Path(arguments.run)
    if (folder / "config.json").is_file() and not (folder / "config.yaml").is_file():
        if arguments.prompt is None:
            raise InputError(f"{folder}: this model has no validation text of its own; give --prompt TEXT")
        if arguments.checkpoint is not None or arguments.all_checkpoints:
            raise InputError(f"--checkpoint: expected a run folder, got {folder}")
        yield trace_prompt(*open_model(folder), arguments.prompt, tokens=arguments.tokens)
        return
    steps = saved_steps(folder) if arguments.all_checkpoints else []
    for step in steps or [arguments.checkpoint]:
        yield trace_run(open_run(folder, step), arguments.prompt, tokens=arguments.tokens)


def _print_trace(trace: Any) -> None:
    from residua.analysis import overview, summary, warnings

    first, *others = overview(trace)
    print(first)
    print_table(*summary(trace))
    for line in others:
        print(line)
    for warning in warnings(trace):
        print(f"warning: {warning}")


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="folder of the runs (default: runs/demo)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="training steps of each run (default: as in the recipes)"
    )


def _demo(arguments: Arguments) -> int:
    try:
        from residua.demo import demonstrate

        result = demonstrate(arguments.out, steps=arguments.steps)
    except KeyboardInterrupt:
        steps = [] if arguments.steps is None else ["--steps", str(arguments.steps)]
        command = shlex.join(["residua", "demo", "--out", arguments.out, *steps])
        return _fail(f"interrupted; go on with: {command}", INTERRUPTED)
    _print_comparison(result.comparison)
    for path in result.pictures:
        print(f"picture: {path}")
    print(f"open in a browser: {result.page}")
    for name, text in result.texts.items():
        print(f"\n{name} writes:")
        print("\n".join(f"  {line}" for line in textwrap.wrap(text, 100)[:3]))
    return 0


def _mup_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connection", default="ddl-tc", metavar="PRESET", help="the scheme (default: ddl-tc)")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[64, 128, 256, 512], metavar="N", help="multiples of 32"
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of Adam (4)")
    parser.add_argument("--lr", type=float, default=0.01, metavar="X", help="at the smallest width (0.01)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs to average over (2)")
    parser.add_argument("--out", metavar="FILE.png", help="draw a picture")
    _add_json(parser)


def _mup_check(arguments: Arguments) -> None:
    from residua.connections import resolve
    from residua.mup_check import check, draw, to_json

    try:
        resolve(arguments.connection)
    except ValueError as error:
        raise InputError(f"--{error}") from error
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
        _print_json(to_json(found))
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


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("residua.benchmarks.cli").add_arguments(parser)


def _bench(arguments: Arguments) -> int | None:
    return importlib.import_module("residua.benchmarks.cli").run(arguments)


def _geometry_arguments(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("residua.geometry.cli").add_arguments(parser)


def _geometry(arguments: Arguments) -> int | None:
    return importlib.import_module("residua.geometry.cli").run(arguments)


def _explore_arguments(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("residua.explorer.cli").add_arguments(parser)


def _explore(arguments: Arguments) -> int | None:
    return importlib.import_module("residua.explorer.cli").run(arguments)


COMMANDS: dict[str, Command] = {
    "schemes": Command(
        "list the residual schemes: equation, options, state, parameters added, paper",
        "residua schemes\nresidua schemes --json",
        _add_json,
        _schemes,
    ),
    "prepare": Command(
        "turn text into tokens on disk",
        "residua prepare --source stdlib --out data/stdlib\n"
        "residua prepare --source my-texts/ --out data/mine --vocab-size 8192\n"
        "residua prepare --source fineweb-edu --sample 100BT --tokenizer gpt2 --out data/fineweb-edu\n"
        "residua prepare --source hf:OWNER/NAME/CONFIG:train --text-column content --tokenizer gpt2 --out data/theirs",
        _prepare_arguments,
        _prepare,
    ),
    "train": Command(
        "train a language model into a run folder, or go on with one",
        "residua train --config tiny --run runs/residual\n"
        "residua train --config tiny --model.connection ddl-cc --train.lr 2e-3 --run runs/ddl-cc\n"
        "residua train --run runs/ddl-cc --resume\n"
        "residua train --config tiny --print_config > mine.yaml\n"
        "torchrun --nproc-per-node 8 --max-restarts 3 -m residua train --config small --train.parallel fsdp "
        "--run-dir runs/small",
        _train_arguments,
        _train,
    ),
    "estimate": Command(
        "what a run will cost: parameters, memory per GPU, tokens/s, days",
        "residua estimate --config small-ddl-tc --gpus 4 --gpu h200\n"
        "residua estimate --config medium-ddl-cc --gpus 8 --train.parallel fsdp --json",
        _estimate_arguments,
        _estimate,
    ),
    "evaluate": Command(
        "validation loss, perplexity and bits per byte of a run, or its scores on tasks",
        "residua evaluate runs/ddl\nresidua evaluate runs/ddl --checkpoint 200 --json\n"
        "residua evaluate runs/ddl --tasks paper --num-fewshot 1\n"
        "residua evaluate a-folder --tasks mine --include-path my-tasks/",
        _evaluate_arguments,
        _evaluate,
    ),
    "export": Command(
        "write a run as a Hugging Face folder: weights, tokenizer, model card",
        "residua export runs/ddl exported/ddl\nresidua export runs/ddl exported/ddl --remote-code",
        _export_arguments,
        _export,
    ),
    "generate": Command(
        "let the model of a run write text",
        "residua generate runs/ddl --prompt 'The function returns'\n"
        "residua generate runs/ddl --prompt '' --temperature 0.6 --seed 3",
        _generate_arguments,
        _generate,
    ),
    "compare": Command(
        "compare runs over seeds with a baseline, as a table and as pictures",
        "residua compare runs/residual-* runs/ddl-*\n"
        "residua compare runs/a runs/b --baseline 'residual train.lr=0.002' --out figures/",
        _compare_arguments,
        _compare,
    ),
    "explore": Command(
        "write one page to play with connections, inspect trained ones and compare runs",
        "residua explore\nresidua explore runs/ddl --out ddl.html\n"
        "residua explore runs/residual runs/ddl runs/ddl-cc-ec",
        _explore_arguments,
        _explore,
    ),
    "analyze": Command(
        "what the connections of a trained model do: gates, norms, mixing, warnings",
        "residua analyze runs/ddl\nresidua analyze runs/ddl --prompt 'The function returns'\n"
        "residua analyze runs/ddl --all-checkpoints --json",
        _analyze_arguments,
        _analyze,
    ),
    "demo": Command(
        "train the plain residual, ddl and ddl-cc-ec side by side and compare them",
        "residua demo\nresidua demo --steps 50 --out runs/quick",
        _demo_arguments,
        _demo,
    ),
    "mup-check": Command(
        "check that activations and their changes do not depend on the width under muP",
        "residua mup-check\nresidua mup-check --connection residual --widths 64 128 256 --out mup.png",
        _mup_check_arguments,
        _mup_check,
    ),
    "bench": Command(
        "measure speed and memory of the schemes, and of single operations",
        "residua bench models --device cpu --presets ddl-cc ddl-tc\n"
        "residua bench memory --presets ddl-cc ddl-cc:recompute=none\n"
        "residua bench generate --presets ddl ddl-cc\n"
        "residua bench ops --device cuda",
        _bench_arguments,
        _bench,
    ),
    "geometry": Command(
        "the geometric benchmarks of arXiv 2605.06729, with controls and references",
        "residua geometry reflection\n"
        "residua geometry quick --tasks gyroscope --models residual ddl edelta-token:num_streams=8\n"
        "residua geometry quick --full --device cuda --out runs/full\n"
        "residua geometry sizes --full",
        _geometry_arguments,
        _geometry,
    ),
}
