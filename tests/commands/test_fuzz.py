"""Commands, options and damaged files, drawn at random: one line and an exit status, whatever they hold.

`make test` draws the same `CASES` every time. For longer, in minutes:

    RESIDUA_FUZZ_MINUTES=60 .venv/bin/python -m pytest tests/commands/test_fuzz.py -n 0 -s --timeout 0
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from itertools import count
from pathlib import Path

import pytest

from residua.commands.cli import main

CASES = 60
MINUTES = float(os.environ.get("RESIDUA_FUZZ_MINUTES", 0))
SECONDS = 60
"""For one command; a longer one hangs."""
MEMORY = 6 * 2**30
"""Address space that a command may take beyond what the tests have."""
TINY = [
    *("--config", "tiny", "--train.steps", "4", "--train.warmup_steps", "1", "--train.batch_size", "2"),
    *("--train.sequence_length", "16", "--train.evaluate_every", "2", "--train.checkpoint_every", "2"),
    *("--train.tensorboard", "false", "--train.device", "cpu", "--train.connections_every", "1"),
    *("--model.num_hidden_layers", "1", "--model.hidden_size", "16", "--model.num_attention_heads", "1"),
    *("--model.head_dim", "16", "--data.tokenizer", "byte"),
]
# Commands that work before anything is changed; words that are names of artefacts are paths.
COMMANDS = [
    ["train", "--run", "new", *TINY, "--data.path", "data"],
    ["train", "--run", "run", "--resume"],
    ["evaluate", "run"],
    ["evaluate", "run", "--checkpoint", "best", "--json"],
    ["generate", "run", "--prompt", "Text", "--max-new-tokens", "2"],
    ["export", "run", "exported"],
    ["explore", "run", "--tokens", "3", "--all-checkpoints", "--no-page"],
    ["explore", "model", "--prompt", "Text", "--tokens", "3", "--json"],
    ["compare", "run", "--json"],
    ["compare", "run", "other"],
    ["explore", "run", "--out", "page.html"],
    ["explore", "run/analysis/trace-step-4.safetensors", "--out", "page.html"],
    ["prepare", "--source", "text", "--out", "prepared", "--tokenizer", "byte"],
    ["prepare", "--source", "text", "--out", "prepared", "--tokenizer", "data/tokenizer"],
    ["cost", "count", "--config", "run/config.yaml"],
    ["schemes", "--json"],
]
ARTEFACTS = ("run", "other", "model", "data", "text")
VALUES = (
    *("", "-", "0", "-1", "1", "2", "0.5", "1e-40", "1e400", "nan", "inf", str(2**31), str(2**63), "true"),
    *("null", "[]", "{}", "[", "ddl:", "mhc", "..", "\x1b[2J", "é", "best"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    (root / "text").mkdir()
    for number in range(40):
        (root / "text" / f"{number:02d}.txt").write_text(f"Text number {number} tells of {number**2} things.\n" * 3)
    shutil.copy(root / "text" / "00.txt", root / "text" / "more.md")
    (root / "text" / "more.jsonl").write_text('{"text": "A line of JSON."}\n' * 5)
    assert main(["prepare", "--source", str(root / "text"), "--out", str(root / "data"), "--tokenizer", "byte"]) == 0
    assert main(["train", "--run", str(root / "run"), *TINY, "--data.source", str(root / "text")]) == 0
    assert main(["explore", str(root / "run"), "--tokens", "4", "--all-checkpoints", "--no-page"]) == 0
    assert main(["export", str(root / "run"), str(root / "model")]) == 0
    shutil.copytree(root / "run", root / "other")
    return root


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return a file's content as an accident or a forger leaves it."""
    kind = chance.randrange(8)
    if kind == 0:
        return content[: chance.randrange(len(content) + 1)]
    if kind == 1 and content:
        place = chance.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    if kind == 2:
        return chance.randbytes(chance.randrange(200))
    if kind == 3:
        lines = content.splitlines(keepends=True)
        chance.shuffle(lines)
        return b"".join(lines)
    if kind == 4:
        return content + chance.choice([b"\n{", b"\0" * 9, b"\xff\xfe", content[:100], b"\n[]\n"])
    try:
        value = json.loads(content)
    except ValueError:
        words = content.split(b": ")
        if len(words) < 2:
            return b""
        place = chance.randrange(1, len(words))
        words[place] = chance.choice([b"null", b"-1", b"[1]", b"{a: 1}", b"x", b"1e99"]) + b"\n" + words[place][1:]
        return b": ".join(words)
    return json.dumps(changed(value, chance)).encode()


def changed(value, chance: random.Random):
    """Return plain data with one part replaced by something else."""
    other = [None, -1, 0, 2**70, 1e308, "", "x", "../x", [], {}, [[]], {"a": None}, True, "\x1b[2J", "9" * 50]
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or chance.random() < 0.15:
        return chance.choice(other)
    key = chance.choice(list(inner))
    if isinstance(value, dict) and chance.random() < 0.2:
        return {name: part for name, part in value.items() if name != key}
    part = changed(value[key], chance)
    return {**value, key: part} if isinstance(value, dict) else [*value[:key], part, *value[key + 1 :]]


def damage(place: Path, chance: random.Random) -> str:
    """Damage a file below `place`; return what was done."""
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.name != ".lock")
    file = chance.choice(files)
    kind = chance.choice(["content"] * 7 + ["gone", "a folder", "a link"])
    if kind == "content":
        file.write_bytes(damaged(file.read_bytes(), chance))
    else:
        file.unlink()
        if kind == "a folder":
            file.mkdir()
        elif kind == "a link":
            file.symlink_to(chance.choice(["..", str(place / "nowhere")]))
    return f"{file.relative_to(place)}: {kind}"


def draw(chance: random.Random) -> tuple[list[str], bool]:
    """Return a command line and whether a file is damaged."""
    command = list(chance.choice(COMMANDS))
    files = chance.random() < 0.7
    if not files or chance.random() < 0.3:
        place = chance.randrange(1, len(command) + 1)
        kind = chance.randrange(3)
        if kind == 0 and place < len(command):
            command[place] = chance.choice(VALUES)
        elif kind == 1 and place < len(command):
            del command[place]
        else:
            command[place:place] = [
                chance.choice([*VALUES, "--json", "--resume", "--tokens", "--seed", "--checkpoint"])
            ]
    return command, files


def run_alone(argv: list[str], place: Path) -> tuple[int, str]:
    """Run a command line in a fork with limits of time and memory; return its status and its standard error.

    A signal that ended it, as a hang does, is a negative status; a traceback is status 99.
    """
    said = place / "stderr"
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.chdir(place)
            signal.alarm(SECONDS)
            limit_memory()
            with said.open("w", errors="surrogateescape") as err, open(os.devnull, "w") as out:
                os.dup2(err.fileno(), 2)
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    try:
                        status = main(argv)
                    except BaseException:
                        traceback.print_exc(file=err)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text(errors="replace")


def limit_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="every command runs in a fork")
def test_whatever_is_typed_and_whatever_files_hold(home, tmp_path):
    ends = time.monotonic() + 60 * MINUTES
    failures = []
    statuses = set()
    for seed in count():
        if time.monotonic() > ends if MINUTES else seed == CASES:
            break
        chance = random.Random(seed)
        place = tmp_path / "place"
        shutil.copytree(home, place, symlinks=True)
        command, files = draw(chance)
        done = damage(place, chance) if files else "nothing damaged"
        argv = [str(place / word) if word.partition("/")[0] in ARTEFACTS else word for word in command]
        status, said = run_alone(argv, place)
        statuses.add(status)
        lines = [line for line in said.splitlines() if line.startswith("residua: ")]
        # argparse would say so in one line too, but a help text is no error.
        clean = status == 0 or (status in (1, 2) and len(lines) == 1 and len(lines[0]) < 12_000)
        if not clean or "Traceback" in said or "\x1b" in said:
            failures.append(f"seed {seed}, {done}: {' '.join(map(ascii, command))}: status {status}: {said[-1500:]}")
            if MINUTES:
                print(failures[-1], flush=True)
        shutil.rmtree(place)
    assert not failures, "\n\n".join(failures)
    assert {0, 2} <= statuses, "some commands must work and some must be refused"
