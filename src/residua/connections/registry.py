"""The schemes behind the names: built in, registered, and declared by installed packages.

A configuration holds names and plain options. A name refers to a scheme of `names.py`, to one that is registered here,
or to one that an installed package declares in the entry-point group `residua.schemes`. A configuration never names a
module to import. The description of a scheme from another package identifies this package by its top-level module; the
name is only compared with those of packages that are installed or registered.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from residua.connections import names
from residua.connections import schemes as papers
from residua.connections.base import Norm, Scheme, Stream
from residua.connections.names import RESERVED, entry_points, package_of
from residua.connections.parts.options import check_options, named
from residua.errors import did_you_mean, keywords, shown


def _preset(text: str) -> Scheme:
    scheme, options = named(text)
    return SCHEMES[scheme](**options)


SCHEMES: dict[str, type[Scheme]] = {name: getattr(papers, kind) for name, kind in names.SCHEMES.items()}
PRESETS: dict[str, Scheme] = {name: _preset(text) for name, text in names.PRESETS.items()}


@keywords
def build(
    connection: str | Mapping[str, Any] | Scheme,
    dim: int,
    num_sublayers: int,
    *,
    norm_eps: float = 1e-5,
    norm: Norm | None = None,
) -> Stream:
    """Build the connections of a stack: `residua.build("mhc", dim=512, num_sublayers=24)`.

    connection: a name, with options if wanted ("ddl-tc:beta_init=0.5"), or any other form that `resolve` takes. The
    remaining arguments are those of `Scheme.build`.
    """
    return resolve(connection).build(dim, num_sublayers, norm_eps=norm_eps, norm=norm)


def register(name: str, scheme: type[Scheme] | Scheme) -> None:
    """Give a scheme a name that works like a preset's in configurations, commands and checkpoints.

    A class is registered with its default options, an instance with its own. An installed package should declare an
    entry point instead, so that no process has to call this function: `[project.entry-points."residua.schemes"]`, then
    `my-scheme = "my_package.module:MyScheme"`.

    Raises:
        TypeError: `scheme` is neither a Scheme nor a class of one, or an option of the class lacks a default.
        ValueError: the name is taken or contains characters that a preset's name must not have; an option has a
            reserved name, or a type that files cannot keep.
    """
    kind = _kind(scheme)
    if not issubclass(kind, Scheme):
        raise TypeError(f"register {name!r} needs a Scheme, its class or an instance, got {scheme!r}")
    if not isinstance(name, str) or not name or any(mark in name for mark in ":,= "):
        raise ValueError(f"register needs a name without spaces and without : , =, got {name!r}")
    if reserved := [field.name for field in fields(kind) if field.name in RESERVED]:
        raise ValueError(f"register {name!r}: {kind.__name__} has an option {reserved[0]!r}; this name is reserved")
    instance = kind() if isinstance(scheme, type) else scheme
    if (PRESETS.get(name, instance), SCHEMES.get(name, kind)) != (instance, kind):
        raise ValueError(f"register: {name!r} is the name of another scheme; choose another name")
    written(instance)
    PRESETS[name] = instance
    if _package(kind) or kind not in SCHEMES.values():
        SCHEMES[name] = kind


def schemes() -> dict[str, Scheme]:
    """Return every preset by its name: built in, registered, and declared by installed packages.

    Warns about declarations that cannot be used, and leaves them out.
    """
    for point in entry_points():
        try:
            _find("preset", point.name, package_of(point) if point.name in names.PRESETS else None)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    return PRESETS


def resolve(connection: str | Mapping[str, Any] | Scheme) -> Scheme:
    """Return the scheme of a preset's name, `{"preset": name, **overrides}` or `{"scheme": name, **options}`.

    A preset's name may include overrides: "ddl-cc:recompute=none,value_channels=3" (`options.named`). Case, `-` and `_`
    do not matter. The name of a class, and a name that the field or ResBench uses, also lead to a preset (`names.py`).
    Overriding an option updates the options derived from it: `{"preset": "ddl-cc", "value_channels": 3}` has a channel
    kernel of 3. With the key "package" the scheme must come from that package.

    Raises:
        ValueError: the name, an option or a value is unknown (the message has the nearest name); the package is not
            installed, or lacks this scheme; several packages declare the name, and there is no key "package".
    """
    if isinstance(connection, Scheme):
        return connection
    if isinstance(connection, str):
        name, overrides = named(connection)
        connection = {"preset": name, **overrides}
    if not isinstance(connection, Mapping) or len(keys := {"preset", "scheme"} & connection.keys()) != 1:
        raise ValueError(
            "connection must be a preset's name or a mapping with the key 'preset' or 'scheme', "
            f"got {shown(connection)}"
        )
    (key,) = keys
    options = {name: _tuples(value) for name, value in connection.items() if name not in RESERVED}
    name = connection[key]
    if key == "preset" and isinstance(name, str) and (meaning := names.meaning(name, PRESETS)) != name:
        name, implied = named(meaning)
        options = {**implied, **options}
    scheme = _find(key, name, connection.get("package"))
    options = names.renamed(_registered_name(_kind(scheme)) or "", options)
    declared = [field.name for field in fields(scheme)]
    for option in options:
        if option not in declared:
            hint = did_you_mean(option, declared) or f" (known: {', '.join(declared)})"
            raise ValueError(f"connection {name!r}: no option is called {option!r}{hint}")
    if isinstance(scheme, type):
        made = scheme(**options)
    else:
        for derived, causes in scheme.derived.items():
            if options.keys() & set(causes):
                options.setdefault(derived, None)
        made = replace(scheme, **options)
    check_options(made)  # the `__post_init__` of another package may not have checked them
    return made


def describe(scheme: Scheme) -> dict[str, Any]:
    """Return a mapping with every option in JSON's types, from which `resolve` builds an equal scheme.

    For a scheme that is not one of residua's own, the mapping also has the key "package". Raises ValueError for a class
    without a name, and for an option that files cannot keep.
    """
    kind = type(scheme)
    name = _registered_name(kind)
    if name is None:
        raise ValueError(
            f"connection: {kind.__name__} has no name: call residua.register(name, {kind.__name__}) first, "
            f"or declare it in the entry-point group {names.ENTRY_POINTS} of its package"
        )
    package = _package(kind)
    return {"scheme": name, **({"package": package} if package else {}), **written(scheme)}


def name_of(scheme: Scheme) -> str:
    """Return the usual name of a scheme, followed by the options that differ: "ddl-tc:value_channels=2".

    The name is that of the nearest preset or alias of the same class, and the options are those in which the scheme
    differs from it. `resolve` makes an equal scheme from the result. Raises ValueError as `describe` does.
    """
    options, nearest = written(scheme), describe(scheme)
    for name, known in (schemes() | {alias: resolve(alias) for alias in names.ALIASES}).items():
        if type(known) is type(scheme):
            changed = {key: value for key, value in options.items() if _tuples(value) != getattr(known, key)}
            causes = {key: value for key, value in changed.items() if key not in scheme.derived}
            implied = resolve({"preset": name, **causes}) == scheme
            nearest = min(nearest, {"preset": name, **(causes if implied else changed)}, key=len)
    return names.label(nearest)


def written(scheme: Scheme) -> dict[str, Any]:
    """Return the options in JSON's types. Raises ValueError if they would not build an equal scheme."""
    kind = type(scheme)
    try:
        options = json.loads(json.dumps(asdict(scheme)))
        again = kind(**{name: _tuples(value) for name, value in options.items()})
        check_options(again)
        equal = again == scheme and hash(again) == hash(scheme)  # a scheme with a dict has no hash
        problem = None if equal else f"{scheme} becomes {again}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ValueError(
            f"{kind.__name__}: its options must be storable in JSON: only None, bool, int, float, str and "
            f"tuples of these: {problem}"
        )
    return options


def _tuples(value: Any) -> Any:
    """Return a value that was read from a file. Its lists become tuples, because a scheme must be hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _find(key: str, name: Any, package: Any) -> Any:
    """Return the preset or the class of this name, from this `package` unless it is None.

    The name is looked up in residua first, then among registered names, then among those that installed packages
    declare.

    Raises:
        ValueError: nothing has this name, another package or several packages have it, or the scheme cannot be used.
    """
    schemes: Mapping[str, Any] = PRESETS if key == "preset" else SCHEMES
    if isinstance(name, str) and name not in schemes:
        _load(key, name, package)
    if not isinstance(name, str) or name not in schemes:
        if package is None:
            raise names.unknown(key, name, schemes)
        raise ValueError(
            f"connection: the scheme {name!r} comes with the package {package!r}, which is not installed or has "
            "not registered it; install it, or import the module that does"
        )
    owner = _package(_kind(schemes[name])) or "residua"
    of_a_script = package == "__main__" and owner != "residua"  # no other process can import __main__
    if package not in (None, owner) and not of_a_script:
        raise ValueError(
            f"connection must be the scheme {name!r} of the package {package!r}, got the one of {owner!r}, which has "
            f"the same name here; open it in a process that uses only {package!r}"
        )
    return schemes[name]


def _load(key: str, name: str, package: Any) -> None:
    """Register all schemes of the installed package that declares `name`, if there is one. Classes come first, so that
    the order of declarations does not matter.

    Raises:
        ValueError: several packages declare it, or its declaration cannot be imported or is not a scheme.
    """
    names.forget()  # the package may have been installed after the last scan
    packages = sorted({package_of(point) for point in entry_points() if point.name == name})
    if package is None and len(packages) > 1:
        raise ValueError(
            f"connection must name one package with a scheme {name!r}, got {', '.join(map(repr, packages))}; choose "
            f"one with the key 'package': {{{key!r}: {name!r}, 'package': {packages[0]!r}}}"
        )
    loaded, errors = [], {}
    for point in entry_points():
        if package_of(point) in packages and package in (None, package_of(point)):
            try:
                loaded.append((point.name, point.load()))
            except Exception as error:
                errors[point.name] = error
    for other, scheme in sorted(loaded, key=lambda pair: (not isinstance(pair[1], type), pair[0])):
        try:
            register(other, scheme)
        except (TypeError, ValueError) as error:
            errors[other] = error
    if name in errors:
        reason = f"{type(errors[name]).__name__}: {errors[name]}"
        raise ValueError(
            f"connection: the scheme {name!r} of the package {(package or packages[0])!r} cannot be used: {reason}"
        ) from errors[name]


def _registered_name(kind: type) -> str | None:
    """Return the name of a scheme's class in files; None if it has none."""
    return next((name for name, registered in SCHEMES.items() if registered is kind), None)


def _kind(scheme: Any) -> type:
    return scheme if isinstance(scheme, type) else type(scheme)


def _package(kind: type) -> str | None:
    """Return the top-level module that a scheme comes from; None for residua's own schemes."""
    top = kind.__module__.partition(".")[0]
    return None if top == "residua" else top
