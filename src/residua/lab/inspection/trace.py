"""A trace: measurements of every connection of a language model at every token of one text.

`trace` runs the model once, with stand-ins for the `read` and `write` of its connections, and keeps only small arrays.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from residua.connections import PRESETS, GateFacts, Mixing, RankOne, describe
from residua.errors import InputError, fits, require, shown, words
from residua.files.durable import unlinked
from residua.files.reading import parse_json
from residua.files.tensors import read_tensors, write_tensors
from residua.lab.inspection.depth import DepthReads
from residua.lab.inspection.measure import gates, measured, norm, stream_similarity
from residua.lab.inspection.spectrum import alignment, effective_rank, matrix_products, rank_one_products
from residua.lab.inspection.subject import Subject
from residua.lab.inspection.watch import ConnectionRecord
from residua.lab.records.progress import say
from residua.lab.records.provenance import circumstances
from residua.models.evaluating import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRACE_VERSION = 1
"""The version of the format of trace files."""


@dataclass(frozen=True)
class Trace:
    """Measurements of the connections of a model at every token of one text.

    Sizes: S sublayers in order, T tokens, n streams, P sampled tokens, d the width. `values` are float32 tensors on the
    CPU (`token_ids` int64); X is the state, x the sublayer's input, y its output.

    every scheme
        token_ids (T); token_loss (T): the loss of predicting the next token, in nats, NaN for the last token
        state_norm (S + 1, T): |X| before each sublayer and after the last
        input_norm (S, T): |x| before its norm, if the connection has one; output_norm (S, T): |y|
        change_norm (S, T): |X' - X|
        lens_loss (S, T): the token_loss if the model ended after the sublayer (`logit_lens`); only in traces made by
            `residua explore`, not in the result of `trace`
    shortcut "rank-one" (`connections.RankOne`)
        beta (S, T); readout (S, T, n): k^T X; erase_norm (S, T): beta |k^T X|
        target (S, T, n): v; write_norm, discrepancy_norm (S, T): beta |v|, |v - k^T X|, if v is written
        compress_share (S, n): the weight of each row in the sublayer's input
        direction (S, P, d): the unit vector k; alignment (S, S): mean |cos(k_i, k_j)|; effective_rank (P) of the k's
    shortcut "mixing" (`connections.Mixing`)
        h_pre, h_post (S, T, n); h_res (S, T, n, n): the shortcut's matrix, target stream first
        row_error, column_error (S, T): largest |sum - 1|; orthogonality_error (S, T): |H^T H - I|, spectral
        gates that h_res depends on (S, T), under the scheme's names; angles in radians
    streams side by side (`Connection.streams`)
        stream_similarity (S + 1, T): the mean cosine between two streams, before each sublayer and after the last
    reads over depth (`connections.DepthWeights`), with `facts["sources"]` as columns
        depth_weights (S, P, reads, sources), depth_mean (S, reads, sources): the weights, and their mean over all T
            tokens; 0 for a source that a sublayer does not read
        sources_read (S, T): the effective number of sources that a sublayer reads; 1 if it reads only the last state
    products M_l ... M_0 of the shortcuts of sublayers 0 to l, on R^d for rank-1 shortcuts, otherwise on R^n
        determinant, singular_max, singular_min, defect (S, P): defect is |M^T M - I|, spectral
        singular_values (P, r): after the last sublayer; r = min(S, d) on R^d, where all others are 1; r = n on R^n

    `facts` is metadata for JSON: version of the format; residua, commit, date; preset (or None) and scheme; shortcut
    ("rank-one", "mixing" or None); causal; constraint on h_res ("doubly stochastic", "orthogonal" or None); gates: the
    `connections.GateFacts` of each gate in `values`, by name; left_out: for each omitted mapping or gate, the sublayers
    that omit it; sources, reads: the names along these axes of depth_weights; dim; rows: the number of rows of width
    dim in the last state; sublayers: their names; run and checkpoint (or None); sampled: positions of tokens; loss: the
    mean of token_loss, or None; lens, with lens_loss: the predictions after each sublayer and token.
    """

    facts: dict[str, Any]
    tokens: list[str]
    values: dict[str, Tensor]

    def __repr__(self) -> str:
        scheme = self.facts["preset"] or self.facts["scheme"]["scheme"]
        sizes = f"{self.num_tokens} tokens, {self.num_sublayers} sublayers"
        return f"Trace({scheme}, {sizes}: {', '.join(sorted(self.values))})"

    @property
    def num_sublayers(self) -> int:
        return len(self.facts["sublayers"])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def regimes(self, identity: float = 0.5, reflection: float = 1.5) -> Tensor:
        """Return the fractions of tokens in four ranges of beta, (S, 4).

        The ranges are beta < -identity, which enlarges the component along k; -identity to identity; identity to
        reflection; and beta > reflection.

        Raises:
            InputError: the scheme has no beta.
        """
        if "beta" not in self.values:
            raise InputError(f"regimes needs a trace with values of beta, got a trace with {sorted(self.values)}")
        beta = self.values["beta"]
        enlarging, reflecting, between = beta < -identity, beta > reflection, (beta >= identity) & (beta <= reflection)
        return torch.stack([enlarging, (beta < identity) & ~enlarging, between, reflecting], -1).float().mean(1)

    def save(self, path: str | Path) -> Path:
        """Write `values` into a safetensors file, with `facts` and `tokens` as JSON in its metadata. Raises OSError."""
        path = Path(path)
        metadata = {
            "residua_trace": str(TRACE_VERSION),
            "facts": json.dumps(self.facts, allow_nan=False),
            "tokens": json.dumps(self.tokens),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, self.values, metadata)
        return path

    def keep(self, folder: str | Path) -> Path | None:
        """Save the trace in the folder of its run and return the path. If this fails, print a line and return None."""
        path = trace_file(folder, self.facts["checkpoint"])
        try:
            unlinked(path.parent)
            return self.save(path)
        except (OSError, InputError) as error:
            say(f"{path}: the trace is not kept: {getattr(error, 'strerror', None) or error}")
            return None

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a trace file. Raises InputError if it is missing, damaged, of another version, or not a trace."""
        values, metadata = read_tensors(path, "a trace", "residua explore RUN writes one")
        version = metadata.get("residua_trace")
        if version != str(TRACE_VERSION):
            other = "other tensors" if version is None else f"version {version}"
            raise InputError(
                f"{path} must be a trace of version {TRACE_VERSION}, got {other}; residua explore RUN writes one"
            )
        tokens = _parsed(metadata, "tokens", path)
        count = len(tokens) if isinstance(tokens, list) else 0
        require(count and all(isinstance(token, str) for token in tokens), f"{path}: tokens", "a list of texts", tokens)
        facts = _facts(_parsed(metadata, "facts", path), count, path)
        _expect_values(values, facts, count, path)
        return cls(facts, tokens, values)


AXES: Mapping[str, str] = {
    "token_ids": "T",
    "token_loss": "T",
    "state_norm": "B T",
    "stream_similarity": "B T",
    **dict.fromkeys(("readout", "target", "h_pre", "h_post"), "S T n"),
    "h_res": "S T n n",
    "compress_share": "S n",
    "direction": "S P d",
    "alignment": "S S",
    "effective_rank": "P",
    "depth_weights": "S P reads sources",
    "depth_mean": "S reads sources",
    "sources_read": "S T",
    **dict.fromkeys(("determinant", "singular_max", "singular_min", "defect"), "S P"),
    "singular_values": "P r",
}
"""The axes of values that are not (S, T): B is S + 1; n, r and reads have any size, the same in one value."""


def _expect_values(values: Mapping[str, Tensor], facts: Mapping[str, Any], count: int, path: str | Path) -> None:
    """Raise InputError unless the values of a trace of `count` tokens have their axes."""
    sublayers = len(facts["sublayers"])
    sizes = {"S": sublayers, "B": sublayers + 1, "T": count, "P": len(facts["sampled"]), "d": facts["dim"]}
    sizes["sources"] = len(facts["sources"])
    missing = sorted({"token_ids", "token_loss", "state_norm", *facts["gates"]} - values.keys())
    require(not missing, f"{path}: values", f"those of {', '.join(missing)} too", sorted(values))
    for name, value in values.items():
        axes, known = AXES.get(name, "S T").split(), dict(sizes)
        right = value.dim() == len(axes) and all(
            size and size == known.setdefault(axis, size) for axis, size in zip(axes, value.shape)
        )
        kind = torch.int64 if name == "token_ids" else torch.float32
        require(right and value.dtype == kind, f"{path}: {name}", f"{kind} ({', '.join(axes)})", tuple(value.shape))


NEEDED_FACTS: Mapping[str, Any] = {
    "run": str | None,
    "checkpoint": int | None,
    "preset": str | None,
    "scheme": dict,
    "causal": bool,
    "constraint": str | None,
    "dim": int,
    "loss": float | None,
    "gates": dict,
    "left_out": dict,
    "sources": list,
    "sublayers": list,
    "sampled": list,
}
"""The facts that must be in a trace, and their types."""


def _parsed(metadata: Mapping[str, str], name: str, path: str | Path) -> Any:
    try:
        return parse_json(metadata.get(name, ""), Path(path))
    except ValueError as error:
        raise InputError(f"{path}: {name} must be JSON, got {shown(metadata.get(name))}") from error


def _facts(facts: Any, count: int, path: str | Path) -> dict[str, Any]:
    """Return the facts of a trace of `count` tokens after checking them. Raises InputError for invalid facts."""
    require(isinstance(facts, dict), f"{path}: facts", "an object", facts)
    facts = {**facts, "sources": facts.get("sources", [])}  # may be missing if the scheme has no reads over depth
    for name, kind in NEEDED_FACTS.items():
        require(name in facts and fits(facts[name], kind), f"{path}: facts.{name}", words(kind), facts.get(name))
    for name in ("sublayers", "sources"):
        require(all(isinstance(each, str) for each in facts[name]), f"{path}: facts.{name}", "texts", facts[name])
    last = len(facts["sublayers"])
    require(last, f"{path}: facts.sublayers", "at least one name", facts["sublayers"])
    omitted = all(
        isinstance(indices, list) and all(fits(i, int) and 0 <= i < last for i in indices)
        for indices in facts["left_out"].values()
    )
    require(omitted, f"{path}: facts.left_out", "lists of sublayers", facts["left_out"])
    gates = all(map(_is_gate, facts["gates"].values()))
    require(gates, f"{path}: facts.gates", "objects with a range of two numbers or null, and a start", facts["gates"])
    require(fits(facts.get("read", ""), str), f"{path}: facts.read", "a text", facts.get("read"))
    require(isinstance(facts["scheme"].get("scheme"), str), f"{path}: facts.scheme", "a scheme", facts["scheme"])
    places = all(fits(place, int) and 0 <= place < count for place in facts["sampled"])
    require(places, f"{path}: facts.sampled", f"positions below {count}", facts["sampled"])
    return facts


def _is_gate(gate: Any) -> bool:
    """Return whether the facts of a gate are its range, two numbers or None, and its start, a number or None."""
    if not isinstance(gate, dict) or not {"range", "start"} <= gate.keys() or not fits(gate["start"], float | None):
        return False
    ends = gate["range"]
    return ends is None or (isinstance(ends, list) and len(ends) == 2 and all(fits(end, float) for end in ends))


def trace_file(folder: str | Path, step: int) -> Path:
    """Return the path of the trace at a step of a run."""
    return Path(folder) / "analysis" / f"trace-step-{step}.safetensors"


def trace(
    model: "PreTrainedModel",
    tokens: Sequence[int] | Tensor,
    *,
    text: Sequence[str] | None = None,
    sample: int = 64,
    facts: Mapping[str, Any] | None = None,
) -> Trace:
    """Run the model once over `tokens` and measure its connections. The model is not changed.

    Within `boundaries`, what a hook changes counts in all values behind its boundary; the norm of the state at the
    boundary itself may be that before the change.

    Args:
        model: one of ours or a converted one, in any mode and dtype and on any device. Without a language-model head
            there are no losses.
        tokens: T token ids, or a batch of one text, (1, T).
        text: the text of each token; None for the token ids as text.
        sample: number of evenly spaced tokens for values that are large or slow to compute.
        facts: further metadata for `Trace.facts`, such as run and checkpoint.

    Raises:
        InputError: the model is neither a residua model nor converted, or the tokens do not fit the model.
    """
    subject = Subject.of(model)
    ids = subject.token_ids(tokens)
    texts = [str(i) for i in ids.tolist()] if text is None else list(text)
    require(len(texts) == len(ids), "the number of texts", f"{len(ids)}, one per token", len(texts))
    sampled = torch.linspace(0, len(ids) - 1, min(sample, len(ids)), dtype=torch.float64).round().long()
    scheme = subject.scheme
    recorder = _Recorder(sampled)
    with evaluating(model):
        losses = subject.losses(ids, recorder.add)
    values = {"token_ids": ids, "token_loss": losses, **recorder.values()}
    counted = losses[:-1]
    process = circumstances(ids.device)
    model_facts = {
        "version": TRACE_VERSION,
        **{name: process[name] for name in ("residua", "commit", "date")},
        "preset": next((name for name, preset in PRESETS.items() if preset == scheme), None),
        "scheme": describe(scheme),
        "shortcut": recorder.shortcut,
        "causal": scheme.causal,
        "constraint": scheme.constraint,
        "gates": {name: _facts_of(scheme.gates.get(name)) for name in recorder.gates if name in values},
        "left_out": recorder.left_out | recorder.depth.left_out(len(subject.sublayers)),
        "sources": recorder.depth.names(subject.sublayers),
        "reads": list(recorder.depth.reads),
        "dim": subject.dim,
        "rows": scheme.state_size(len(subject.sublayers), subject.dim) // subject.dim,
        "sublayers": list(subject.sublayers),
        "run": None,
        "checkpoint": None,
        "sampled": sampled.tolist(),
        "loss": counted.mean().item() if len(counted) and counted.isfinite().all() else None,
    }
    narrow = {name: x.cpu() if name == "token_ids" else x.to("cpu", torch.float32) for name, x in values.items()}
    return Trace(model_facts | dict(facts or {}), texts, narrow)


def pieces(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> list[str]:
    """Return the text of each token; a token with part of a character becomes a replacement character."""
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in tokens]


class _Recorder:
    """Collects the values of every sublayer; sampled: (P) positions of tokens."""

    def __init__(self, sampled: Tensor):
        self.sampled = sampled
        self.shortcut: str | None = None
        self.gates: dict[str, None] = {}
        self.left_out: dict[str, list[int]] = {}
        self._states: list[Tensor] = []
        self._rows: list[dict[str, Tensor]] = []
        self._exact: list[dict[str, Tensor]] = []
        self._similarity: list[Tensor] = []
        self.depth = DepthReads(sampled)

    def add(self, record: ConnectionRecord) -> None:
        for state in [record.after] if record.index else [record.before, record.after]:
            self._states.append(norm(state).to("cpu", torch.float32))
            streams = record.connection.streams(state)
            if streams is not None and streams.shape[-2] > 1:
                self._similarity.append(stream_similarity(streams).to("cpu", torch.float32))
        weights = record.connection.depth_weights(record.carry)
        if weights is not None:
            self.depth.add(record.index, weights, record.y)
        shortcut = record.shortcut()
        self.shortcut = "rank-one" if isinstance(shortcut, RankOne) else "mixing" if shortcut else self.shortcut
        if isinstance(shortcut, Mixing):
            for name in shortcut.left_out:
                self.left_out.setdefault(name, []).append(record.index)
        self.gates |= dict.fromkeys(gates(shortcut))
        values = measured(record, shortcut)
        # Values for products over depth are kept in float64, at the sampled tokens.
        exact = {name: values[name].cpu()[self.sampled].double() for name in _MULTIPLIED if name in values}
        values.pop("direction", None)
        self._rows.append({name: rows.to("cpu", torch.float32) for name, rows in values.items()})
        self._exact.append(exact)

    def values(self) -> dict[str, Tensor]:
        values = {"state_norm": torch.stack(self._states), **_stacked(self._rows)}
        if self._similarity:
            values["stream_similarity"] = torch.stack(self._similarity)
        values |= self.depth.values(len(self._rows))
        exact = _stacked(self._exact)
        if "direction" in exact:
            k = exact["direction"]
            values |= {"direction": k, "alignment": alignment(k), "effective_rank": effective_rank(k)}
            values |= rank_one_products(k, exact["beta"])._asdict()
        elif "h_res" in exact:
            values |= matrix_products(exact["h_res"])._asdict()
        return values


def _facts_of(gate: GateFacts | None) -> dict[str, Any]:
    """Return the facts of a gate as plain values, as they will be read from JSON."""
    ends, start = gate or GateFacts()
    return {"range": None if ends is None else list(ends), "start": start}


_MULTIPLIED = ("direction", "beta", "h_res")


def _stacked(sublayers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the values that every sublayer has, with the axis of sublayers first."""
    names = [name for name in sublayers[0] if all(name in values for values in sublayers)] if sublayers else []
    return {name: torch.stack([values[name] for values in sublayers]) for name in names}
