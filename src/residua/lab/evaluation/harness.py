"""Tasks of EleutherAI's lm-evaluation-harness, in the columns of the paper's tables."""

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.errors import InputError, did_you_mean, extra, first_line, require
from residua.lab.evaluation.published import PAPER_TASKS, PublishedScores
from residua.lab.opening import context_of
from residua.lab.records.jsonlines import finite
from residua.models.evaluating import evaluating

with extra("eval"):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAPER = "paper"
METRICS = ("acc_norm", "acc")
"""The preferred metrics: the first that a task has is reported, otherwise the task's own first metric. acc_norm divides
the log-likelihood of a choice by its length in characters."""
WRITTEN = 256
"""The number of tokens that the harness lets a task generate by default."""
PERCENTAGES = ("acc_norm", "acc", "exact_match", "f1", "em")
"""Metrics that are reported in percent; all others are reported as the harness returns them."""


@dataclass(frozen=True)
class Score:
    """The result of one task, or of a group of tasks with an aggregate.

    value, stderr: the metric and its standard error, in percent if the metric is one of `PERCENTAGES`. results: all
    metrics of the task as the harness returns them. subtasks: the scores behind an aggregate.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    version: str
    num_fewshot: int
    documents: int
    results: Mapping[str, Any] = field(default_factory=dict)
    subtasks: tuple["Score", ...] = ()

    @property
    def is_share(self) -> bool:
        return self.metric.partition(",")[0] in PERCENTAGES

    @property
    def title(self) -> str:
        """The heading of the score's column, with the metric if it is not in percent."""
        name = PAPER_TASKS.get(self.task, self.task)
        return name if self.is_share else f"{name} ({self.metric})"


@dataclass(frozen=True)
class Scores:
    """The scores of one model; `harness` is the version of lm-evaluation-harness."""

    name: str
    scores: tuple[Score, ...]
    harness: str

    @property
    def average(self) -> float | None:
        """The mean of all scores in percent; None if there are none."""
        shares = [score.value for score in self.scores if score.is_share]
        return statistics.fmean(shares) if shares else None

    def table(self, published: Sequence[PublishedScores] = ()) -> tuple[list[str], list[list[str]]]:
        """Return header and rows: our scores, their standard errors, then published rows, each with its source."""
        header = ["", "source", *(score.title for score in self.scores), "Avg"]
        stderr = ["" if score.stderr is None else f"±{score.stderr:.2f}" for score in self.scores]
        mean = "" if self.average is None else f"{self.average:.2f}"
        rows = [
            [self.name, "ours", *(f"{score.value:.2f}" for score in self.scores), mean],
            ["", "ours: standard error", *stderr, ""],
        ]
        for row in published:
            by_task = dict(zip(PAPER_TASKS, row.scores))
            cells = [f"{by_task[score.task]:.2f}" for score in self.scores]
            average = f"{row.average:.2f}" if len(cells) == len(PAPER_TASKS) else ""
            rows.append([row.title, f"published: {row.source}", *cells, average])
        return header, rows

    def to_json(self, published: Sequence[PublishedScores] = ()) -> dict[str, Any]:
        """Return plain values, with the published rows under their own key."""
        return {
            **finite(asdict(self)),
            "average": self.average,
            "published": [row.to_json() for row in published],
        }


def score(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    name: str,
    tasks: Sequence[str] = (PAPER,),
    num_fewshot: int = 0,
    batch_size: int = 8,
    include_path: str | Path | None = None,
    limit: int | None = None,
    bfloat16: bool = False,
) -> Scores:
    """Score a causal language model on tasks of the harness.

    Args:
        name: the name of the model in tables.
        tasks: names of tasks, groups or tags; "paper" means the paper's eight. A group with an aggregate gets one
            score; any other group or tag gets a score for each of its tasks.
        num_fewshot: number of solved examples before each question.
        batch_size: requests per batch; affects results only by rounding.
        include_path: a folder with your own task files. If it has every requested task, no other tasks are loaded, and
            the network is used only if those files need it.
        limit: number of documents per task, for a quick test; None for all.
        bfloat16: compute under autocast, as in bfloat16 training.

    Raises:
        InputError: a task is unknown, cannot be loaded or has no metric, two names are of one task, a task writes more
            tokens than the context holds, or the folder does not exist. In these cases
            nothing has been computed.
    """
    names = [task for given in tasks for task in (PAPER_TASKS if given == PAPER else [given])]
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = list(dict.fromkeys(names))
    manager = _task_manager(names, include_path)
    chosen = _loaded(manager, names, context_of(model))
    runner = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        device=str(model.device),
        batch_size=batch_size,
        max_length=context_of(model),
        mixed_precision_dtype="bfloat16" if bfloat16 else None,
        softmax_dtype="float32",  # otherwise log-probabilities and their sums are rounded to the dtype of the logits
    )
    with evaluating(model):
        report = lm_eval.simple_evaluate(
            model=runner,
            tasks=[task for tasks in chosen.values() for task in tasks],
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
            task_manager=manager,  # otherwise the harness reads thousands of other tasks
        )
    scores = (score for tasks in chosen.values() for task in tasks for score in _scores(_task_name(task), report))
    return Scores(name, tuple(scores), lm_eval.__version__)


def _task_manager(names: Sequence[str], include_path: str | Path | None) -> TaskManager:
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise InputError(f"--include-path must be a folder of task files, got {include_path}")
        # Reading the harness's own thousands of tasks takes ten seconds, and one of them may have the same name.
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        nearest = did_you_mean(unknown[0], manager.all_tasks)
        raise InputError(
            f"--tasks must be paper, or tasks of the harness or of --include-path; got {unknown[0]}{nearest}"
        )
    return manager


def _loaded(manager: TaskManager, names: Sequence[str], context: int | None) -> dict[str, list[Any]]:
    """Return, for each name, the group with this name, or else all tasks that the name covers. Raises InputError."""
    chosen: dict[str, list[Any]] = {}
    leaves: dict[str, str] = {}
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # task files and data sets raise anything
            raise InputError(f"--tasks must name tasks that can be loaded, got {name}: {first_line(error)}") from error
        for leaf, task in loaded["tasks"].items():
            require(leaf not in leaves, "--tasks", f"every task once, but {leaf} is in {leaves.get(leaf)} too", name)
            leaves[leaf] = name
            require(bool(task.get_config("metric_list")), "--tasks", f"tasks with a metric, but {leaf} has none", name)
            written = _tokens_to_write(task)
            fits = context is None or written < context
            require(fits, "--tasks", f"tasks that write fewer than {context} tokens, but {leaf} writes {written}", name)
        chosen[name] = [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    return chosen


def _tokens_to_write(task: Any) -> int:
    """Return the largest number of tokens that a task generates; 0 if it measures likelihoods."""
    if task.OUTPUT_TYPE != "generate_until":
        return 0
    return int((task.get_config("generation_kwargs") or {}).get("max_gen_toks", WRITTEN))


def _task_name(task: Any) -> str:
    """Return the name of a task or a group of the harness."""
    return str(getattr(task, "task_name", None) or task.name)


def _scores(task: str, report: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the score of a task or of a group with an aggregate, otherwise the scores of the group's tasks."""
    results = report["results"].get(task, {})
    children = report.get("group_subtasks", {}).get(task, ())
    subtasks = tuple(score for child in children for score in _scores(child, report))
    metric = _metric(results)
    if metric is None:
        yield from subtasks
        return
    name, _, filtered = metric.partition(",")
    factor = 100.0 if name in PERCENTAGES else 1.0
    stderr = results.get(f"{name}_stderr,{filtered}")
    documents = report["n-samples"].get(task, {}).get("effective")
    yield Score(
        task,
        name if filtered == "none" else metric,
        factor * float(results[metric]),
        factor * float(stderr) if isinstance(stderr, (int, float)) else None,
        str(report["versions"].get(task, "")),
        int(report["n-shot"].get(task) or 0),
        sum(score.documents for score in subtasks) if documents is None else int(documents),
        {key: value for key, value in results.items() if "," in key},
        subtasks,
    )


def _metric(results: Mapping[str, Any]) -> str | None:
    """Return the name of the metric to report for a task, with its filter: "acc,none"; None if it has none."""
    found = [key for key, value in results.items() if "," in key and isinstance(value, (int, float))]
    metrics = [key for key in found if not key.partition(",")[0].endswith("_stderr")]
    return next((f"{name},none" for name in METRICS if f"{name},none" in metrics), next(iter(metrics), None))
