"""Summarise a trace: warnings, and tables of its sublayers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.lab.inspection.trace import Trace
from residua.lab.records.jsonlines import finite
from residua.lab.records.table import Table

STUCK = 1e-3
"""A gate has not moved if its mean distance from its initial value is below this."""
SATURATED = 0.005
"""A gate is saturated if it is closer to a bound than this fraction of its range; its gradient is then under 1/50 of
the largest."""
MOST = 0.9
"""A larger fraction of the tokens, or of the weights, counts as all of them."""
IDENTITY = 0.01
"""A mixing matrix does not mix if the largest distance of its entries from the identity's, averaged over tokens, is
below this."""
COPIES = 1e-5
"""Streams are copies if their mean cosine is closer to 1 than this, about the resolution of float32."""
CONSTRAINT = 0.05
"""The largest mean error of a constraint that rounding or too few iterations can explain."""
NOT_CAUSAL = "not causal: the coefficients of a token depend on later tokens, so losses of this model mean nothing"
ALL_COPIES = (
    "the streams are copies of one another before and after every sublayer: together they hold no more than one"
)


class TraceCheck(NamedTuple):
    """A statement about a trace. It holds unless there are `warnings`, which are sentences."""

    holds: str
    warnings: Sequence[str]


def warnings(trace: Trace) -> list[str]:
    """Return warnings about a trace, one sentence each; empty if nothing is wrong."""
    return [sentence for check in checks(trace) for sentence in check.warnings]


def checks(trace: Trace) -> Iterator[TraceCheck]:
    """Yield the checks for which a trace has the values."""
    facts, values = trace.facts, trace.values
    yield TraceCheck("all numbers are finite", _not_finite(trace))
    yield TraceCheck("the connection is causal", [] if facts["causal"] else [NOT_CAUSAL])
    if any(gate["range"] or gate["start"] is not None for gate in facts["gates"].values()):
        yield TraceCheck("no gate is stuck at its start or saturated", [*_gates(trace)])
    if "h_res" in values and values["h_res"].shape[-1] > 1:
        kept = f" and stayed {facts['constraint']}" if facts["constraint"] else ""
        yield TraceCheck(f"the mixing has left the identity{kept}", [*_mixing(trace)])
    if "stream_similarity" in values:
        copies = (1 - values["stream_similarity"].mean(1) < COPIES).all()
        yield TraceCheck("the streams are not copies of one another", [ALL_COPIES] if copies else [])
    if "compress_share" in values and values["compress_share"].shape[1] > 1:
        yield TraceCheck("no compressor reads only one channel", [*_compressors(trace)])


def sublayer_statistics(trace: Trace) -> list[dict[str, Any]]:
    """Return the numbers of every sublayer, averaged over the tokens, as plain values; None if not finite.

    Means have the names of `Trace.values`; gates also have the quantiles `_q05`, `_q50`, `_q95`. Singular values and
    determinants are those of the product of all shortcuts so far, as medians over the sampled tokens. `most_read` names
    the source with the largest weight, which is `most_read_weight`; both are None for a sublayer that reads no sources.
    """
    values, gates = trace.values, trace.facts["gates"]
    columns: dict[str, Sequence[Any]] = {"sublayer": trace.facts["sublayers"]}
    for name in ("state_norm", "input_norm", "output_norm", "change_norm", "erase_norm", "write_norm", *gates, *_MEANS):
        if name in values:
            columns[name] = values[name][: trace.num_sublayers].mean(1).tolist()
    for name in gates:
        levels = torch.tensor([0.05, 0.5, 0.95])
        quantiles = values[name].quantile(levels, dim=1).tolist()
        columns |= {f"{name}_{level}": column for level, column in zip(("q05", "q50", "q95"), quantiles)}
    if "beta" in values:
        low, _ = gates["beta"]["range"] or (0.0, 2.0)
        regimes = dict(zip(("enlarging", "identity", "projection", "reflection"), trace.regimes().T.tolist()))
        columns |= {name: column for name, column in regimes.items() if low < 0 or name != "enlarging"}
    if "h_res" in values:
        columns["distance_from_identity"] = _from_identity(values["h_res"]).mean(1).tolist()
    for name in ("determinant", "singular_max", "singular_min", "defect"):
        if name in values:
            columns[name] = values[name].median(1).values.tolist()
    if "depth_mean" in values:
        columns |= zip(_MOST_READ, zip(*_most_read(trace)))
    return [finite(dict(zip(columns, row))) for row in zip(*columns.values())]


_MEANS = (
    *("discrepancy_norm", "row_error", "column_error", "orthogonality_error"),
    *("stream_similarity", "sources_read", "h_pre", "h_post"),
)


def summary(trace: Trace) -> Table:
    """Return the `sublayer_statistics` as a table: one row per sublayer, with the columns that the scheme has."""
    statistics = sublayer_statistics(trace)
    gates = [column for name in trace.facts["gates"] for column in _columns_of_gate(name)]
    columns = [column for column in (*gates, *_COLUMNS) if column.key in statistics[0]]
    if trace.facts["constraint"] != "doubly stochastic":
        columns = [column for column in columns if column.key not in ("row_error", "column_error")]
    rows = [[row["sublayer"], *(column.cell(row[column.key]) for column in columns)] for row in statistics]
    return Table(["sublayer", *(column.title for column in columns)], rows)


def overview(trace: Trace) -> list[str]:
    """Return lines about the text that was read, about the whole depth, and about the meaning of the columns."""
    facts, values = trace.facts, trace.values
    headline = [facts["preset"] or facts["scheme"]["scheme"]]
    headline += [f"step {facts['checkpoint']}"] if facts["checkpoint"] is not None else []
    headline += [facts.get("read", f"{trace.num_tokens} tokens")]
    headline += [f"loss {facts['loss']:.4f} nats per token"] if facts["loss"] is not None else []
    lines = [", ".join(headline)]
    if "alignment" in values and trace.num_sublayers > 1:
        others = ~torch.eye(trace.num_sublayers, dtype=torch.bool)
        lines.append(
            f"directions: mean |cos(k_i, k_j)| {values['alignment'][others].mean():.3f}, effective rank "
            f"{values['effective_rank'].mean():.2f} of {min(trace.num_sublayers, facts['dim'])}"
        )
    if "singular_max" in values:
        low, high = values["singular_min"][-1].median(), values["singular_max"][-1].median()
        lines.append(f"product of all shortcuts: singular values {low:.4g} to {high:.4g} (median token)")
    if "stream_similarity" in values:
        first, last = values["stream_similarity"][[0, -1]].mean(1)
        lines.append(f"streams: mean cosine between two of them {first:.3f} at the start, {last:.3f} at the end")
    return [*lines, "columns: " + "; ".join(meaning for key, meaning in _MEANINGS if key in values)]


_MEANINGS = [
    ("state_norm", "means over the tokens, |X| before the sublayer"),
    ("beta", "5% to 95%: quantiles of the gate over the tokens"),
    ("beta", "enlarging: beta < -0.5, identity: -0.5 to 0.5, projection: to 1.5, reflection: above"),
    ("erase_norm", "erase beta |k^T X|"),
    ("write_norm", "write beta |v|"),
    ("h_res", "H the shortcut's matrix, |H - I| by its largest entry"),
    ("stream_similarity", "cos the mean cosine between two streams before the sublayer"),
    ("sources_read", "sources: how many are read in effect; reads most: the one with the largest weight"),
    ("singular_max", "min s, max s: singular values of the product so far"),
]


class _Column(NamedTuple):
    key: str
    title: str
    form: str

    def cell(self, value: Any) -> str:
        if isinstance(value, list):
            return " ".join(map(self.cell, value))
        if value is None:
            return "none" if self.key in _MOST_READ else "nan"
        return format(value, self.form)


_MOST_READ = ("most_read", "most_read_weight")
_COLUMNS = [
    _Column("enlarging", "enlarging", ".0%"),
    _Column("identity", "identity", ".0%"),
    _Column("projection", "projection", ".0%"),
    _Column("reflection", "reflection", ".0%"),
    _Column("h_pre", "h_pre", ".2f"),
    _Column("h_post", "h_post", ".2f"),
    _Column("distance_from_identity", "|H - I|", ".3f"),
    _Column("sources_read", "sources", ".2f"),
    _Column("most_read", "reads most", ""),
    _Column("most_read_weight", "weight", ".3f"),
    _Column("stream_similarity", "cos", ".3f"),
    _Column("row_error", "rows off", ".1e"),
    _Column("column_error", "columns off", ".1e"),
    _Column("orthogonality_error", "|H'H - I|", ".1e"),
    _Column("state_norm", "|X|", ".4g"),
    _Column("change_norm", "|change|", ".4g"),
    _Column("erase_norm", "erase", ".3g"),
    _Column("write_norm", "write", ".3g"),
    _Column("output_norm", "|y|", ".3g"),
    _Column("singular_min", "min s", ".3g"),
    _Column("singular_max", "max s", ".3g"),
]


def _columns_of_gate(name: str) -> list[_Column]:
    quantiles = (_Column(f"{name}_q{level}", f"{int(level)}%", ".3f") for level in ("05", "50", "95"))
    return [_Column(name, name, ".3f"), *quantiles]


def _most_read(trace: Trace) -> Iterator[tuple[str | None, float | None]]:
    sources, without = trace.facts["sources"], trace.facts["left_out"].get("depth_weights", [])
    for i, weights in enumerate(trace.values["depth_mean"].mean(1)):
        most = int(weights.abs().argmax())
        read = i not in without and weights.isfinite().all()
        yield (sources[most], weights[most].item()) if read else (None, None)


def _named(trace: Trace, which: list[int]) -> str:
    """Return the names of sublayers: "all sublayers", or the first few."""
    if len(which) == trace.num_sublayers:
        return "all sublayers"
    names = ", ".join(trace.facts["sublayers"][i] for i in which[:4])
    return names + (f" and {len(which) - 4} more" if len(which) > 4 else "")


def _where(condition: Tensor) -> list[int]:
    return condition.nonzero().flatten().tolist()


def _not_finite(trace: Trace) -> list[str]:
    values = trace.values
    broken = []
    for name, value in values.items():
        numbers = value[..., :-1] if name in ("token_loss", "lens_loss") else value  # there is no token after the last
        if name == "token_loss" and numbers.isnan().all():
            continue  # the model has no head
        if not numbers.isfinite().all():
            broken.append(name)
    if not broken:
        return []
    places = ["from the start", *(f"after {name}" for name in trace.facts["sublayers"])]
    where = _where(~values["state_norm"].isfinite().all(1))
    place = f"; the state {places[where[0]]}" if where else ""
    return [f"not finite: {', '.join(broken[:5])}{' and more' if len(broken) > 5 else ''}{place}"]


def _gates(trace: Trace) -> Iterator[str]:
    for name, gate_facts in trace.facts["gates"].items():
        gate, start = trace.values[name], gate_facts["start"]
        present = torch.ones(trace.num_sublayers, dtype=torch.bool)
        present[trace.facts["left_out"].get(name, [])] = False
        stuck = _where(present & ((gate - start).abs().mean(1) < STUCK)) if start is not None else []
        if stuck:
            yield f"{name} is still at its start, {start:g}: {_named(trace, stuck)}"
        if gate_facts["range"] is None:
            continue
        low, top = gate_facts["range"]
        margin = SATURATED * (top - low)
        for bound, near in ((low, gate < low + margin), (top, gate > top - margin)):
            closed = _where(present & (near.float().mean(1) > MOST))
            if closed:
                yield (
                    f"{name} is saturated at {bound:g}, where it has nearly no gradient, for most tokens: "
                    f"{_named(trace, closed)}"
                )


def _mixing(trace: Trace) -> Iterator[str]:
    values = trace.values
    without = set(trace.facts["left_out"].get("h_res", []))
    same = _where(_from_identity(values["h_res"]).mean(1) < IDENTITY)
    same = [i for i in same if i not in without]
    if same:
        yield f"the mixing matrix is still the identity, within {IDENTITY:g}: {_named(trace, same)}"
    constraint = trace.facts["constraint"]
    errors = {"doubly stochastic": ("row_error", "column_error"), "orthogonal": ("orthogonality_error",)}
    for name in errors.get(constraint, ()):
        off = _where(values[name].mean(1) > CONSTRAINT)
        if off:
            worst = values[name].mean(1).max()
            yield f"the mixing matrix is not {constraint}: {name} is {worst:.2g} on average: {_named(trace, off)}"


def _compressors(trace: Trace) -> Iterator[str]:
    share = trace.values["compress_share"]
    for channel in range(share.shape[1]):
        alone = _where(share[:, channel] > MOST)
        if alone:
            yield f"the compressor reads only channel {channel}: {_named(trace, alone)}"


def _from_identity(h_res: Tensor) -> Tensor:
    """Return the largest difference between an entry and the identity's: (S, T, n, n) -> (S, T)."""
    return (h_res - torch.eye(h_res.shape[-1])).abs().amax((-2, -1))
