"""Ranks of a training job in processes of their own, started without torchrun, and what they did."""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from residua.commands import cli
from residua.files import durable
from residua.lab import experiment
from residua.lab.data import Batches, PreparedData
from residua.lab.training import checkpoint, saving
from support.tiny_runs import run_config


class LoggedBatches(experiment.Batches):
    """Batches that write down which windows were asked for, and do something `before` batch `index`, once."""

    log: Path
    before: dict = {}

    def at(self, index):
        if index in self.before:
            self.before[index]()
        tokens, starts = self.tokens, []

        class Recorder:
            def window(self, start, length):
                starts.append(int(start))
                return tokens.window(start, length)

        self.tokens = Recorder()
        try:
            return super().at(index)
        finally:
            self.tokens = tokens
            with self.log.open("a") as file:
                file.write(json.dumps({"index": index, "member": self.rank, "starts": starts}) + "\n")


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number, fatal, original):
    calls = iter(range(1, 10_000))
    return lambda *args, **kwargs: (fatal if next(calls) == number else original)(*args, **kwargs)


# What may befall a rank: a function of nothing that is called in it before it starts.
def kill_before(index):
    LoggedBatches.before = {index: die}


def stop_before(index):
    LoggedBatches.before = {index: lambda: os.kill(os.getpid(), signal.SIGTERM)}


def fail_in_save(name, number, error):
    module = next(module for module in (saving, checkpoint, durable) if hasattr(module, name))
    setattr(module, name, at_call(number, Mock(side_effect=error), getattr(module, name)))


def fail_to_build(error):
    experiment.build_model = Mock(side_effect=error)


def compile_eagerly():
    """Dynamo without the compiler behind it, which takes minutes."""
    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: plain(self, backend="eager", fullgraph=True)


def mislead(wrong):
    os.environ |= wrong


def rank_main(rank, size, port, folder, arguments, fates):
    """One rank: the command line itself, with its output in a file next to the run, and its windows in another file."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    for fate, *details in fates.get(rank, ()):
        fate(*details)
    LoggedBatches.log = folder.with_name(f"{folder.name}.{port}.{rank}.windows")
    experiment.Batches = LoggedBatches
    path = folder.with_name(f"{folder.name}.{port}.{rank}.out")
    with path.open("w", buffering=1) as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = 3
        try:
            status = cli.main(["train", "--run", str(folder), *arguments])
        except BaseException:
            traceback.print_exc()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os._exit(status)


class Job:
    """The outcome of the ranks: exit statuses, what each printed, and the windows that each read, in order."""

    def __init__(self, folder, port, size, statuses):
        files = [folder.with_name(f"{folder.name}.{port}.{rank}.") for rank in range(size)]
        self.statuses = statuses
        self.out = [Path(f"{file}out").read_text() for file in files]
        self.errors = [line for text in self.out for line in text.splitlines() if line.startswith("residua: ")]
        logs = [Path(f"{file}windows") for file in files]
        self.windows = [[json.loads(line) for line in log.open()] if log.exists() else [] for log in logs]


def run_ranks(start, size, folder, arguments, fates=None, *, resume=False) -> Job:
    """Run `size` ranks to their ends. arguments: as for `tiny_runs.options`; fates: the fault of each rank."""
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(run_config(arguments).to_yaml())
    arguments = ["--config", str(file), *(["--resume"] if resume else [])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(rank_main, rank, size, port, folder, arguments, fates or {}) for rank in range(size)]
    for process in processes:
        process.join(240)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return Job(folder, port, size, statuses)


def trained_windows(jobs, accumulation):
    """Micro-batch -> the windows that the run was trained on in the end, where each job went on with the one before."""
    trained = {}
    for job in jobs:
        asked = sorted((w["index"], w["member"], w["starts"]) for windows in job.windows for w in windows)
        first = asked[0][0] // accumulation * accumulation
        trained = {index: starts for index, starts in trained.items() if index < first}
        for index, _, starts in asked:
            trained[index] = trained.get(index, []) + starts
    return trained


def windows_alone(data, steps=6, accumulation=2, batch_size=2):
    """The windows that one process trains on, as `trained_windows` gives them, from the definition of their order."""
    batches = Batches(PreparedData.open(data).train, batch_size, 16, 0)
    found = {}
    for index in range(steps * accumulation):
        epoch, first = divmod(index * batch_size, batches.windows_per_epoch)
        assert first + batch_size <= batches.windows_per_epoch, "tests stay within an epoch"
        found[index] = [int(start) for start in batches._starts(epoch, np.arange(first, first + batch_size))]
    return found


def weights(folder):
    return experiment.open_run(folder, device="cpu").model.state_dict()


def assert_same_run(folder, other, rows, *, exact):
    """The same rows and the same last weights, to the last bit or to the rounding of sums in another order."""
    mine, theirs = rows(folder), rows(other)
    assert [list(row) for row in mine] == [list(row) for row in theirs]
    if exact:
        assert mine == theirs
    for row, expected in zip(mine, theirs):
        assert row == pytest.approx(expected, rel=2e-5)
    for (name, tensor), expected in zip(weights(folder).items(), weights(other).values()):
        if exact:
            assert torch.equal(tensor, expected), name
        else:
            # Adam divides by the size of gradients: where one is nearly zero, its rounding decides the step.
            assert (tensor - expected).abs().max() < 1e-4, name


def break_loss(step):
    """The loss of this rank is NaN in the first micro-batch of a step that it computes."""
    plain = experiment.build_model

    def build(*arguments, **options):
        model = plain(*arguments, **options)
        forwards = iter(range(1, 10_000))

        def poison(module, inputs, output):
            if module.training and next(forwards) == step:
                output.loss = output.loss * float("nan")
            return output

        model.register_forward_hook(poison)
        return model

    experiment.build_model = build
