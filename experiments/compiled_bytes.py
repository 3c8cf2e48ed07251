"""Bytes that the kernels of a compiled training step read and write, as the compiler itself counts them.

A count instead of a time: it is the same on every machine, and where memory is what a step waits for, as on a GPU, it
says what a change is worth. A tensor that one kernel reads at four shifts counts four times, as does one that a cache
would hold. One JSON line for each preset: bytes above the plain residual's, per token, sublayer and number of width.

    python experiments/compiled_bytes.py
"""

import argparse
import json
from pathlib import Path

import torch
from torch._inductor import config, metrics

from residua.lab.cost.steps import MeasuredStep
from residua.lab.experiment import model_config
from residua.lab.records.provenance import circumstances
from residua.lab.training import load_config

RECORD = Path(__file__).with_name("compiled-bytes.jsonl")
PRESETS = ("residual", "ddl", "ddl-cc", "ddl-tc", "hc", "mhc")
SIZES = {"layers": 2, "dim": 128, "heads": 2, "head_dim": 64, "vocab_size": 64, "sequence_length": 128, "batch_size": 2}
KEYS = {
    "model.num_hidden_layers": SIZES["layers"],
    "model.hidden_size": SIZES["dim"],
    "model.num_attention_heads": SIZES["heads"],
    "model.head_dim": SIZES["head_dim"],
    "model.vocab_size": SIZES["vocab_size"],
    "model.state_dtype": "bfloat16",
    "train.sequence_length": SIZES["sequence_length"],
    "train.batch_size": SIZES["batch_size"],
    "train.precision": "bfloat16",
    "train.compile": True,
    "train.device": "cpu",
}


def moved(preset: str) -> int:
    """Bytes of one step under bfloat16 autocast with a bfloat16 state, forward and backward, products included."""
    torch.compiler.reset()
    metrics.reset()
    run = load_config("tiny", {**KEYS, "model.connection": preset})
    MeasuredStep(run, model_config(run))()
    return metrics.num_bytes_accessed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD, help="append the lines to this file")
    out = parser.parse_args().out
    config.force_disable_caches = True  # what comes from a cache is not counted
    torch._logging.set_logs(inductor_metrics=True)  # the compiler counts only when it is asked to print
    numbers = SIZES["batch_size"] * SIZES["sequence_length"] * SIZES["dim"] * 2 * SIZES["layers"]
    baseline = moved(PRESETS[0])
    for preset in PRESETS:
        total = baseline if preset == PRESETS[0] else moved(preset)
        above = round((total - baseline) / numbers, 1)
        print(f"{preset:10} {total:12,} {above:8.1f}", flush=True)
        line = {"preset": preset, "bytes": total, "above_residual": above, "sizes": SIZES}
        with out.open("a", encoding="utf-8") as record:
            record.write(json.dumps({**line, **circumstances(torch.device("cpu"))}) + "\n")


if __name__ == "__main__":
    main()
