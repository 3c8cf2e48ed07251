"""The names of schemes as text: presets, aliases, and the names that installed packages declare.

Importing this module does not import torch, so that a mistyped name fails at once. `registry.py` makes schemes of these
names. A name may be written in any case, and with or without `-`, `_`, spaces, brackets and `/`.
"""

import functools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from residua.connections.parts.options import listed, named, parsed
from residua.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "residua.schemes"
RESERVED = ("preset", "scheme", "package")  # keys of a description that are not options

SCHEMES = {  # name in files -> class in `connections.schemes`
    "residual": "Residual",
    "lambdas": "Lambdas",
    "siamese": "SiameseNorm",
    "gated_orthogonal": "GatedOrthogonal",
    "gated_delta": "GatedDelta",
    "deep_delta": "DeepDelta",
    "hyper": "HyperConnections",
    "frac": "FracConnections",
    "mhc": "ManifoldHyperConnections",
    "mhc_deepseek": "DeepSeekHyperConnections",
    "krom": "KroneckerHyperConnections",
    "ihc": "IndependentHyperConnections",
    "gated_residual": "GatedResidual",
    "jpmhc": "JacobianHyperConnections",
    "edelta": "EDelta",
    "edelta_stream": "EDeltaStream",
    "pooled_householder": "PooledHouseholder",
    "attnres": "AttentionResiduals",
    "attnres_inkling": "InklingAttentionResiduals",
    "altup": "AlternatingUpdates",
    "delta_attnres": "DeltaAttentionResiduals",
    "denseformer": "DenseFormer",
    "mudd": "MultiwayDynamicDense",
    "wide": "WideResidual",
}

PRESETS = {  # preset -> the scheme's name in files, and the options that differ from its defaults
    "residual": "residual",
    "lambdas": "lambdas:r=1.15,r_last=1.05,z=0.20,z_last=0.05,backout=0.2",
    "siamese": "siamese",
    "gated-orthogonal": "gated_orthogonal",
    "orthogonal": "gated_orthogonal:gate=one",
    "gated-delta": "gated_delta",
    "ddl": "deep_delta",
    "ddl-v": "deep_delta:map=v",
    "ddl-tc": "deep_delta:value_channels=4,compress=token",
    "ddl-tc-v": "deep_delta:value_channels=4,compress=token,map=v",
    "ddl-ec": "deep_delta:value_channels=4,compress=token,expand=conv",
    "ddl-cc": "deep_delta:value_channels=4,compress=channel",
    "ddl-cc-ec": "deep_delta:value_channels=4,compress=channel,expand=conv",
    "hc": "hyper",
    "frac": "frac",
    "mhc": "mhc",
    "mhc-deepseek": "mhc_deepseek",
    "mhc-glm": "mhc_deepseek:head=mean",
    "krom": "krom",
    "ihc": "ihc",
    "gated-residual": "gated_residual",
    "jpmhc": "jpmhc",
    "edelta": "edelta",
    "edelta-stream": "edelta_stream",
    "pooled-householder": "pooled_householder",
    "attnres": "attnres",
    "attnres-block": "attnres:block_size=12",
    "attnres-inkling": "attnres_inkling",
    "altup": "altup",
    "mhar": "attnres:heads=4",
    "delta-attnres": "delta_attnres",
    "denseformer": "denseformer",
    "mudd": "mudd",
    "wide": "wide",
}

ALIASES = {  # alias -> preset, and the options that differ from it
    # Names that the field uses.
    "deep-delta-learning": "ddl",
    "pre-norm": "residual",
    "nanochat": "lambdas",
    "rezero": "lambdas:r=null,z=null,backout=null,p=0.0",
    "deepnorm": "lambdas:r=null,z=null,backout=null,norm=post",
    "kromhc": "krom",
    "muddformer": "mudd",
    # The labels of ResBench.
    "residual+tc": "residual:compress=token",
    "residual+conv": "residual:expand=conv",
    "lambdas+tc": "lambdas:compress=token",
    "lambdas+conv": "lambdas:expand=conv",
    "lambdas+smear": "lambdas:expand=smear",
    "residual+smear": "residual:expand=smear",
    "lambdas-gated": "lambdas:gate=token",
    "lambdas-gated+tc": "lambdas:gate=token,compress=token",
    "lambdas-gated+conv": "lambdas:gate=token,expand=conv",
    "gated-orthogonal+tc": "gated-orthogonal:compress=token",
    "gated-delta+tc": "gated-delta:compress=token",
    "gated-delta-4": "gated-delta:value_channels=4,write_gate=true",
    "gated-delta-4-write-only": "gated-delta:value_channels=4,erase=none,write_gate=true",
    "ddl-write-only": "gated-delta:erase=none,write=value",
    "ddl-tc-write-only": "gated-delta:value_channels=4,erase=none,write=value",
    "hc-static": "hc:dynamic=false",
    # The paper's names since its third version, in full.
    "ddl-tc-ec": "ddl-ec",
    "ddl-tc-wo-ec": "ddl-tc",
    "ddl-cc-wo-ec": "ddl-cc",
    "ddl-tc-without-ec": "ddl-tc",
    "ddl-cc-without-ec": "ddl-cc",
}

IN_THE_PAPER = {  # preset -> its names in the third version of arXiv 2601.00417 and later
    "ddl": ("DDL, d_v = 1",),
    "ddl-tc": ("DDL-TC w/o EC",),
    "ddl-ec": ("DDL-TC",),
    "ddl-cc": ("DDL-CC w/o EC",),
    "ddl-cc-ec": ("DDL-CC", "DDL"),
}

_STREAMS = ("hyper", "mhc", "mhc_deepseek", "krom", "ihc", "gated_residual", "jpmhc", "edelta_stream", "wide")

RENAMED = (  # (an option, or option=value, in earlier versions; its current spelling; the schemes' names in files)
    ("init", "start", ("deep_delta",)),
    ("start=random", "start=published", ("edelta_stream",)),
    ("expand=copies", "expand=repeat", _STREAMS),
    ("expand_last", "readout_multiple", ("mudd",)),
    ("gate=none", "write_gate=false", ("residual",)),
    ("gate=token", "write_gate=true", ("residual",)),
    ("write_gates", "write_gate", ("mudd",)),
    ("phi_k_rank", "phi_k_hidden", ("deep_delta",)),
    ("ends=projections", "expand=projections", ("altup",)),
    ("ends=copies", "expand=repeat", ("altup",)),
    ("beta_init", "cayley_init", ("edelta", "edelta_stream")),
    ("per_channel", "per_feature", ("lambdas",)),
    ("rank", "gate_rank", ("gated_residual",)),
    ("steps", "iterations", ("jpmhc",)),
    ("alpha_init", "scale_init", ("mhc",)),
    ("scale", "reduction", ("attnres",)),
    ("gate", "read_gate", ("delta_attnres",)),
)

RELATED = {  # names that no scheme has -> the nearest scheme, which an error suggests
    "canon": "residual:compress=token",
    "layerscale": "lambdas:r=null,z=null,backout=null,p=0.0001,per_feature=true",
}


def key(name: str) -> str:
    """Return a name in lower case, without the punctuation that is ignored in names."""
    return re.sub(r"[-_ ()/]", "", name.casefold())


def _meanings() -> dict[str, str]:
    """Map the key of every name of this library to its preset, or to the preset and options of an alias."""
    firsts: dict[str, str] = {}
    for preset, text in PRESETS.items():
        firsts.setdefault(named(text)[0], preset)
    schemes = {name: firsts[scheme] for scheme, kind in SCHEMES.items() for name in (scheme, kind)}
    return {key(name): meaning for name, meaning in (schemes | ALIASES | dict(zip(PRESETS, PRESETS))).items()}


MEANINGS = _meanings()


def meaning(name: str, registered: Iterable[str] = ()) -> str:
    """Resolve an alias to its preset and options: "lambdas:compress=token" for "Lambdas+TC".

    The exact name of a preset, of a registered scheme or of one that an installed package declares is returned
    unchanged, and so is an unknown name.
    """
    if name in PRESETS:
        return name
    if name.isupper():
        _tell_apart(name)
    others = [*registered, *(point.name for point in entry_points())]
    return name if name in others else ({key(other): other for other in others} | MEANINGS).get(key(name), name)


def in_the_paper(preset: str) -> str:
    """Return the names of a preset in the paper since its third version, "DDL-TC" for "ddl-ec"; "" for any other."""
    return ", ".join(IN_THE_PAPER.get(preset, ()))


@functools.cache
def _tell_apart(name: str) -> None:
    """Warn once if `name` is in capitals, and the third version of the paper uses it for another preset."""
    ours, spelling = MEANINGS.get(key(name), ""), name.replace("_", "-")
    theirs = next((preset for preset, titles in IN_THE_PAPER.items() if spelling in titles), ours)
    if ours != theirs:
        message = (
            f"connection: {name} is the preset {ours} here, {in_the_paper(ours)!r} in the paper since its third "
            f"version; its {spelling!r} is the preset {theirs}"
        )
        warnings.warn_explicit(message, UserWarning, __name__, 1)  # a fixed line number, so that it warns once


def canonical(text: str) -> str:
    """Return "name" or "name:options" with the canonical name of the preset, as files have it.

    Raises InputError for an unknown name, without importing torch. Schemes that this process has registered are known.
    """
    registry = sys.modules.get("residua.connections.registry")
    registered = () if registry is None else registry.PRESETS
    typed, _, options = text.partition(":")
    name, _, implied = meaning(typed, registered).partition(":")
    if name not in {*PRESETS, *registered}:
        forget()
        if all(point.name != name for point in entry_points()):
            raise unknown("preset", name, registered or PRESETS)
    given = {option.partition("=")[0] for option in listed(options)}  # override the options of an alias
    parts = [option for option in listed(implied) if option.partition("=")[0] not in given] if implied else []
    parts += [options] if options else []
    return _respelled(f"{name}:{','.join(parts)}") if parts else name


def renamed(scheme: str, options: Mapping[str, Any], *, back: bool = False) -> dict[str, Any]:
    """Return the options of a scheme by their current names, or with `back` by their names in earlier versions.

    scheme: its name in files. Raises InputError for an option that is given under both names.
    """
    for earlier, today, schemes in RENAMED:
        if scheme in schemes:
            before, after = (today, earlier) if back else (earlier, today)
            (option, _, only), (name, _, choice) = before.partition("="), after.partition("=")
            if option not in options or (only and parsed(options[option]) != parsed(only)):
                continue
            if name != option and name in options:
                raise InputError(f"connection: {option} is called {name} now; give it once, got both")
            options = {key if key != option else name: value for key, value in options.items()}  # keeps their order
            options |= {name: parsed(choice)} if choice else {}
    return dict(options)


def recorded(connection: Any) -> Any:
    """Return "name:options" with options named as in earlier versions, for keys of records; other values unchanged."""
    return _respelled(connection, back=True) if isinstance(connection, str) else connection


def today(connection: Any) -> Any:
    """Return a connection from a file or record, as text or as a mapping, with the current names of its options."""
    if isinstance(connection, str):
        return _respelled(connection)
    if not isinstance(connection, Mapping):
        return connection
    kept = {key: value for key, value in connection.items() if key in RESERVED}
    options = {key: value for key, value in connection.items() if key not in kept}
    return kept | renamed(kept.get("scheme") or _scheme_of(str(kept.get("preset"))), options)


def _respelled(text: str, *, back: bool = False) -> str:
    name, colon, typed = text.partition(":")
    parts = [part.partition("=") for part in listed(typed)] if colon else []
    if not parts or not all(equals for _, equals, _ in parts) or len({part[0] for part in parts}) < len(parts):
        return text  # `named` raises the error
    options = renamed(_scheme_of(name), {option: value for option, _, value in parts}, back=back)
    return f"{name}:{options_text(options)}"


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as they are typed behind a name: "erase=none,write=value"."""
    return ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())


def _scheme_of(preset: str) -> str:
    """Return the name in files of the scheme behind a preset or alias of this library; "" for any other name."""
    return named(PRESETS.get(meaning(preset).partition(":")[0], ""))[0]


def label(connection: str | Mapping[str, Any]) -> str:
    """Return the usual name of a connection: "residual+tc" for "residual:compress=token". `resolve` accepts both.

    connection: as in a configuration. An unknown name, or text that is not "name:options", is returned unchanged.
    """
    try:
        name, options = _preset_of(_mapping(connection) if isinstance(connection, str) else connection)
    except ValueError:
        return str(connection)
    alias = next((alias for alias, (of, implied) in _LABELS.items() if (of, implied) == (name, options)), None)
    if alias is not None:
        return alias
    return f"{name}:{options_text(options)}" if options else name


def _mapping(text: str) -> dict[str, Any]:
    """Return "name:option=value" as a mapping; an alias becomes its preset. Raises ValueError for any other form."""
    name, options = named(text)
    preset, implied = named(meaning(name))
    return {"preset": preset, **implied, **options}


def _preset_of(connection: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the preset that has the most options of a mapping, and the remaining options."""
    options = {key: value for key, value in connection.items() if key not in RESERVED}
    if "preset" in connection:
        return str(connection["preset"]), options
    scheme = str(connection.get("scheme"))
    presets = {preset: named(text) for preset, text in PRESETS.items()}
    inside = {name: of for name, (kind, of) in presets.items() if kind == scheme and of.items() <= options.items()}
    if not inside:
        return scheme, options
    name = max(inside, key=lambda name: len(inside[name]))
    return name, {key: value for key, value in options.items() if key not in inside[name]}


_LABELS = {alias: named(text) for alias, text in ALIASES.items() if ":" in text}


def unknown(kind: str, name: Any, choices: Iterable[str]) -> InputError:
    """Return the error for an unknown name of a scheme; it suggests the nearest of the `choices`, if any is similar."""
    suggestions = {choice: choice for choice in (*choices, *(point.name for point in entry_points()))}
    if kind == "preset":
        suggestions = MEANINGS | RELATED | {alias: alias for alias in ALIASES} | suggestions
    quoted = {other: repr(suggestion) for other, suggestion in suggestions.items()}
    likeliest = did_you_mean(str(name).casefold(), quoted, show=quoted, cutoff=0.5)
    return InputError(f"connection: no {kind} is called {name!r}{likeliest} (`residua schemes` lists all)")


def entry_points() -> "tuple[EntryPoint, ...]":
    """Return the schemes that installed packages declare."""
    return _entry_points_on(tuple(map(str, sys.path)))


@functools.cache
def _entry_points_on(path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    from importlib import metadata  # slow to import, and not needed for the names of residua

    return tuple(metadata.entry_points(group=ENTRY_POINTS))


def forget() -> None:
    """Rescan the installed packages."""
    _entry_points_on.cache_clear()


def package_of(point: "EntryPoint") -> str:
    """Return the top-level module that declares a scheme."""
    return point.value.partition(":")[0].partition(".")[0]
