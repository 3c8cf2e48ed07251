"""The memory of training: the bytes kept for the backward pass, counted, and the peak of a step, measured."""

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.errors import InputError, RunError
from residua.lab.cost.models import Measured, model_config
from residua.lab.cost.settings import BASELINE, MemorySettings
from residua.lab.cost.steps import TrainingStep
from residua.records.provenance import circumstances
from residua.records.threads import threads

MEBIBYTE = 2**20
STATUS = Path("/proc/self/status")


COLUMNS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "preset": lambda row: row["preset"],
    "kept, MiB": lambda row: f"{row['kept_bytes'] / MEBIBYTE:.1f}",
    "d-vectors": lambda row: f"{row['vectors']:.2f}",
    f"above {BASELINE}": lambda row: f"{row['vectors_above_baseline']:+.2f}",
    "peak, MiB": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MEBIBYTE:.1f}",
    "ratio": lambda row: "" if row["peak_ratio"] is None else f"{row['peak_ratio']:.3f}",
}


def benchmark(
    settings: MemorySettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> Measured:
    """Check the training step of every preset against float64, count what it keeps, and measure the peak of a step.

    vectors   kept for the backward pass per token and layer, of width dim in the dtype of the precision
    peak      most bytes in use during a step, with weights, gradients and the state of AdamW, or None if not measured.
              On the CPU: the growth of a separate process

    `advance` is called after every preset, `keep` with its record.

    Raises:
        InputError: the peak cannot be measured here, or an option of a preset cannot be used.
        RunError: a step computes something wrong, or runs out of memory.
    """
    if settings.peak and settings.device == "cpu" and not STATUS.exists():
        raise InputError("the peak needs Linux, which records the peak of a process; give --no-peak")
    for preset in settings.presets:
        model_config(settings, preset)  # raises before anything is measured
    records: list[dict[str, Any]] = []
    vector = settings.dim * getattr(torch, settings.precision).itemsize
    layers = settings.batch_size * settings.sequence_length * settings.layers
    with threads(settings.threads):
        conditions = circumstances(torch.device(settings.device))
        for preset in settings.presets:
            step = TrainingStep(preset, settings)
            errors = step.check()
            kept = kept_bytes(step)
            del step
            peak = peak_bytes(preset, settings) if settings.peak else None
            vectors = kept / (layers * vector)
            baseline = records[0] if records else {"vectors": vectors, "peak_bytes": peak}
            record = {
                "benchmark": "memory",
                "preset": preset,
                "baseline": BASELINE,
                "kept_bytes": kept,
                "vectors": vectors,
                "vectors_above_baseline": vectors - baseline["vectors"],
                "peak_bytes": peak,
                "peak_ratio": None if peak is None else peak / baseline["peak_bytes"],
                "errors": errors._asdict(),
                "settings": asdict(settings),
                **conditions,
            }
            records.append(record)
            keep(record)
            advance()
    return Measured(records, COLUMNS)


def kept_bytes(step: TrainingStep) -> int:
    """Count the bytes that autograd keeps for the backward pass: every storage once, without parameters."""
    return storages_kept(step.loss, step.model.parameters())


def storages_kept(forward: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """Count the bytes of the storages that autograd keeps for `forward`, each once, without those of `parameters`."""
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


def peak_bytes(preset: str, settings: MemorySettings) -> int:
    """Measure the peak of a training step: of PyTorch's allocations on a CUDA device, of a new process on the CPU.

    Raises:
        RunError: the step ran out of memory.
    """
    return peak_of(TrainingStep, (preset, settings), preset, device=settings.device, threads=settings.threads)


def peak_of(
    make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], name: str, *, device: str, threads: int = 1
) -> int:
    """Measure the most bytes that `make(*arguments)` and two calls of its result take.

    On a CUDA device, the peak of PyTorch's allocations in the second call; on the CPU, the growth of a new process.

    Raises:
        RunError: the process of `name` ran out of memory.
    """
    if device == "cuda":
        return _cuda_peak(make, arguments)
    # Every measurement starts from a copy of one process that has only imported this module, because importing takes
    # longer than the step.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_process_peak, make, arguments, threads).result()
    except BrokenProcessPool as error:
        raise RunError(f"{name}: the process of the training step was killed, perhaps for lack of memory") from error


def _cuda_peak(make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> int:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make(*arguments)
    step()  # makes the state of the optimiser, and compiles if asked to
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _process_peak(make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], threads: int) -> int:
    """Measure the largest growth of this process, from before the model to the end of its second step."""
    torch.set_num_threads(threads)
    before = _status("VmRSS")
    step = make(*arguments)
    step()  # makes the state of the optimiser
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Read a size from the status of this process, in bytes: VmRSS now, VmHWM the largest so far."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
