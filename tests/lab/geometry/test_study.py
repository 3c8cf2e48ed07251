import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from residua.errors import InputError, RunError
from residua.lab.geometry.study import FULL, Settings, job, train
from residua.lab.training.optimizer import parameter_groups
from residua.records import jsonlines
from residua.records.jobs import Job, open_runs, run_jobs

TINY = Settings(
    steps=60,
    batch_size=4,
    warmup=5,
    dim=32,
    layers=2,
    length=6,
    num_train=40,
    num_val=10,
    evaluate_every=20,
    online_trajectories=4,
    online_stride=1,
)
CPU = torch.device("cpu")
BY_CLOCK = ("seconds", "circumstances")


def jobs(models=("residual", "edelta-token"), tasks=("gyroscope", "near-pi"), seeds=(0,), settings=TINY):
    return [job(m, t, s, settings, CPU) for t in tasks for m in models for s in seeds]


def timeless(records):
    return [{key: value for key, value in record.items() if key not in BY_CLOCK} for record in records]


def run_all(folder, chosen, workers=1):
    with open_runs(folder, {"of": "a test"}) as made:
        return timeless(run_jobs(chosen, made, processes=workers, finish=with_key))


def with_key(job, record):
    return {"key": job.key, **record}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("undisturbed") / "out", jobs())


def test_the_recipe_is_the_published_one():
    assert (FULL.steps, FULL.batch_size, FULL.clip, FULL.weight_decay) == (2000, 64, 1.0, 0.1)
    rates = [FULL.learning_rate(step) for step in (1, 50, 100, 1050, 2000)]
    assert rates == pytest.approx([1e-5, 5e-4, 1e-3, 5.5e-4, 1e-4])
    assert FULL.task("gyroscope").length == 255
    model = job("residual", "gyroscope", 0, TINY, CPU).arguments[0].build()
    groups = parameter_groups(model, TINY.weight_decay)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(parameter.dim() == 2 for parameter in groups[0]["params"])
    assert all(parameter.dim() == 1 for parameter in groups[1]["params"])


@pytest.mark.slow
def test_a_record_is_complete(undisturbed):
    record = undisturbed[1]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["task"], record["model"], record["seed"]) == ("gyroscope", "edelta-token", 0)
    assert [step for step, _ in record["curve"]] == [20, 40, 60]
    assert record["curve"][-1][1] == pytest.approx(record["loss"], rel=1e-5)
    assert record["best_loss"] == min(loss for _, loss in record["curve"])
    assert record["online_loss"] == pytest.approx(record["loss"], rel=1e-4)
    assert record["causal"] is True
    assert len(record["by_position"]) == len(record["online_by_position"]) == 6
    assert len(record["stream_norms"]) == 2 * record["architecture"]["layers"] + 1
    assert record["stream_norms"][0] == 1.0
    assert record["gates"].keys() == {"gamma", "beta"}
    assert record["position0_leak"] in (True, False)
    assert record["settings"]["lr"] == TINY.lr
    assert "position0_leak" not in undisturbed[2]
    assert undisturbed[2]["gates"] == {}


@pytest.mark.slow
def test_the_seed_decides_everything_and_nothing_else_does(undisturbed):
    torch.manual_seed(99)
    one = jobs()[0]
    again = train(*one.arguments)
    assert timeless([again])[0] == {key: undisturbed[0][key] for key in again if key not in BY_CLOCK}
    other = train(*jobs(seeds=(1,))[0].arguments)
    assert other["loss"] != again["loss"]


TRAINING = """
import sys
sys.path.insert(0, sys.argv[1])
from test_study import jobs, run_all
run_all(sys.argv[2], jobs())
"""
WORKERS = """
import sys
sys.path.insert(0, sys.argv[1])
from test_study import Job, endless, run_all
run_all(sys.argv[2], [Job(f"job{i}", endless, (), 1) for i in range(3)], workers=2)
"""


def start(code, folder):
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


def wait_for(condition, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@pytest.mark.processes
def test_killed_in_the_middle_it_goes_on_and_ends_the_same(undisturbed, tmp_path):
    folder = tmp_path / "out"
    records = folder / "records.jsonl"
    process = start(TRAINING, folder)
    wait_for(lambda: records.exists() and records.stat().st_size)
    process.kill()
    process.wait()
    done = len(jsonlines.read(records))
    assert 0 < done < len(undisturbed)
    assert run_all(folder, jobs()) == undisturbed
    assert len(records.read_text().splitlines()) == len(undisturbed)


@pytest.mark.processes
def test_several_workers_change_no_number(undisturbed, tmp_path):
    assert run_all(tmp_path / "out", jobs()[:2], workers=2) == undisturbed[:2]


def endless(*, place, report):
    """Leaves the number of its process where its state would be."""
    place.with_suffix(".pid").write_text(str(os.getpid()))
    while True:
        report(1)
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see which processes run")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start(WORKERS, tmp_path / "out")

    def workers():
        return [path.read_text() for path in (tmp_path / "out" / "runs").glob("*.pid")]

    wait_for(lambda: len(workers()) == 2 and all(workers()))
    assert all(running(worker) for worker in workers())
    process.kill()
    process.wait()
    wait_for(lambda: not any(running(worker) for worker in workers()))


def running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def dies(*, place, report):
    os._exit(3)


def instant(*, place, report):
    report(0)
    return {"kind": "run"}


@pytest.mark.processes
def test_a_process_that_dies_is_told_and_what_is_finished_stays(tmp_path):
    chosen = [Job("good", instant, (), 1, cost=2.0), Job("bad", dies, (), 1), Job("late", instant, (), 1, cost=0.5)]
    with open_runs(tmp_path / "out", {}) as made:
        with pytest.raises(RunError, match=r"bad ended with exit status 3"):
            run_jobs(chosen, made, processes=2, finish=with_key)
        assert "good" in made.finished or not made.finished
    assert run_all(tmp_path / "other", [chosen[0]]) == [{"key": "good", "kind": "run"}]


@pytest.mark.slow
def test_finished_runs_are_not_made_again(tmp_path):
    first = run_all(tmp_path / "out", jobs(tasks=("stability",)))
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    assert run_all(tmp_path / "out", jobs(tasks=("stability",))) == first
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_torn_last_line_is_made_again_and_a_damaged_one_told(undisturbed, tmp_path):
    folder = tmp_path / "out"
    run_all(folder, jobs()[:2])
    records = folder / "records.jsonl"
    text = records.read_text()
    records.write_text(text[:-40])
    assert len(jsonlines.read(records)) == 1
    assert run_all(folder, jobs()[:2]) == undisturbed[:2]
    records.write_text("{not json}\n" + text)
    with pytest.raises(InputError, match="line 1"):
        run_all(folder, jobs())


def test_a_run_that_diverges_is_recorded_without_numbers(tmp_path):
    settings = replace(TINY, lr=1e30, final_lr=1e30)
    (record,) = run_all(tmp_path / "out", jobs(("residual",), ("stability",), settings=settings))
    assert record["diverged"] is True
    assert record["loss"] is record["online_loss"] is record["stream_norms"] is None
    assert record["steps_done"] < TINY.steps


def test_a_folder_has_one_writer_and_one_recipe(tmp_path):
    folder = tmp_path / "out"
    held = open_runs(folder, {"lr": 1.0})
    with held, pytest.raises(InputError, match="another process"), open_runs(folder, {"lr": 1.0}):
        pass
    with pytest.raises(InputError, match=r"lr was 1.0, is 2.0"), open_runs(folder, {"lr": 2.0}):
        pass
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="other files"), open_runs(tmp_path, {}):
        pass
    with pytest.raises(InputError, match="must be a folder"), open_runs(tmp_path / "mine.txt", {}):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]


@pytest.mark.slow
def test_the_reflection_keeps_its_size_and_has_no_order():
    """A single position: nothing to be causal about, and a cosine in the place of scores by position."""
    settings = replace(TINY, features=16)
    chosen = settings.task("reflection")
    assert (chosen.length, chosen.dim, chosen.num_train, chosen.num_val) == (1, 16, 500, 500)
    record = train(*job("edelta-sequence", "reflection", 0, settings, CPU).arguments)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert -1 <= record["cosine"] <= 1
    assert record["num_train"] == 500
    assert record["gamma"] == record["gates"]["gamma"][-1][1]
    assert record["causal"] is None
    assert record["online_loss"] is None
