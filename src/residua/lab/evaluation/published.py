"""Published results of arXiv 2601.00417; never mixed with our own measurements.

The scores on the eight tasks, in percent, are in this file; losses, costs and validation curves are in published.jsonl.
The numbers in published.jsonl come from the tables and figures of the PDF of 27 July 2026 in the authors' repository.
The figures are vector graphics; their points agree with the printed losses to 1e-4. The scheme "hc"
is only in a figure.

The paper does not name its metric; the values fit `acc_norm` for tasks that define it and `acc` for others. Each row is
one run with one seed. The medium 0-shot ARC-C of "ddl" is printed as 32.07, which no number of correct answers yields.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from residua.connections.names import in_the_paper

PAPER_TASKS: dict[str, str] = {
    "arc_challenge": "ARC-C",
    "arc_easy": "ARC-E",
    "hellaswag": "Hellaswag",
    "openbookqa": "OpenBookQA",
    "piqa": "PIQA",
    "sciq": "SciQ",
    "social_iqa": "Social IQA",
    "winogrande": "WG",
}
"""Names of tasks in the harness, and in the paper, in the order of the paper's columns."""


TRAINING_TOKENS = 100_000 * 480 * 1024
SHAPES = {"small": (12, 768), "medium": (24, 1024)}
"""The number of layers and the width of the published models."""
PARAMETERS = {"small": "124M", "medium": "353M"}


class PublishedModel(NamedTuple):
    """A published model: its final validation loss, the cost of its run, and its loss by billions of tokens.

    A number that is not in the paper is None; a curve that is not in the paper is empty. Tokens per second are for four
    H200 GPUs.
    """

    size: str
    preset: str
    loss: float | None = None
    perplexity: float | None = None
    train_tokens_per_second: int | None = None
    inference_tokens_per_second: int | None = None
    peak_gigabytes: float | None = None
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def hours(self) -> float | None:
        """The hours on four H200 GPUs for the whole run, computed from the speed; the paper does not state them."""
        speed = self.train_tokens_per_second
        return None if speed is None else TRAINING_TOKENS / speed / 3600

    def loss_at(self, billions: float) -> float | None:
        """Return the loss at this many billion tokens, interpolated on the curve; None outside the curve."""
        for (start, before), (end, after) in zip(self.curve, self.curve[1:]):
            if start <= billions <= end:
                return before + (after - before) * (billions - start) / (end - start)
        return None

    @property
    def title(self) -> str:
        return f"{titled(self.preset)}, published at {PARAMETERS[self.size]}"


class PublishedScores(NamedTuple):
    """One published row; `preset` is our name for the scheme, `scores` are in the order of PAPER_TASKS."""

    size: str
    num_fewshot: int
    preset: str
    version: int
    scores: tuple[float, ...]
    average: float

    @property
    def source(self) -> str:
        return f"arXiv 2601.00417v{self.version}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the scores by task."""
        return {
            **self._asdict(),
            "name_in_paper": in_the_paper(self.preset),
            "scores": dict(zip(PAPER_TASKS, self.scores)),
        }

    @property
    def title(self) -> str:
        """Our name of the scheme, with the name that the paper uses since its third version."""
        return titled(self.preset)


SCORES: tuple[PublishedScores, ...] = (
    PublishedScores("small", 1, "residual", 2, (29.01, 55.85, 37.59, 30.2, 65.94, 80.6, 37.87, 51.38), 48.56),
    PublishedScores("small", 1, "ddl", 2, (29.35, 57.49, 38.08, 31.8, 64.85, 78.5, 37.77, 52.01), 48.73),
    PublishedScores("small", 1, "ddl-tc", 2, (27.9, 58.16, 38.26, 30.8, 66.49, 80.3, 38.54, 50.83), 48.91),
    PublishedScores("small", 1, "ddl-cc", 2, (27.82, 58.92, 38.44, 33.2, 65.83, 79.5, 38.28, 51.07), 49.13),
    PublishedScores("small", 1, "ddl-ec", 2, (28.75, 57.37, 38.41, 34.4, 64.47, 82.0, 38.38, 52.01), 49.47),
    PublishedScores("small", 1, "ddl-cc-ec", 2, (28.33, 57.87, 38.24, 32.2, 64.09, 82.6, 38.43, 52.57), 49.29),
    PublishedScores("medium", 1, "residual", 2, (33.62, 67.05, 47.42, 33.2, 70.24, 87.3, 40.28, 52.57), 53.96),
    PublishedScores("medium", 1, "ddl", 2, (35.49, 65.7, 46.94, 34.2, 70.35, 88.9, 40.99, 54.93), 54.69),
    PublishedScores("medium", 1, "ddl-tc", 2, (33.02, 66.16, 47.83, 35.6, 69.86, 89.5, 40.99, 55.64), 54.83),
    PublishedScores("medium", 1, "ddl-cc", 3, (34.3, 66.08, 48.65, 36.6, 68.72, 88.8, 40.84, 55.33), 54.92),
    PublishedScores("medium", 1, "ddl-ec", 3, (35.15, 65.7, 47.74, 35.4, 69.04, 88.6, 40.63, 56.59), 54.86),
    PublishedScores("medium", 1, "ddl-cc-ec", 3, (34.39, 65.57, 48.92, 36.0, 69.48, 90.5, 40.53, 55.72), 55.14),
    PublishedScores("small", 0, "residual", 2, (28.33, 52.44, 37.6, 33.0, 65.94, 71.2, 37.46, 52.41), 47.3),
    PublishedScores("small", 0, "ddl", 2, (26.96, 52.4, 37.91, 32.2, 64.91, 72.5, 38.08, 53.59), 47.32),
    PublishedScores("small", 0, "ddl-tc", 2, (27.3, 52.95, 38.4, 33.8, 65.4, 73.7, 38.64, 50.12), 47.54),
    PublishedScores("small", 0, "ddl-cc", 2, (27.05, 51.47, 38.72, 32.2, 66.16, 71.8, 38.08, 51.07), 47.07),
    PublishedScores("small", 0, "ddl-ec", 2, (28.5, 51.89, 38.82, 33.2, 65.29, 73.0, 39.05, 52.88), 47.83),
    PublishedScores("small", 0, "ddl-cc-ec", 2, (27.9, 51.26, 38.42, 31.4, 64.85, 73.6, 37.77, 52.25), 47.18),
    PublishedScores("medium", 0, "residual", 2, (31.74, 59.85, 47.91, 34.0, 69.21, 78.1, 40.69, 53.83), 51.92),
    PublishedScores("medium", 0, "ddl", 2, (32.07, 59.39, 47.62, 34.4, 70.08, 77.3, 39.61, 55.01), 51.94),
    PublishedScores("medium", 0, "ddl-tc", 2, (32.08, 58.38, 48.08, 35.8, 69.42, 79.9, 39.92, 54.14), 52.22),
    PublishedScores("medium", 0, "ddl-cc", 3, (32.08, 61.74, 49.12, 34.8, 69.53, 80.2, 40.43, 55.17), 52.88),
    PublishedScores("medium", 0, "ddl-ec", 3, (33.02, 59.68, 48.0, 36.8, 68.77, 81.0, 39.82, 55.88), 52.87),
    PublishedScores("medium", 0, "ddl-cc-ec", 3, (32.59, 59.55, 49.01, 36.0, 69.7, 82.3, 39.82, 53.83), 52.85),
)


def titled(preset: str) -> str:
    """Return the name of a preset with the paper's name: "ddl-ec (DDL-TC)"."""
    title = in_the_paper(preset)
    return f"{preset} ({title})" if title else preset


@cache
def models() -> Mapping[tuple[str, str], PublishedModel]:
    """Return the published models by size and preset."""
    lines = Path(__file__).with_name("published.jsonl").read_text(encoding="utf-8").splitlines()
    found = (
        PublishedModel(**{**(row := json.loads(line)), "curve": tuple(map(tuple, row.get("curve", ())))})
        for line in lines
    )
    return {(model.size, model.preset): model for model in found}


def size_of(settings: Mapping[str, Any]) -> str | None:
    """Return the published size with the depth and width in a run's settings (by dotted key); None if there is none."""
    shape = settings.get("model.num_hidden_layers"), settings.get("model.hidden_size")
    return next((size for size, published in SHAPES.items() if published == shape), None)


def rows(size: str, num_fewshot: int) -> list[PublishedScores]:
    """Return the published rows of a model size, "small" or "medium", with this many examples in the prompt."""
    return [row for row in SCORES if (row.size, row.num_fewshot) == (size, num_fewshot)]


def comparable(
    config: Any, tasks: Collection[str], num_fewshot: int, *, size: str | None = None
) -> list[PublishedScores]:
    """Return the published rows to show with scores on `tasks`; [] if a task is not among the paper's eight.

    size: "small" or "medium"; None for the published size with the depth and width of `config`.
    """
    if size is None:
        from residua.models.configuration import SIZES

        shape = ("num_hidden_layers", "hidden_size")
        alike = (name for name in SIZES if all(getattr(config, key, None) == SIZES[name][key] for key in shape))
        size = next(alike, "")
    return rows(size, num_fewshot) if set(tasks) <= PAPER_TASKS.keys() else []


def averages(names: Collection[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the published averages of these presets and the plain residual.

    There are no rows if none of the presets was published.
    """
    columns = list(dict.fromkeys(f"{row.size}, {row.num_fewshot}-shot" for row in SCORES))
    scores: dict[str, dict[str, str]] = {}
    for row in SCORES:
        if row.preset in {*names, "residual"}:
            column = f"{row.size}, {row.num_fewshot}-shot"
            scores.setdefault(row.preset, {})[column] = f"{row.average:.2f} (v{row.version})"
    if not scores.keys() & set(names):
        return [], []
    return ["scheme", *columns], [[name, *(row.get(column, "") for column in columns)] for name, row in scores.items()]
