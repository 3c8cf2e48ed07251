import json

import pytest

from residua.lab.experiment import run
from residua.lab.training import train
from support.tiny_runs import options, prepare_texts, run_config
from support.toy_language_model import ToyBatches, ToyModel, evaluate, toy_config


@pytest.fixture
def fit():
    """Train the toy model into a folder: `fit(folder, steps=..., resume=..., model=..., batches=...)`."""

    def fit(folder, *, resume=False, model=None, batches=None, facts=None, progress=False, **changes):
        given = {"evaluate": evaluate, "resume": resume, "facts": facts, "progress": progress}
        return train(model or ToyModel(), batches or ToyBatches(), toy_config(**changes), folder, **given)

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
    """A folder of prepared bytes, for `tiny_runs.options`."""
    return prepare_texts(tmp_path_factory.mktemp("texts")).folder


@pytest.fixture(scope="session")
def alone(data, tmp_path_factory):
    """The run of one process with the options of `tiny_runs.options`, trained once: `alone(connection, **train)`."""
    done = {}

    def alone(connection="ddl-tc", **train):
        key = (connection, *sorted(train.items()))
        if key not in done:
            done[key] = tmp_path_factory.mktemp("alone") / "run"
            run(run_config(options(data, model={"connection": connection}, **train)), done[key], progress=False)
        return done[key]

    return alone
