"""Write docs/families.md and the record of `residua convert --check`: which models convert, and why others do not.

Run it after a change: .venv/bin/python tests/support/family_table.py
"""

import csv
import re
import sys
from pathlib import Path

import transformers
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import residua  # noqa: E402
from residua.conversion.convert_model import Trial  # noqa: E402
from residua.errors import InputError  # noqa: E402
from residua.models.evaluating import evaluating  # noqa: E402
from support.families import FAMILIES, halves, other_families, tiny  # noqa: E402
from support.small_inputs import inputs_of  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
RECORD = ROOT / "src/residua/commands/families.csv"


def row(family: str) -> str:
    """Return the line of the table for a family."""
    try:
        model = tiny(family)
    except Exception as error:  # configurations and models raise many kinds
        return _line(family, "not tried", "-", _short(str(error)))
    try:
        inputs = inputs_of(model)
        with evaluating(model), Trial(model, inputs) as trial:
            anatomy = trial.find(residua.Residual()).anatomy
    except InputError as error:
        reason = str(error).partition("; residua.models.dialects")[0]  # convert also says where to look then
        return _line(family, "refused", "-", _short(reason.partition(" ")[2]))
    kinds = [
        "; ".join(" + ".join(f"`{name}`" for name in sub.readers) for sub in layer) for layer in dict.fromkeys(anatomy)
    ]
    return _line(family, "bit-equal", _in_bfloat16(model.bfloat16()), " or ".join(dict.fromkeys(kinds)))


def _in_bfloat16(model: PreTrainedModel) -> str:
    try:
        inputs = inputs_of(model)
    except InputError:
        return "does not run"
    try:
        with evaluating(model), Trial(model, inputs) as trial:
            trial.find(residua.Residual())
    except InputError as error:
        return f"refused: {_short(str(error).partition(': ')[2])}"
    return "equal"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _short(text: str) -> str:
    return re.sub(r"[`<>{}\[\]*]", "", " ".join(text.split()))[:140]


def rows() -> dict[str, str]:
    """Return the lines that the page has now, by family."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if re.match(r"\| (?!family )[a-z]", line)}


def record() -> None:
    """Write the rows that the page has now into the record of the command."""
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["family", "result", "reads", "transformers"])
        for line in rows().values():
            family, result, _, reads = line.strip("| ").split(" | ")
            table.writerow([family, result, reads.replace("`", ""), version()])


def sample() -> set[str]:
    """Return the first two families of each kind of row, and the three that people ask about first."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for family, line in rows().items():
        kinds.setdefault(_kind(line), []).append(family)
    return {"gpt2", "llama", "qwen3"}.union(*(families[:2] for families in kinds.values()))


def _kind(line: str) -> tuple[str, ...]:
    """Return a row without names and numbers: how many norms a layer has, or the reason of a refusal."""
    _, result, narrow, reason = line.strip("| ").split(" | ")
    reason = re.sub(r"\(.*?\)|`.*?`|\d+", "x", reason)
    return result, narrow.partition(":")[0], re.split(r"found|, got|:", reason)[0]


def version() -> str:
    """Return the version of transformers that the page was written with."""
    found = re.search(r"transformers ([\d.]+)\.", PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1].rstrip(".")


def page(language_models: list[str], others: list[str]) -> str:
    def count(lines: list[str], kind: str) -> int:
        return sum(f"| {kind} |" in line for line in lines)

    built = [line for line in others if "| not tried |" not in line and "could not run it" not in line]
    head = ["| family | `residual` | in bfloat16 | reads the residual, or why not |", "|---|---|---|---|"]
    return "\n".join(
        [
            "# Families that convert",
            "",
            "Does your model convert? Search the page for its `model_type`, or let `residua convert --check llama` or",
            "`residua convert --check FOLDER` say it in one line.",
            f"Of the causal language models {count(language_models, 'bit-equal')} of {len(language_models)} compute",
            "what they computed before, to the last bit; "
            f"{count(language_models, 'refused')} raise an error with the reason; "
            f"{count(language_models, 'not tried')} were not tried.",
            "Of the encoders of text, images, video and sound, and the halves of encoder-decoders: "
            f"{count(built, 'bit-equal')} of {len(built)}.",
            "",
            "Each was a tiny model with noise on its weights, given to "
            f'`residua.convert(model, "residual")` with transformers {transformers.__version__}.',
            f"In bfloat16 {count(language_models, 'equal')} of them are bit-equal too; "
            "a model that does not run there does not run unconverted either.",
            f"{len(others) - len(built)} more encoders, which no tiny configuration or small input fits, are left out.",
            "",
            "The last column names the modules that read the residual, sublayer by sublayer, for each kind of layer.",
            "`a + b`: both read the same state, and their outputs are written at once. A norm there is the",
            "connection's; other modules read the state as it is. The residual of `qwen4_exp` has four streams,",
            "and counts as one of four times the width.",
            "`tests/support/family_table.py` writes this page, and a test compares every line.",
            "",
            "## Causal language models",
            "",
            *head,
            *language_models,
            "",
            "## Encoders, and halves of encoder-decoders",
            "",
            *head,
            *built,
            "",
        ]
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    others = sorted([*other_families(), *halves()])
    PAGE.write_text(page([row(family) for family in FAMILIES], [row(family) for family in others]), encoding="utf-8")
    record()
