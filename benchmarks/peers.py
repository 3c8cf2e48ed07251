"""Other packages' implementations beside ours: are they what the paper says, and what do time and memory cost?"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.adapters import PEERS, Peer, PeerAdapter
from benchmarks.cases import expect_at_least
from benchmarks.exact import perturb
from benchmarks.settings import Measuring, Precision
from residua.errors import require
from residua.lab.cost.measured_memory import storages_kept
from residua.lab.cost.timing import Timing, compare
from residua.lab.jobs.pool import threads
from residua.lab.records.provenance import circumstances, version
from residua.testing.checks import Report, run
from residua.testing.inputs import normal
from residua.testing.module import CHECKS

GATE = ("parameters", "forward", "gradients")
"""Checks that a peer must pass to be timed: it computes what the paper says. Other failures are notes."""
PACKAGES = tuple(dict.fromkeys(peer.package for peer in PEERS))


@dataclass(frozen=True, kw_only=True)
class PeerSettings(Measuring):
    """Which packages to measure beside ours, and how: a chain of connections around sublayers that cost nothing.

    Args:
        packages: of `benchmarks.adapters.PEERS` (default: all)
        layers: of two connections each, in the chain
        dim: width of the state, which is in float32
        sequence_length: tokens in a sequence
        batch_size: sequences
        precision: bfloat16 is autocast around the forward pass
    """

    packages: tuple[str, ...] = PACKAGES
    layers: int = 4
    dim: int = 384
    sequence_length: int = 256
    batch_size: int = 2
    precision: Precision = "float32"

    def __post_init__(self):
        super().__post_init__()
        for package in self.packages:
            require(package in PACKAGES, "packages", ", ".join(PACKAGES), package)
        require(self.precision in get_args(Precision), "precision", " or ".join(get_args(Precision)), self.precision)
        expect_at_least(1, self, "layers", "dim", "sequence_length", "batch_size")

    def peers(self) -> list[Peer]:
        return [peer for peer in PEERS if peer.package in self.packages]

    @property
    def steps(self) -> int:
        return len(self.peers())


@dataclass(frozen=True)
class PeerResult:
    """One peer: the report of the kit, and if it passed `GATE` the timing and the vectors kept, "ours" and "theirs".

    kept: vectors of the width that each token keeps for the backward pass in each connection.
    """

    peer: Peer
    version: str | None
    report: Report
    timing: Timing | None = None
    kept: Mapping[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> str:
        """What it computes instead, in words; empty if it computes what the paper says."""
        found = "; ".join(self.report.failed[check] for check in GATE if check in self.report.failed)
        return f"{self.peer.differs} ({found})" if found and self.peer.differs else found

    def record(self) -> dict[str, Any]:
        peer, timing = self.peer, self.timing
        found = {
            "benchmark": "peers",
            "package": peer.package,
            "version": self.version,
            "name": peer.name,
            "preset": peer.preset,
            "agrees": not self.wrong,
            "differs": peer.differs if self.wrong else "",
            "failed": self.report.failed,
            "not_checked": self.report.not_checked,
            "passed": self.report.passed,
        }
        if timing is not None:
            found |= {
                "ratio": timing.ratio("theirs")._asdict(),
                "median_seconds": {name: timing.median_seconds(name) for name in timing.seconds},
                "kept_vectors": self.kept,
                "seconds": timing.seconds,
            }
        return found


@dataclass(frozen=True)
class PeerResults:
    """Every peer that took part, and a note for each that could not, or that failed a check."""

    settings: PeerSettings
    results: list[PeerResult]
    notes: list[str]
    circumstances: Mapping[str, Any]

    def records(self) -> list[dict[str, Any]]:
        """Return one record for each peer, complete in itself."""
        about = {"clock": self.settings.clock.__name__, "settings": asdict(self.settings), **self.circumstances}
        return [{**one.record(), **about} for one in self.results]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table, as text."""
        header = ["package", "version", "name", "scheme", "as the paper", "time / ours", "kept", "ours keeps"]
        rows = []
        for one in self.results:
            cells = ["no", "", "", ""]
            if one.timing is not None:
                kept = (f"{one.kept[name]:.2f}" for name in ("theirs", "ours"))
                cells = ["yes", f"{one.timing.ratio('theirs'):.2f}", *kept]
            rows.append([one.peer.package, one.version or "", one.peer.name, one.peer.preset, *cells])
        return header, rows


class Chain(nn.Module):
    """Connections one after the other, ours or a peer's with the same parameters; a call runs forward and backward.

    Each sublayer returns half of its input, which takes no time and keeps nothing.
    """

    def __init__(self, parts: list[nn.Module], connect: Callable[[nn.Module, Any, Any], Any], state: Any, narrow: bool):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.connect, self.state, self.narrow = connect, state, narrow
        self.leaves = tree_leaves(state)
        self.grads = [torch.ones_like(leaf) for leaf in tree_leaves(self.after())]

    def after(self) -> Any:
        """Return the state after all connections."""
        state = self.state
        with torch.autocast(self.leaves[0].device.type, dtype=torch.bfloat16, enabled=self.narrow):
            for part in self.parts:
                state = self.connect(part, state, lambda x: 0.5 * x)
        return state

    def forward(self) -> None:
        torch.autograd.grad(
            tree_leaves(self.after()), [*self.leaves, *self.parameters()], self.grads, allow_unused=True
        )

    def kept(self) -> float:
        """Count the vectors of the width that a token keeps in a connection, without parameters and the first state."""
        known = [*self.leaves, *self.parameters()]
        numbers = self.leaves[0].shape[:2].numel() * self.leaves[0].shape[-1] * len(self.parts)
        return storages_kept(self.after, known) / (numbers * self.leaves[0].dtype.itemsize)


def chains(adapter: PeerAdapter, settings: PeerSettings) -> dict[str, Chain]:
    """Return the chains to compare: "ours" and "theirs"."""
    first, last = adapter.index, adapter.index + 2 * settings.layers
    adapter.dim, adapter.num_sublayers = settings.dim, last + 1  # so that neither the first nor the last takes part
    stream = adapter.reference()
    perturb(stream)
    stream.to(settings.device)
    ours = list(stream.connections)[first:last]
    theirs = []
    for connection in ours:
        module = adapter.build(settings.dim)
        module.load_state_dict(adapter.parameters(dict(connection.named_parameters())), strict=False)
        theirs.append(module)
    shape, seeds = (settings.batch_size, settings.sequence_length), count(settings.seed)
    state = tree_map(
        lambda one: normal(*shape, *one.shape, seed=next(seeds)).to(settings.device, torch.float32).requires_grad_(),
        adapter.scheme.state_spec(first, settings.dim),
    )
    narrow = settings.precision == "bfloat16"
    return {
        "ours": Chain(ours, lambda part, state, sublayer: part(state, sublayer), state, narrow),
        "theirs": Chain(theirs, adapter.connect, state, narrow),
    }


def benchmark(
    settings: PeerSettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> PeerResults:
    """Check every installed peer against our scheme with the kit, then time the ones that pass beside ours, in turns.

    `advance` is called after every peer, `keep` with its record. What is missing or fails a check is in the notes.
    """
    results, notes = [], []
    with threads(settings.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        conditions = circumstances(torch.device(settings.device))
        for peer in settings.peers():
            found, reason = peer.imported(settings.device)
            if found is None:
                notes.append(f"{peer.package}, {peer.name}: left out, {reason}")
            else:
                one = _measured(peer, found, settings)
                results.append(one)
                notes += _told(one)
                keep(PeerResults(settings, [one], [], conditions).records()[0])
            advance()
    return PeerResults(settings, results, notes, conditions)


def _measured(peer: Peer, module: Any, settings: PeerSettings) -> PeerResult:
    result = PeerResult(peer, version(peer.package), run(CHECKS, peer.adapter(module, settings.device)))
    if result.wrong:
        return result
    both = chains(peer.adapter(module, settings.device), settings)
    kept = {name: chain.kept() for name, chain in both.items()}
    timing = compare(both, "ours", rounds=settings.rounds, warmup=settings.warmup, clock=settings.clock)
    return replace(result, timing=timing, kept=kept)


def _told(result: PeerResult) -> list[str]:
    name = f"{result.peer.package} {result.version}, {result.peer.name}"
    if result.wrong:
        return [f"{name} does not compute what the paper of {result.peer.preset} says: {result.wrong}"]
    return [f"{name}: {words}" for words in result.report.failed.values()]
