"""`make gpu`: each step is tried within its time, once, and what is said at the end is what the records say."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from residua.commands import cost
from residua.commands.signature import call, command_parser
from support.pages import TOOLS, script

pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="tools/ is not in this archive")


@pytest.fixture(scope="module")
def gpu():
    return script("gpu", TOOLS)


@pytest.fixture
def place(gpu, tmp_path):
    return gpu.Place(tmp_path / "out", dry=True)


def step(gpu, name, code, limit=60.0):
    return gpu.Step(name, "what it shows", (sys.executable, "-c", code), limit)


def results(place):
    lines = (place.out / "steps.jsonl").read_text().splitlines()
    return [(row["step"], row["result"], row["detail"]) for row in map(json.loads, lines)]


@pytest.mark.processes
def test_steps_pass_fail_and_time_out_each_by_itself(gpu, place, capsys):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    steps = [
        step(gpu, "first", "print('all well')"),
        step(gpu, "crashes", "import os; os.abort()"),
        step(gpu, "hangs", child, limit=1.0),
        step(gpu, "complains", "print('this is wrong'); raise SystemExit(3)"),
    ]
    gpu.run(place, steps, 300)
    assert results(place) == [
        ("first", "passed", "all well"),
        ("crashes", "failed", "status -6: it printed nothing"),
        ("hangs", "timed out", "after 1 s; it printed nothing"),
        ("complains", "failed", "status 3: this is wrong"),
    ]
    text = gpu.summary(place, [*steps, step(gpu, "last", "")])
    assert "## Steps: 1 passed, 2 failed, 1 timed out, 1 not reached" in text
    assert "| complains | failed |" in text

    (place.out / "steps.jsonl").open("a").write('{"step": "torn')
    gpu.run(place, [*steps[:2], step(gpu, "new", "print('later')")], 300)
    assert [row[:2] for row in results(place)[4:]] == [("new", "passed"), ("crashes", "failed")]


@pytest.mark.processes
def test_the_time_of_all_steps_is_kept(gpu, place, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "SHORTEST", 1.0)
    steps = [step(gpu, name, "import time; time.sleep(60)") for name in "abc"]
    gpu.run(place, steps, 2.5)
    assert results(place)[0][1] == "timed out"
    assert "steps wait for the next call" in capsys.readouterr().out


def test_tests_are_counted_and_named(gpu, tmp_path):
    cases = "".join(f'<testcase name="test_{n}">{"<failure/>" if n < 4 else ""}</testcase>' for n in range(9))
    report = tmp_path / "report.xml"
    report.write_text(
        f'<testsuites><testsuite tests="9" failures="4" errors="0" skipped="2">{cases}</testsuite></testsuites>'
    )
    assert gpu._result_of_tests(report, 1, tmp_path / "log") == (
        "failed",
        "3 of 9 tests passed, 2 skipped; failed: test_0, test_1, test_2 and 1 more",
    )
    report.write_text('<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2"/></testsuites>')
    assert gpu._result_of_tests(report, 0, tmp_path / "log")[0] == "failed", "nothing ran"


@pytest.mark.parametrize("dry", [False, True])
def test_every_benchmark_is_one_that_its_command_takes(dry, gpu, tmp_path, monkeypatch):
    place = gpu.Place(tmp_path, dry)
    steps = gpu.steps(place)
    assert len({step.name for step in steps}) == len(steps)
    commands = [step.command[2:] for step in steps if {"cost", "benchmarks"} & set(step.command)]
    monkeypatch.setattr("benchmarks.__main__.measure", lambda benchmark, settings, out: measured.append(settings.steps))
    steps_of_cost = "residua.lab.cost.steps"
    monkeypatch.setattr(f"{steps_of_cost}.measure_schemes", lambda config, names, **_: measured.append(names) or [])
    monkeypatch.setattr(f"{steps_of_cost}.table", lambda records: (["scheme"], []))
    measured, kinds = [], set()
    place.out.mkdir(exist_ok=True)
    for command in commands:
        inside = command[:2] == ("residua", "cost")
        kind, *options = command[2 if inside else 1 :]
        kinds.add(kind)
        function = cost.step if inside else BENCHMARKS[kind]
        arguments = command_parser(kind, function).parse_args(options)
        if inside:
            assert f"--train.device={place.device}" in arguments.overrides
        else:
            assert arguments.device == place.device
            arguments.device = "cpu"  # otherwise refused here
        call(function, arguments)
        assert measured.pop()
    assert kinds == {"ops", "step", "generate", "peers"}
    for step in steps:
        if step.tests:
            assert Path(next(part for part in step.command if part.endswith(".py"))).is_file()


def test_compiled_gradients_are_checked_before_all_else(gpu, place):
    """Whoever trains compiled on a new GPU needs that first."""
    assert gpu.steps(place)[0].name == "compile"


def test_the_faster_implementation_is_named(gpu, place):
    place.out.mkdir()
    common = {"benchmark": "ops", "operation": "sinkhorn", "dtype": "bfloat16", "tokens": 8, "dim": 4, "channels": 4}
    common["share_of_copy"] = {"median": 0.5}
    with (place.out / "bench.jsonl").open("w") as file:
        for kind, times in (("forward", (3e-6, 1e-6)), ("forward+backward", (4e-6, 6e-6))):
            for name, seconds in zip(("reference", "triton"), times):
                row = common | {"implementation": name, "pass": kind, "median_seconds": seconds}
                print(json.dumps(row), file=file)
    text = gpu.summary(place, [])
    assert "| sinkhorn, 8 x 4 x 4, bfloat16, forward | 3.0 | 1.0 |  |  |  | 0.50 | triton |" in text
    assert "forward+backward | 4.0 | 6.0 |  |  |  | 0.50 | reference (auto takes triton) |" in text


@pytest.mark.processes
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_a_dry_run_measures_and_goes_on_where_it_ended(gpu, tmp_path, capsys):
    argv = ["--dry-run", "--out", str(tmp_path), "--only", "ops sinkhorn"]
    assert gpu.main(argv) == 0
    assert "auto should choose" in capsys.readouterr().out
    records = (tmp_path / "bench.jsonl").read_text()
    assert {json.loads(line)["implementation"] for line in records.splitlines()} == {"reference", "triton"}
    assert gpu.main(argv) == 0
    assert (tmp_path / "bench.jsonl").read_text() == records
    assert "[1/" not in capsys.readouterr().out


def test_without_a_gpu_it_says_so(gpu, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a machine with a CUDA device, found none; --dry-run" in capsys.readouterr().err
