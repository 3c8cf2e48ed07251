"""Collect the weights of reads over depth: one row for each sublayer, one column for each source."""

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.connections import DepthWeights
from residua.lab.inspection.measure import each_token


class DepthReads:
    """Collect `DepthWeights` of T tokens, sublayer by sublayer; sampled: (P) positions of tokens.

    Sublayers see different sources: later sublayers see more, and a source that sums outputs may still lack some of
    them. Sources that begin with the same sublayer share a column.
    """

    def __init__(self, sampled: Tensor):
        self.sampled = sampled
        self.reads: tuple[str, ...] = ()
        self._weights: dict[int, tuple[tuple[range | None, ...], Tensor, Tensor, Tensor]] = {}

    def add(self, index: int, depth_weights: DepthWeights, y: Tensor) -> None:
        """Add the reads of sublayer `index`; y: (1, T, dim), its output."""
        weights = each_token(depth_weights.weights, y, 2).to("cpu", torch.float32)
        self._weights[index] = depth_weights.sources, weights[self.sampled], weights.mean(0), sources_read(weights)
        self.reads = max(self.reads, depth_weights.reads, key=len)

    def sources(self) -> list[range | None]:
        """Return the columns that were read: learned sources, the embedding, and outputs of sublayers."""
        seen = {source for sources, *_ in self._weights.values() for source in sources}
        longest = {_start(source): source for source in sorted(seen, key=lambda source: len(source or ()))}
        return [longest[start] for start in sorted(longest)]

    def names(self, sublayers: Sequence[str]) -> list[str]:
        """Return the names of the columns, given those of the sublayers."""
        return ["learned" if source is None else _name(source, sublayers) for source in self.sources()]

    def left_out(self, depth: int) -> dict[str, list[int]]:
        """Return `left_out` of `Trace.facts`: those of `depth` sublayers that read no sources although others do."""
        missing = [i for i in range(depth) if i not in self._weights]
        return {"depth_weights": missing} if self._weights and missing else {}

    def values(self, depth: int) -> dict[str, Tensor]:
        """Return depth_weights, depth_mean and sources_read of `depth` sublayers, as described in `Trace`."""
        if not self._weights:
            return {}
        starts = [_start(source) for source in self.sources()]
        reads = max(1, len(self.reads))
        first = next(iter(self._weights.values()))
        weights = torch.zeros(depth, len(self.sampled), reads, len(starts))
        mean = torch.zeros(depth, reads, len(starts))
        counts = torch.ones(depth, len(first[3]))
        for i, (sources, sampled, average, count) in self._weights.items():
            columns = [starts.index(_start(source)) for source in sources]
            weights[i, ..., columns] = sampled  # a single read counts for all inputs
            mean[i, ..., columns] = average
            counts[i] = count
        return {"depth_weights": weights, "depth_mean": mean, "sources_read": counts}


def sources_read(weights: Tensor) -> Tensor:
    """Return the effective number of sources that a token reads, from 1 to all: (T, reads, sources) -> (T).

    This is the exponential of the entropy of the absolute weights, scaled to a sum of 1; the mean over the reads.
    """
    sizes = weights.abs()
    shares = sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)  # all may be 0 at the start
    return torch.special.entr(shares).sum(-1).exp().mean(-1)


def _start(source: range | None) -> int:
    return -2 if source is None else source.start


def _name(source: range, sublayers: Sequence[str]) -> str:
    if source.start < 0:
        return "embedding"
    first, last = sublayers[source.start], sublayers[source.stop - 1]
    return first if first == last else f"{first} to {last}"
