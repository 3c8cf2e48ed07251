"""What the benchmarks of whole language models share: sizes, names, and the state of PyTorch around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from residua.benchmarks.timing import Clock, cuda_clock, process_clock, wall_clock
from residua.checks import require
from residua.connections import PRESETS
from residua.errors import InputError
from residua.models import ResiduaConfig

BASELINE = "residual"
Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Settings:
    """Which models, on what; the plain residual always takes part.

    presets      names in `residua.PRESETS`, with options of their own where wanted: "ddl-cc:rebuild=none"
    layers, dim, heads, head_dim, vocab_size   the model
    precision    the dtype in which it computes
    state_dtype  see `ResiduaConfig`
    threads      of PyTorch on the CPU. With one, the CPU time of the process counts; with more, the time that passes
    seed         of weights and tokens

    Raises InputError where a value cannot be used.
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    device: Device = "cpu"
    layers: int = 6
    dim: int = 384
    heads: int = 3
    head_dim: int = 128
    vocab_size: int = 4096
    precision: Precision = "float32"
    state_dtype: Precision | None = None
    threads: int = 1
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "presets", tuple(dict.fromkeys([BASELINE, *self.presets])))
        self._require_positive("layers", "threads")
        for name, choices in (("device", get_args(Device)), ("precision", get_args(Precision))):
            require(getattr(self, name) in choices, name, " or ".join(choices), getattr(self, name))
        expect_device(self.device)
        for preset in self.presets:
            self.config(preset)

    @property
    def positions(self) -> int:
        """The longest sequence that is measured."""
        raise NotImplementedError

    def config(self, preset: str) -> ResiduaConfig:
        """The model of one preset. Raises InputError where there is no such preset or a size cannot be used."""
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

    @property
    def clock(self) -> Clock:
        if self.device == "cuda":
            return cuda_clock
        return process_clock if self.threads == 1 else wall_clock

    def _require_positive(self, *names: str) -> None:
        for name in names:
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                require(value >= 1, name, "at least 1", value)

    def _require_not_negative(self, *names: str) -> None:
        for name in names:
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))


def expect_device(device: str) -> None:
    """InputError for "cuda" on a machine without."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: expected a machine with a CUDA device, found none; use cpu")


def perturb(model: Any) -> None:
    """Noise on every parameter: gates and filters start with many zeros, behind which a wrong term would hide."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch with `count` threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def many_graphs(count: int) -> Iterator[None]:
    """Room for `count` graphs of the same code: `torch.compile` by itself gives up after a few."""
    with torch._dynamo.config.patch(recompile_limit=4 * count):
        yield
