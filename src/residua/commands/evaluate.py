"""The command `residua evaluate`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from residua.commands.base import Checkpoint, expect_path
from residua.commands.signature import Output
from residua.errors import Count, InputError, between

NAMES = {
    "step": "step",
    "val_loss": "validation loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "repeated_loss": "loss on pairs of tokens seen before",
    "other_loss": "loss on all other tokens",
    "tokens": "held-out tokens",
}


@dataclass(frozen=True)
class Scoring:
    """What is scored in place of the validation loss.

    Tasks, by lm-evaluation-harness:
        tasks (paper|NAME,NAME): the paper's eight or any others, in place of the validation loss
        num_fewshot: solved examples in the prompt
        batch_size: changes speed and no result
        include_path (DIR): a folder of local task files; needs no network
        limit: only the first documents of each task
        published: show the paper's rows of this size (default: if it matches)
    """

    tasks: str | None = None
    num_fewshot: Annotated[int, between(0, 1000)] = 0
    batch_size: Annotated[int, between(1, 2**20)] = 8
    include_path: str | None = None
    limit: Count | None = None
    published: Literal["small", "medium"] | None = None


def evaluate(run: str, *, checkpoint: Checkpoint | None = None, data: str | None = None, scoring: Scoring) -> Output:
    """Print the validation loss of a run, or its scores on tasks.

    Examples:
        residua evaluate runs/ddl
        residua evaluate runs/ddl --checkpoint 200 --json
        residua evaluate runs/ddl --tasks paper --num-fewshot 1
        residua evaluate a-folder --tasks mine --include-path my-tasks/

    Args:
        run (RUN|HF_DIR): folder of a run, or with --tasks of a Hugging Face model
        checkpoint (STEP|best): the newest by default; best has the lowest validation loss of the kept ones
        data (DIR): the run's prepared data, if they have moved
    """
    for option in fields(scoring):
        if scoring.tasks is None and getattr(scoring, option.name) != option.default:
            flag = option.name.replace("_", "-")
            raise InputError(f"--{flag} needs --tasks beside it, got none; give --tasks paper")
    expect_path(run)
    if scoring.tasks is None:
        return _validated(run, checkpoint, data)
    from residua.lab.evaluation.harness import score
    from residua.lab.evaluation.published import comparable
    from residua.lab.experiment import open_model

    opened = open_model(run, checkpoint, data=data)
    report = score(
        opened.model,
        opened.tokenizer,
        name=Path(run).name,
        tasks=scoring.tasks.split(","),
        num_fewshot=scoring.num_fewshot,
        batch_size=scoring.batch_size,
        include_path=scoring.include_path,
        limit=scoring.limit,
        bfloat16=opened.bfloat16,
    )
    names = [result.task for result in report.scores]
    rows = comparable(opened.model.config, names, scoring.num_fewshot, size=scoring.published)
    versions = ", ".join(f"{result.task} {result.version}" for result in report.scores)
    metrics = ", ".join(f"{result.task} {result.metric}" for result in report.scores)
    notes = [
        f"\n{scoring.num_fewshot}-shot, percent; ours: {metrics}; the paper does not name its metrics",
        f"lm_eval {report.harness}; task versions: {versions}",
    ]
    if scoring.limit is not None:
        notes.append(f"note: only the first {scoring.limit} documents of each task: do not compare this with anything")
    return Output(report.to_json(rows), [report.table(rows), *notes])


def _validated(run: str, checkpoint: Checkpoint | None, data: str | None) -> Output:
    from residua.lab.experiment import evaluate, is_model_folder, open_run
    from residua.lab.records.jsonlines import finite

    if is_model_folder(run):
        raise InputError(f"{run}: this model has no validation text of its own; give --tasks paper")
    opened = open_run(run, checkpoint, data=data)
    result = {"step": opened.step, **evaluate(opened)}
    cells = {key: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for key, value in result.items()}
    table = ["what", run], [[name, cells[key]] for key, name in NAMES.items() if key in cells]
    return Output(finite(result), [table])
