import pytest

from support.planted_runs import planted_run


@pytest.fixture
def make_run(tmp_path):
    """`make_run(name, **settings)` writes a run folder, as `planted_run` says."""
    return lambda name, **settings: planted_run(tmp_path / name, **settings)
