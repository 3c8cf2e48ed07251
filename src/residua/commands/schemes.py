"""The command `residua schemes`, and the facts of a scheme that it and the scheme's page show."""

import csv
import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from inspect import cleandoc
from textwrap import TextWrapper, indent
from typing import TYPE_CHECKING, Any

from residua.commands.signature import Output
from residua.connections.names import SCHEMES, canonical
from residua.errors import InputError, first_line, ranges_of, types_of, words

if TYPE_CHECKING:
    from residua.connections import Scheme

WRAP = TextWrapper(75, break_on_hyphens=False)
OURS = """
ours, ResBench: validation loss of language models of 0.1 and 0.3 million
parameters, tuned under the same budget, and the difference to two baselines
(*: clear after the correction for the number of comparisons); step time
relative to residual; -deep and -wide: eight and two layers in place of four;
-muon: trained with Muon
"""
PAPER_SIZES = {"small": (768, 24), "medium": (1024, 48)}
"""Width and sublayers of the models of arXiv 2601.00417. `residua.models.SIZES` has more, and needs transformers."""


def schemes(name: str | None = None) -> Output:
    """List the residual schemes, or explain one.

    Examples:
        residua schemes
        residua schemes ddl-cc
        residua schemes --json

    Args:
        name (SCHEME): explain this one, also with options: ddl:beta_init=0.5
    """
    if name is not None:
        return _explained(name)
    from residua.connections import schemes

    records = [_record(name, scheme) for name, scheme in schemes().items()]
    rows = [
        [
            record["name"],
            record["state_per_token"] or "-",
            "-" if record["not_built"] else f"{record['parameters_added']['small']:+,}",
            record["paper"].removeprefix("github.com/"),
        ]
        for record in records
    ]
    notes = [
        "\nstate: numbers per token, at the first and last of 24 sublayers; d is the width\n"
        "parameters: what it adds to the plain residual in a model of 124 million\n"
        "residua schemes NAME: its equation, options, cost, who runs it, results"
    ]
    notes += [
        f"{record['name']}: -, because it cannot be built here: {record['not_built']}"
        for record in records
        if record["not_built"]
    ]
    return Output(records, [(["name", "state", "parameters", "paper"], rows), *notes])


def _record(name: str, scheme: "Scheme") -> dict[str, Any]:
    reason = size = None
    counts: dict[str, int | None] = dict.fromkeys(PAPER_SIZES)
    try:
        size, counts = state(scheme), {**added(scheme)}
    except Exception as error:  # of a custom scheme, such as one for some widths only
        size, reason = None, f"{type(error).__name__}: {first_line(error)}"
    values = {field.name: (getattr(scheme, field.name), field.default) for field in fields(scheme)}
    return {
        "name": name,
        "equation": scheme.equation,
        "options": {option: value for option, (value, default) in values.items() if value != default},
        "paper": scheme.source,
        "state_per_token": size,
        "parameters_added": counts,
        "not_built": reason,
    }


def _explained(name: str) -> Output:
    try:
        name = canonical(name)  # raises before torch is imported
        from residua.connections import resolve

        scheme = resolve(name)
    except (TypeError, ValueError) as error:
        raise InputError(first_line(error)) from error
    kind = type(scheme)
    header, rows = averages({name})
    ours_header, ours = own_results(kind)
    record = _record(name, scheme) | {
        "title": kind.title,
        "users": kind.users,
        "all_options": [
            {
                "name": field.name,
                "value": getattr(scheme, field.name),
                "default": field.default,
                "values": values(kind, field.name),
                "meaning": meaning(kind, field.name),
            }
            for field in fields(scheme)
        ],
        "published": [dict(zip(header, row)) for row in rows],
        "ours": [dict(zip(ours_header, row)) for row in ours],
    }
    cost = f"it cannot be built here: {record['not_built']}"
    if not record["not_built"]:
        counts = " and ".join(f"{count:+,} at {size}" for size, count in record["parameters_added"].items())
        cost = f"a state of {record['state_per_token']} per token, d the width; parameters beside residual: {counts}"
        cost += ", the DDL paper's models of 124M and 353M"
    parts: list[Any] = [f"{name}: {kind.title or kind.__name__}\n\n{indent(WRAP.fill(kind.equation), '    ')}\n"]
    parts += [f"{text if text.startswith('    ') else WRAP.fill(text)}\n" for text in about(kind)]
    parts.append(f"paper: {scheme.source}")
    parts += [WRAP.fill(f"cost: {cost}"), WRAP.fill(f"who runs it: {kind.users or 'not known'}")]
    for option in sorted(record["all_options"], key=lambda option: _place(kind, option)):
        default = f"(default: {option['default']}; {option['values']})"
        parts.append("\n" + WRAP.fill(f"{option['name']} = {option['value']} {default}"))
        parts.append(indent(WRAP.fill(option["meaning"]), "    "))
    if rows:
        parts += [
            "\npublished, mean accuracy in percent of eight tasks, one seed (arXiv 2601.00417):\n",
            (header, rows),
        ]
    sized = [[f"{label}, {size}", *cells] for label, size, *cells in ours]
    parts += [OURS, (["row, size", *ours_header[2:]], sized)] if ours else ["\nours: not trained in a comparison yet"]
    return Output(record, parts)


def _place(kind: "type[Scheme]", option: dict[str, Any]) -> tuple[bool, bool]:
    """Sort what a preset sets first, then the options of its scheme, then those of many schemes."""
    return option["value"] == option["default"], option["name"] not in kind.__annotations__


def state(scheme: "Scheme") -> str:
    """Return the numbers per token at both ends of 24 sublayers, in units of the width: "4d", or "d to 25d"."""
    rows = dict.fromkeys(scheme.state_size(boundary, 768) // 768 for boundary in (0, 24))
    return " to ".join(f"{count}d" if count > 1 else "d" for count in rows)


def added(scheme: "Scheme") -> dict[str, int]:
    """Count the parameters beyond the plain residual in models of the paper's sizes, "small" and "medium"."""
    from residua.connections import Residual

    return {size: _parameters(scheme, size) - _parameters(Residual(), size) for size in PAPER_SIZES}


@cache
def _parameters(scheme: "Scheme", size: str) -> int:
    import torch

    with torch.device("meta"):
        stream = scheme.build(*PAPER_SIZES[size])
    return sum(parameter.numel() for parameter in stream.parameters())


def about(kind: "type[Scheme]") -> list[str]:
    """Return the paragraphs of the docstring of `kind` that explain it, without the list of its options."""
    options = meanings(kind)
    paragraphs = cleandoc(kind.__doc__ or "").split("\n\n")
    return [text for text in paragraphs if text.split(maxsplit=1)[0].strip(",") not in options]


def meaning(kind: "type[Scheme]", option: str) -> str:
    """Return the text on an option in the docstring of `kind` or of the nearest base class that has one, else ""."""
    texts = (meanings(base) for base in kind.__mro__ if is_dataclass(base))
    return next((text[option] for text in texts if option in text), "")


def meanings(kind: "type[Scheme]") -> dict[str, str]:
    """Return the text on each option that has its own line in the docstring of `kind`."""
    options = "|".join(field.name for field in fields(kind)) or "(?!)"
    pattern = rf"(?m)^((?:{options})(?:, (?:{options}))*) +(\S.*(?:\n +\S.*)*)"
    lines = re.findall(pattern, cleandoc(kind.__doc__ or ""))
    return {name: " ".join(text.split()) for names, text in lines for name in names.split(", ")}


def values(kind: "type[Scheme]", option: str) -> str:
    """Return the values of an option in words: its choices, or its types and their ranges."""
    text = words(types_of(kind)[option])
    for allowed in ranges_of(kind)[option]:
        if "number" in allowed.words:
            text = re.sub("a (whole )?number", allowed.words, text)
        else:
            text += f", {allowed.words}"
    return text


def own_results(kind: "type[Scheme]") -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of ResBench that are of a scheme; experiments/scheme_results.py wrote the file."""
    text = (resources.files("residua.commands") / "results.csv").read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    names = [name for name, place in SCHEMES.items() if place.partition(":")[2] == kind.__name__]
    return header[1:], [row[1:] for row in rows if row[0] in names]


def averages(names: Collection[str]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the published averages of these presets and the plain residual; no rows if
    none of these presets was published."""
    from residua.lab.evaluation.published import ROWS

    columns = list(dict.fromkeys(f"{row.size}, {row.num_fewshot}-shot" for row in ROWS))
    scores: dict[str, dict[str, str]] = {}
    for row in ROWS:
        if row.preset in {*names, "residual"}:
            column = f"{row.size}, {row.num_fewshot}-shot"
            scores.setdefault(row.preset, {})[column] = f"{row.average:.2f} (v{row.version})"
    if not scores.keys() & set(names):
        return [], []
    return ["scheme", *columns], [[name, *(row.get(column, "") for column in columns)] for name, row in scores.items()]
