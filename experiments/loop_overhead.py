"""What the training loop costs beyond its model, what the gates cost that it logs, and how long a run takes to start.

Steps: `residua.lab.training.train` and a bare loop (forward, backward, clip, step) with the same model, batches and
optimizer take turns; CPU time of the process from one batch to the next, medians, ratio of the rounds. Observing: the
same for `tiny-ddl-cc-ec` with the gates of all sublayers logged at every step, and without. Start: from the
end of `import torch`, and from that of `import transformers`, to the first batch of `residua train --config tiny`, in
processes of their own, with corpora whose shards are holes in sparse files. One JSON line each goes into the record.

    python experiments/loop_overhead.py [--record experiments/loop-overhead.jsonl]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

SHARD = 100_000_000
CORPORA = {
    "100 million tokens": (1, SHARD),
    "10 billion tokens": (100, SHARD),
    "1 trillion tokens": (10_000, SHARD),
}


class Timed:
    """Batches that write down when each was asked for, in CPU time of the process."""

    def __init__(self, batches):
        self.batches, self.times = batches, []

    def at(self, index):
        self.times.append(time.process_time())
        return self.batches.at(index)

    def seconds(self, warmup: int) -> float:
        return statistics.median(later - earlier for earlier, later in pairwise(self.times[warmup:]))


def steps(rounds: int, length: int, warmup: int) -> dict:
    """Seconds of a step in both loops, round by round, for the tiny recipe."""
    import torch

    from residua.lab.data import Batches, PreparedData, prepare
    from residua.lab.experiment import build_model
    from residua.lab.training import load_config, train
    from residua.lab.training.optimizer import make_optimizer

    torch.set_num_threads(1)
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as home:
        prepare("stdlib", Path(home) / "data", vocab_size=2048, progress=False)
        data = PreparedData.open(Path(home) / "data")
        overrides = [f"--train.steps={length}", "--train.device=cpu", f"--train.checkpoint_every={length}",
                     "--train.warmup_steps=1"]  # fmt: skip
        config = load_config("tiny", overrides)
        for number in range(rounds):
            batches = Timed(Batches(data.train, config.train.batch_size, config.train.sequence_length, 0))
            model = build_model(config, data.tokenizer())
            train(model, batches, config.train, Path(home) / f"run-{number}", progress=False)
            ours.append(batches.seconds(warmup))

            batches = Timed(batches.batches)
            model = build_model(config, data.tokenizer()).train()
            optimizer = make_optimizer(model, config.train)
            for step in range(length):
                inputs, labels = batches.at(step)
                model(input_ids=inputs, labels=labels, shift_labels=labels).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
                optimizer.step()
                optimizer.zero_grad()
            bare.append(batches.seconds(warmup))
            print(f"round {number + 1}: {ours[-1] * 1000:.1f} ms, bare {bare[-1] * 1000:.1f} ms", flush=True)
    ratios = [mine / theirs for mine, theirs in zip(ours, bare)]
    return {"measured": "step", "ratio": statistics.median(ratios), "ratios": ratios, "seconds": ours, "bare": bare}


def observing(rounds: int, length: int, warmup: int) -> dict:
    """What one row of connections.jsonl costs, as a share of a step: every step with one, and every step without."""
    import torch

    from residua.lab.data import Batches, PreparedData, prepare
    from residua.lab.experiment import build_model
    from residua.lab.inspection import gate_quantiles
    from residua.lab.training import load_config, train

    torch.set_num_threads(1)
    seconds = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as home:
        prepare("stdlib", Path(home) / "data", vocab_size=2048, progress=False)
        data = PreparedData.open(Path(home) / "data")
        overrides = [f"--train.steps={length}", "--train.device=cpu", "--train.warmup_steps=1"]
        for number in range(rounds):
            for every, found in seconds.items():
                config = load_config("tiny-ddl-cc-ec", [*overrides, f"--train.connections_every={every}"])
                batches = Timed(Batches(data.train, config.train.batch_size, config.train.sequence_length, 0))
                folder = Path(home) / f"run-{number}-{every}"
                train(
                    build_model(config, data.tokenizer()),
                    batches,
                    config.train,
                    folder,
                    observe=gate_quantiles,
                    progress=False,
                )
                found.append(batches.seconds(warmup))
    shares = [observed / plain - 1 for plain, observed in zip(*seconds.values())]
    return {"measured": "observing", "share_of_a_step": statistics.median(shares), "shares": shares,
            "seconds": seconds[0], "seconds_observed": seconds[1]}  # fmt: skip


# A process of its own: prints what passed until the first batch, on the clock and on the CPU.
START = """
import sys, time
import torch
began = time.perf_counter(), time.process_time()
import transformers.modeling_utils
imported = time.perf_counter(), time.process_time()
from residua.lab import experiment
from residua.lab.training import load_config

class First(experiment.Batches):
    def at(self, index):
        found = super().at(index)
        now = time.perf_counter(), time.process_time()
        print(now[0] - began[0], now[1] - began[1], now[0] - imported[0], now[1] - imported[1], len(self.tokens))
        sys.stdout.flush()
        import os
        os._exit(0)

experiment.Batches = First
experiment.run(load_config("tiny", [f"--data.path={sys.argv[1]}", "--train.device=cpu"]), sys.argv[2], progress=False)
"""


def start(rounds: int) -> list[dict]:
    from residua.lab.data import prepare

    found = []
    with tempfile.TemporaryDirectory() as home:
        prepare("stdlib", Path(home) / "data", vocab_size=2048, progress=False)
        folders = {name: holes(Path(home), name, *size) for name, size in CORPORA.items()}
        times = {name: [] for name in folders}
        for number in range(rounds):
            for name, folder in folders.items():
                command = [sys.executable, "-c", START, str(folder), f"{home}/run {name} {number}"]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                times[name].append(tuple(map(float, done.stdout.split())))
        for name, rows in times.items():
            names = "clock", "process", "clock_after_transformers", "process_after_transformers"
            seconds = {key: round(statistics.median(values), 3) for key, values in zip(names, zip(*rows))}
            found.append({"measured": "start", "corpus": name, "tokens": int(rows[0][-1]), "seconds": seconds})
            print({key: found[-1][key] for key in ("corpus", "seconds")}, flush=True)
    return found


def holes(home: Path, name: str, shards: int, tokens: int) -> Path:
    """A prepared folder like home/data, but with training shards that are holes: nothing on the disk."""
    folder = shutil.copytree(home / "data", home / name, ignore=shutil.ignore_patterns("train-*"))
    index = json.loads((folder / "index.json").read_text())
    listed = [{"file": f"train-{i:05d}.bin", "tokens": tokens, "sha256": "0" * 64} for i in range(shards)]
    for shard in listed:
        with (folder / shard["file"]).open("wb") as file:
            file.truncate(2 * tokens)
    index["splits"]["train"] |= {"shards": listed, "tokens": shards * tokens}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("loop-overhead.jsonl"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    names = ("step", "observing", "start")
    parser.add_argument("--measure", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    from torch import device

    from residua.lab.records.provenance import circumstances

    measures = {
        "step": lambda: [steps(arguments.rounds, arguments.steps, warmup=5)],
        "observing": lambda: [observing(arguments.rounds, arguments.steps, warmup=5)],
        "start": lambda: start(arguments.rounds),
    }
    found = [row for name in arguments.measure for row in measures[name]()]
    with arguments.record.open("a", encoding="utf-8") as record:
        for row in found:
            record.write(json.dumps({**row, **circumstances(device("cpu"))}) + "\n")
    for row in found:
        if row["measured"] == "step":
            print(f"a step takes {row['ratio']:.3f} of a bare one")
        if row["measured"] == "observing":
            print(f"a row of connections.jsonl takes {row['share_of_a_step']:.3f} of a step")


if __name__ == "__main__":
    main()
