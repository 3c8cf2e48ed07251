"""Time the generation of a token under every scheme, relative to the plain residual in the same run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import expect_at_least
from benchmarks.exact import in_float64, perturb
from benchmarks.settings import Measuring, Precision
from residua.connections.names import PRESETS, canonical
from residua.errors import Count, InputError, Natural, RunError, extra
from residua.lab.cost.steps import many_graphs
from residua.lab.cost.timing import Timing, compare
from residua.lab.jobs.pool import threads
from residua.lab.records.provenance import circumstances
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.models.cache import CACHE

with extra("lab"):
    from transformers import StaticCache

BASELINE = "residual"
# Relative errors of logits against a float64 copy that sees all tokens at once, without a cache.
TOLERANCES: Mapping[Precision, float] = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(Measuring):
    """The models to measure; the plain residual is always included.

    Args:
        presets (SCHEME): schemes to measure beside the plain residual, also with options (default: all that residua
            schemes lists)
        layers: layers of attention and MLP
        dim: width
        heads: attention heads
        head_dim: width of a head
        vocab_size: rows of the embedding
        prompt_length: tokens of the prompt; reading them does not count
        new_tokens: tokens to generate in one measurement, greedily
        batch_sizes: sequences to generate at once; each size is a comparison of its own
        precision: the dtype of weights and activations
        state_dtype: of the residual state (default: as the embeddings)
        compile: every model through torch.compile; with CUDA graphs on a CUDA device
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    layers: Count = 6
    dim: int = 384
    heads: int = 3
    head_dim: int = 128
    vocab_size: int = 4096
    prompt_length: int = 64
    new_tokens: int = 16
    batch_sizes: tuple[int, ...] = (1, 8)
    precision: Precision = "float32"
    state_dtype: Precision | None = None
    compile: bool = False
    rounds: Count = 9
    warmup: Natural = 2

    def __post_init__(self):
        object.__setattr__(self, "presets", tuple(dict.fromkeys([BASELINE, *map(canonical, self.presets)])))
        expect_at_least(1, self, "prompt_length", "new_tokens", "batch_sizes")
        super().__post_init__()
        self.model(BASELINE)  # raises for sizes that cannot be used

    @property
    def length(self) -> int:
        return self.prompt_length + self.new_tokens

    @property
    def steps(self) -> int:
        """The number of times that the benchmark calls `advance`."""
        return len(self.batch_sizes) * len(self.presets) * (self.warmup + self.rounds)

    def model(self, preset: str) -> ResiduaConfig:
        try:
            return ResiduaConfig(
                connection=preset,
                vocab_size=self.vocab_size,
                hidden_size=self.dim,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                head_dim=self.head_dim,
                max_position_embeddings=self.length,
                state_dtype=self.state_dtype,
            )
        except ValueError as error:
            raise InputError(str(error)) from error


class Decoding:
    """The model of one preset behind a prompt; a call generates `new_tokens` tokens, one after the other.

    Shapes and addresses are the same for every token: the cache has its full length from the start.
    """

    def __init__(self, preset: str, batch: int, settings: GenerateSettings):
        self.preset = preset
        self.settings = settings
        self.device = torch.device(settings.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.tokens = torch.randint(settings.vocab_size, (batch, settings.length)).to(self.device)
            model = ResiduaForCausalLM(settings.model(preset))
            perturb(model)
        self.model = model.to(self.device, getattr(torch, settings.precision)).eval()
        self.forward: Callable[..., Any] = self.model
        if settings.compile:
            mode = "reduce-overhead" if self.device.type == "cuda" else "default"
            self.forward = torch.compile(self.model, mode=mode, fullgraph=True, dynamic=False)
        self.cache = StaticCache(config=self.model.config, max_cache_len=settings.length)
        self.next = self.tokens[:, :1]

    @torch.inference_mode()
    def prepare(self) -> None:
        """Read the prompt."""
        self.cache.reset()
        prompt = self.tokens[:, : self.settings.prompt_length]
        logits = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE: self.cache}).logits
        self.next = logits.argmax(-1)

    @torch.inference_mode()
    def __call__(self) -> None:
        for _ in range(self.settings.new_tokens):
            self.next = self._step(self.next).argmax(-1)

    def _step(self, ids: Tensor) -> Tensor:
        if self.settings.compile and self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return self.forward(input_ids=ids, use_cache=True, **{CACHE: self.cache}).logits

    @torch.inference_mode()
    def check(self) -> float:
        """Return the relative error of the logits after each token, against a float64 copy without a cache.

        Raises:
            RunError: it is larger than `TOLERANCES` allows.
        """
        start = self.settings.prompt_length
        self.prepare()
        steps = [self._step(self.tokens[:, i : i + 1]).double() for i in range(start, self.tokens.shape[1])]
        reference = in_float64(self.model)
        expected = reference(input_ids=self.tokens, use_cache=False).logits[:, start:]
        error = ((torch.cat(steps, 1) - expected).norm() / expected.norm()).item()
        low = "bfloat16" in (self.settings.precision, self.settings.state_dtype)
        allowed = TOLERANCES["bfloat16" if low else "float32"]
        if not error <= allowed:  # also where it is not a number
            raise RunError(
                f"{self.preset} must be logits within {allowed:g} of a float64 copy's, relatively, got {error:.2g}; "
                "a wrong model has no speed"
            )
        return error


@dataclass(frozen=True)
class GenerateResult:
    """The timing and the errors of all presets at every batch size, and the parameter count of each."""

    settings: GenerateSettings
    timing: Mapping[int, Timing]
    parameters: Mapping[str, int]
    errors: Mapping[int, Mapping[str, float]]
    circumstances: Mapping[str, Any]

    def seconds_per_token(self, preset: str, batch: int) -> float:
        """Return the time of one step, which adds a token to every sequence of the batch."""
        return self.timing[batch].median_seconds(preset) / self.settings.new_tokens

    def records(self) -> list[dict[str, Any]]:
        """Return one complete record per preset and batch size."""
        return [
            {
                "benchmark": "generate",
                "preset": preset,
                "batch_size": batch,
                **timing.record(preset),
                "median_seconds_per_token": self.seconds_per_token(preset, batch),
                "parameters": self.parameters[preset],
                "error": self.errors[batch][preset],
                "clock": self.settings.clock.__name__,
                "settings": asdict(self.settings),
                **self.circumstances,
            }
            for batch, timing in self.timing.items()
            for preset in timing.seconds
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table, as text."""
        header = ["preset", "batch", "ms per token", f"ratio to {BASELINE}", "tokens/s"]
        rows = []
        for batch, timing in self.timing.items():
            for preset in timing.seconds:
                seconds = self.seconds_per_token(preset, batch)
                rows.append(
                    [
                        preset,
                        str(batch),
                        f"{1e3 * seconds:.3f}",
                        f"{timing.ratio(preset):.3f}",
                        f"{batch / seconds:,.0f}",
                    ]
                )
        return header, rows


def benchmark(
    settings: GenerateSettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> GenerateResult:
    """Check the logits of every preset against float64, then time all of them in turns, for every batch size.

    `advance` is called after every measurement or warm-up, `len(batch_sizes) * len(presets) * (warmup + rounds)` times;
    `keep` with the records of a batch size once they are complete.

    Raises:
        RunError: a model computes something wrong.
    """
    timing: dict[int, Timing] = {}
    errors: dict[int, dict[str, float]] = {}
    parameters: dict[str, int] = {}

    def clock(decoding: Any) -> float:
        decoding.prepare()
        return settings.clock(decoding)

    with threads(settings.threads), many_graphs(len(settings.presets) * len(settings.batch_sizes)):
        conditions = circumstances(torch.device(settings.device))
        for batch in settings.batch_sizes:
            decodings = {preset: Decoding(preset, batch, settings) for preset in settings.presets}
            errors[batch] = {preset: decoding.check() for preset, decoding in decodings.items()}
            parameters = {preset: decoding.model.num_parameters() for preset, decoding in decodings.items()}
            timing[batch] = compare(
                decodings, BASELINE, rounds=settings.rounds, warmup=settings.warmup, clock=clock, advance=advance
            )
            for record in GenerateResult(settings, {batch: timing[batch]}, parameters, errors, conditions).records():
                keep(record)
    return GenerateResult(settings, timing, parameters, errors, conditions)
