"""Draw the two pictures of docs/architecture.md from the code: the rooms, and the frames of three calls.

python tools/architecture.py    needs Python 3.11
"""

import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import tomllib

sys.path.append(str(Path(__file__).parent))

from drawings import DOCS, INK, ONE, ROOT, SOFT, WIDTH, box, line, picture, text

import residua

ROW, GAP, EDGE = 34, 8, 10
SMALL = 14


def rooms() -> str:
    """The rooms as the contracts of import-linter have them: each may import only what is below it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = {contract["name"]: contract for contract in contracts if contract["type"] == "layers"}
    inside = {contract["containers"][0]: contract["layers"] for contract in layers.values() if "containers" in contract}
    parts, y = [], float(EDGE)
    for layer in layers["Rooms"]["layers"]:
        rows = inside.get(layer, [])
        height = ROW + (ROW + GAP) * len(rows)
        names = [name.removeprefix("residua.") for name in layer.split(" | ")]
        width = (WIDTH - 2 * EDGE - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            x = EDGE + column * (width + GAP)
            parts.append(room(x, y, width, height, name))
        for number, row in enumerate(rows):
            parts += list(shelf(y + ROW + number * (ROW + GAP), row.split(" | ")))
        y += height + GAP
    return picture(round(y - GAP + EDGE), *parts)


def room(x: float, y: float, width: float, height: float, name: str) -> str:
    frame = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="none" '
        'stroke="var(--one)" stroke-width="1.5"/>'
    )
    return frame + text(x + width / 2, y + 22, name, ONE, size=16)


def shelf(y: float, names: list[str]) -> Iterator[str]:
    """Draw the inner rooms of one layer side by side."""
    width = (WIDTH - 4 * EDGE - GAP * (len(names) - 1)) / len(names)
    for column, name in enumerate(names):
        x = 2 * EDGE + column * (width + GAP) + width / 2
        yield box(x, y + ROW / 2, "", width, ROW, SOFT) + text(x, y + ROW / 2 + 5, name, size=SMALL)


Frame = tuple[str, str]
"""The file of a function and its qualified name; without a file, packages that are not ours."""


def frames(call: Callable[[], object], last: str) -> list[Frame]:
    """Return the frames of the last time that `call` reaches the function of ours that is called `last`."""
    found: list[Frame] = []

    def look(frame, event, _) -> None:
        if event == "call" and frame.f_code.co_qualname == last and place(frame.f_code.co_filename):
            found.clear()
            while frame.f_code is not call.__code__:
                if frame.f_code.co_name not in ("<lambda>", "checked"):  # `checked`: the decorator `keywords`
                    found.insert(0, named(frame.f_code.co_filename, frame.f_code.co_qualname))
                frame = frame.f_back

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    joined: list[Frame] = []
    for ours, group in groupby(found, lambda frame: bool(frame[0])):
        names = list(group)
        joined += names if ours else [("", ", ".join(sorted({name for _, name in names})))]
    return joined


def place(file: str) -> str:
    """Return the place of a file below src/residua; "" if it is not ours."""
    root = Path(residua.__file__).parent
    return str(Path(file).relative_to(root)) if Path(file).is_relative_to(root) else ""


def named(file: str, name: str) -> Frame:
    if not place(file):
        return "", next(package for package in ("transformers", "torch") if f"/{package}/" in file)
    return "/".join(place(file).split("/")[-2:]), name.replace(".<locals>", "")


def calls() -> str:
    """Three calls as stacks of frames, the outermost above."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    stream = residua.build("ddl-tc", dim=8, num_sublayers=2)
    stacks = {
        'build("ddl-tc", ...)': frames(
            lambda: residua.build("ddl-tc", dim=8, num_sublayers=2), "DeltaConnection.__init__"
        ),
        "stream(x, sublayers)": frames(lambda: stream(torch.zeros(1, 4, 8), [torch.nn.Identity()] * 2), "_written"),
        'convert(llama, "mhc")': frames(lambda: residua.convert(llama, "mhc"), "swap"),
        "llama(ids)": frames(lambda: llama(torch.zeros(1, 3, dtype=torch.long)), "hyper_write"),
    }
    first, second, *third = [[title, *stack] for title, stack in stacks.items()]
    columns = [first], [second], third
    width = (WIDTH - 2 * EDGE) / len(columns)
    parts, lowest = [], 0.0
    for number, column in enumerate(columns):
        y = 24.0
        for title, *stack in column:
            parts.append(text(EDGE + number * width, y, title, ONE, "start", 15))
            for file, name in stack:
                parts += [text(EDGE + number * width, y + 24, name, INK if file else SOFT, "start", SMALL)]
                if file:
                    parts.append(text(EDGE + number * width, y + 39, file, SOFT, "start", 12))
                y += 40 if file else 26
            y += 46
        lowest = max(lowest, y)
    rules = [
        line((number * width + 2, 8), (number * width + 2, lowest - 40), colour=SOFT, width=1, arrow=False)
        for number in (1, 2)
    ]
    return picture(round(lowest - 30), *rules, *parts)


PICTURES = {"architecture-rooms": rooms, "architecture-calls": calls}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(draw(), encoding="utf-8")
