"""The command `residua convert`."""

import csv
import re
from pathlib import Path
from typing import Literal

from residua.commands.base import BAD_INPUT, FAILED, expect_path
from residua.connections.names import canonical
from residua.errors import InputError, did_you_mean, mapping
from residua.files.reading import read_json
from residua.lab.records.folder import new_folder
from residua.lab.records.terminal import one_line

FAMILIES = Path(__file__).with_name("families.csv")
"""The table that says which transformers model types convert; tests/support/family_table.py writes it."""
CONVERTS = {"bit-equal": True, "refused": False}
"""Whether a model converts, by the result in the table; a model with any other result was not tried."""


def convert(
    model: str,
    *,
    connection: str | None = None,
    out: str | None = None,
    start: Literal["preserve", "fresh"] = "preserve",
    remote_code: bool = False,
    check: bool = False,
) -> int:
    """Give a pretrained model another residual connection.

    Examples:
        residua convert models/smollm2 --connection ihc --out models/smollm2-ihc
        residua convert models/llama --connection ddl-tc --start fresh --out llama-ddl
        residua convert --check qwen3

    Args:
        model (MODEL): a folder with a Hugging Face model and its tokenizer
        connection (SCHEME): a scheme; residua schemes lists them
        out (DIR): a new or empty folder
        start: preserve: the outputs stay as before; fresh: connections start as in a new model
        remote_code: let trust_remote_code=True open the folder wherever residua is installed, without import residua
        check: only say whether such a model converts, with status 0 if it does, 1 if not, and 2 if it was not tried;
            MODEL may also be a transformers model type
    """
    if check:
        answers = _checked(model)
        for line in answers:
            print(one_line(line))
        return FAILED if False in answers.values() else BAD_INPUT if None in answers.values() else 0
    if connection is None or out is None:
        missing = "--connection" if connection is None else "--out"
        raise InputError(f"{missing} must be given, or --check to ask whether the model converts")
    scheme, folder = canonical(connection), new_folder(out, "--out")  # both raise before torch is imported
    from residua.conversion import convert
    from residua.lab.export import add_code, converted_card, loading, model_folder
    from residua.lab.opening import read_model

    opened, tokenizer = read_model(model)
    size = opened.num_parameters()
    convert(opened, scheme, start=start)
    growth = opened.num_parameters() - size
    with model_folder(folder) as temporary:
        opened.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if remote_code:
            add_code(temporary)
        card = converted_card(model, scheme, name=folder.name, remote_code=remote_code)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    print(f"{one_line(folder)}: {type(opened).__name__} with {scheme}, {growth:,} parameters more than {size:,}")
    print(one_line(f"load it with: {'; '.join(loading(folder, remote_code=remote_code))}"))
    return 0


def _checked(model: str) -> dict[str, bool | None]:
    """Return a line for each part of a model type, or of the model in a folder; the value is whether it converts.

    The value is None if it was not tried.

    Raises InputError if the folder does not exist or has no model, or if the type is not in the table.
    """
    kind, config = model.lower(), {}
    if (folder := Path(model)).is_dir():
        config = mapping(read_json(folder / "config.json"), str(folder / "config.json"))
        kind = str(config.get("model_type"))
        if kind.startswith("residua"):
            return {f"{model}: has its connections already ({kind})": False}
        if quantised := config.get("quantization_config"):
            method = mapping(quantised, "quantization_config").get("quant_method")
            reason = f"because it is quantised ({method}); convert the model it was made from"
            return {f"{model}: does not convert, {reason}": False}
    elif folder.name != model:
        expect_path(model, "a folder with a model, or a transformers model type such as qwen3")
    rows = _rows()
    found = _found(kind, rows)
    if not found and "auto_map" in config:
        return {f"{model}: {kind} has code of its own, which was not tried; residua.convert tries any model": None}
    if not found:
        expected = "a model type that was tried" if config else "a folder with a model, or a model type that was tried"
        known = {name.partition(":")[0] for name in rows}
        near = [name for name in known if _digits(name) == _digits(kind)]  # qwen9 is not a misspelt qwen3
        hint = did_you_mean(kind, near, cutoff=0.8)
        raise InputError(f"{kind} must be {expected} (see docs/families.md){hint}")
    names = {name: f"{model} ({name})" if config else name for name in found}
    return {f"{names[name]}: {_verdict(row)}": CONVERTS.get(row["result"]) for name, row in found.items()}


def _digits(name: str) -> str:
    return re.sub(r"\D", "", name)


def _rows() -> dict[str, dict[str, str]]:
    with FAMILIES.open(newline="", encoding="utf-8") as file:
        return {row["family"]: row for row in csv.DictReader(file)}


def _found(kind: str, rows: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the rows for a model type, and for its encoder and decoder.

    If there are none, return those for the parts of the type, such as `gemma3_text` for "gemma3".
    """
    own = kind.replace("-", "_")
    families = {name: name.partition(":")[0].replace("-", "_") for name in rows}
    halves = {name: rows[name] for name, family in families.items() if family == own}
    return halves or {name: rows[name] for name, family in families.items() if family.startswith(f"{own}_")}


def _verdict(row: dict[str, str]) -> str:
    tried = f"tiny models, transformers {row['transformers']}"
    if row["result"] == "bit-equal":
        return f"converts with equal outputs ({tried}); {row['reads'].replace('; ', ' and ')} read its residual"
    if row["result"] == "refused":
        return f"does not convert: {row['reads']} ({tried})"
    return f"was not tried: {row['reads']}; residua.convert tries any model"
