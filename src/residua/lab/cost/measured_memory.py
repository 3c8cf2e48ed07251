"""The memory of training: the bytes kept for the backward pass, counted, and the peak of a step, measured."""

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.connections import PRESETS
from residua.errors import InputError, RunError
from residua.lab.cost.settings import BASELINE
from residua.lab.cost.steps import Errors, ModelSettings, TrainingStep
from residua.records.provenance import circumstances
from residua.records.threads import threads

MEBIBYTE = 2**20
STATUS = Path("/proc/self/status")


def with_and_without_recompute() -> tuple[str, ...]:
    """Return all presets, and a variant with every state kept of those that recompute states."""
    names = []
    for preset, scheme in PRESETS.items():
        names.append(preset)
        if next(iter(scheme.ways_to_keep())) == "replay":
            names.append(f"{preset}:recompute=none")
    return tuple(names)


@dataclass(frozen=True)
class MemorySettings(ModelSettings):
    """The models to measure (`ModelSettings`; one step is enough, so there are no rounds).

    presets   by default all; those that recompute states also with every state kept
    peak      whether to measure the peak of a training step too; on the CPU this needs Linux
    """

    presets: tuple[str, ...] = with_and_without_recompute()
    peak: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.peak and self.device == "cpu" and not STATUS.exists():
            raise InputError("peak needs Linux, which records the peak of a process; measure without it")

    @property
    def steps(self) -> int:
        return len(self.presets)


@dataclass(frozen=True)
class MemoryResult:
    """kept: bytes kept for the backward pass by preset, with logits and loss, without parameters.

    peak: most bytes in use during a training step by preset, with weights, gradients and the state of AdamW, or None if
    not measured. On the CPU: the growth of a separate process.
    """

    settings: MemorySettings
    kept: Mapping[str, int]
    peak: Mapping[str, int] | None
    errors: Mapping[str, Errors]
    circumstances: Mapping[str, Any]

    def vectors(self, preset: str) -> float:
        """Return the memory kept per token and layer, in vectors of width dim in the dtype of the precision."""
        settings = self.settings
        size = settings.batch_size * settings.sequence_length * settings.layers * settings.dim
        return self.kept[preset] / (size * getattr(torch, settings.precision).itemsize)

    def above_baseline(self, preset: str) -> float:
        return self.vectors(preset) - self.vectors(BASELINE)

    def peak_ratio(self, preset: str) -> float | None:
        return None if self.peak is None else self.peak[preset] / self.peak[BASELINE]

    def records(self) -> list[dict[str, Any]]:
        """Return one record for each preset, complete in itself."""
        return [
            {
                "benchmark": "memory",
                "preset": preset,
                "baseline": BASELINE,
                "kept_bytes": self.kept[preset],
                "vectors": self.vectors(preset),
                "vectors_above_baseline": self.above_baseline(preset),
                "peak_bytes": None if self.peak is None else self.peak[preset],
                "peak_ratio": self.peak_ratio(preset),
                "errors": self.errors[preset]._asdict(),
                "settings": asdict(self.settings),
                **self.circumstances,
            }
            for preset in self.kept
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table, as text."""
        header = ["preset", "kept, MiB", "d-vectors", f"above {BASELINE}", "peak, MiB", "ratio"]
        rows = []
        for preset in self.kept:
            ratio = self.peak_ratio(preset)
            peak = ["", ""] if ratio is None else [f"{self.peak[preset] / MEBIBYTE:.1f}", f"{ratio:.3f}"]
            rows.append(
                [
                    preset,
                    f"{self.kept[preset] / MEBIBYTE:.1f}",
                    f"{self.vectors(preset):.2f}",
                    f"{self.above_baseline(preset):+.2f}",
                    *peak,
                ]
            )
        return header, rows


def benchmark(
    settings: MemorySettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> MemoryResult:
    """Check the training step of every preset against float64, count what it keeps, and measure the peak of a step.

    `advance` is called after every preset, `keep` with its record.

    Raises:
        RunError: a step computes something wrong, or runs out of memory.
    """
    kept: dict[str, int] = {}
    peak: dict[str, int] = {}
    errors: dict[str, Errors] = {}
    with threads(settings.threads):
        conditions = circumstances(torch.device(settings.device))
        result = MemoryResult(settings, kept, peak if settings.peak else None, errors, conditions)
        for preset in settings.presets:
            step = TrainingStep(preset, settings)
            errors[preset] = step.check()
            kept[preset] = kept_bytes(step)
            del step
            if settings.peak:
                peak[preset] = peak_bytes(preset, settings)
            keep(result.records()[-1])
            advance()
    return result


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
