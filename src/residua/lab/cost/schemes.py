"""The training step of a run beside the plain residual and other schemes, as records and as a table."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from residua.lab.cost.steps import measure
from residua.lab.cost.timing import Quartiles
from residua.lab.experiment import model_config
from residua.lab.training import RunConfig
from residua.records.jobs import Record
from residua.records.table import Table

BASELINE = "residual"


def measure_schemes(
    config: RunConfig,
    schemes: Sequence[str | dict[str, Any]],
    *,
    rounds: int,
    peak: bool,
    advance: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Measure the step of a run under the plain residual and under each of these schemes; one record each.

    vectors   kept for the backward pass per token and layer, of the model's width, in the run's precision

    Raises:
        InputError: a scheme cannot be built with the sizes of the run.
        RunError: a step runs out of memory.
    """
    configs = {}
    for scheme in (BASELINE, *schemes):
        run = replace(config, model=replace(config.model, connection=scheme))
        configs[scheme if isinstance(scheme, str) else json.dumps(scheme)] = run, model_config(run)
    records = measure(configs, BASELINE, rounds=rounds, peak=peak, advance=advance)
    train = config.train
    for record in records:
        sizes = configs[record["scheme"]][1].get_text_config()
        numbers = train.batch_size * train.sequence_length * sizes.num_hidden_layers * sizes.hidden_size
        record["vectors"] = record["kept_bytes"] / (numbers * getattr(torch, train.precision).itemsize)
        record["train"] = asdict(train)
    return records


def table(records: Sequence[Record]) -> Table:
    """Return the times, and the vectors beyond those of the first scheme, which is the plain residual."""
    first = records[0]
    rows = []
    for record in records:
        ratio = Quartiles(**record["time_ratio"])
        rows.append(
            [
                record["scheme"],
                f"{1e3 * record['step_seconds']:.1f}",
                f"{ratio:.3f}",
                f"{record['vectors']:.2f}",
                f"{record['vectors'] - first['vectors']:+.2f}",
                "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:,.0f}",
            ]
        )
    return Table(["scheme", "ms", f"times {first['scheme']}", "vectors kept", "above", "peak MiB"], rows)
