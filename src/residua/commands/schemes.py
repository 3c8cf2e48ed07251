"""The command `residua schemes`."""

import csv
import json
from dataclasses import MISSING, fields
from pathlib import Path
from textwrap import TextWrapper, indent
from typing import TYPE_CHECKING, Any

from residua.commands.signature import Output
from residua.connections.names import ALIASES, canonical, in_the_paper
from residua.connections.parts.options import has_effect, named
from residua.errors import InputError, first_line

if TYPE_CHECKING:
    from residua.connections import Scheme

RESULTS = Path(__file__).with_name("results.csv")
"""The table with the results of ResBench for every scheme; resbench/scheme_results.py writes it."""
WRAP = TextWrapper(75, break_on_hyphens=False)
OURS = """
ours, ResBench: validation loss of language models of 0.1 and 0.3 million
parameters, tuned under the same budget (baselines under a larger one), and
the difference to two baselines (*: clear after the correction for the number
of comparisons); step time relative to residual; -deep and -wide: eight and
two layers in place of four; -long: three times the tokens; -muon: trained
with Muon
"""


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
    from residua.connections.registry import schemes

    records = [_record(name, scheme) for name, scheme in schemes().items()]
    rows = [
        [
            record["name"],
            record["state_per_token"] or "-",
            "-" if record["not_built"] else f"{record['parameters_added']['small']:+,}",
            ": ".join(filter(None, (record["paper"].removeprefix("github.com/"), record["name_in_paper"]))),
        ]
        for record in records
    ]
    notes = [
        "\npaper: with the name there since its third version, if it differs\n"
        "state: numbers per token, at the first and last of 24 sublayers; d is the width\n"
        "parameters: added to the plain residual's in a model of 124 million\n"
        "residua schemes NAME: its equation, cost, who runs it, results, options\n",
        WRAP.fill(f"presets with options: {', '.join(name for name, text in ALIASES.items() if ':' in text)}"),
        WRAP.fill(f"other names of presets: {', '.join(name for name, text in ALIASES.items() if ':' not in text)}"),
    ]
    notes += [
        f"{record['name']}: -, because it cannot be built here: {record['not_built']}"
        for record in records
        if record["not_built"]
    ]
    return Output(records, [(["name", "state", "parameters", "paper"], rows), *notes])


def _record(name: str, scheme: "Scheme") -> dict[str, Any]:
    from residua.connections.explained import PAPER_SIZES, added, state

    size = reason = None
    counts: dict[str, int | None] = dict.fromkeys(PAPER_SIZES)
    try:
        size, counts = state(scheme), {**added(scheme)}
    except Exception as error:  # a custom scheme, which may allow only some widths
        size, reason = None, f"{type(error).__name__}: {first_line(error)}"
    values = {field.name: (getattr(scheme, field.name), field.default) for field in fields(scheme)}
    return {
        "name": name,
        "equation": scheme.equation,
        "options": {option: value for option, (value, default) in values.items() if value != default},
        "paper": scheme.source,
        "name_in_paper": in_the_paper(name),
        "state_per_token": size,
        "parameters_added": counts,
        "not_built": reason,
    }


def _explained(name: str) -> Output:
    try:
        name = canonical(name)  # raises before torch is imported
        from residua.connections import SCHEMES, resolve

        scheme = resolve(name)
    except (TypeError, ValueError) as error:
        raise InputError(first_line(error)) from error
    from residua.connections import explained
    from residua.lab.evaluation.published import averages, titled

    kind = type(scheme)
    header, rows = averages({name})
    with RESULTS.open(encoding="utf-8") as file:
        (_, *ours_header), *results = csv.reader(file)
    ours = [row for of, *row in results if SCHEMES[of] is kind]
    record = _record(name, scheme) | {
        "title": kind.title,
        "users": kind.users,
        "all_options": [
            {
                "name": field.name,
                "value": getattr(scheme, field.name),
                "default": None if field.default is MISSING else field.default,
                "values": explained.values(kind, field.name),
                "meaning": explained.meaning(kind, field.name).replace("None", "null"),
            }
            for field in fields(scheme)
        ],
        "published": [dict(zip(header, row)) for row in rows],
        "ours": [dict(zip(ours_header, row)) for row in ours],
    }
    cost = f"it cannot be built here: {record['not_built']}"
    if not record["not_built"]:
        counts = " and ".join(f"{count:+,} at {size}" for size, count in record["parameters_added"].items())
        cost = f"a state of {record['state_per_token']} per token, d the width; parameters beyond residual: {counts}"
        cost += ", the DDL paper's models of 124M and 353M"
    equation = f"{indent(WRAP.fill(scheme.equation), '    ')}\n" if scheme.equation else "no equation is declared\n"
    parts: list[Any] = [f"{name}: {kind.title or kind.__name__}\n\n{equation}"]
    preset, _, options = name.partition(":")
    if options:
        parts.append(f"{WRAP.fill(f'This is {preset} with {options}.')}\n")
        meanings = {option["name"]: option["meaning"] for option in record["all_options"]}
        parts += [f"{WRAP.fill(f'{option}: {meanings[option]}')}\n" for option in named(name)[1]]
    about = (text.replace("None", "null") for text in explained.about(kind))
    parts += [f"{text if text.startswith('    ') else WRAP.fill(text)}\n" for text in about]
    parts.append(f"paper: {scheme.source or 'none'}")
    if title := record["name_in_paper"]:
        parts.append(f"its name there, since the third version: {title}")
    changed = ", ".join(f"{option}={_as_typed(value)}" for option, value in record["options"].items())
    parts += [WRAP.fill(f"cost: {cost}"), WRAP.fill(f"who runs it: {kind.users or 'not known'}")]
    if fields(scheme):
        parts.append(
            WRAP.fill(f"options that it sets: {changed or 'none'}; all {len(fields(scheme))} are explained at the end")
        )
    if rows:
        parts += [
            "\npublished, mean accuracy in percent of eight tasks, one seed (arXiv 2601.00417):\n",
            (header, [[titled(preset), *cells] for preset, *cells in rows]),
        ]
    sized = [[f"{label}, {size}", *cells] for label, size, *cells in ours]
    parts += [OURS, (["row, size", *ours_header[2:]], sized)] if ours else ["\nours: not trained in a comparison yet"]
    idle = {field.name for field in fields(scheme) if not has_effect(scheme, field.name)}
    for title, chosen in (
        ("options, those that the preset sets first", lambda option: option["name"] not in idle),
        ("options without effect here, because of the values of others", lambda option: option["name"] in idle),
    ):
        listed = sorted(filter(chosen, record["all_options"]), key=lambda option: _place(kind, option))
        parts += [f"\n{title}:"] * bool(listed)
        for option in listed:
            default = f"(default: {_as_typed(option['default'])}; {option['values']})"
            parts.append("\n" + WRAP.fill(f"{option['name']} = {_as_typed(option['value'])} {default}"))
            parts.append(indent(WRAP.fill(option["meaning"]), "    "))
    return Output(record, parts)


def _as_typed(value: Any) -> str:
    """Return the value of an option as it is written in a name, a command or a file."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _place(kind: "type[Scheme]", option: dict[str, Any]) -> tuple[bool, bool]:
    """Return the sort key of an option: first those set by the preset, then the scheme's own, then common options."""
    return option["value"] == option["default"], option["name"] not in kind.__annotations__
