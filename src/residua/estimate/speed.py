"""The model of speed: what GPUs are assumed to reach, and the time of a training step. Nothing here was measured.

Arithmetic runs at a share of a GPU's peak. The memory traffic of everything between the matrix products, the optimizer
and what the GPUs send each other come on top: nothing overlaps.
"""

from collections.abc import Mapping
from typing import NamedTuple

GIB = 2**30
ADAMW_BYTES = 28
"""Per parameter in one step: read weight, gradient and two moments, write all but the gradient, in float32."""

# What large matrix products and copies are assumed to reach of a vendor's figures.
REACHED_COMPUTE, REACHED_BANDWIDTH = 0.8, 0.9


class GPU(NamedTuple):
    """One device: memory in bytes, and its ceilings: bfloat16 FLOP/s of matrix products, bytes/s of memory and link."""

    memory: float
    compute: float
    bandwidth: float
    link: float


def _vendor(memory: float, teraflops: float, terabytes: float, link: float) -> GPU:
    return GPU(memory * GIB, teraflops * REACHED_COMPUTE * 1e12, terabytes * REACHED_BANDWIDTH * 1e12, link * 1e9)


GPUS: Mapping[str, GPU] = {
    "h200": _vendor(139, 989, 4.8, 450),
    "h100": _vendor(79, 989, 3.35, 450),
    "b200": _vendor(179, 2250, 8.0, 900),
    "a100": _vendor(79, 312, 2.04, 300),
    "rtx4090": _vendor(23.5, 165, 1.01, 25),
}


class Scenario(NamedTuple):
    """The assumed utilisation of a GPU's ceilings, and whether the operations between two sublayers are fused."""

    compute: float
    bandwidth: float
    fused: bool


SCENARIOS: Mapping[str, Scenario] = {
    "ceiling": Scenario(1.0, 1.0, fused=True),
    "expected": Scenario(0.5, 0.8, fused=True),
    "unfused": Scenario(0.5, 0.8, fused=False),
}


def step_seconds(
    gpu: GPU, scenario: Scenario, *, tokens: float, flops: float, traffic: float, weights: float, sent: float
) -> float:
    """Estimate the time of one training step on one GPU.

    tokens: that it computes; flops, traffic: per token, FLOPs of matrix products and bytes of everything else;
    weights: parameters that it updates; sent: bytes that it sends.
    """
    bandwidth = gpu.bandwidth * scenario.bandwidth
    token = flops / (gpu.compute * scenario.compute) + traffic / bandwidth
    return token * tokens + ADAMW_BYTES * weights / bandwidth + sent / gpu.link


def communication(count: int, micro_batches: int, gpus: int, *, sharded: bool) -> float:
    """Count the bytes that a GPU sends in a step over a ring: gradients, and of shards the weights of every batch."""
    ring = (gpus - 1) / gpus
    if not sharded:
        return 2 * ring * 4 * count
    return ring * 4 * count + micro_batches * 2 * ring * 2 * count
