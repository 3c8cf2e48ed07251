"""Code and functions of tests in processes of their own, and groups of such processes that talk to each other."""

import multiprocessing
import os
import subprocess
import sys
import traceback

import pytest


@pytest.fixture(scope="session")
def start():
    """Start a function of a test module in a process of its own, which costs no second import of torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["residua.lab.experiment"])

    def start(function, *arguments):
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    return start


def run_python(code, *arguments, cwd=None, **environment):
    """Run code in a new process with nobody at stdin, which must end well; return what it printed and said."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=cwd, env=environment, **streams)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _member(rank, size, path, function, arguments):
    import torch

    torch.set_num_threads(1)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    torch.distributed.init_process_group("gloo", init_method=f"file://{path / 'meeting'}", rank=rank, world_size=size)
    try:
        found = function(rank, *arguments)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, path / f"{rank}.pt")
    os._exit(0)


def together(start, path, size, function, *arguments, seconds=240):
    """Return what function(rank, *arguments) returns in each of `size` processes of one gloo group.

    path: an empty folder; seconds: when they are killed. Raises AssertionError with the traceback of a rank that fails.
    """
    import torch  # here: the process that hands out tests reads this file, and is ready seconds sooner without it

    members = [start(_member, rank, size, path, function, arguments) for rank in range(size)]
    for member in members:
        member.join(seconds)
        member.kill()
    found = [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for rank, result in enumerate(found):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    return found
