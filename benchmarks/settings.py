"""Where and how often the benchmarks measure."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from residua.errors import Count, InputError, Natural, at_most, check_types
from residua.lab.cost.timing import Clock, cuda_clock, process_clock

Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Where and how often to measure. Raises InputError for a value that cannot be used.

    Args:
        device: cuda needs a GPU

    Rarely:
        rounds: times each candidate is measured
        warmup: rounds before that which do not count
        threads: of the CPU; with more than one, wall-clock time is measured in place of CPU time
        seed: of weights and inputs
    """

    device: Device = "cpu"
    rounds: Count = 15
    warmup: Natural = 3
    threads: Annotated[Count, at_most(4096)] = 1
    seed: int = 0

    def __post_init__(self):
        check_types(self)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device needs a machine with a CUDA device, found none; use cpu")

    @property
    def clock(self) -> Clock:
        if self.device == "cuda":
            return cuda_clock
        return process_clock if self.threads == 1 else wall_clock


def wall_clock(call: Callable[[], None]) -> float:
    """Measure wall-clock time: for several threads on the CPU."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
