"""A soak test: training that is killed and whose disk fails, again and again, ends as an undisturbed run does.

The undisturbed run is one plain process. The other is a chain of torchrun jobs of one or two ranks (gloo, on the CPU).
At random moments a rank is killed, and torchrun starts again, or the whole job is killed; or the second save of a job
fails: the disk is full in the middle of a file, the system cuts a write short, the folder refuses new files. Both runs
must have the same weights in the end and the same loss at every step, to the last bit. One JSON line goes into the
record.

    python experiments/soak.py --steps 16000 [--record experiments/soak.jsonl]
"""

import argparse
import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import processes

SETTINGS = {
    "model": {"connection": "ddl-cc", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
              "head_dim": 32},
    "train": {"batch_size": 4, "gradient_accumulation": 2, "sequence_length": 64, "evaluate_every": 1_000_000,
              "checkpoint_every": 50, "log_every": 1, "warmup_steps": 100, "tensorboard": "false", "device": "cpu"},
}  # fmt: skip
FAULTS = {"disk full": "No space left", "short write": "File too large", "no permission": "Permission denied"}
KILLS = ("a rank killed", "the job killed")
MEAN_SECONDS = 25.0
"""Between the first step of a job, or the last kill, and the next kill."""
RESTARTS = 3
FAULT = "SOAK_FAULT"
"""The variable that tells the first rank of a job what befalls its second save."""


def rank_main(arguments: list[str]) -> int:
    """One rank: `residua train`, with a disk that fails if this job's does."""
    import torch

    torch.set_num_threads(1)
    fault = os.environ.get(FAULT)
    if fault and os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from residua.lab.training import saving

        plain, calls = saving.write_checkpoint, iter(range(1, 10_000))

        def write_checkpoint(*details):
            with failing_disk(fault) if next(calls) == 2 else contextlib.nullcontext():
                return plain(*details)

        saving.write_checkpoint = write_checkpoint
    from residua.commands.cli import main

    return main(["train", *arguments])


@contextmanager
def failing_disk(fault: str) -> Iterator[None]:
    """The tensors of a checkpoint do not arrive on the disk."""
    from residua.lab.training import checkpoint

    if fault == "short write":  # by the system itself: a write over the limit is cut, the next one fails
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        yield
        return
    plain, number = checkpoint.save_file, errno.ENOSPC if fault == "disk full" else errno.EACCES

    def save_file(tensors, path, metadata):
        if number == errno.ENOSPC:
            path.write_bytes(bytes(4096))
        raise OSError(number, os.strerror(number), str(path))

    checkpoint.save_file = save_file
    try:
        yield
    finally:
        checkpoint.save_file = plain


def last_step(folder: Path) -> int:
    from residua.lab.records import jsonlines

    rows = jsonlines.read(folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


class Soak:
    """The chain of jobs that ends in a finished run, and what befell it."""

    def __init__(self, folder: Path, arguments: list[str], steps: int, chance: random.Random):
        self.folder, self.arguments, self.steps, self.chance = folder, arguments, steps, chance
        self.log = folder.with_name("soak.log")
        self.events: Counter[str] = Counter()
        self.ranks: Counter[int] = Counter()

    def run(self) -> None:
        while not self._job():
            pass

    def _job(self) -> bool:
        """One job, until it is over, one way or another; returns whether the run is finished."""
        size = self.chance.choice((1, 2))
        fault = self.chance.choice((*FAULTS, "", "", ""))
        resume = ["--resume"] if self.folder.exists() else []
        began = last_step(self.folder)
        self.ranks[size] += 1
        with self.log.open("a") as log:
            log.write(f"--- step {began}: {size} ranks {fault}\n")
            log.flush()
            job = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}",
                 f"--max-restarts={RESTARTS}", "--", __file__, "--rank", *self.arguments, "--run", str(self.folder),
                 *resume],
                stdout=log,
                stderr=log,
                env={**os.environ, FAULT: fault, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )  # fmt: skip
        self._kill(job, began)
        status = job.wait()
        print(f"step {last_step(self.folder)} of {self.steps}: { ({**self.events, **self.faults()}) }", flush=True)
        return status == 0 and last_step(self.folder) == self.steps

    def faults(self) -> dict[str, int]:
        """How many saves failed, by what the ranks said; a kill may come before the save that was to fail."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("residua: ")]
        return {fault: sum(reason in line for line in lines) for fault, reason in FAULTS.items()}

    def _kill(self, job: subprocess.Popen, began: int) -> None:
        """Kill a rank or the job as soon as it trains and some time has passed, until it is over."""
        while True:
            wait_until = None
            while wait_until is None or time.monotonic() < wait_until:
                if job.poll() is not None:
                    return
                if wait_until is None and last_step(self.folder) != began:
                    wait_until = time.monotonic() + self.chance.expovariate(1 / MEAN_SECONDS)
                time.sleep(0.05)
            kill = self.chance.choice(KILLS)
            family = processes(job.pid)[1:]
            began = last_step(self.folder)
            self.events[kill] += 1
            for pid in [job.pid, *family] if kill == KILLS[1] else [self.chance.choice(family)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=0, help="of what befalls the run")
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("soak.jsonl"))
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    arguments = parser.parse_args()

    import torch

    from residua.lab.data import prepare
    from residua.lab.experiment import open_run, run
    from residua.lab.records import jsonlines
    from residua.lab.records.provenance import circumstances
    from residua.lab.training import load_config

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        home = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        data = prepare("stdlib", home / "data", vocab_size=2048, progress=False).folder
        settings: dict[str, Any] = {**SETTINGS, "data": {"path": data}}
        settings["train"] = {**settings["train"], "steps": arguments.steps}
        options = [f"--{section}.{key}={value}" for section, keys in settings.items() for key, value in keys.items()]
        config = load_config("tiny", options)
        (home / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")

        began = time.monotonic()
        run(config, home / "undisturbed", progress=False)
        undisturbed = time.monotonic() - began
        print(f"undisturbed: {arguments.steps} steps in {undisturbed / 60:.1f} minutes", flush=True)

        soak = Soak(
            home / "soaked", ["--config", str(home / "config.yaml")], arguments.steps, random.Random(arguments.seed)
        )
        began = time.monotonic()
        soak.run()
        minutes = (time.monotonic() - began) / 60

        weights = [open_run(home / name, device="cpu").model.state_dict() for name in ("undisturbed", "soaked")]
        same_weights = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        losses = [
            [(row["step"], row["loss"]) for row in jsonlines.read(home / name / "metrics.jsonl")]
            for name in ("undisturbed", "soaked")
        ]
        row = {
            "steps": arguments.steps,
            "seed": arguments.seed,
            "minutes": round(minutes, 1),
            "minutes_undisturbed": round(undisturbed / 60, 1),
            "disturbances": {**soak.events, **soak.faults()},
            "jobs_by_ranks": {str(size): number for size, number in sorted(soak.ranks.items())},
            "same_weights": same_weights,
            "same_losses": losses[0] == losses[1],
            "steps_logged": len(losses[1]),
            "unfinished_files": [str(path.relative_to(home)) for path in (home / "soaked").rglob(".*.partial")],
            "settings": SETTINGS,
            **circumstances(torch.device("cpu")),
        }
    with arguments.record.open("a", encoding="utf-8") as record:
        record.write(json.dumps(row) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key != "settings"}, indent=1))
    return 0 if same_weights and row["same_losses"] else 1


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main())
