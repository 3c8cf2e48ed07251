"""Ten training steps of every preset, to the last bit: a change that must change no number is checked against them.

    python experiments/ten_steps.py           write experiments/ten-steps.jsonl
    python experiments/ten_steps.py --check   train again and compare with it

PRESETS after either restrict it to them: rows of a new preset join the record, and the other rows stay.

Losses are compared as exact float64 values. The last bit depends on the processor and the version of torch, so a record
of others is refused: check out the commit before the change, write the record there, then compare.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from residua.connections import PRESETS
from residua.provenance import circumstances

RECORD = Path(__file__).with_name("ten-steps.jsonl")
OPTIONS = shlex.split("""
    --model.num_hidden_layers 2 --model.hidden_size 64 --model.num_attention_heads 2 --model.head_dim 32
    --train.steps 10 --train.warmup_steps 2 --train.batch_size 4 --train.sequence_length 64 --train.evaluate_every 10
    --train.tensorboard false --train.device cpu
""")


def residua(*arguments: str) -> None:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the order of a sum depends on how many share it
    subprocess.run([sys.executable, "-m", "residua", *arguments], check=True, capture_output=True, env=one_thread)


def losses(preset: str, data: Path, folder: Path) -> dict[str, object]:
    run = folder / preset
    options = ["--config", "tiny", "--run", str(run), "--data.path", str(data), "--model.connection", preset]
    residua("train", *options, *OPTIONS)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {"preset": preset, "loss": [row["loss"] for row in rows], "grad_norm": [row["grad_norm"] for row in rows]}
    return found | {"val_loss": rows[-1]["val_loss"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    arguments = parser.parse_args()
    here = circumstances(torch.device("cpu"))
    same = {name: here[name] for name in ("cpu", "torch")}
    head = {name: here[name] for name in ("date", "commit", "python", "torch", "cpu", "threads")}
    before = {}
    if arguments.check or arguments.presets:
        head, *lines = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
        if any(head[name] != value for name, value in same.items()):
            print(f"the record is of {head['cpu']}, torch {head['torch']}; this is {same}: write one here first")
            return 2
        before = {line["preset"]: line for line in lines}
    presets = arguments.presets or list(before if arguments.check else PRESETS)
    if unknown := [name for name in presets if name not in PRESETS]:
        parser.error(f"expected presets, got {', '.join(unknown)}; residua schemes lists them")
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text").mkdir()
        for i in range(200):  # the same text for every version of Python
            words = " ".join(f"word{(i * j) % 97} is {(i + j) % 13}," for j in range(120))
            (folder / "text" / f"{i:03d}.txt").write_text(f"Page {i}. {words}\n", encoding="utf-8")
        residua("prepare", "--source", str(folder / "text"), "--out", str(folder / "data"), "--vocab-size", "512")
        for preset in presets:
            found.append(losses(preset, folder / "data", folder))
            print(preset, found[-1]["loss"][-1], flush=True)
    if not arguments.check:
        rows = {**before, **{line["preset"]: line for line in found}}
        RECORD.write_text("".join(json.dumps(line) + "\n" for line in [head, *rows.values()]), encoding="utf-8")
        return 0
    changed = [line["preset"] for line in found if line != before.get(line["preset"])]
    print(f"changed: {', '.join(changed)}" if changed else f"{len(found)} presets: equal to the last bit")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
