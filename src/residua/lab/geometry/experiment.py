"""An experiment: its runs, then the tables and pictures of all runs in its folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from residua.errors import extra
from residua.files.reading import read_json
from residua.lab.geometry.forms import expect_runs
from residua.lab.geometry.references import references
from residua.lab.geometry.report import table, write_tables
from residua.lab.geometry.tasks import Task
from residua.lab.jobs.pool import Job, open_runs, run_jobs
from residua.lab.records.provenance import available_cores, circumstances


def run_experiment(
    out: Path,
    settings: dict[str, Any],
    jobs: Sequence[Job],
    tasks: Sequence[Task],
    device: torch.device,
    processes: int | None,
) -> tuple[Any, list[Any]]:
    """Run the jobs that the folder lacks. Return the tables of the folder as JSON, and as texts and tables to print.

    processes: the number of simultaneous runs; None for one per core, or four on a GPU.
    """
    processes = processes or min(available_cores(), 4 if device.type == "cuda" else 1024)
    with extra("lab"):  # raises before hours of training
        from residua.lab.geometry.pictures import draw
    facts = {"circumstances": circumstances(device) | {"threads": 1}}
    with open_runs(out, settings) as runs:
        expect_runs(runs.rows, runs.path)
        rows = run_jobs(jobs, runs, processes=processes, finish=lambda job, record: {"key": job.key, **record, **facts})
        keys = {record["key"] for record in rows}
        records = [*rows, *(record for key, record in runs.finished.items() if key not in keys)]
        tasks = [task for task in tasks if any(record["task"] == task.name for record in records)]
        for task in tasks:
            records += references(task)
        paths = [runs.path, *write_tables(records, out), *draw(records, out)]
    tables = [part for task in tasks for part in (f"{task.name}:", table(records, task.name), "")]
    return read_json(out / "tables.json"), [*tables, *(f"written: {path}" for path in paths)]
