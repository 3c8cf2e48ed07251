"""What the benchmarks measure and how: the options of `residua cost`, without PyTorch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from residua.connections.names import PRESETS, canonical
from residua.errors import Count, InputError, Natural, at_most, check_types, require
from residua.lab.cost.timing import Clock, cuda_clock, process_clock, wall_clock
from residua.model_fields import ModelFields

BASELINE = "residual"
Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "bfloat16"]
Base = Literal["residua", "llama"]


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
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise InputError("device needs a machine with a CUDA device, found none; use cpu")

    @property
    def clock(self) -> Clock:
        if self.device == "cuda":
            return cuda_clock
        return process_clock if self.threads == 1 else wall_clock


@dataclass(frozen=True, kw_only=True)
class Settings(Measuring):
    """The models to measure and where to run them; the plain residual is always included.

    Args:
        presets (SCHEME): schemes to measure beside the plain residual, also with options, as in ddl-cc:recompute=none
            (default: all that residua schemes lists)
        layers: layers of attention and MLP
        dim: width
        precision: bfloat16 is autocast, with weights in float32
        compile: every model through torch.compile, as one graph
        base: residua's model, or a Llama of transformers that residua.convert gives each scheme

    Rarely:
        heads: attention heads
        head_dim: width of a head
        vocab_size: rows of the embedding
        state_dtype: of the residual state (default: as the embeddings)
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    layers: Count = 6
    dim: int = 384
    heads: int = 3
    head_dim: int = 128
    vocab_size: int = 4096
    precision: Precision = "float32"
    state_dtype: Precision | None = None
    compile: bool = False
    base: Base = "residua"
    rounds: Count = 9
    warmup: Natural = 2

    def __post_init__(self):
        object.__setattr__(self, "presets", tuple(dict.fromkeys([BASELINE, *map(canonical, self.presets)])))
        super().__post_init__()
        ModelFields(**self.sizes)  # raises for sizes that cannot be used
        narrow = self.base == "llama" and self.state_dtype is not None
        require(not narrow, "state_dtype", "None with base='llama'", self.state_dtype)

    @property
    def positions(self) -> int:
        """The length of the longest sequence."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the models, as `ResiduaConfig` calls them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "state_dtype": self.state_dtype,
        }

    @property
    def steps(self) -> int:
        """The number of times that a benchmark with these settings calls `advance`."""
        return len(self.presets) * (self.warmup + self.rounds)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Training steps on random tokens.

    Args:
        sequence_length: tokens in a sequence
        batch_size: sequences in a step
    """

    base: Base = "residua"
    sequence_length: Count = 256
    batch_size: Count = 2
    base: Base = "residua"

    def __post_init__(self):
        super().__post_init__()

    @property
    def positions(self) -> int:
        return self.sequence_length


@dataclass(frozen=True, kw_only=True)
class MemorySettings(ModelSettings):
    """The memory of training steps. One step is enough, so there are no rounds.

    Args:
        presets (SCHEME): schemes to measure beside the plain residual, also with options, as in ddl-cc:recompute=none
            (default: all, and those that recompute states also without that)
        peak: only count what is kept, without running a step
    """

    presets: tuple[str, ...] = ()
    peak: bool = True

    def __post_init__(self):
        if not self.presets:
            object.__setattr__(self, "presets", with_and_without_recompute())
        super().__post_init__()

    @property
    def steps(self) -> int:
        return len(self.presets)


def with_and_without_recompute() -> tuple[str, ...]:
    """Return all presets, and a variant with every state kept of those that recompute states. It imports PyTorch."""
    from residua.connections import PRESETS

    variants = {name: next(iter(scheme.ways_to_keep())) == "replay" for name, scheme in PRESETS.items()}
    return tuple(name + how for name, replayed in variants.items() for how in ("", ":recompute=none")[: 1 + replayed])
