import pytest
import torch

from residua.lab.inspection import gate_quantiles, has_gates, trace
from support.tiny_models import prompt, tiny_model
from support.variants import ALL

LEVELS = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


@pytest.mark.parametrize("name", ALL)
def test_the_quantiles_are_those_of_a_trace(name):
    model, ids = tiny_model(name, torch.float32), prompt(20)
    told, found = gate_quantiles(model, ids[None]), trace(model, ids)
    values = found.values
    assert told.keys() == found.facts["gates"].keys()
    assert has_gates(ALL[name].build(16, 2), 16) == bool(told)
    for key, statistics in told.items():
        assert list(statistics) == ["mean", *LEVELS]
        assert statistics["mean"] == pytest.approx(values[key].mean(1).tolist(), rel=1e-5)
        for level, share in LEVELS.items():
            assert statistics[level] == pytest.approx(values[key].quantile(share, dim=1).tolist(), rel=1e-5)


def test_several_rows_form_one_sample():
    model, ids = tiny_model("ddl"), torch.stack([prompt(20), prompt(20, seed=1)])
    betas = torch.cat([trace(model, row).values["beta"] for row in ids], 1)
    assert gate_quantiles(model, ids)["beta"]["q50"] == pytest.approx(betas.quantile(0.5, dim=1).tolist(), rel=1e-5)
