"""Multiple-choice tasks through EleutherAI's lm-evaluation-harness, in the columns of the paper's tables."""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.conversion.opening import context_of
from residua.errors import InputError, extra
from residua.lab.evaluation.published import TASKS, Row
from residua.models.evaluating import evaluating

with extra("eval"):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAPER = "paper"
METRICS = ("acc_norm", "acc")
"""The first one that a task defines is reported. acc_norm divides a choice's likelihood by its length in characters."""


@dataclass(frozen=True)
class Score:
    """The result of one task in percent, with its standard error, the task's version and the number of documents."""

    task: str
    metric: str
    value: float
    stderr: float | None
    version: str
    num_fewshot: int
    documents: int


@dataclass(frozen=True)
class Scores:
    """The scores of one model; `harness` is the version of lm-evaluation-harness."""

    name: str
    scores: tuple[Score, ...]
    harness: str

    @property
    def average(self) -> float:
        return statistics.fmean(score.value for score in self.scores)

    def table(self, published: Sequence[Row] = ()) -> tuple[list[str], list[list[str]]]:
        """Return header and rows: our scores, their standard errors, then the published rows, each with its source."""
        header = ["", "source", *(TASKS.get(score.task, score.task) for score in self.scores), "Avg"]
        stderr = ["" if score.stderr is None else f"±{score.stderr:.2f}" for score in self.scores]
        rows = [
            [self.name, "ours", *(f"{score.value:.2f}" for score in self.scores), f"{self.average:.2f}"],
            ["", "ours: standard error", *stderr, ""],
        ]
        for row in published:
            by_task = dict(zip(TASKS, row.scores))
            cells = [f"{by_task[score.task]:.2f}" for score in self.scores]
            average = f"{row.average:.2f}" if len(cells) == len(TASKS) else ""
            rows.append([row.preset, f"published: {row.source}", *cells, average])
        return header, rows

    def to_json(self, published: Sequence[Row] = ()) -> dict[str, Any]:
        """Return plain values, with the published rows under their own key."""
        return {
            **asdict(self),
            "average": self.average,
            "published": [{**row._asdict(), "scores": dict(zip(TASKS, row.scores))} for row in published],
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
        tasks: names of tasks; "paper" means the paper's eight.
        num_fewshot: number of solved examples before each question.
        batch_size: requests per batch; affects results only by rounding.
        include_path: a folder with your own task files. If it has every requested task, no others are loaded, and the
            network is used only if those files need it.
        limit: number of documents per task, for a quick test; None for all.
        bfloat16: compute under autocast, as in bfloat16 training.

    Raises:
        InputError: a task is unknown or has no accuracy, or the folder does not exist.
    """
    names = [task for given in tasks for task in (TASKS if given == PAPER else [given])]
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _task_manager(names, include_path)
    runner = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        device=str(model.device),
        batch_size=batch_size,
        max_length=context_of(model),
        mixed_precision_dtype="bfloat16" if bfloat16 else None,
    )
    with evaluating(model):
        report = lm_eval.simple_evaluate(
            model=runner,
            tasks=names,
            num_fewshot=num_fewshot,
            task_manager=manager,
            limit=limit,
            log_samples=False,
        )
    return Scores(name, tuple(_score(task, report) for task in names), lm_eval.__version__)


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
        raise InputError(f"--tasks must be paper, or tasks of the harness or --include-path, got {unknown[0]}")
    return manager


def _score(task: str, report: Mapping[str, Any]) -> Score:
    results = report["results"][task]
    for metric in METRICS:
        if f"{metric},none" in results:
            stderr = results.get(f"{metric}_stderr,none")
            return Score(
                task,
                metric,
                100 * float(results[f"{metric},none"]),
                100 * float(stderr) if isinstance(stderr, (int, float)) else None,
                str(report["versions"][task]),
                int(report["n-shot"][task]),
                int(report["n-samples"][task]["effective"]),
            )
    raise InputError(f"--tasks must name tasks with an accuracy, got {task} with {', '.join(results)}")
