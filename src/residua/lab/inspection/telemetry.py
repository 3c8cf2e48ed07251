"""The gates that a training run logs: mean and quantiles for every sublayer."""

from typing import Any

import torch
from torch import Tensor, nn

from residua.connections import Stream
from residua.connections.base import as_inputs
from residua.connections.parts.memory import whole_sequence
from residua.lab.inspection.measure import gates
from residua.lab.inspection.subject import Subject
from residua.lab.inspection.watch import ConnectionRecord

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


@torch.no_grad()
def has_gates(stream: Stream, dim: int) -> bool:
    """Run one token through a connection of a stream; return whether it has gates for `gate_quantiles`."""
    for connection in stream.connections[:1]:
        weights = next(stream.parameters(), None)
        like = {} if weights is None else {"dtype": weights.dtype, "device": weights.device}
        before = stream.expand(torch.ones(1, 1, dim, **like), whole_sequence(stream.expand))
        x, carry = connection.read(before, whole_sequence(connection))
        return bool(gates(connection.shortcut(before, carry, as_inputs(x)[0])))
    return False


def gate_quantiles(model: nn.Module, tokens: Tensor, **options: Any) -> dict[str, dict[str, list[float]]]:
    """Return mean and quantiles of every gate over the tokens (rows, T), {"beta": {"mean": [S], "q05": [S], ...}, ...}.

    There are S sublayers. This takes one forward pass without gradients, in the precision of the caller. If the model
    is sharded over ranks, all of them must call this together. options: further arguments of the model.
    """
    sublayers: dict[str, list[Tensor]] = {}

    def collect(record: ConnectionRecord) -> None:
        for name, gate in gates(record.shortcut()).items():
            sublayers.setdefault(name, []).append(gate.float().flatten())

    Subject.of(model).run(tokens, collect, logits_to_keep=1, **options)
    return {name: _quantiles(torch.stack(rows)) for name, rows in sublayers.items()}


def _quantiles(gates: Tensor) -> dict[str, Any]:
    """Return mean and quantiles of gates, (S, tokens). Only one copy makes the host wait for the device."""
    shares = torch.tensor(list(QUANTILES.values()), device=gates.device)
    table = torch.cat([gates.mean(-1, keepdim=True).T, gates.quantile(shares, -1)]).tolist()
    return dict(zip(("mean", *QUANTILES), table))
