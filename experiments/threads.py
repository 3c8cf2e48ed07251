"""How long small models take on one thread and on two, on a quiet machine and beside busy processes.

Steps: models of four layers and several widths (forward, backward, clip, step) take turns on one thread and on two.
Demo: the runs of `residua demo`, one after the other on two threads, and side by side on one thread each. Both are
measured as the machine is, and again beside processes that count. Medians of the rounds, in seconds of the clock.
`busy` in a row is the number of these processes, and `load` what the machine did before: 0 if it was quiet.
`waiting` is how idle threads wait, as GOMP_SPINCOUNT or OMP_WAIT_POLICY says; the command `residua` lets them spin
10,000 times before they sleep.

    python experiments/threads.py [--record experiments/threads.jsonl] [--rounds 3]
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONNECTIONS = ("residual", "ddl-tc")
VOCABULARY, ROWS, TOKENS = 2048, 16, 128
WARMUP = 2
WAYS = ("separate", "side_by_side")


@contextlib.contextmanager
def busy(count: int):
    """Keep `count` processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def steps(rounds: int, length: int, widths: list[int]) -> list[dict]:
    """Seconds of a training step, and the last losses to the last bit."""
    import torch

    from residua.models import ResiduaConfig, ResiduaForCausalLM

    rows = []
    for connection in CONNECTIONS:
        for width in widths:
            config = ResiduaConfig(
                vocab_size=VOCABULARY,
                hidden_size=width,
                num_hidden_layers=4,
                num_attention_heads=width // 32,
                connection=connection,
            )
            seconds, losses = {1: [], 2: []}, {}
            for _ in range(rounds):
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    torch.manual_seed(0)
                    model = ResiduaForCausalLM(config)
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                    for step in range(WARMUP + length):
                        if step == WARMUP:
                            began = time.perf_counter()
                        tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1))
                        loss = model(input_ids=tokens[:, :-1], shift_labels=tokens[:, 1:]).loss
                        loss.backward()
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                    seconds[threads].append((time.perf_counter() - began) / length)
                    losses[threads] = loss.item().hex()
            one, two = (statistics.median(seconds[threads]) for threads in (1, 2))
            print(f"{connection}, width {width}: {one:.4f} s on one thread, {two:.4f} s on two", flush=True)
            sizes = {"connection": connection, "width": width, "elements": width * ROWS * TOKENS}
            times = {"one_thread": one, "two_threads": two, "rounds": seconds}
            rows.append({"measured": "step", **sizes, **times, "same_loss": losses[1] == losses[2], "losses": losses})
    return rows


def demo(rounds: int, length: int, data: Path) -> list[dict]:
    """Seconds of the demo's runs, in processes of their own, without the comparison."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    seconds = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as home:
                shutil.copytree(data, Path(home) / "data")
                began = time.perf_counter()
                command = [sys.executable, __file__, "--train", way, home, "--steps", str(length)]
                subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
                seconds[way].append(time.perf_counter() - began)
                print(f"demo {way}: {seconds[way][-1]:.1f} s", flush=True)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return [{"measured": "demo", "steps": length, **medians, "rounds": seconds}]


def train(way: str, home: Path, length: int) -> None:
    """Train the runs of the demo in one of `WAYS`."""
    from residua.lab.demo import RECIPES, train_side_by_side
    from residua.lab.experiment import run
    from residua.lab.training import load_config

    if way == "side_by_side":
        train_side_by_side(home, length)
        return
    for name, recipe in RECIPES.items():
        keys = {"train.threads": 2, "train.steps": length, "data.path": str(home / "data")}
        run(load_config(recipe, keys), home / name, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a file to append to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="processes beside which everything is measured again")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--length", type=int, default=20, help="steps of a model in a round")
    parser.add_argument("--steps", type=int, default=150, help="of each run of the demo; 0 leaves the demo out")
    parser.add_argument("--train", nargs=2, metavar=("WAY", "DIR"), help="only train the runs of the demo, for a row")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train[0], Path(arguments.train[1]), arguments.steps)
        return

    import torch

    from residua.lab.data import prepare
    from residua.lab.records.provenance import circumstances

    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "data"
        if arguments.steps:
            prepare("stdlib", data, vocab_size=VOCABULARY, progress=False)
        waiting = os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY")
        for count in (0, arguments.busy):
            here = circumstances(torch.device("cpu"))
            print(f"beside {count} busy processes, load {here['load']:.1f}", flush=True)
            with busy(count):
                rows = steps(arguments.rounds, arguments.length, arguments.widths)
                rows += demo(arguments.rounds, arguments.steps, data) if arguments.steps else []
            if arguments.record:
                with arguments.record.open("a") as file:
                    facts = {"waiting": waiting, "busy": count, **here}
                    file.writelines(json.dumps({**row, **facts}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
