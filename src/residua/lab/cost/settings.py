"""Sizes, names and PyTorch settings that the benchmarks of whole language models share."""

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from residua.connections import PRESETS
from residua.errors import InputError, require
from residua.lab.cost.timing import Clock, cuda_clock, process_clock, wall_clock
from residua.models import ResiduaConfig, ResiduaForCausalLM

BASELINE = "residual"
Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Where and how often to measure. Raises InputError for a value that cannot be used.

    rounds, warmup   see `timing.compare`
    threads          PyTorch's threads on the CPU. One: CPU time of the process is measured; more: wall-clock time
    seed             for weights and inputs
    """

    device: Device = "cpu"
    rounds: int = 15
    warmup: int = 3
    threads: int = 1
    seed: int = 0

    def __post_init__(self):
        expect_at_least(1, self, "threads", "rounds")
        expect_at_least(0, self, "warmup")
        require(self.device in get_args(Device), "device", " or ".join(get_args(Device)), self.device)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device needs a machine with a CUDA device, found none; use cpu")

    @property
    def clock(self) -> Clock:
        if self.device == "cuda":
            return cuda_clock
        return process_clock if self.threads == 1 else wall_clock


@dataclass(frozen=True)
class Settings(Measuring):
    """The models to measure and where to run them; the plain residual is always included.

    presets      names of presets, with options if wanted: "ddl-cc:recompute=none"
    layers, dim, heads, head_dim, vocab_size   the model
    precision    the dtype of the computation
    state_dtype  see `ResiduaConfig`
    compile      the model through `torch.compile`, as one graph
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    layers: int = 6
    dim: int = 384
    heads: int = 3
    head_dim: int = 128
    vocab_size: int = 4096
    precision: Precision = "float32"
    state_dtype: Precision | None = None
    compile: bool = False
    rounds: int = 9
    warmup: int = 2

    def __post_init__(self):
        object.__setattr__(self, "presets", tuple(dict.fromkeys([BASELINE, *self.presets])))
        super().__post_init__()
        expect_at_least(1, self, "layers")
        require(self.precision in get_args(Precision), "precision", " or ".join(get_args(Precision)), self.precision)
        for preset in self.presets:
            self.config(preset)

    @property
    def positions(self) -> int:
        """The length of the longest sequence."""
        raise NotImplementedError

    def config(self, preset: str) -> ResiduaConfig:
        """Return the model of one preset. Raises InputError for an unknown preset or a size that cannot be used."""
        try:
            return ResiduaConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.dim,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                head_dim=self.head_dim,
                max_position_embeddings=self.positions,
                connection=preset,
                state_dtype=self.state_dtype,
            )
        except ValueError as error:
            raise InputError(str(error)) from error

    def build(self, preset: str) -> Any:
        """Return the model of one preset, on the CPU, drawn from the global generator."""
        return ResiduaForCausalLM(self.config(preset))

    def model(self, preset: str, *shape: int) -> tuple[Any, Tensor]:
        """Return the model of one preset, on the CPU, and random tokens of this shape; both follow from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            tokens = torch.randint(self.vocab_size, shape)
            model = self.build(preset)
            perturb(model)
        return model, tokens

    @property
    def steps(self) -> int:
        """The number of times that a benchmark with these settings calls `advance`."""
        return len(self.presets) * (self.warmup + self.rounds)


def llama(config: ResiduaConfig) -> LlamaForCausalLM:
    """Return a Llama with random weights and the sizes of `config`, without a cache."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    return LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in sizes}, use_cache=False))


def expect_at_least(least: int, settings: object, *names: str) -> None:
    """Raise InputError if one of these settings, or a number in its tuple, is below `least`."""
    for name in names:
        values = getattr(settings, name)
        for value in values if isinstance(values, tuple) else (values,):
            require(value >= least, name, f"at least {least}", value)


def perturb(model: Any) -> None:
    """Add noise to every parameter: gates and filters start with many zeros, which would hide a wrong term."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def in_float64(model: Any) -> Any:
    """Return a copy of a model that computes with the plain definitions, in float64 end to end."""
    if not isinstance(model, ResiduaForCausalLM):  # a Hugging Face model, perhaps converted
        return copy.deepcopy(model).double()
    config = copy.deepcopy(model.config)
    config.state_dtype = None
    if "implementation" in config.connection:
        config.connection = {**config.connection, "implementation": "reference"}
    with torch.random.fork_rng(devices=[]):
        reference = ResiduaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    return reference.to(model.device, torch.float64).train(model.training)


def many_graphs(count: int) -> AbstractContextManager:
    """Let `torch.compile` make `count` graphs of the same code; by default it gives up after a few."""
    return torch._dynamo.config.patch(recompile_limit=4 * count)
