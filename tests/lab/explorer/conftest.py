import shutil

import pytest

from residua.lab import experiment
from support.tiny_runs import options, prepare_texts, run_config


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    return prepare_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def trained(prepared, tmp_path_factory):
    """A run of four steps, with checkpoints of two of them."""
    folder = tmp_path_factory.mktemp("runs") / "ddl"
    settings = options(prepared, model={"connection": "ddl-cc", "num_hidden_layers": 1}, steps=4)
    experiment.run(run_config(settings), folder, progress=False)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "ddl")
