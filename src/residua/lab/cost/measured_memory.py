"""The memory of training: the bytes kept for the backward pass, counted, and the peak of a step, measured."""

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.errors import RunError

STATUS = Path("/proc/self/status")


def storages_kept(forward: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """Count the bytes that autograd keeps for `forward`: each storage once, without the storages of `parameters`."""
    excluded = {x.untyped_storage().data_ptr() for x in parameters}
    storages = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in excluded:
            storages[storage.data_ptr()] = storage  # kept alive, so that no other tensor gets the same address
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in storages.values())


def peak_of(
    make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], name: str, *, device: str
) -> int | None:
    """Measure the peak memory of a step, in bytes: `make(*arguments)` returns the step, which is called twice.

    On a CUDA device this is the peak of PyTorch's allocations in the second call. On the CPU it is the growth of a new
    process with one thread, or None if the system does not report it (only Linux does).

    Raises:
        RunError: the process ran out of memory; the message names `name`.
    """
    if device == "cuda":
        return _cuda_peak(make, arguments)
    if not STATUS.exists():
        return None
    # Every measurement forks a process that has already imported the module of `make`, because the import takes longer
    # than the step.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([make.__module__])
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_process_peak, make, arguments).result()
    except BrokenProcessPool as error:
        raise RunError(f"{name}: the process of the training step was killed, perhaps for lack of memory") from error


def _cuda_peak(make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> int:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make(*arguments)
    step()  # makes the optimiser's state, and compiles a model that is to be compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _process_peak(make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> int:
    """Measure the peak growth of this process, from before the model is made to the end of its second step."""
    torch.set_num_threads(1)
    before = _status("VmRSS")
    step = make(*arguments)
    step()  # makes the state of the optimiser
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Read a size from the status of this process, in bytes: VmRSS is the current size, VmHWM the peak."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
