"""The coordinate check tells muP from one learning rate for everything."""

import math

import pytest
import torch

from support.pages import script

mup_check = script("mup_check")
SITES = ["embedding", "attention", "mlp", "hidden", "logits"]


@pytest.fixture(scope="module")
def coordinates():
    return mup_check.check("residual", widths=(32, 64, 128), steps=3, seeds=1)


def test_training_moves_logits_equally_at_every_width_only_under_mup(coordinates):
    slopes = {(c.parameterisation, c.site): c.slope for c in coordinates}
    assert [c.site for c in coordinates] == SITES * 2
    assert abs(slopes["muP", "logits"]) < 0.25
    assert slopes["standard", "logits"] > 0.5
    assert slopes["standard", "mlp"] > slopes["muP", "mlp"] + 0.5


def test_with_and_without_mup_agree_at_the_base_width(coordinates):
    by_name = {(c.parameterisation, c.site): c for c in coordinates}
    for site in SITES:
        mup, standard = by_name["muP", site], by_name["standard", site]
        assert (mup.start[32], mup.change[32]) == (standard.start[32], standard.change[32])
        assert min(mup.change.values()) > 0


def test_the_global_random_state_is_unchanged():
    state = torch.random.get_rng_state()
    mup_check.check("ddl", widths=(32, 64), steps=1, seeds=1)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "slope", "verdict"),
    [
        ({64: 1.0, 256: 1.0}, 0.0, "flat"),
        ({64: 1.0, 256: 4.0}, 1.0, "grows"),
        ({64: 1.0, 256: 0.5}, -0.5, "shrinks"),
        ({64: 1.0, 256: math.inf}, math.nan, "diverges"),
    ],
)
def test_a_slope_has_a_verdict(change, slope, verdict):
    coordinate = mup_check.Coordinate("muP", "logits", change, change)
    assert coordinate.slope == pytest.approx(slope, nan_ok=True)
    assert coordinate.verdict == verdict


def test_the_script_prints_a_table_and_draws_a_picture(capsys, tmp_path):
    argv = ["--connection", "ddl", "--widths", "32", "64", "--steps", "1", "--seeds", "1"]
    mup_check.main([*argv, "--out", str(tmp_path / "mup.png")])
    lines = capsys.readouterr().out.splitlines()
    assert sum("standard" in line for line in lines) == sum("muP" in line for line in lines) == len(SITES)
    assert (tmp_path / "mup.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="2"):
        mup_check.main(["--connection", "dll", "--widths", "32", "64"])
    assert "did you mean" in capsys.readouterr().err
