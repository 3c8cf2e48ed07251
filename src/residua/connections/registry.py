"""The names of schemes: built in, registered, and declared by installed packages.

A configuration holds names and plain options. A name refers to a scheme that is registered here or that an installed
package declares in the entry-point group `residua.schemes`. A configuration never names a module to import.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib import metadata
from typing import Any

from residua.connections.altup import AlternatingUpdates
from residua.connections.attnres import AttentionResiduals
from residua.connections.attnres_inkling import InklingAttentionResiduals
from residua.connections.base import Scheme
from residua.connections.deep_delta import DeepDelta
from residua.connections.delta_attnres import DeltaAttentionResiduals
from residua.connections.denseformer import DenseFormer
from residua.connections.edelta import EDelta, EDeltaStream
from residua.connections.frac import FracConnections
from residua.connections.gated_delta import GatedDelta
from residua.connections.gated_orthogonal import GatedOrthogonal
from residua.connections.gated_residual import GatedResidual
from residua.connections.hyper import HyperConnections
from residua.connections.ihc import IndependentHyperConnections
from residua.connections.jpmhc import JacobianHyperConnections
from residua.connections.krom import KroneckerHyperConnections
from residua.connections.lambdas import Lambdas
from residua.connections.mhc import ManifoldHyperConnections
from residua.connections.mhc_deepseek import DeepSeekHyperConnections
from residua.connections.mudd import MultiwayDynamicDense
from residua.connections.options import named, nearest
from residua.connections.pooled_householder import PooledHouseholder
from residua.connections.residual import Residual
from residua.connections.siamese import SiameseNorm

ENTRY_POINTS = "residua.schemes"
RESERVED = ("preset", "scheme", "package")  # keys of a description that are not options

SCHEMES: dict[str, type[Scheme]] = {
    "residual": Residual,
    "lambdas": Lambdas,
    "siamese": SiameseNorm,
    "gated_orthogonal": GatedOrthogonal,
    "gated_delta": GatedDelta,
    "deep_delta": DeepDelta,
    "hyper": HyperConnections,
    "frac": FracConnections,
    "mhc": ManifoldHyperConnections,
    "mhc_deepseek": DeepSeekHyperConnections,
    "krom": KroneckerHyperConnections,
    "ihc": IndependentHyperConnections,
    "gated_residual": GatedResidual,
    "jpmhc": JacobianHyperConnections,
    "edelta": EDelta,
    "edelta_stream": EDeltaStream,
    "pooled_householder": PooledHouseholder,
    "attnres": AttentionResiduals,
    "attnres_inkling": InklingAttentionResiduals,
    "altup": AlternatingUpdates,
    "delta_attnres": DeltaAttentionResiduals,
    "denseformer": DenseFormer,
    "mudd": MultiwayDynamicDense,
}

PRESETS: dict[str, Scheme] = {
    "residual": Residual(),
    "lambdas": Lambdas(r=1.15, r_last=1.05, z=0.20, z_last=0.05, backout=0.2),
    "siamese": SiameseNorm(),
    "gated-orthogonal": GatedOrthogonal(),
    "orthogonal": GatedOrthogonal(gate="one"),
    "gated-delta": GatedDelta(),
    "ddl": DeepDelta(),
    "ddl-v": DeepDelta(map="v"),
    "ddl-tc": DeepDelta(value_channels=4, compress="token"),
    "ddl-tc-v": DeepDelta(value_channels=4, compress="token", map="v"),
    "ddl-ec": DeepDelta(value_channels=4, compress="token", expand="conv"),
    "ddl-cc": DeepDelta(value_channels=4, compress="channel"),
    "ddl-cc-ec": DeepDelta(value_channels=4, compress="channel", expand="conv"),
    "hc": HyperConnections(),
    "frac": FracConnections(),
    "mhc": ManifoldHyperConnections(),
    "mhc-deepseek": DeepSeekHyperConnections(),
    "mhc-glm": DeepSeekHyperConnections(head="mean"),
    "krom": KroneckerHyperConnections(),
    "ihc": IndependentHyperConnections(),
    "gated-residual": GatedResidual(),
    "jpmhc": JacobianHyperConnections(),
    "edelta": EDelta(),
    "edelta-stream": EDeltaStream(),
    "pooled-householder": PooledHouseholder(),
    "attnres": AttentionResiduals(),
    "attnres-block": AttentionResiduals(block_size=12),
    "attnres-inkling": InklingAttentionResiduals(),
    "altup": AlternatingUpdates(),
    "mhar": AttentionResiduals(heads=4),
    "delta-attnres": DeltaAttentionResiduals(),
    "denseformer": DenseFormer(),
    "mudd": MultiwayDynamicDense(),
}

_PACKAGES: dict[type[Scheme], str] = {}  # the package of each scheme that is not built in


def register(name: str, scheme: type[Scheme] | Scheme) -> None:
    """Give a scheme a name that works like a preset's in configurations, commands and checkpoints.

    A class is registered with its default options, an instance with its own. An installed package should declare an
    entry point instead, so that no process has to call this: `[project.entry-points."residua.schemes"]`, then
    `my-scheme = "my_package.module:MyScheme"`.

    Raises:
        TypeError: `scheme` is neither a Scheme nor a class of one, or an option of the class lacks a default.
        ValueError: the name is taken or has marks that a preset's name must not have; an option has a reserved name.
    """
    _register(name, scheme, package=None)


def _register(name: str, scheme: type[Scheme] | Scheme, *, package: str | None) -> None:
    """Register `scheme` as a part of `package`; None for the top-level package of its module."""
    kind = scheme if isinstance(scheme, type) else type(scheme)
    if not issubclass(kind, Scheme):
        raise TypeError(f"register {name!r}: expected a Scheme, its class or an instance, got {scheme!r}")
    if not isinstance(name, str) or not name or any(mark in name for mark in ":,= "):
        raise ValueError(f"register: expected a name without spaces and without : , =, got {name!r}")
    if taken := [field.name for field in fields(kind) if field.name in RESERVED]:
        raise ValueError(f"register {name!r}: {kind.__name__} has an option {taken[0]!r}; this name is reserved")
    instance = kind() if isinstance(scheme, type) else scheme
    if (PRESETS.get(name, instance), SCHEMES.get(name, kind)) != (instance, kind):
        raise ValueError(f"register: {name!r} is the name of another scheme; choose another name")
    PRESETS[name] = instance
    if kind not in SCHEMES.values():
        SCHEMES[name] = kind
        _PACKAGES[kind] = package or kind.__module__.partition(".")[0]


def presets() -> dict[str, Scheme]:
    """Return every preset: built in, registered, and declared by installed packages.

    Warns of a declaration that cannot be used, and leaves it out.
    """
    for name in _installed():
        try:
            _find(name)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    return PRESETS


def resolve(connection: str | Mapping[str, Any] | Scheme) -> Scheme:
    """Return the scheme of a preset's name, `{"preset": name, **overrides}` or `{"scheme": name, **options}`.

    A preset's name may include overrides: "ddl-cc:recompute=none,value_channels=3" (`options.named`). Overriding an
    option updates the options derived from it: `{"preset": "ddl-cc", "value_channels": 3}` has a channel kernel of 3.

    Raises:
        ValueError: an unknown name (with the nearest one), option or value, or a package that is not installed.
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
    options = {name: value for name, value in connection.items() if name not in RESERVED}
    known: Mapping[str, Any] = PRESETS if key == "preset" else SCHEMES
    name = connection[key]
    if not isinstance(name, str) or (name not in known and not _find(name)) or name not in known:
        package = connection.get("package")
        if isinstance(package, str):
            raise ValueError(
                f"connection: the scheme {name!r} comes with the package {package!r}, which is not installed"
            )
        raise ValueError(f"connection: no {key} is called {name!r}{nearest(name, [*known, *_installed()])}")
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
    """Return a mapping with every option, from which `resolve` builds an equal scheme.

    For a scheme of another package it has the key "package". Raises ValueError for a class without a name.
    """
    kind = type(scheme)
    name = next((name for name, found in SCHEMES.items() if found is kind), None)
    if name is None:
        raise ValueError(
            f"connection: {kind.__name__} has no name: call residua.register(name, {kind.__name__}) first, "
            f"or declare it in the entry-point group {ENTRY_POINTS} of its package"
        )
    package = {"package": _PACKAGES[kind]} if kind in _PACKAGES else {}
    return {"scheme": name, **package, **asdict(scheme)}


def _installed() -> dict[str, metadata.EntryPoint]:
    """Return the entry points of installed packages by name, except names that are presets already."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in PRESETS}


def _find(name: str) -> bool:
    """Register the schemes of the installed package that declares `name`; return whether there is one.

    Register all of them, classes first, so that a scheme's description does not depend on which one was used first.

    Raises:
        ValueError: the object that the package declares under this name cannot be imported or is not a scheme.
    """
    installed = _installed()
    if name not in installed:
        return False
    package = _package(installed[name])
    loaded = []
    for point in installed.values():
        if _package(point) == package:
            try:
                loaded.append((point.name, point.load()))
            except Exception as error:
                if point.name == name:
                    raise _unusable(name, package, error) from error
    for other, scheme in sorted(loaded, key=lambda found: (not isinstance(found[1], type), found[0])):
        try:
            _register(other, scheme, package=package)
        except (TypeError, ValueError) as error:
            if other == name:
                raise _unusable(name, package, error) from error
    return True


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else point.value.partition(":")[0]


def _unusable(name: str, package: str, error: Exception) -> ValueError:
    reason = f"{type(error).__name__}: {error}"
    return ValueError(f"connection: the scheme {name!r} of the package {package!r} cannot be used: {reason}")
