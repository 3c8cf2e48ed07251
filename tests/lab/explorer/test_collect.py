"""What goes into the page: from run folders and trace files, within its size, or one clear line."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from residua.commands.cli import main
from residua.files.tensors import write_tensors
from residua.lab.explorer.collect import DRAWN, PAGE_BYTES, Source, collect, page_of
from support import planted


def read(page: Path) -> dict:
    """The payload of a written page."""
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', page.read_text(encoding="utf-8"))
    return json.loads(found[1])


def test_without_arguments_the_page_has_only_its_interactive_part(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explore"]) == 0
    assert "explorer.html" in capsys.readouterr().out
    assert read(tmp_path / "explorer.html") == {"title": "residua", "traces": [], "comparison": None}


def test_runs_and_trace_files_are_shown_together_under_distinct_names(run, tmp_path):
    paths = [planted.delta(torch.ones(2, 3)).save(tmp_path / folder / "a.safetensors") for folder in ("x", "y")]
    named = planted.residual(run="plain", checkpoint=7).save(tmp_path / "z.safetensors")
    payload, arrays = page_of(*collect([*paths, run, named, paths[0]]))
    assert [trace["name"] for trace in payload["traces"]] == ["a (1)", "a (2)", "ddl", "plain, step 7"]
    np.testing.assert_array_equal(arrays["1.beta"], np.ones((2, 3)))
    assert payload["comparison"] is None


def test_the_arrays_of_the_page_are_those_of_the_trace():
    trace = planted.streams()
    payload, arrays = page_of([Source("streams", trace)])
    for name, described in payload["traces"][0]["arrays"].items():
        assert described["tokens"] is None
        assert list(arrays[described["key"]].shape) == described["shape"]
        if name in trace.values:
            np.testing.assert_array_equal(arrays[described["key"]], trace.values[name])
    np.testing.assert_allclose(arrays["0.mixing"][-1], np.linalg.norm(trace.values["h_res"][-1, 0].numpy() - np.eye(3)))
    np.testing.assert_allclose(arrays["0.change"], 0.5 / trace.values["state_norm"][:-1])


def test_beta_stays_exact_and_other_values_are_reduced_if_a_page_would_be_too_large():
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(96, 4, generator=generator), dim=1)
    trace = planted.delta(2 * torch.rand(96, 2048, generator=generator), directions=directions)
    trace.values["change_norm"] = trace.values["change_norm"] * 1e6
    payload, arrays = page_of([Source("large", trace)])
    np.testing.assert_array_equal(arrays["0.beta"], trace.values["beta"])
    described = payload["traces"][0]["arrays"]
    assert arrays["0.state_norm"].dtype == np.float16
    sampled = trace.facts["sampled"]
    assert described["discrepancy_norm"]["tokens"] == sampled
    torch.testing.assert_close(
        torch.from_numpy(arrays["0.discrepancy_norm"]).float(),
        trace.values["discrepancy_norm"][:, sampled],
        rtol=1e-3,
        atol=1e-3,
    )
    assert np.isfinite(arrays["0.change_norm"]).all()  # too large for 16 bits
    assert sum(array.nbytes for array in arrays.values()) * 4 / 3 < PAGE_BYTES
    payload, arrays = page_of([Source(str(number), trace) for number in range(12)])
    assert sum(array.nbytes for array in arrays.values()) * 4 / 3 < PAGE_BYTES


def test_weights_over_depth_are_reduced_to_their_mean_if_they_are_too_large():
    trace = planted.depth(36, 300, reads=("q", "k", "v"))
    payload, arrays = page_of([Source("one", trace)])
    np.testing.assert_array_equal(arrays["0.depth_weights"], trace.values["depth_weights"].half())
    payload, arrays = page_of([Source(str(number), trace) for number in range(4)])
    for number in range(4):
        assert "depth_weights" not in payload["traces"][number]["arrays"]
        np.testing.assert_array_equal(arrays[f"{number}.depth_mean"], trace.values["depth_mean"])
    assert sum(array.nbytes for array in arrays.values()) * 4 / 3 < PAGE_BYTES


def test_the_page_shows_the_checks_for_which_the_trace_has_values():
    shared = torch.full((4, 4), 0.25)
    compressed = planted.delta(torch.ones(4, 10))
    compressed.values["compress_share"] = shared
    expected = {
        "residual": (planted.residual(), []),
        "delta": (planted.delta(torch.ones(4, 10)), ["no gate is stuck"]),
        "compressed": (compressed, ["no gate is stuck", "no compressor"]),
        "orthogonal": (
            planted.streams(constraint="orthogonal"),
            ["the mixing has left the identity and stayed orthogonal", "the streams are not copies"],
        ),
        "streams": (planted.streams(), ["the mixing has left the identity", "the streams are not copies"]),
        "geometric": (planted.geometric(), ["no gate is stuck"]),
        "gated": (planted.gated({"other": torch.linspace(0.1, 0.9, 40).view(4, 10)}), ["no gate is stuck"]),
    }
    payload, _ = page_of([Source(name, trace) for name, (trace, _) in expected.items()])
    for described in payload["traces"]:
        always, own = described["checked"][:2], described["checked"][2:]
        assert always == ["all numbers are finite", "the connection is causal"]
        beginnings = expected[described["name"]][1]
        assert len(own) == len(beginnings)
        assert all(text.startswith(beginning) for text, beginning in zip(own, beginnings))


def test_a_run_that_was_stopped_in_the_middle_of_a_row_can_be_explored(run):
    rows = ({"step": step, "beta": {key: [1, end] for key in DRAWN}} for step, end in ((1, 1), (2, None)))
    (run / "connections.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"ste')
    _, arrays = page_of(*collect([run]))
    np.testing.assert_array_equal(arrays["0.training.beta.mean"], [[1, 1], [1, np.nan]])


def test_a_damaged_trace_of_a_run_is_made_again_and_that_of_a_named_file_is_refused(run, capsys):
    assert main(["explore", str(run), "--no-page"]) == 0
    first = capsys.readouterr().out
    (kept,) = (run / "analysis").glob("trace-*.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert main(["explore", str(kept), "--no-page"]) == 2
    assert "must be a trace" in capsys.readouterr().err
    assert main(["explore", str(run), "--no-page"]) == 0
    captured = capsys.readouterr()
    assert captured.out == first
    assert "makes the trace again" in captured.err
    assert len(kept.read_bytes()) == len(whole)


def without(trace, *names):
    return dataclasses.replace(trace, values={name: x for name, x in trace.values.items() if name not in names})


@pytest.mark.parametrize(
    "trace",
    [
        planted.delta(torch.ones(2, 3), loss=math.nan),
        planted.delta(torch.ones(2, 3), note=[math.inf]),
        planted.delta(torch.ones(2, 3), gates={}),
        planted.residual(gates={"token_loss": None}),
        without(planted.streams(constraint="doubly stochastic"), "row_error"),
        without(planted.delta(torch.ones(2, 3)), "effective_rank"),
        without(planted.delta(torch.ones(2, 3)), "singular_min"),
    ],
    ids=["nan", "inf", "no gate", "gate of other axes", "row_error", "effective_rank", "singular_min"],
)
def test_a_trace_whose_parts_do_not_belong_together_is_refused(trace, tmp_path, capsys):
    metadata = {"residua_trace": "1", "facts": json.dumps(trace.facts), "tokens": json.dumps(trace.tokens)}
    write_tensors(tmp_path / "forged.safetensors", trace.values, metadata)
    assert main(["explore", str(tmp_path / "forged.safetensors"), "--no-page"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "forged.safetensors must be a trace" in line
