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
def test_each_step_passes_fails_or_times_out_separately(gpu, place, capsys):
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
def test_the_total_time_of_all_steps_is_limited(gpu, place, capsys, monkeypatch):
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
def test_every_benchmark_is_accepted_by_its_command(dry, gpu, tmp_path, monkeypatch):
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


def test_questions_come_first_in_their_order_and_checks_before_single_operations(gpu, tmp_path):
    steps = gpu.steps(gpu.Place(tmp_path, dry=False))
    names = [step.name for step in steps]
    assert names[:2] == ["text", "rates 10M"]
    tables = [name for name in names if name.startswith("steps 124M")]
    assert names[2:6] == tables
    order = ["rivals 1M", "write-only 10M", "geometry", "generate graphs", "steps 353M", "models mhc hc"]
    assert names[6:12] == order
    assert names.index("kernels sinkhorn") < names.index("compile") < names.index("ops sinkhorn")
    timed = [scheme for table in gpu.TABLES for scheme in table if ":" not in scheme]
    assert len(["residual", *timed]) == 12
    (rates,) = (step for step in steps if step.name == "rates 10M")
    assert rates.beside.count("--rounds 1 ") == len(gpu.TABLES)
    assert "bench.jsonl" not in rates.beside


@pytest.mark.processes
def test_processes_started_by_a_step_end_with_it(gpu, place, tmp_path):
    mark = tmp_path / "mark"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.05)"
    beside = f"touch {mark}; sleep 600"
    gpu.run(place, [gpu.Step("alone", "", (sys.executable, "-c", wait), 60.0, beside=beside)], 300)
    assert results(place)[0][:2] == ("alone", "passed")


QUESTIONS = ("text", "rates", "steps", "rivals", "write-only", "geometry")


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # ten steps in processes of their own, minutes on two cores and more on busy ones
def test_every_question_is_tried_on_a_cpu(gpu, tmp_path, capsys):
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--minutes", "60", "--only", *QUESTIONS]) == 0
    done = {row["step"] for row in map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())}
    assert len(done) == 10
    assert {"rates 10M", "rivals 1M", "write-only 10M", "geometry", "steps 353M"} <= done
    for study in ("rates", "rivals", "write-only"):
        runs = [json.loads(line) for line in (tmp_path / study / "records.jsonl").read_text().splitlines()]
        assert {"report"} <= {run["kind"] for run in runs}
    assert (tmp_path / "geometry" / "tables.md").exists()
    capsys.readouterr()
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--only", *QUESTIONS]) == 0
    assert "[1/" not in capsys.readouterr().out


def test_the_text_is_sent_compressed_and_refused_if_too_large(gpu, tmp_path, capsys, monkeypatch):
    for name in gpu.TEXTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text(name)
    monkeypatch.setattr(gpu, "DATA", tmp_path)
    monkeypatch.setattr(gpu, "PACKED", tmp_path / "packed.tar.xz")
    assert gpu.main(["--pack"]) == 0
    for name in gpu.TEXTS:
        (tmp_path / name / "index.json").unlink()
    place = gpu.Place(tmp_path / "out", dry=False)
    assert gpu.open_text(place) == 0
    assert [(tmp_path / name / "index.json").read_text() for name in gpu.TEXTS] == [*gpu.TEXTS]
    monkeypatch.setattr(gpu, "MOST_PACKED", 10)
    assert gpu.main(["--pack"]) == 1
    (tmp_path / "packed.tar.xz").unlink()
    (tmp_path / "further" / "index.json").unlink()
    assert gpu.open_text(place) == 1
    assert "further" in capsys.readouterr().out


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
def test_a_dry_run_measures_and_resumes_where_it_ended(gpu, tmp_path, capsys):
    argv = ["--dry-run", "--out", str(tmp_path), "--only", "ops sinkhorn"]
    assert gpu.main(argv) == 0
    assert "auto should choose" in capsys.readouterr().out
    records = (tmp_path / "bench.jsonl").read_text()
    assert {json.loads(line)["implementation"] for line in records.splitlines()} == {"reference", "triton"}
    assert gpu.main(argv) == 0
    assert (tmp_path / "bench.jsonl").read_text() == records
    assert "[1/" not in capsys.readouterr().out


def test_without_a_gpu_the_script_gives_a_one_line_message(gpu, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a machine with a CUDA device, found none; --dry-run" in capsys.readouterr().err
