import json

import pytest
import torch

from residua.lab.data import prepare
from residua.lab.experiment import run
from residua.lab.training import train
from support.ranks import config, options
from support.toy_language_model import ToyBatches, ToyModel, evaluate, toy_config


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fit():
    """Train the toy model into a folder: `fit(folder, steps=..., resume=..., model=..., batches=...)`."""

    def fit(folder, *, resume=False, model=None, batches=None, facts=None, progress=False, **changes):
        return train(
            model or ToyModel(),
            batches or ToyBatches(),
            toy_config(**changes),
            folder,
            evaluate=evaluate,
            resume=resume,
            facts=facts,
            progress=progress,
        )

    return fit


@pytest.fixture
def rows():
    """The rows of a run's metrics without what a clock decides."""

    def rows(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: row[key] for key in row if key not in ("seconds", "tokens_per_second")} for row in lines]

    return rows


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of prepared bytes, for `ranks.options`."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"Text number {number} tells of {number * number} things.\n" * 2)
    return prepare(folder, tmp_path_factory.mktemp("prepared") / "data", tokenizer="byte", progress=False).folder


@pytest.fixture(scope="session")
def alone(data, tmp_path_factory):
    """The run of one process with the options of `ranks.options`, trained once: `alone(connection, **train)`."""
    done = {}

    def alone(connection="ddl-tc", **train):
        key = (connection, *sorted(train.items()))
        if key not in done:
            done[key] = tmp_path_factory.mktemp("alone") / "run"
            run(config(options(data, model={"connection": connection}, **train)), done[key], progress=False)
        return done[key]

    return alone
