"""Time single operations: how much of the bandwidth of a copy their bytes (`roofline`) reach."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.cases import CASES, CONNECTION, CONNECTIONS, MEASURED, Case, Draw, Dtype, Sizes, expect_at_least, make
from benchmarks.roofline import TRAFFIC
from benchmarks.settings import Measuring
from residua.connections import TensorSpec, resolve
from residua.errors import InputError, RunError, require
from residua.lab.cost.timing import Clock, Quartiles, Timing, compare, cuda_clock
from residua.lab.jobs.pool import threads
from residua.lab.records.provenance import circumstances
from residua.ops.dispatch import choose

Implementation = Literal["auto", "reference", "compiled", "triton"]
Pass = Literal["forward", "forward+backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
COPY = "copy"

# Relative errors of results and gradients: several times rounding, and less than a wrong term makes.
TOLERANCES: Mapping[Dtype, float] = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def model_bytes(operation: str, sizes: Sizes, kind: Pass) -> int:
    """Return the bytes that one call has to move, see `roofline`: for a connection, of all between two sublayers."""
    forward, backward = _bytes_per_token(operation, sizes)
    return sizes.tokens * (forward if kind == "forward" else forward + backward)


def _bytes_per_token(operation: str, sizes: Sizes) -> tuple[int, ...]:
    width, rows = getattr(torch, sizes.dtype).itemsize, sizes.channels
    if operation.startswith(CONNECTION):
        scheme = resolve(operation.removeprefix(CONNECTION))
        spec = scheme.state_spec(MEASURED, 1)
        if not isinstance(spec, TensorSpec):
            operation, rows = "sources", len(tree_leaves(spec))
        else:
            operation = "residual" if scheme.state_size(MEASURED, 1) == 1 else "boundary"
    return tuple(
        passes.bytes(dim=sizes.dim, channels=sizes.channels, state_bytes=width, vector_bytes=width)
        for passes in TRAFFIC[operation](rows)
    )


@dataclass(frozen=True, kw_only=True)
class OpSettings(Measuring):
    """What to measure, and how: every operation at every combination of sizes and dtypes.

    Args:
        operations: of `benchmarks.cases.CASES`, or connection:PRESET for a whole connection around a sublayer
            (default: all, and some connections)
        implementations: reference is the plain definition, compiled the same through torch.compile, triton the kernel,
            auto the library's choice
        tokens: tokens of all sequences together
        dims: widths
        channels: value channels, or streams
        dtypes: of the tensors
        sequence_length: tokens in a sequence; all tokens if there are fewer
    """

    operations: tuple[str, ...] = (*CASES, *CONNECTIONS)
    implementations: tuple[Implementation, ...] = ("auto",)
    tokens: tuple[int, ...] = (2048,)
    dims: tuple[int, ...] = (768,)
    channels: tuple[int, ...] = (4,)
    dtypes: tuple[Dtype, ...] = ("float32",)
    sequence_length: int = 1024

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("implementations", Implementation), ("dtypes", Dtype)):
            for value in getattr(self, name):
                require(value in get_args(known), name, ", ".join(get_args(known)), value)
        expect_at_least(1, self, "tokens", "dims", "channels", "sequence_length")
        for tokens in self.tokens:
            if tokens % min(self.sequence_length, tokens):
                raise InputError(f"tokens must be a multiple of the sequence length {self.sequence_length}: {tokens}")
        for operation in self.operations:
            smallest = Sizes(2, 2, min(self.dims), min(self.channels), "float32")
            make(operation, smallest, Draw(smallest, torch.device("cpu"), 0))

    def plan(self) -> list[tuple[str, Sizes]]:
        """Return every operation at every combination of sizes, in the order of measurement."""
        return [
            (operation, Sizes(tokens, min(self.sequence_length, tokens), dim, channels, dtype))
            for dtype in self.dtypes
            for channels in self.channels
            for dim in self.dims
            for tokens in self.tokens
            for operation in self.operations
        ]

    @property
    def steps(self) -> int:
        return len(self.plan())


@dataclass(frozen=True)
class OpResult:
    """One operation at one size under one implementation; `runs`: what "auto" chose."""

    operation: str
    sizes: Sizes
    implementation: str
    runs: str
    kind: Pass
    timing: Timing
    error: float

    @property
    def name(self) -> str:
        return f"{self.implementation} {self.kind}"

    @property
    def bytes(self) -> int:
        return model_bytes(self.operation, self.sizes, self.kind)

    @property
    def seconds(self) -> float:
        return self.timing.median_seconds(self.name)

    @property
    def copied(self) -> int:
        return copy_bytes(self.sizes)

    def share_of_copy(self) -> Quartiles:
        """Model bytes per second over bytes per second of a copy, round by round."""
        return Quartiles.of([self.bytes / self.copied / ratio for ratio in self.timing.ratios(self.name)])

    def speedup(self) -> float | None:
        """Median over the rounds of the reference's time over this one's; None if it took no part."""
        seconds = self.timing.seconds
        other = f"reference {self.kind}"
        if other not in seconds:
            return None
        return statistics.median([b / a for a, b in zip(seconds[self.name], seconds[other], strict=True)])

    def record(self) -> dict[str, Any]:
        copied = self.timing.median_seconds(COPY)
        return {
            "benchmark": "ops",
            "operation": self.operation,
            "implementation": self.implementation,
            "runs": self.runs,
            "pass": self.kind,
            **{key: value for key, value in self.sizes._asdict().items() if key != "length"},
            "median_seconds": self.seconds,
            "quartiles_seconds": Quartiles.of(self.timing.seconds[self.name])._asdict(),
            "model_bytes": self.bytes,
            "bytes_per_second": self.bytes / self.seconds,
            "copy_bytes_per_second": self.copied / copied,
            "share_of_copy": self.share_of_copy()._asdict(),
            "speedup_over_reference": self.speedup(),
            "error": self.error,
            "seconds": list(self.timing.seconds[self.name]),
        }


@dataclass(frozen=True)
class OpResults:
    settings: OpSettings
    results: list[OpResult]
    notes: list[str]
    clock: str
    circumstances: Mapping[str, Any]

    def records(self) -> list[dict[str, Any]]:
        facts = {"clock": self.clock, "settings": asdict(self.settings), **self.circumstances}
        return [{**result.record(), **facts} for result in self.results]

    def table(self) -> tuple[list[str], list[list[str]]]:
        header = ["operation", "tokens x dim x channels", "dtype", "implementation", "pass"]
        header += ["us", "GB/s", "share of copy", "times reference"]
        rows = []
        for result in self.results:
            sizes, speedup = result.sizes, result.speedup()
            # A peer runs a version of itself, "auto" an implementation with another name.
            same = result.runs.startswith(result.implementation)
            rows.append(
                [
                    result.operation,
                    f"{sizes.tokens} x {sizes.dim} x {sizes.channels}",
                    sizes.dtype,
                    result.runs if same else f"{result.implementation} ({result.runs})",
                    result.kind,
                    f"{1e6 * result.seconds:.1f}",
                    f"{result.bytes / result.seconds / 1e9:.1f}",
                    f"{result.share_of_copy():.2f}",
                    "" if speedup is None else f"{speedup:.2f}",
                ]
            )
        return header, rows


def copy_bytes(sizes: Sizes) -> int:
    """Return the bytes of the copy that everything is compared with: a state, read once and written once."""
    return 2 * sizes.tokens * sizes.channels * sizes.dim * getattr(torch, sizes.dtype).itemsize


def benchmark(
    settings: OpSettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> OpResults:
    """Check every operation against float64, then time its implementations and a copy in turns, from cold caches.

    `advance` is called after every operation of `settings.plan()`, `keep` with each of its records.

    Raises:
        RunError: an implementation computes something wrong.
        InputError: "triton" on a machine that cannot run the kernels.
    """
    device = torch.device(settings.device)
    results: list[OpResult] = []
    notes: dict[str, None] = {}  # a set that keeps its order
    with threads(settings.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        clock, name = cold(settings.clock, device), settings.clock.__name__
        conditions = circumstances(device)
        for operation, sizes in settings.plan():
            found, remarks = _measure(operation, sizes, settings, clock)
            for record in OpResults(settings, found, [], f"cold {name}", conditions).records():
                keep(record)
            results += found
            notes.update(dict.fromkeys(remarks))
            advance()
    return OpResults(settings, results, list(notes), f"cold {name}", conditions)


def _measure(operation: str, sizes: Sizes, settings: OpSettings, clock: Clock) -> tuple[list[OpResult], list[str]]:
    device = torch.device(settings.device)
    case = make(operation, sizes, Draw(sizes, device, settings.seed))
    candidates, notes = _implementations(operation, case, settings.implementations)
    calls: dict[str, Callable[[], None]] = {}
    errors: dict[str, float] = {}
    for name, (_, candidate) in candidates.items():
        for leaf in candidate.leaves():
            leaf.requires_grad_()
        draw = Draw(sizes, device, settings.seed + 1)
        grads = [draw.coefficients(*result.shape).to(result.dtype) for result in candidate()]
        error = check(candidate, case, grads)
        if not error <= TOLERANCES[sizes.dtype]:  # also if it is not a number
            raise RunError(
                f"{operation}, {name}, {sizes.dtype} must be results and gradients within "
                f"{TOLERANCES[sizes.dtype]:g} of float64, relatively, got {error:.2g}; what is wrong has no speed"
            )
        errors[name] = error
        calls[f"{name} forward"] = candidate
        calls[f"{name} forward+backward"] = partial(_forward_backward, candidate, grads)
    if not calls:
        return [], notes
    source = torch.empty(copy_bytes(sizes) // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    calls[COPY] = lambda: target.copy_(source)
    timing = compare(calls, COPY, rounds=settings.rounds, warmup=settings.warmup, clock=clock)
    found = [
        OpResult(operation, sizes, name, candidates[name][0], kind, timing, error)
        for name, error in errors.items()
        for kind in PASSES
    ]
    return found, notes


def _implementations(
    operation: str, case: Case, wanted: Sequence[str]
) -> tuple[dict[str, tuple[str, Case]], list[str]]:
    """Return for every available implementation what it runs and its case, and a note for each missing one."""
    found: dict[str, tuple[str, Case]] = {}
    notes = []
    tensors = list(case.inputs.values())
    for name in wanted:
        if name == "compiled":
            torch._dynamo.reset()  # every case is another graph of the same code, and the compiler would give up
            found[name] = (name, replace(case, function=torch.compile(case.function, fullgraph=True, dynamic=False)))
        elif name == "reference" or (name == "auto" and not case.has_kernel):
            found[name] = ("reference", case)
        elif not case.has_kernel:
            notes.append(f"{operation} has no kernel")
        else:
            try:
                runs = choose(name, *tensors)
            except (ValueError, ModuleNotFoundError) as error:
                raise InputError(str(error)) from error
            found[name] = (runs, replace(case, function=partial(case.function, implementation=name)))
    return found, notes


def _forward_backward(case: Case, grads: Sequence[Tensor]) -> None:
    torch.autograd.grad(case(), case.leaves(), grads, allow_unused=True)


def check(case: Case, reference: Case, grads: Sequence[Tensor]) -> float:
    """Return the largest relative error |x - x'| / |x'| of a result or a gradient; x' is the reference in float64.

    The reference runs on a few sequences at a time, so that its float64 copies need little memory.
    """
    results = case()
    gradients = torch.autograd.grad(results, case.leaves(), grads, allow_unused=True)
    number = len(results)
    shared = [name in reference.shared for name in reference.inputs]
    shared += [True] * (len(gradients) - len(shared))
    squares = [[0.0, 0.0] for _ in range(number + len(gradients))]
    sums: dict[int, Tensor] = {}
    sequences = results[0].shape[0]
    step = max(1, sequences // 8)

    def add(index: int, ours: Tensor, theirs: Tensor) -> None:
        squares[index][0] += (ours.detach().double() - theirs.detach()).square().sum().item()
        squares[index][1] += theirs.detach().square().sum().item()

    for low in range(0, sequences, step):
        part = reference.part(low, low + step)
        expected = part()
        slices = [grad[low : low + step].double() for grad in grads]
        for index, result in enumerate(expected):
            add(index, results[index][low : low + step], result)
        found = torch.autograd.grad(expected, part.leaves(), slices, allow_unused=True)
        for index, (ours, theirs) in enumerate(zip(gradients, found, strict=True)):
            if theirs is None or ours is None:
                continue
            if shared[index]:
                sums[index] = sums.get(index, 0) + theirs
            else:
                add(number + index, ours[low : low + step], theirs)
    for index, theirs in sums.items():
        add(number + index, gradients[index], theirs)
    total = sum(square for _, square in squares[number:])
    # A gradient that is small beside the others may be nothing but rounding.
    floors = [0.0] * number + [1e-6 * total] * len(gradients)
    return max(math.sqrt(gap / max(size, floor, 1e-300)) for (gap, size), floor in zip(squares, floors))


def cold(clock: Clock, device: torch.device) -> Clock:
    """Return `clock` with empty caches before each call: in training, a sublayer runs in between.

    On a CUDA device the call is launched while the caches are still being emptied, which hides launches as a training
    step does; `clock` is not used there.
    """
    if device.type != "cuda":
        sweep = torch.empty(2**24)  # 64 MiB: more than the last level of cache that a core can fill

        def cold_clock(call: Callable[[], None]) -> float:
            sweep.zero_()
            return clock(call)

        return cold_clock
    sweep = torch.empty(2**28, device=device)  # 1 GiB, a quarter of a millisecond to write
    return partial(cuda_clock, before=sweep.zero_)
