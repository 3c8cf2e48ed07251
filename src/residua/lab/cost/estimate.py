"""Estimate the cost of a run: its parameters, FLOPs per token, memory per GPU and number of tokens.

Nothing is measured, so there is no estimate of time: run a few steps on your device and multiply.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from textwrap import fill
from typing import Any

from residua.connections.families.streams import RecomputingScheme
from residua.errors import require
from residua.lab.cost.counts import flops_per_token, parameters
from residua.lab.cost.step_memory import step_memory
from residua.lab.records.table import Table
from residua.lab.training import RunConfig, TrainConfig
from residua.lab.training.distributed import BatchShard, Ranks
from residua.models import ResiduaConfig

__all__ = ["CostEstimate", "estimate"]

GIB = 2**30
GPU_MEMORY: Mapping[str, float] = {"h200": 139, "h100": 79, "b200": 179, "a100": 79, "rtx4090": 23.5}
"""The memory that a program can use on each GPU, in GiB."""


@dataclass(frozen=True)
class CostEstimate:
    """The result of `estimate`. Memory is in bytes per GPU, for each value of the option `recompute` of the scheme."""

    parameters: Mapping[str, int]
    flops_per_token: Mapping[str, float]
    memory: Mapping[str, Mapping[str, float]]
    largest_batch_size: Mapping[str, int]
    gpu_memory: float
    tokens: int
    assumptions: tuple[str, ...]

    def parts(self) -> Iterator[Any]:
        """Yield the output of `residua cost count`: texts and tables."""
        yield Table(["parameters", ""], [[name, f"{number:,}"] for name, number in self.parameters.items()])
        yield ""
        yield Table(["MFLOP per token", ""], [[name, f"{x / 1e6:,.2f}"] for name, x in self.flops_per_token.items()])
        yield ""
        ways, (parts, *_) = list(self.memory), self.memory.values()
        unit, size = ("GiB", GIB) if parts["total"] >= GIB else ("MiB", GIB / 1024)
        cells = {
            way: (*(f"{x / size:.2f}" for x in self.memory[way].values()), f"{self.largest_batch_size[way]}")
            for way in ways
        }
        if len({*cells.values()}) == 1:  # recomputing saves nothing, for example if a state has one row
            cells = {"all": cells[ways[0]]}
        header = [f"{unit} per GPU", *(f"states: {way}" for way in cells)]
        yield Table(header, [*zip([*parts, "largest batch_size"], *cells.values())])
        total = self.tokens * sum(self.flops_per_token.values())
        tokens = f"{self.tokens / 1e9:.3g} billion" if self.tokens >= 1e9 else f"{self.tokens:,}"
        yield f"\n{tokens} tokens, {total:.3g} FLOPs\n"
        yield from (fill(f"assumed: {line}", 79) for line in self.assumptions)
        if all(self.memory[way]["total"] > self.gpu_memory for way in ways):
            yield f"note: this does not fit into {self.gpu_memory / GIB:.0f} GiB; lower train.batch_size"


def estimate(config: RunConfig, model: ResiduaConfig, *, gpu: str = "h200", gpus: int = 1) -> CostEstimate:
    """Estimate the cost of a run of a residua model, from scratch or from a base.

    Raises:
        InputError: the GPU is unknown, the model is converted, or a step cannot be divided among this number of
            GPUs.
    """
    ours = isinstance(model, ResiduaConfig)
    require(ours, "model.base", "a run or an export of our own model, whose layers are counted", model.model_type)
    require(not config.freezes_base, "model.freeze_base", "false, as the base was trained with its connection", True)
    require(gpu in GPU_MEMORY, "--gpu", f"one of {', '.join(GPU_MEMORY)}", gpu)
    capacity, train = GPU_MEMORY[gpu] * GIB, config.train
    share = BatchShard.of(train, Ranks(world_size=gpus))  # torchrun starts a process for each GPU
    parameter_counts = parameters(model)
    memory, largest = {}, {}
    scheme = model.scheme
    replays = isinstance(scheme, RecomputingScheme)
    for name in ("replay", "none") if replays else ("all",):
        connection = replace(scheme, recompute=name) if replays else scheme
        parts = step_memory(ResiduaConfig(**{**model.to_dict(), "connection": connection}), train, share)
        memory[name] = parts
        per_batch = parts["activations"] + parts["logits"] + parts["temporary"]
        bytes_free = capacity - parts["total"] + per_batch
        largest[name] = max(0, math.floor(bytes_free / per_batch * share.rows_here)) * share.members

    return CostEstimate(
        parameters=parameter_counts,
        flops_per_token=flops_per_token(model, sequence_length=train.sequence_length),
        memory=memory,
        largest_batch_size=largest,
        gpu_memory=capacity,
        tokens=train.tokens_per_step * train.steps,
        assumptions=_assumptions(train, model, share, gpu, gpus),
    )


def _assumptions(train: TrainConfig, model: ResiduaConfig, share: BatchShard, gpu: str, gpus: int) -> tuple[str, ...]:
    lines = [
        f"vocabulary {model.vocab_size:,}; a step is {train.batch_size} x {train.gradient_accumulation} sequences of "
        f"{train.sequence_length}; {gpus} {gpu}, a whole model on each, "
        f"{train.gradient_accumulation // share.teams} micro-batches of {share.rows_here} sequences a step",
        f"{gpu}: {GPU_MEMORY[gpu]:g} GiB",
        f"the residual state in {model.state_dtype or 'float32'}; matrix products in "
        + ("bfloat16, weights in float32" if train.precision == "bfloat16" else "float32"),
        "memory is counted for eager mode; the device's context, communication buffers and fragmentation (1 to 3 GiB) "
        "come on top",
    ]
    if train.compile:
        lines.append("train.compile: a compiled model keeps every state (none) but fewer activations of the sublayers")
    return tuple(lines)
