"""Other libraries' implementations of the same operations, measured beside ours where they are installed."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from residua.benchmarks.cases import Case, Draw, Sizes


def peers(operation: str, case: Case, sizes: Sizes, draw: Draw) -> tuple[dict[str, Case], list[str]]:
    """Return the peers of one operation by name, and a note for each that cannot take part."""
    found, notes = {}, []
    for name, (package, make) in PEERS.get(operation, {}).items():
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            reason = f"no {error.name}" if isinstance(error, ModuleNotFoundError) else str(error)
            notes.append(f"{name} is left out of {operation}: {reason} (pip install {name})")
            continue
        if name == "liger-kernel" and draw.device.type != "cuda":
            notes.append(f"{name} is left out of {operation}: it needs a CUDA device")
            continue
        found[name] = make(module, case, sizes, draw)
    return found, notes


def _liger_read(module, case: Case, sizes: Sizes, draw: Draw) -> Case:
    return replace(case, function=lambda streams, h_pre: module.liger_mhc_pre(streams, h_pre))


def _liger_write(module, case: Case, sizes: Sizes, draw: Draw) -> Case:
    return replace(
        case,
        function=lambda streams, y, h_res, h_post: module.liger_mhc_post_res(streams, y, h_post, h_res),
    )


class _Around(nn.Module):
    """A connection of lucidrains/hyper-connections without its sublayer.

    state: (batch, streams, seq, dim), y: (batch, seq, dim), in its layout.
    """

    def __init__(self, connection: nn.Module):
        super().__init__()
        self.connection = connection

    def forward(self, state: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, write = self.connection(state.flatten(0, 1))
        return x, write(y).unflatten(0, state.shape[:2])


def _lucidrains(name: str, module, case: Case, sizes: Sizes, draw: Draw) -> Case:
    connection = getattr(module, name)(sizes.channels, dim=sizes.dim, layer_index=0)
    around = _Around(connection).to(draw.device, draw.dtype)
    sequences, length = sizes.leading
    inputs = {
        "state": draw.large(sequences, sizes.channels, length, sizes.dim),
        "y": draw.large(sequences, length, sizes.dim),
    }
    return Case(around, inputs, module=around)


# By operation and distribution: the package to import, and the function that makes a case from it.
PEERS: dict[str, dict[str, tuple[str, Callable[..., Case]]]] = {
    "hyper_read": {"liger-kernel": ("liger_kernel.transformers.functional", _liger_read)},
    "hyper_write": {"liger-kernel": ("liger_kernel.transformers.functional", _liger_write)},
    "connection:hc": {"hyper-connections": ("hyper_connections", partial(_lucidrains, "HyperConnections"))},
    "connection:mhc": {"hyper-connections": ("hyper_connections", partial(_lucidrains, "mHC"))},
}
