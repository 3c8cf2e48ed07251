"""The command `residua evaluate`."""

from pathlib import Path

from residua.commands.base import Arguments, Parser, add_checkpoint, add_data, add_json, opens_model, print_json, whole
from residua.errors import InputError
from residua.records.table import print_table

HELP = "validation loss, perplexity and bits per byte of a run, or its scores on tasks"
EXAMPLES = """\
residua evaluate runs/ddl
residua evaluate runs/ddl --checkpoint 200 --json
residua evaluate runs/ddl --tasks paper --num-fewshot 1
residua evaluate a-folder --tasks mine --include-path my-tasks/"""
NAMES = {
    "step": "step",
    "val_loss": "validation loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "repeated_loss": "loss on labels whose pair came before",
    "other_loss": "loss on all other labels",
    "tokens": "held-out tokens",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN|HF_DIR", help="folder of a run, or with --tasks of a transformers model")
    add_checkpoint(parser)
    add_data(parser)
    group = parser.add_argument_group("tasks, by lm-evaluation-harness")
    group.add_argument(
        "--tasks", metavar="paper|NAME,NAME", help="the paper's eight or any others, in place of the validation loss"
    )
    group.add_argument("--num-fewshot", type=whole(0, 1000), metavar="N", help="solved examples in the prompt (0)")
    group.add_argument("--batch-size", type=whole(1, 2**20), metavar="N", help="changes speed and no result (8)")
    group.add_argument("--include-path", metavar="DIR", help="a folder of local task files; needs no network")
    group.add_argument("--limit", type=whole(1), metavar="N", help="only the first documents of each task")
    group.add_argument(
        "--published", choices=("small", "medium"), help="show the paper's rows of this size (default: if it matches)"
    )
    add_json(parser)


def run(arguments: Arguments) -> None:
    if arguments.tasks is not None:
        _score(arguments)
        return
    for option in ("num_fewshot", "batch_size", "include_path", "limit", "published"):
        if getattr(arguments, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} needs --tasks beside it, got none; give --tasks paper")
    from residua.lab.experiment import evaluate, is_model_folder, open_run
    from residua.records.jsonlines import finite

    if is_model_folder(arguments.run):
        raise InputError(f"{arguments.run}: this model has no validation text of its own; give --tasks paper")
    opened = open_run(arguments.run, arguments.checkpoint, data=arguments.data)
    result = {"step": opened.step, **evaluate(opened)}
    if arguments.json:
        print_json(finite(result))
        return
    cells = {key: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for key, value in result.items()}
    print_table(["what", arguments.run], [[name, cells[key]] for key, name in NAMES.items() if key in cells])


def _score(arguments: Arguments) -> None:
    from residua.lab.evaluation.harness import score
    from residua.lab.evaluation.published import comparable
    from residua.lab.experiment import open_model, open_run

    if opens_model(arguments.run, arguments.checkpoint):
        (model, tokenizer), bfloat16 = open_model(arguments.run), False
    else:
        opened = open_run(arguments.run, arguments.checkpoint, data=arguments.data)
        model, tokenizer, bfloat16 = opened.model, opened.tokenizer, opened.config.train.precision == "bfloat16"
    num_fewshot = arguments.num_fewshot or 0
    report = score(
        model,
        tokenizer,
        name=Path(arguments.run).name,
        tasks=arguments.tasks.split(","),
        num_fewshot=num_fewshot,
        batch_size=arguments.batch_size or 8,
        include_path=arguments.include_path,
        limit=arguments.limit,
        bfloat16=bfloat16,
    )
    tasks = [result.task for result in report.scores]
    published = comparable(model.config, tasks, num_fewshot, size=arguments.published)
    if arguments.json:
        print_json(report.to_json(published))
        return
    print_table(*report.table(published))
    versions = ", ".join(f"{result.task} {result.version}" for result in report.scores)
    metrics = ", ".join(f"{result.task} {result.metric}" for result in report.scores)
    print(f"\n{num_fewshot}-shot, percent; ours: {metrics}; the paper does not name its metrics")
    print(f"lm_eval {report.harness}; task versions: {versions}")
    if arguments.limit is not None:
        print(f"note: only the first {arguments.limit} documents of each task: do not compare this with anything")
