"""Measuring speed fairly: candidates take turns in one process, and every number is a ratio within one round."""

from residua.benchmarks.timing import Quartiles, Timing, compare, cuda_clock, process_clock, wall_clock

__all__ = ["Quartiles", "Timing", "compare", "cuda_clock", "process_clock", "wall_clock"]
