"""Residual connections: one interface (`base.py`, the file to read first), one file for each paper's scheme."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from residua.connections.base import Carry, Connection, Memory, Readout, Scheme, Stream
from residua.connections.deep_delta import DeepDelta, DeltaResidual
from residua.connections.edelta import EDelta, EDeltaStream
from residua.connections.hyper import HyperConnections
from residua.connections.jpmhc import JacobianHyperConnections
from residua.connections.mhc import ManifoldHyperConnections
from residua.connections.norm import RMSNorm
from residua.connections.options import named, nearest
from residua.connections.pooled_householder import PooledHouseholder
from residua.connections.projection import Projection
from residua.connections.residual import Residual

SCHEMES: dict[str, type[Scheme]] = {
    "residual": Residual,
    "deep_delta": DeepDelta,
    "hyper": HyperConnections,
    "mhc": ManifoldHyperConnections,
    "jpmhc": JacobianHyperConnections,
    "edelta": EDelta,
    "edelta_stream": EDeltaStream,
    "pooled_householder": PooledHouseholder,
}

PRESETS: dict[str, Scheme] = {
    "residual": Residual(),
    "ddl": DeepDelta(),
    "ddl-v": DeepDelta(map="v"),
    "ddl-tc": DeepDelta(value_channels=4, compress="token"),
    "ddl-tc-v": DeepDelta(value_channels=4, compress="token", map="v"),
    "ddl-ec": DeepDelta(value_channels=4, compress="token", expand="conv"),
    "ddl-cc": DeepDelta(value_channels=4, compress="channel"),
    "ddl-cc-ec": DeepDelta(value_channels=4, compress="channel", expand="conv"),
    "hc": HyperConnections(),
    "mhc": ManifoldHyperConnections(),
    "jpmhc": JacobianHyperConnections(),
    "edelta": EDelta(),
    "edelta-stream": EDeltaStream(),
    "pooled-householder": PooledHouseholder(),
}


def resolve(connection: str | Mapping[str, Any] | Scheme) -> Scheme:
    """The scheme named by a preset, by `{"preset": name, **overrides}` or by `{"scheme": name, **options}`.

    A preset's name may carry overrides itself: "ddl-cc:recompute=none,value_channels=3" (`options.named`). Overriding
    what other options are derived from derives them anew: `{"preset": "ddl-cc", "value_channels": 3}` has a channel
    kernel of 3. ValueError for an unknown name (with the nearest one), option or value.
    """
    if isinstance(connection, Scheme):
        return connection
    if isinstance(connection, str):
        name, overrides = named(connection)
        connection = {"preset": name, **overrides}
    if not isinstance(connection, Mapping) or len(keys := {"preset", "scheme"} & connection.keys()) != 1:
        raise ValueError(
            f"connection: expected a preset's name or a mapping with the key 'preset' or 'scheme', got {connection!r}"
        )
    (key,) = keys
    options = {name: value for name, value in connection.items() if name != key}
    known: Mapping[str, Any] = PRESETS if key == "preset" else SCHEMES
    name = connection[key]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"connection: no {key} is called {name!r}{nearest(name, list(known))}")
    scheme = known[name]
    declared = [field.name for field in fields(scheme)]
    for option in options:
        if option not in declared:
            raise ValueError(f"connection {name!r}: no option is called {option!r}{nearest(option, declared)}")
    if key == "scheme":
        return scheme(**options)
    for derived, causes in scheme.derived.items():
        if options.keys() & set(causes):
            options.setdefault(derived, None)
    return replace(scheme, **options)


def describe(scheme: Scheme) -> dict[str, Any]:
    """The mapping with all options spelt out from which `resolve` makes `scheme` again.

    ValueError for a scheme whose class is not in `SCHEMES`.
    """
    name = next((name for name, kind in SCHEMES.items() if type(scheme) is kind), None)
    if name is None:
        raise ValueError(
            f"connection: {type(scheme).__name__} has no name: add it to residua.SCHEMES (known: {', '.join(SCHEMES)})"
        )
    return {"scheme": name, **asdict(scheme)}


__all__ = [
    "PRESETS",
    "SCHEMES",
    "Carry",
    "Connection",
    "DeepDelta",
    "DeltaResidual",
    "EDelta",
    "EDeltaStream",
    "HyperConnections",
    "JacobianHyperConnections",
    "ManifoldHyperConnections",
    "Memory",
    "PooledHouseholder",
    "Projection",
    "RMSNorm",
    "Readout",
    "Residual",
    "Scheme",
    "Stream",
    "describe",
    "named",
    "resolve",
]
