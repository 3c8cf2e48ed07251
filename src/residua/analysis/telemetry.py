"""The gates that a training run logs: those of every sublayer, as a mean and quantiles."""

from typing import Any

import torch
from torch import Tensor, nn

from residua.analysis.measure import gates
from residua.analysis.watch import Passage, as_written, watching
from residua.connections import Stream
from residua.connections.base import as_inputs

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


@torch.no_grad()
def has_gates(stream: Stream, dim: int) -> bool:
    """Whether the connections of a stream have gates for `gate_quantiles`: one token goes through the first."""
    for connection in stream.connections[:1]:
        weights = next(stream.parameters(), None)
        like = {} if weights is None else {"dtype": weights.dtype, "device": weights.device}
        before = stream.expand(torch.ones(1, 1, dim, **like))
        x, carry = connection.read(before)
        y = as_inputs(x)[0]
        return bool(gates(Passage(0, connection, before, None, y, carry, y, before)))
    return False


def gate_quantiles(model: nn.Module, tokens: Tensor) -> dict[str, dict[str, list[float]]]:
    """Mean and quantiles over the tokens (rows, T) of every gate, {"beta": {"mean": [S], "q05": [S], ...}, ...}.

    S sublayers; one forward pass without gradients, in the precision of the caller. Where ranks hold parts of the
    model, all of them call this together.
    """
    found: dict[str, list[Tensor]] = {}

    def see(passage: Passage) -> None:
        for name, gate in gates(passage).items():
            found.setdefault(name, []).append(gate.float().flatten())

    with torch.no_grad(), as_written(model):
        model(input_ids=tokens, use_cache=False, logits_to_keep=1, watch=watching(see))
    return {name: _quantiles(torch.stack(rows)) for name, rows in found.items()}


def _quantiles(gates: Tensor) -> dict[str, Any]:
    """gates: (S, tokens). One copy to the host for all numbers, each of which may have to wait for the device."""
    shares = torch.tensor(list(QUANTILES.values()), device=gates.device)
    table = torch.cat([gates.mean(-1, keepdim=True).T, gates.quantile(shares, -1)]).tolist()
    return dict(zip(("mean", *QUANTILES), table))
