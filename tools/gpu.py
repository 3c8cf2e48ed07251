"""Measure on a GPU what a CPU cannot show, in order of worth, within the time that it is given.

    make gpu                             ten minutes; the next call goes on where this one ended
    python tools/gpu.py --minutes 25     more
    python tools/gpu.py --list           the steps, in their order
    make gpu DRY=1                       the same steps on a CPU: sizes are tiny, tests are collected
    python tools/gpu.py --pack           the text of ResBench in one file, for a machine without it

First the plain residual at ten million parameters and twice its rate, and compiled steps at 124 million; the rivals at
one million; the runs of ten million that only write; the geometric benchmarks at their published size; decoding through
CUDA graphs, compiled steps at 353 million, and kernels in a model. Then whether everything is right: kernels, compiled
training, autocast, DDP. Then the times of single operations.

Every step is a process with a time limit, so that a crash or a hang costs no other step. A step that passed is not
repeated; the others are tried again after those that never ran, and studies keep their finished runs. The folder --out
gets

    steps.jsonl      one line for each try: step, result, seconds, detail, commit
    bench.jsonl      the records of the benchmarks, each as soon as it is measured
    rates, rivals, write-only, geometry    the records of the studies
    logs/STEP.txt    what a step printed
    summary.md       what is printed at the end
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 10.0
SHORTEST = 20.0
"""Seconds below which no step is begun."""
GRACE = 15.0
"""Seconds that a step has to write what it measured after its time is up."""
LARGE = 40 * 2**30
"""Bytes of memory from which on a GPU gets the larger batches."""
FIRST = ("ddl-cc", "ddl-tc", "ddl")
KERNELS = ("mhc", "hc", "jpmhc")
"""Presets to try first, the most important first: those without kernels, and those with."""


@dataclass(frozen=True)
class Step:
    """A process to run: `limit` in seconds. `tests`: it is pytest, and the numbers of its tests are its result.

    beside: what a shell runs at low priority while it runs, and ends with it; it fills caches.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit: float
    tests: bool = False
    beside: str = ""


@dataclass(frozen=True)
class Place:
    """Where the steps run and their records go. A dry run is on the CPU."""

    out: Path
    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def path(self, *parts: str) -> Path:
        return self.out.joinpath(*parts)


def steps(place: Place) -> list[Step]:
    """Return all steps in order of worth."""
    benchmarks = {step.name: step for step in _benchmarks(place)}
    first = [benchmarks.pop(name) for name in ("generate graphs", "steps 353M", *_kernels_in_models())]
    found = [*_questions(place), *first, *_tests(place), *_checks(place), *benchmarks.values()]
    # A dry run asks whether a step ends, not how soon.
    return [replace(step, limit=1800.0) for step in found] if place.dry else found


TABLES = (
    ("lambdas", "residual+tc", "lambdas+tc"),
    ("ddl", "ddl-tc", "ddl-tc-write-only", "attnres-block"),
    ("hc", "hc:implementation=triton", "ihc"),
    ("mhc", "mhc:implementation=triton", "mudd"),
)
"""The compiled steps at 124 million parameters, the most wanted first, each table beside the plain residual."""
STUDIES = ROOT / "resbench"
DATA, PACKED = ROOT / "data", ROOT / "data" / "packed.tar.xz"
TEXTS = ("resbench", "further")
MOST_PACKED = 64 * 2**20


def _questions(place: Place) -> Iterator[Step]:
    """Return the steps that answer a question each: studies, step times and the geometric benchmarks."""
    filling = (shlex.join(_compiled_steps(place, table, rounds=1, out="filling.jsonl")) for table in TABLES)
    yield Step("text", "the text of ResBench", _itself(place, "text"), 60)
    rates = _study(place, "gpu-rates", "rates", "--processes", "3")
    yield Step("rates 10M", "the plain residual at 0.008, three seeds", rates, 400, beside="; ".join(filling))
    for table in TABLES:
        yield Step(f"steps 124M {_short(table)}", STEPS, _compiled_steps(place, table, rounds=15), 150)
    some = ("mhc",) if place.dry else ("mhc", "hc", "attnres-block")
    rivals = _study(place, "rivals-1M", "rivals", "--processes", "6", "--schemes", "lambdas+smear", *some)
    yield Step("rivals 1M", "rivals beside a look back by one token", rivals, 560)
    only = _study(place, "gpu-write-only", "write-only", "--processes", "3", "--schemes", "ddl-tc-write-only")
    yield Step("write-only 10M", "four channels that only write, at 0.008", only, 560)
    tiny = ["--steps", "1", "--tasks", "stability", "--seeds", "42", "--models", "zero-layer", "edelta-sequence"]
    geometry = ("study", "geometry", "quick", "--full", "--device", place.device, "--out", str(place.path("geometry")))
    command = _residua(*geometry, "--processes", "6", *(tiny if place.dry else ()))
    yield Step("geometry", "the geometric benchmarks at their published size", command, 580)


STEPS = "compiled training steps in bfloat16"


def _compiled_steps(
    place: Place, schemes: Sequence[str], config: str = "small", *, rounds: int, out: str = "bench.jsonl"
) -> tuple[str, ...]:
    sizes = (
        f"--model.vocab_size 50304 --train.batch_size {16 if config == 'small' else 8} --train.sequence_length 1024 "
        f"--train.precision bfloat16 --train.compile true --no-peak --rounds {rounds}"
    ).split()
    which = ("--config", "tiny" if place.dry else config, "--schemes", "residual", *schemes)
    where = ("--train.device", place.device, "--out", str(place.path(out)))
    return _residua("cost", "step", *which, *(_sizes(place)["step"] if place.dry else sizes), *where)


def _study(place: Place, name: str, folder: str, *options: str) -> tuple[str, ...]:
    """Return the command of a study of ResBench, in a dry run of the same study with tiny models and few steps."""
    file = place.path(f"{name}.yaml") if place.dry else STUDIES / f"{name}.yaml"
    data = place.path("text") if place.dry else DATA / "resbench"
    where = ("--data", str(data), "--out", str(place.path(folder)))
    return _residua("study", "run", str(file), *where, "--no-costs", *options)


def _residua(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "residua", *arguments)


def _itself(place: Place, check: str) -> tuple[str, ...]:
    command = (sys.executable, str(Path(__file__).resolve()), "--check", check, "--out", str(place.out))
    return (*command, *["--dry-run"] * place.dry)


def _kernels_in_models() -> dict[str, Sequence[str]]:
    """Return the names of the steps that compare kernels with references in models, and their schemes."""
    both = [f"{name}:implementation={how}" for name in KERNELS for how in ("reference", "triton")]
    return {f"models {_short(some)}": some for some in _chunks(both, 4)}


def _tests(place: Place) -> Iterator[Step]:
    kernels = sorted((ROOT / "tests" / "ops" / "kernels").glob("test_triton_*.py"))
    files = {f"kernels {path.stem.removeprefix('test_triton_')}": path for path in kernels}
    files["models with kernels"] = ROOT / "tests" / "models" / "test_triton_models.py"
    for name, path in files.items():
        # The plugins that pyproject.toml configures may not be installed here.
        command = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
        command += ["-q", "-rf", "--tb=short", f"--junitxml={place.path('logs', _file(name, '.xml'))}", str(path)]
        yield Step(name, "results and gradients of the kernels", (*command, *["--collect-only"] * place.dry), 120, True)


def _checks(place: Place) -> Iterator[Step]:
    what = {
        "compile": "compiled training steps, with and without kernels, against float64",
        "autocast": "a training step of every preset under autocast, with its kernels, against float64",
        "graphs": "generation through CUDA graphs, against float64",
        "ddp": "DDP on one rank (NCCL), in float32 and bfloat16, against one process",
    }
    for name, text in what.items():
        yield Step(name, text, _itself(place, name), 250 if name == "compile" else 150)


def _benchmarks(place: Place) -> Iterator[Step]:
    import torch

    from benchmarks.cases import CASES, Draw, Sizes, make
    from residua.connections import PRESETS

    tiny = Sizes(2, 2, 4, 2, "float32")
    operations = [name for name in CASES if make(name, tiny, Draw(tiny, torch.device("cpu"), 0)).has_kernel]
    pairs = _kernels_in_models()
    both = [name for pair in pairs.values() for name in pair]
    rest = [name for name in PRESETS if name not in ("residual", *FIRST, *KERNELS)]
    sizes = _sizes(place)

    def bench(kind: str, *arguments: str) -> tuple[str, ...]:
        where = ("--device", place.device, "--out", str(place.path("bench.jsonl")))
        return (sys.executable, "-m", "benchmarks", kind, *arguments, *sizes[kind], *where)

    def cost(schemes: Sequence[str], *arguments: str) -> tuple[str, ...]:
        where = ("--train.device", place.device, "--out", str(place.path("bench.jsonl")))
        return _residua("cost", "step", "--config", "tiny", "--schemes", *schemes, *arguments, *sizes["step"], *where)

    def presets(*names: str) -> tuple[str, ...]:
        return "--presets", *names

    ops_of = ("--implementations", "reference", "triton", *["compiled"] * (not place.dry))
    for name in operations:
        yield Step(f"ops {name}", "an operation beside its definition", bench("ops", "--operations", name, *ops_of), 75)
    yield Step(f"models {_short(FIRST)}", "training steps and memory", cost(FIRST), 130)
    for name, pair in pairs.items():
        yield Step(name, "training steps and memory, reference and kernels", cost(pair), 130)
    connections = [f"connection:{name}" for name in ("residual", *FIRST, *KERNELS, "attnres")]
    yield Step("ops connections", "connections alone", bench("ops", "--operations", *connections), 100)
    yield Step("peers", "connections beside other packages", bench("peers"), 100)
    yield Step("generate first", "writing a token", bench("generate", *presets(*FIRST, *both[:4])), 150)
    graphs = bench("generate", *presets(*FIRST[:2], *both[:2]), *["--compile"] * (not place.dry))
    yield Step("generate graphs", "writing a token through CUDA graphs", graphs, 150)
    large = _compiled_steps(place, ("residual+tc", "ddl-tc"), "medium", rounds=9)
    yield Step("steps 353M", STEPS, large, 200)
    for some in _chunks(rest, 4):
        yield Step(f"models {_short(some)}", "training steps and memory", cost(some), 130)
    yield Step("generate rest", "writing a token", bench("generate", *presets(*rest)), 150)


def _sizes(place: Place) -> Mapping[str, tuple[str, ...]]:
    """Return the options of each benchmark that set sizes: of GPT-2 on a GPU, tiny on the CPU."""
    if place.dry:
        few = "--rounds 1 --warmup 0"
        step = (
            "--model.num_hidden_layers 1 --model.hidden_size 16 --model.num_attention_heads 2 --model.head_dim 8 "
            "--model.vocab_size 32 --train.sequence_length 8 --train.batch_size 1 --rounds 1 --no-peak"
        )
        model = f"--layers 1 --dim 16 --heads 2 --head-dim 8 --vocab-size 32 {few}"
        return {
            "ops": tuple(f"--tokens 12 --sequence-length 6 --dims 16 {few}".split()),
            "step": tuple(step.split()),
            "generate": tuple(f"{model} --prompt-length 4 --new-tokens 2 --batch-sizes 1".split()),
            "peers": tuple(f"--packages attn-res --layers 1 --dim 16 --sequence-length 8 --batch-size 1 {few}".split()),
        }
    import torch

    batch = 8 if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= LARGE else 2
    model = "--layers 12 --dim 768 --heads 6 --vocab-size 50304 --precision bfloat16"
    training = (
        "--model.num_hidden_layers 12 --model.hidden_size 768 --model.num_attention_heads 6 --model.head_dim 128 "
        "--model.vocab_size 50304 --model.max_position_embeddings 1024 --train.precision bfloat16 --rounds 9 "
        f"--train.sequence_length 1024 --train.batch_size {batch}"
    )
    types = "--dtypes bfloat16 float32"
    return {
        "ops": tuple(f"--tokens 16384 --dims 768 --channels 4 {types} --rounds 25".split()),
        "step": tuple(training.split()),
        "generate": tuple(f"{model} --prompt-length 512 --new-tokens 32 --batch-sizes 1 8 --rounds 5".split()),
        "peers": ("--layers", "6", "--dim", "768", "--sequence-length", "1024", "--batch-size", "8", "--rounds", "9"),
    }


def _scheme(preset: str) -> str:
    from residua.connections import PRESETS, describe

    return describe(PRESETS[preset])["scheme"]


def _chunks(values: Sequence[str], size: int) -> list[Sequence[str]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _short(presets: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(name.partition(":")[0] for name in presets))


def _file(step: str, suffix: str) -> str:
    return step.replace(" ", "-") + suffix


# Running the steps.


def run(place: Place, wanted: Sequence[Step], seconds: float) -> None:
    """Run the steps that have not passed yet, within so many seconds altogether; append a line for each."""
    from residua.lab.records.jsonlines import JsonLines

    place.path("logs").mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    tried = {row["step"]: row["result"] for row in rows(place.path("steps.jsonl"))}
    waiting = [step for step in wanted if tried.get(step.name) != "passed"]
    waiting.sort(key=lambda step: step.name in tried)
    conditions = _conditions(place)
    with JsonLines(place.path("steps.jsonl")) as record:
        for number, step in enumerate(waiting, start=1):
            left = ends - time.monotonic()
            if left < SHORTEST:
                print(f"time is up: {len(waiting) - number + 1} steps wait for the next call", flush=True)
                return
            print(f"[{number}/{len(waiting)}] {step.name} ... ", end="", flush=True)
            began = time.monotonic()
            result, detail = _try(step, place, min(step.limit, left))
            taken = time.monotonic() - began
            print(f"{result} in {taken:.0f} s  {detail}", flush=True)
            record.write(
                {"step": step.name, "result": result, "seconds": round(taken, 1), "detail": detail, **conditions}
            )


def _try(step: Step, place: Place, limit: float) -> tuple[str, str]:
    """Run one step; return its result and one line about it."""
    log = place.path("logs", _file(step.name, ".txt"))
    xml = log.with_suffix(".xml")
    xml.unlink(missing_ok=True)
    measured = len(rows(place.path("bench.jsonl")))
    with log.open("wb") as file:
        file.write((" ".join(step.command) + "\n").encode())
        file.flush()
        where = {"cwd": ROOT, "env": _environment(place), "start_new_session": True}
        process = subprocess.Popen(step.command, stdout=file, stderr=file, **where)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        beside = subprocess.Popen(["nice", "-n", "10", "sh", "-c", step.beside], **quiet, **where)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return "timed out", f"after {limit:.0f} s; {_last_line(log)}"
        except BaseException:
            _end(process)
            raise
        finally:
            _end(beside)
    if step.tests and not place.dry:
        return _result_of_tests(xml, status, log)
    if status:
        return "failed", f"status {status}: {_last_line(log)}"
    new = len(rows(place.path("bench.jsonl"))) - measured
    return "passed", f"{new} records" if new else _last_line(log)


def _end(process: subprocess.Popen) -> None:
    """End a step and all that it started; first with a signal on which benchmarks write what they measured."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _result_of_tests(xml: Path, status: int, log: Path) -> tuple[str, str]:
    if not xml.exists():
        return "failed", f"status {status}: {_last_line(log)}"
    suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    passed = total - failures - errors - skipped
    broken = [case.get("name") for case in suite.iter("testcase") if {"failure", "error"} & {x.tag for x in case}]
    detail = f"{passed} of {total} tests passed" + (f", {skipped} skipped" if skipped else "")
    if broken:
        detail += f"; failed: {', '.join(broken[:3])}" + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
    return "passed" if status == 0 and passed else "failed", detail


def _environment(place: Place) -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), known.get("PYTHONPATH")]))
    # In a dry run, kernels run in Triton's interpreter.
    return known | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if place.dry else {})


def _conditions(place: Place) -> dict[str, Any]:
    import torch

    from residua.lab.records.provenance import circumstances, version

    here = circumstances(torch.device(place.device))
    kept = {name: here[name] for name in ("date", "commit", "python", "torch", "transformers", "device")}
    return kept | {"triton": version("triton"), "cuda": torch.version.cuda}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]]
    return next((line for line in reversed(lines) if line), "it printed nothing")[:300]


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, without a torn last one."""
    from residua.lab.records.jsonlines import read

    return read(path)


# What the steps `autocast`, `compile`, `graphs` and `ddp` do, each in a process of its own.


def check_autocast(place: Place) -> int:
    from residua.connections import PRESETS

    return _check_all([_with_kernels(name) for name in PRESETS], lambda name: _check_step(place, name))


def check_compile(place: Place) -> int:
    import torch

    def check(name: str) -> Any:
        torch.compiler.reset()
        return _check_step(place, name, compile=not place.dry)

    return _check_all(["ddl-cc", "ddl-tc", "mhc", "mhc:implementation=triton", "attnres"], check)


def check_graphs(place: Place) -> int:
    import torch

    from benchmarks.generate import Decoding, GenerateSettings

    tiny = {"layers": 2, "dim": 128, "heads": 2, "head_dim": 64, "vocab_size": 512, "prompt_length": 16}
    settings = GenerateSettings(device=place.device, compile=not place.dry, new_tokens=4, **tiny)

    def check(name: str) -> Any:
        torch.compiler.reset()
        return Decoding(name, 2, settings).check()

    return _check_all(["residual", "ddl-cc", "ddl-tc", "mhc:implementation=triton"], check)


def _check_step(place: Place, connection: str, compile: bool = False) -> Any:
    from benchmarks.exact import check
    from residua.lab.experiment import model_config
    from residua.lab.training import load_config

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "head_dim": 16, "vocab_size": 64}
    if not place.dry:
        sizes = {
            "num_hidden_layers": 4,
            "hidden_size": 384,
            "num_attention_heads": 3,
            "head_dim": 128,
            "vocab_size": 4096,
        }
    run = load_config(
        "tiny",
        {
            **{f"model.{name}": size for name, size in sizes.items()},
            "model.connection": connection,
            "train.sequence_length": 4 if place.dry else 256,
            "train.batch_size": 2,
            # Triton's interpreter rounds to bfloat16 in its own way.
            "train.precision": "float32" if place.dry else "bfloat16",
            "train.compile": compile,
            "train.device": place.device,
        },
    )
    return check(run, model_config(run))


def _with_kernels(preset: str) -> str:
    from residua.connections import SCHEMES

    has = "implementation" in SCHEMES[_scheme(preset)].__dataclass_fields__
    return f"{preset}:implementation=triton" if has else preset


def _check_all(names: Sequence[str], check: Callable[[str], Any]) -> int:
    """Check each name and print one line for it; return 1 if one failed, whatever the others did."""
    wrong = []
    for name in names:
        try:
            print(f"{name}: errors {check(name)}", flush=True)
        except Exception as error:  # the next one may work
            wrong.append(name)
            reason = next(iter(str(error).splitlines()), "")
            print(f"{name}: FAILED, {type(error).__name__}: {reason}", flush=True)
    print(f"{len(names) - len(wrong)} of {len(names)} right" + (f"; wrong: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def check_ddp(place: Place) -> int:
    """Train a few steps in one process and under torchrun with one rank; the losses must agree."""
    from residua.lab.records import jsonlines

    model = "--model.hidden_size 64 --model.num_hidden_layers 2 --model.num_attention_heads 2 --model.head_dim 32"
    train = "--train.steps 8 --train.batch_size 4 --train.sequence_length 64 --train.warmup_steps 2 --train.lr 1e-3"
    common = [*model.split(), *train.split(), "--train.tensorboard", "false", "--train.device", place.device]
    wrong = []
    with tempfile.TemporaryDirectory() as home:
        data = Path(home, "data")
        text = Path(home, "text")
        text.mkdir()
        for number in range(60):
            (text / f"{number:02d}.txt").write_text(f"Text number {number} tells of {number**2} things.\n" * 6)
        prepare = ["prepare", "--source", str(text), "--out", str(data), "--tokenizer", "byte"]
        subprocess.run([sys.executable, "-m", "residua", *prepare], check=True)
        # Of the "--": torchrun takes --run for one of its own options.
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "--"]
        for connection, precision, bound in (("ddl-tc", "float32", 1e-4), ("mhc", "bfloat16", 1e-2)):
            losses = []
            for name, start in (("alone", [sys.executable, "-m"]), ("ddp", torchrun)):
                folder = Path(home, f"{connection}-{name}")
                argv = ["residua", "train", "--config", "tiny", "--run", str(folder), *common]
                argv += ["--data.path", str(data), "--model.connection", connection]
                argv += ["--train.precision", precision]
                subprocess.run([*start, *argv], check=True)
                losses.append([row["loss"] for row in jsonlines.read(folder / "metrics.jsonl")])
            gap = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
            print(f"{connection} in {precision}: losses within {gap:.1e} of one process (at most {bound:g})")
            if not gap <= bound:  # also where it is not a number
                wrong.append(f"{connection} in {precision}")
    print(f"DDP on one rank: wrong: {', '.join(wrong)}" if wrong else "DDP on one rank trains as one process does")
    return 1 if wrong else 0


def open_text(place: Place) -> int:
    """Unpack the text of ResBench where it is not; in a dry run make a tiny one, and tiny studies of it."""
    if not place.dry:
        missing = [name for name in TEXTS if not (DATA / name / "index.json").exists()]
        if missing and not PACKED.exists():
            print(f"{DATA} must have {' and '.join(missing)}, or {PACKED} of --pack; resbench/README.md makes them")
            return 1
        if missing:
            with tarfile.open(PACKED) as archive:
                archive.extractall(DATA, filter="data")
        print("unpacked" if missing else "it is there")
        return 0
    for name in ("gpu-rates", "rivals-1M", "gpu-write-only"):
        place.path(f"{name}.yaml").write_text(_tiny_study(STUDIES / f"{name}.yaml"), encoding="utf-8")
    text = place.path("lines")
    text.mkdir(parents=True, exist_ok=True)
    for number in range(60):
        (text / f"{number:02d}.txt").write_text(f"Text number {number} tells of {number**2} things.\n" * 6)
    prepare = ["prepare", "--source", str(text), "--out", str(place.path("text")), "--tokenizer", "byte"]
    shutil.rmtree(place.path("text"), ignore_errors=True)
    return subprocess.run(_residua(*prepare)).returncode


def _tiny_study(path: Path) -> str:
    """The study of a file with models of a few thousand parameters, one seed and a handful of steps, on the CPU."""
    import yaml

    study = yaml.safe_load(path.read_text(encoding="utf-8"))
    small = {"train.batch_size": 2, "train.sequence_length": 16, "model.max_position_embeddings": 16}
    study["set"] |= small | {"train.device": "cpu", "train.precision": "float32", "train.compile": False}
    del study["set"]["data.further_validation"]
    layers = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
    for size in study["sizes"].values():
        size |= {f"model.{name}": value for name, value in layers.items()}
    study.pop("longer", None)
    return yaml.safe_dump(study | {"tokens_per_parameter": 0.05, "epochs": 100}, sort_keys=False)


def pack() -> int:
    """Write the text of ResBench into one file, and return 1 if that is larger than what may travel."""
    with tarfile.open(PACKED, "w:xz", preset=9) as archive:
        for name in TEXTS:
            archive.add(DATA / name, name)
    size = PACKED.stat().st_size
    print(f"{PACKED}: {size / 2**20:.1f} MiB, at most {MOST_PACKED / 2**20:.0f}")
    return int(size > MOST_PACKED)


CHECKS = {"compile": check_compile, "autocast": check_autocast, "graphs": check_graphs, "ddp": check_ddp}
CHECKS["text"] = open_text


# The summary.


def summary(place: Place, wanted: Sequence[Step]) -> str:
    """Return what the records say, as Markdown."""
    latest = {row["step"]: row for row in rows(place.path("steps.jsonl"))}
    records = rows(place.path("bench.jsonl"))
    machine = next(reversed(latest.values()), {})
    versions = ", ".join(
        f"{name} {machine.get(name)}" for name in ("torch", "cuda", "triton", "transformers", "commit")
    )
    parts = [f"# {'A dry run on the CPU' if place.dry else machine.get('device', 'No step ran')}\n\n{versions}"]
    known = [(step, latest.get(step.name, {"result": "not reached", "seconds": 0, "detail": ""})) for step in wanted]
    table = [[step.name, row["result"], f"{row['seconds']:.0f}", row["detail"]] for step, row in known]
    counts = ", ".join(
        f"{sum(cells[1] == result for cells in table)} {result}"
        for result in ("passed", "failed", "timed out", "not reached")
        if any(cells[1] == result for cells in table)
    )
    parts += [f"## Steps: {counts}", _markdown(["step", "result", "seconds", "detail"], table)]
    parts += _operations(records) + _models(records) + _generation(records)
    return "\n\n".join(parts) + "\n"


def _operations(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the time of every operation, and which implementation "auto" should choose."""
    found: dict[tuple, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for record in records:
        if record.get("benchmark") == "ops":
            key = tuple(record[name] for name in ("operation", "dtype", "tokens", "dim", "channels"))
            found.setdefault(key, {})[record["implementation"], record["pass"]] = record
    if not found:
        return []
    table = []
    for (operation, dtype, *sizes), timed in found.items():
        for kind in ("forward", "forward+backward"):
            seconds = {name: record["median_seconds"] for (name, way), record in timed.items() if way == kind}
            choice = ""
            if {"reference", "triton"} <= seconds.keys():
                choice = min(("reference", "triton"), key=seconds.__getitem__)
                choice += "" if choice == "triton" else " (auto takes triton)"
            others = [f"{name} {1e6 * taken:.1f}" for name, taken in seconds.items() if name not in OURS]
            own = [f"{1e6 * seconds[name]:.1f}" if name in seconds else "" for name in OURS]
            share = [record["share_of_copy"]["median"] for (_, way), record in timed.items() if way == kind]
            where = f"{operation}, {' x '.join(map(str, sizes))}, {dtype}, {kind}"
            table.append([where, *own, ", ".join(others), f"{max(share):.2f}", choice])
    head = ["operation, tokens x dim x channels", *(f"{name}, us" for name in OURS), "others, us", "best share of copy"]
    return ["## Operations: what `auto` should choose on this device", _markdown([*head, "auto should choose"], table)]


OURS = ("reference", "triton", "compiled", "auto")


def _models(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the training steps, which are the records of `residua cost step`."""
    found = {_step_key(record): record for record in records if "train" in record}
    first = {alike: record for (_, alike), record in reversed(found.items())}
    table = []
    for (scheme, alike), record in found.items():
        tokens = record["train"]["batch_size"] * record["train"]["sequence_length"]
        peak = "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:,.0f}"
        table.append(
            [
                scheme,
                *alike,
                f"{1e3 * record['step_seconds']:.1f}",
                f"{tokens / record['step_seconds']:,.0f}",
                _quartiles(record["time_ratio"]),
                f"{record['vectors'] - first[alike]['vectors']:+.2f}",
                peak,
            ]
        )
    head = [
        "scheme",
        "layers x width, batch x length",
        "compiled",
        "ms a step",
        "tokens/s",
        "times the plain residual",
        "vectors kept above it",
        "peak MiB",
    ]
    return ["## Training steps", _markdown(head, table)] if table else []


def _step_key(record: Mapping[str, Any]) -> tuple[str, tuple[str, str]]:
    model, train = record["model"], record["train"]
    sizes = f"{model['num_hidden_layers']} x {model['hidden_size']}, {train['batch_size']} x {train['sequence_length']}"
    return record["scheme"], (sizes, "yes" if train["compile"] else "no")


def _generation(records: Sequence[Mapping[str, Any]]) -> list[str]:
    found = {_key(record): record for record in records if record.get("benchmark") == "generate"}
    table = [
        [preset, compiled, str(batch), f"{1e3 * record['median_seconds_per_token']:.2f}", _quartiles(record["ratio"])]
        for (preset, compiled, batch), record in found.items()
    ]
    head = ["preset", "CUDA graphs", "sequences", "ms a token", "times the plain residual"]
    return ["## Generation", _markdown(head, table)] if table else []


def _key(record: Mapping[str, Any]) -> tuple[str, str, int]:
    return record["preset"], "yes" if record["settings"]["compile"] else "no", record["batch_size"]


def _quartiles(ratio: Mapping[str, float]) -> str:
    return "{median:.3f} [{lower:.3f}, {upper:.3f}]".format(**ratio)


def _markdown(header: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "/") for cell in row] for row in (header, ["---"] * len(header), *table)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the records (default: runs/gpu, or runs/gpu-dry)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call altogether (%(default)g)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only steps with one of these words in their names")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: collect the tests, measure tiny sizes")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    parser.add_argument("--pack", action="store_true", help="write the text of ResBench into one file and stop")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    out = arguments.out or ROOT / "runs" / ("gpu-dry" if arguments.dry_run else "gpu")
    place = Place(out.resolve(), arguments.dry_run)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    if arguments.pack:
        return pack()
    import torch

    if not (arguments.dry_run or arguments.list or torch.cuda.is_available()):
        print("gpu needs a machine with a CUDA device, found none; --dry-run tries it on the CPU", file=sys.stderr)
        return 2
    if arguments.check:
        return CHECKS[arguments.check](place)
    wanted = [step for step in steps(place) if not arguments.only or any(word in step.name for word in arguments.only)]
    if arguments.list:
        for step in wanted:
            print(f"{step.name:40} at most {step.limit:3.0f} s  {step.what}")
        return 0
    try:
        run(place, wanted, 60 * arguments.minutes)
    except KeyboardInterrupt:
        print("interrupted; the next call goes on here")
    text = summary(place, wanted)
    place.path("summary.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten: {place.path('summary.md')}")
    latest = {row["step"]: row["result"] for row in rows(place.path("steps.jsonl"))}
    return 0 if all(latest.get(step.name) == "passed" for step in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
