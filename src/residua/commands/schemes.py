"""The command `residua schemes`."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from residua.commands.base import Arguments, Parser, add_json, print_json
from residua.errors import first_line
from residua.sizes import SIZES
from residua.tables import print_table

if TYPE_CHECKING:
    from residua.connections import Scheme

HELP = "list the residual schemes: equation, options, state, parameters added, paper"
EXAMPLES = "residua schemes\nresidua schemes --json"


def add_arguments(parser: Parser) -> None:
    add_json(parser)


def run(arguments: Arguments) -> None:
    from residua.connections import presets

    known = presets()
    plain = {size: _parameters(known["residual"], size) for size in ("small", "medium")}
    records, reasons = [], {}
    for name, scheme in known.items():
        try:
            state = _state(scheme)
            added = {size: _parameters(scheme, size) - count for size, count in plain.items()}
        except Exception as error:  # of somebody's scheme, such as one for some widths alone
            state, added = None, dict.fromkeys(plain)
            reasons[name] = f"{type(error).__name__}: {first_line(error)}"
        records.append(
            {
                "name": name,
                "equation": scheme.equation,
                "options": _options(scheme),
                "paper": scheme.source,
                "state_per_token": state,
                "parameters_added": added,
                "not_built": reasons.get(name),
            }
        )
    if arguments.json:
        print_json(records)
        return
    rows = [
        [
            record["name"],
            record["equation"],
            record["state_per_token"] or "-",
            *("-" if count is None else f"{count:+,}" for count in record["parameters_added"].values()),
            record["paper"],
            " ".join(f"{key}={value}" for key, value in record["options"].items()),
        ]
        for record in records
    ]
    print_table(["name", "equation", "state", *plain, "paper", "options"], rows)
    print(
        "\nstate: numbers per token, d the width, from the first to the last of 24 sublayers; "
        f"{' and '.join(plain)}: parameters added to the plain residual."
    )
    for name, reason in reasons.items():
        print(f"{name}: -, because it cannot be built here: {reason}")


def _options(scheme: "Scheme") -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    values = {field.name: (getattr(scheme, field.name), field.default) for field in fields(scheme)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _state(scheme: "Scheme") -> str:
    """Return the numbers per token at both ends of 24 sublayers, in units of the width: "4d", or "d to 25d"."""
    rows = dict.fromkeys(scheme.state_size(boundary, 768) // 768 for boundary in (0, 24))
    return " to ".join(f"{count}d" if count > 1 else "d" for count in rows)


def _parameters(scheme: "Scheme", size: str) -> int:
    import torch

    with torch.device("meta"):
        stream = scheme.build(SIZES[size]["hidden_size"], 2 * SIZES[size]["num_hidden_layers"])
    return sum(parameter.numel() for parameter in stream.parameters())
