"""The command `residua evaluate`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from residua.commands.base import CheckpointChoice, expect_path
from residua.commands.signature import Output
from residua.errors import Count, InputError, between, require
from residua.lab.records.terminal import one_line

if TYPE_CHECKING:
    from residua.lab.experiment import OpenModel

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
    """The options for scoring tasks in place of the validation loss.

    Tasks, by lm-evaluation-harness:
        tasks (paper|NAME,NAME): the paper's eight or any others, in place of the validation loss
        num_fewshot: solved examples in the prompt
        batch_size: affects only speed
        include_path (DIR): a folder of local task files; needs no network
        limit: score only this many documents per task
        published: show the paper's rows of this size (default: the model's size, if it is one of the paper's)
    """

    tasks: str | None = None
    num_fewshot: Annotated[int, between(0, 1000)] = 0
    batch_size: Annotated[int, between(1, 2**20)] = 8
    include_path: str | None = None
    limit: Count | None = None
    published: Literal["small", "medium"] | None = None


def evaluate(
    run: str,
    *,
    checkpoint: CheckpointChoice | None = None,
    data: str | None = None,
    text_column: str = "text",
    scoring: Scoring,
) -> Output:
    """Print the validation loss of a run, or its scores on tasks.

    Examples:
        residua evaluate runs/ddl
        residua evaluate runs/ddl --checkpoint 200 --json
        residua evaluate runs/ddl --data another-text.txt
        residua evaluate runs/ddl --tasks paper --num-fewshot 1
        residua evaluate a-folder --tasks mine --include-path my-tasks/

    Args:
        run (RUN|HF_DIR): folder of a run, or of a Hugging Face model, which needs --tasks or --data
        checkpoint (STEP|best): the newest by default; best has the lowest validation loss of the kept ones
        data (DIR|TEXT): the run's prepared data, if they have moved, or another text to score: prepared with the same
            tokenizer (its held-out part is scored), or a file or folder of text
        text_column: the key of the text in rows; meta.text is the text inside meta
    """
    for option in fields(scoring):
        if scoring.tasks is None and getattr(scoring, option.name) != option.default:
            flag = option.name.replace("_", "-")
            raise InputError(f"--{flag} needs --tasks, got none; give --tasks paper")
    expect_path(run)
    if data is not None:
        expect_path(data, "a file or folder of text, or the run's prepared data")
    if scoring.tasks is None:
        return _validated(run, checkpoint, data, text_column)
    require(data is None, "--data", "left out with --tasks, which bring their own texts", data)
    require(text_column == "text", "--text-column", "left out without --data", text_column)
    from residua.lab.evaluation.harness import score
    from residua.lab.evaluation.published import comparable
    from residua.lab.experiment import open_model
    from residua.lab.opening import context_of

    opened = open_model(run, checkpoint)
    window, context = opened.window, context_of(opened.model)
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
    shots = sorted({result.num_fewshot for result in report.scores})  # the task's own, if its file says 0
    rows = comparable(opened.model.config, names, shots[0], size=scoring.published)
    versions = ", ".join(f"{result.task} {result.version}" for result in report.scores)
    several = {result.task: f" {result.num_fewshot}-shot" * (len(shots) > 1) for result in report.scores}
    metrics = ", ".join(f"{result.task} {result.metric}{several[result.task]}" for result in report.scores)
    percent = ", percent" * any(result.is_share for result in report.scores)
    unnamed = "; the paper does not name its metrics" * bool(rows)
    notes = [
        f"\n{'/'.join(map(str, shots))}-shot{percent}; ours: {metrics}{unnamed}",
        f"lm_eval {report.harness}; task versions: {versions}",
    ]
    if scoring.limit is not None:
        notes.append(f"note: only the first {scoring.limit} documents of each task: do not compare this with anything")
    if window is not None and (context is None or context > window):
        longest = "any" if context is None else context
        notes.append(
            f"note: the model was trained on windows of {window} tokens; tasks give it up to {longest}, and it may be "
            "worse there"
        )
    return Output(report.to_json(rows), [report.table(rows), *notes])


def _validated(run: str, checkpoint: CheckpointChoice | None, data: str | None, text_column: str) -> Output:
    from residua.lab.experiment import evaluate, is_model_folder, open_model, open_run

    if is_model_folder(run):
        if data is None:
            raise InputError(f"{run}: this model has no validation text of its own; give --data TEXT or --tasks paper")
        return _on_text(open_model(run, checkpoint), run, data, text_column)
    opened = open_run(run, checkpoint, data=data)
    if data is not None and not opened.is_own(data):
        return _on_text(opened, run, data, text_column)
    require(text_column == "text", "--text-column", "left out with the run's prepared data", text_column)
    lines = [] if data is None else [f"the run's own text: the held-out part of {one_line(data)}"]
    return _losses(run, {"step": opened.step, **evaluate(opened)}, lines)


def _on_text(opened: "OpenModel", run: str, data: str, text_column: str) -> Output:
    """Return the loss of a model on a text other than its own held-out text."""
    from residua.lab.data.model_text import open_text
    from residua.lab.experiment import evaluate_on

    text = open_text(
        Path(data), opened.tokenizer, opened.tokenizer_folder, text_column=text_column, trained_on=opened.trained_on
    )
    own = "not the run's own text" if opened.step is not None else "not known whether the model was trained on it"
    if text.own:
        own = "the run's own text, training part included"
    elif text.own is None:
        own = "perhaps the run's own text, cut into other documents"
    first = opened.tokenizer.convert_ids_to_tokens(opened.first)
    after = f", each after {one_line(' '.join(first))}" if first else ""
    lines = [f"{own}: {one_line(text.name)}, in windows of {opened.evaluation[0]} tokens{after}"]
    step = {} if opened.step is None else {"step": opened.step}
    return _losses(run, {**step, **evaluate_on(opened, text)}, lines)


def _losses(run: str, result: dict[str, Any], lines: list[str]) -> Output:
    from residua.lab.records.jsonlines import finite

    cells = {key: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for key, value in result.items()}
    table = ["what", run], [[name, cells[key]] for key, name in NAMES.items() if key in cells]
    text = {"text": lines[0]} if lines else {}
    return Output({**finite(result), **text}, [*lines, table])
