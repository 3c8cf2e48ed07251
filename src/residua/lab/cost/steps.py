"""Measure the training step of a run under several schemes: time in interleaved rounds, arithmetic, memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from residua.connections.names import label
from residua.errors import InputError, extra
from residua.lab.cost.counts import elementwise, products_per_token
from residua.lab.cost.measured_memory import peak_of, storages_kept
from residua.lab.cost.timing import Quartiles, compare, cuda_clock, process_clock
from residua.lab.experiment import model_config
from residua.lab.jobs.pool import Record, threads
from residua.lab.opening import fill_no_cache, new_model
from residua.lab.records.provenance import circumstances
from residua.lab.records.table import Table
from residua.lab.training import RunConfig, pick_device
from residua.lab.training.base_model import HasConnection, freeze_base
from residua.lab.training.step import Step

with extra("lab"):
    from transformers import PreTrainedConfig

ROUNDS, WARMUP = 45, 2
BASELINE = "residual"


class MeasuredStep:
    """The training step of a run on random tokens, in one micro-batch."""

    def __init__(self, config: RunConfig, model: PreTrainedConfig):
        train = replace(config.train, gradient_accumulation=1)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            tokens = torch.randint(model.get_text_config().vocab_size, (train.batch_size, train.sequence_length + 1))
            self.model = new_model(model)
        fill_no_cache(self.model.config)
        if config.freezes_base:
            freeze_base(self.model)
        device = pick_device(train.device)
        tokens = tokens.to(device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self._step = Step(self.model, lambda index: self.batch, train, device)

    def loss(self) -> Tensor:
        return self._step.loss(self.batch)[0]

    def __call__(self) -> None:
        self._step(1)

    def kept(self) -> int:
        """Count the bytes that autograd keeps for the backward pass: every storage once, without parameters."""
        return storages_kept(self.loss, self.model.parameters())


def measure(
    configs: Mapping[str, tuple[RunConfig, PreTrainedConfig]],
    baseline: str,
    *,
    rounds: int = ROUNDS,
    peak: bool = True,
    compiled: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Measure the step of every scheme at one size. Return one self-contained record for each.

    The measurements of a scheme:

    time     time of a step, in rounds in which all schemes take turns, so that a busy machine slows all alike: process
             time of one thread on the CPU, or device time
    flops    FLOPs per token of the matrix products and of all other arithmetic (`elementwise`)
    kept     bytes that autograd keeps for the backward pass
    peak     growth in bytes of a process that makes the model and takes two steps, or on a GPU the peak of allocations
             in the second step; None if not measured

    compiled: run all steps through `torch.compile`, whatever the configurations say, and measure only time.
    advance: called after every step, including those of the first WARMUP rounds, which do not count.

    Raises:
        InputError: the FLOPs of a converted model cannot be counted.
        RunError: a step runs out of memory.
    """
    if compiled:
        configs = {
            name: (replace(config, train=replace(config.train, compile=True)), model)
            for name, (config, model) in configs.items()
        }
        peak = False
    flops = {name: _flops_per_token(*pair) for name, pair in configs.items()}  # first, as it may refuse a model
    device = pick_device(next(iter(configs.values()))[0].train.device)
    peaks = {
        name: peak_of(MeasuredStep, pair, name, device=device.type) if peak else None for name, pair in configs.items()
    }
    with threads(1), many_graphs(len(configs)):
        steps = {name: MeasuredStep(*pair) for name, pair in configs.items()}
        kept = {name: None if compiled else step.kept() for name, step in steps.items()}
        clock = cuda_clock if device.type == "cuda" else process_clock
        timing = compare(steps, baseline, rounds=rounds, warmup=WARMUP, clock=clock, advance=advance)
        conditions = circumstances(device)
    records = []
    for name, (config, _) in configs.items():
        records.append(
            {
                "scheme": name,
                "baseline": baseline,
                "compiled": compiled,
                "parameters": sum(x.numel() for x in steps[name].model.parameters() if x.requires_grad),
                "time_ratio": timing.ratio(name)._asdict(),
                "step_seconds": timing.median_seconds(name),
                "seconds": list(timing.seconds[name]),
                "flops_per_token": flops[name],
                "kept_bytes": kept[name],
                "peak_bytes": peaks[name],
                "model": {key: value for key, value in asdict(config.model).items() if key != "base"},  # a local path
                **conditions,
            }
        )
    return records


def products_of_run(config: RunConfig, model: PreTrainedConfig) -> float:
    """Count the matrix products of one token of a run's step, in FLOPs, see `products_per_token`."""
    return products_per_token(model, sequence_length=config.train.sequence_length, frozen=config.freezes_base)


def _flops_per_token(config: RunConfig, model: PreTrainedConfig) -> dict[str, float]:
    others = elementwise(model, config.train.sequence_length, frozen=config.freezes_base)
    return {"products": products_of_run(config, model), "elementwise": others}


def measured(schemes: Sequence[str | dict[str, Any] | None]) -> dict[str, str | dict[str, Any]]:
    """Return what `measure_schemes` measures, by name: the plain residual and each scheme once; None is the base."""
    named = (BASELINE, *(scheme for scheme in schemes if scheme is not None))
    return {scheme if isinstance(scheme, str) else json.dumps(scheme): scheme for scheme in named}


def measure_schemes(
    config: RunConfig,
    schemes: Sequence[str | dict[str, Any]],
    *,
    rounds: int,
    peak: bool,
    advance: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Measure the step of a run under the plain residual and under each of these schemes, as `measure` does.

    Each record also has `vectors`: the memory kept for the backward pass per token and layer, in units of a vector of
    the model's width and precision.

    Raises:
        InputError: a scheme cannot be built with the sizes of the run.
        RunError: a step runs out of memory.
    """
    configs = {}
    for name, scheme in measured(schemes).items():
        run = replace(config, model=replace(config.model, connection=scheme))
        configs[name] = run, _configured(run)
    records = measure(configs, BASELINE, rounds=rounds, peak=peak, advance=advance)
    train = config.train
    for record in records:
        sizes = configs[record["scheme"]][1].get_text_config()
        numbers = train.batch_size * train.sequence_length * sizes.num_hidden_layers * sizes.hidden_size
        record["vectors"] = record["kept_bytes"] / (numbers * getattr(torch, train.precision).itemsize)
        record["train"] = asdict(train)
    return records


def _configured(run: RunConfig) -> PreTrainedConfig:
    """Return the configuration of a run's model. Raises InputError, also for a base that has a connection already."""
    try:
        return model_config(run)
    except HasConnection as error:
        must = "a model without a connection, because steps are compared with those of the plain residual"
        raise InputError(f"model.base must be {must}, got {run.model.base}") from error


def table(records: Sequence[Record]) -> Table:
    """Return a table of the times, and of the vectors in excess of those of the first scheme, the plain residual."""
    first = records[0]
    rows = []
    for record in records:
        ratio = Quartiles(**record["time_ratio"])
        rows.append(
            [
                label(record["model"]["connection"]),
                f"{1e3 * record['step_seconds']:.1f}",
                f"{ratio:.3f}",
                f"{record['vectors']:.2f}",
                f"{record['vectors'] - first['vectors']:+.2f}",
                "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:,.0f}",
            ]
        )
    return Table(["scheme", "ms", f"times {BASELINE}", "vectors kept", "above", "peak MiB"], rows)


def rate(config: RunConfig, model: PreTrainedConfig) -> float:
    """Return the FLOPs of a training step's matrix products over the time of the whole step on the run's device."""
    device = pick_device(config.train.device)
    with threads(1):
        clock = cuda_clock if device.type == "cuda" else process_clock
        timing = compare({"step": MeasuredStep(config, model)}, "step", rounds=5, warmup=WARMUP, clock=clock)
    tokens = config.train.batch_size * config.train.sequence_length
    return products_of_run(config, model) * tokens / timing.median_seconds("step")


def many_graphs(count: int) -> AbstractContextManager:
    """Let `torch.compile` make `count` graphs of the same code while the `with` block runs, and not just a few."""
    return torch._dynamo.config.patch(recompile_limit=4 * count)
