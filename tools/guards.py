"""Compute at two commits what a change of structure must not change, and compare it to the last bit.

    python tools/guards.py BASE [HEAD]               HEAD is the working tree by default
    python tools/guards.py BASE --parts models copies
    python tools/guards.py BASE --times              step and decoding time as ratios, and graph breaks
    python tools/guards.py --write                   write tests/guards.json anew

models       every preset and variant: logits, loss and gradients in three dtypes, also under checkpointing
generation   every preset: greedy, beam search, padded, static cache, sampling
copies       every preset: deepcopy, pickle, save_pretrained, a process that is spawned
converted    five families of transformers with six connections: logits, gradients, padding, generation, reloading
authors      the checkpoints in tests/models/authors, with gradients
training     ten steps of every preset by `residua train`: float32, bfloat16, checkpointing; and what they wrote
ranks        ten steps on two gloo ranks
geometry     twenty steps of every task, model and operator of the geometry benchmarks: their records

Both commits run on this machine with this interpreter, because the last bit depends on the processor and on torch: a
record of bits would hold for one kind of processor. What `--write` keeps is compared within a tolerance, by
tests/test_guards.py. Both are asked through public names only, so that modules may move.
"""

import argparse
import copy
import hashlib
import inspect
import io
import json
import multiprocessing
import os
import pickle
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "guards.json"
TIMES = Path(__file__).with_name("guards.jsonl")
KINDS = ("residual", "ddl-tc", "ddl-cc-ec", "mhc", "edelta", "attnres-block", "mudd")  # one for each kind of state
CONVERSIONS = ("residual", "lambdas", "hc", "mhc", "attnres-block", "ddl-tc")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NUMBERS = ("models", "generation", "converted")
PAD, EOS, VOCAB = 1, 0, 48
OPTIONS = """
    --config tiny --model.num_hidden_layers 2 --model.hidden_size 64 --model.num_attention_heads 2 --model.head_dim 32
    --train.steps 10 --train.warmup_steps 2 --train.batch_size 4 --train.sequence_length 64 --train.evaluate_every 10
    --train.tensorboard false --train.device cpu
"""
TRAINED = {
    "float32": "",
    "bfloat16": "--train.precision bfloat16",
    "checkpointing": "--train.activation_checkpointing true",
}

GEOMETRY = (
    "reflection",
    "quick --device cpu --tasks gyroscope",
    "quick --device cpu --tasks gyroscope --models hc edelta-stream attnres edelta-token:gamma_init=0.5",
    "quick --device cpu --tasks stability near-pi near-pi-multi reflection --models residual jpmhc edelta-sequence",
)
BY_CLOCK = ("seconds", "circumstances")

Tensors = dict[str, Tensor]
Results = Iterator[tuple[str, Tensors]]


# What is computed: each part yields names and tensors.


def shaken(model: nn.Module, scale: float = 0.3) -> Any:
    """The model with noise on every parameter, drawn by its name: gates leave zero, filters the identity."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((scale * noise).to(parameter.dtype))
    return model.eval()


def tiny(connection: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from residua.models import ResiduaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "max_position_embeddings": 64}
    config = ResiduaConfig(**sizes, **tokens, **options, connection=connection)
    return shaken(AutoModelForCausalLM.from_config(config, dtype=dtype))


def batch() -> Tensors:
    """Two rows of nine tokens; the second begins with three of padding."""
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def with_gradients(model: nn.Module, inputs: Tensors, **labels: Tensor) -> Tensors:
    model.zero_grad()
    out = model(**inputs, **labels)
    value = out.loss if labels else out[0].double().square().mean()
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.logits if labels else out[0], "loss": value, **gradients}


def schemes() -> dict[str, Any]:
    """Every preset, and the variants that the tests of the same commit try."""
    from residua.connections import PRESETS
    from support.variants import VARIANTS

    return dict.fromkeys(PRESETS) | dict(VARIANTS)


def models(names: tuple[str, ...] = (), dtypes: tuple[torch.dtype, ...] = DTYPES) -> Results:
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for name, scheme in (dict.fromkeys(names) or schemes()).items():
        for dtype in dtypes:
            model = tiny(scheme or name, dtype).train()
            yield f"{name} {dtype}", with_gradients(model, inputs, labels=labels)
            if dtype != torch.float64:
                model.gradient_checkpointing_enable()
                yield f"{name} {dtype} checkpointing", with_gradients(model, inputs, labels=labels)


def generation(names: tuple[str, ...] = ()) -> Results:
    inputs = batch()
    alone = {"input_ids": inputs["input_ids"][:1], "attention_mask": inputs["attention_mask"][:1]}
    for name in names or presets():
        model = tiny(name, embedding_init_std=2.0, tie_word_embeddings=False)
        yield f"{name} greedy", generated(model, alone)
        yield f"{name} padded", generated(model, inputs)
        yield f"{name} static", generated(model, inputs, cache_implementation="static", disable_compile=True)
        yield f"{name} beam", generated(model, inputs, num_beams=3, num_return_sequences=2)
        torch.manual_seed(7)
        yield f"{name} sampling", generated(model, inputs, do_sample=True, top_k=20)


def generated(model: Any, inputs: Tensors, **options: Any) -> Tensors:
    plain = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": PAD}
    with torch.no_grad():
        out = model.generate(**inputs, **plain | options, return_dict_in_generate=True, output_logits=True)
    return {"tokens": out.sequences, "logits": torch.stack(out.logits)}


def presets() -> tuple[str, ...]:
    from residua.connections import PRESETS

    return tuple(PRESETS)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**batch()).logits


def in_order(loaded: Any) -> Any:
    """A copy: weights stand in a file at any byte, and from there CPUs add in another order."""
    return copy.deepcopy(loaded)


def spawned(pickled: bytes) -> Tensor:
    torch.set_num_threads(1)
    return logits(pickle.loads(pickled))


def copies(names: tuple[str, ...] = ()) -> Results:
    from transformers import AutoModelForCausalLM

    for name in names or presets():
        model = tiny(name, torch.float32)
        yield f"{name} deepcopy", {"logits": logits(copy.deepcopy(model))}
        yield f"{name} pickle", {"logits": logits(pickle.loads(pickle.dumps(model)))}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
            yield f"{name} saved", {"logits": logits(in_order(loaded))}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for name in names or KINDS:
            yield f"{name} spawned", {"logits": pool.submit(spawned, pickle.dumps(tiny(name, torch.float32))).result()}


def family(name: str, dtype: torch.dtype) -> tuple[Any, Tensors]:
    """A small model of transformers with random weights, and its inputs."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64, "head_dim": 4}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sizes |= {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    sizes |= {"image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    template = AutoConfig.for_model(name)
    config = AutoConfig.for_model(name, **{key: value for key, value in sizes.items() if hasattr(template, key)})
    torch.manual_seed(0)
    causal = name in ("llama", "gpt2", "qwen3_moe")
    options = {"experts_implementation": "eager"} if name == "qwen3_moe" else {}  # what groups experts lacks float64
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config, dtype=dtype, **options)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # how transformers draws weights depends on its version
            nn.init.zeros_(parameter)
    shaken(model)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return model, {"pixel_values": pixels.to(dtype)}
    return model, batch()


def converted(names: tuple[str, ...] = (), dtypes: tuple[torch.dtype, ...] = DTYPES) -> Results:
    import residua

    for name in ("llama", "gpt2", "qwen3_moe", "modernbert", "vit"):
        for connection in names or CONVERSIONS:
            if name in ("modernbert", "vit"):
                connection = connection.replace("-tc", "-cc")  # they read in both directions
            for dtype in dtypes:
                model, inputs = family(name, dtype)
                torch.manual_seed(1)
                residua.convert(model, connection, start="fresh", **watched_on(residua.convert, name, inputs))
                shaken(model, 0.1)
                key = f"{name} {connection} {dtype}"
                yield key, with_gradients(model, inputs)
                if model.can_generate() and dtype == torch.float64:
                    yield f"{key} generation", generated(model, inputs)
                    yield f"{key} static", generated(model, inputs, cache_implementation="static", disable_compile=True)
                if dtype == torch.float32:
                    with torch.no_grad():
                        yield f"{key} reloaded", {"output": reloaded(model, name, inputs)(**inputs)[0]}


def watched_on(function: Callable[..., Any], name: str, inputs: Tensors) -> dict[str, Tensors]:
    """What a function is given besides for a model without token ids, at commits where it takes inputs."""
    taken = "inputs" in inspect.signature(function).parameters
    return {"inputs": inputs} if name == "vit" and taken else {}


def reloaded(model: Any, name: str, inputs: Tensors) -> Any:
    """Its connections alone, saved and loaded into a plain model with the same weights."""
    import residua

    with tempfile.TemporaryDirectory() as folder:
        residua.save_connection(model, folder)
        plain, _ = family(name, torch.float32)
        plain.load_state_dict(model.state_dict(), strict=False)
        return in_order(residua.load_connection(plain, folder, **watched_on(residua.load_connection, name, inputs)))


def authors(dtypes: tuple[torch.dtype, ...] = DTYPES) -> Results:
    from safetensors.torch import load_file

    from residua.models import load_authors_checkpoint

    folder = ROOT / "tests" / "models" / "authors"
    for case in json.loads((folder / "index.json").read_text(encoding="utf-8"))["cases"]:
        tensors = load_file(folder / case["file"])
        inputs = {"input_ids": tensors["input_ids"]}
        for dtype in dtypes:
            state = {key.removeprefix("param."): t.to(dtype) for key, t in tensors.items() if key.startswith("param.")}
            model = load_authors_checkpoint(case["config"], state)
            yield f"{case['name']} {dtype}", with_gradients(model, inputs, labels=tensors["input_ids"])


def command(*arguments: str) -> None:
    """Run `residua ARGUMENTS` in this process."""
    before, sys.argv = sys.argv, ["residua", *arguments]
    try:
        with redirect_stdout(io.StringIO()):
            runpy.run_module("residua", run_name="__main__")
    except SystemExit as stopped:
        if stopped.code:
            raise RuntimeError(f"residua {shlex.join(arguments)}: status {stopped.code}") from None
    finally:
        sys.argv = before


def training(names: tuple[str, ...] = ()) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder))
        for name in names or presets():
            for form, options in TRAINED.items():
                yield f"{name} {form}", trained(name, data, Path(folder) / f"{name} {form}", options)


def ranks(names: tuple[str, ...] = ("residual", "ddl-tc", "mhc", "attnres-block")) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder))
        for name in names:
            run = Path(folder) / name
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command = [*torchrun, "-m", "--", "residua", *train(name, data, run)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
            yield name, written(run)


def geometry() -> Results:
    with tempfile.TemporaryDirectory() as folder:
        for number, options in enumerate(GEOMETRY):
            out = Path(folder) / str(number)
            fixed = ["--seeds", "42", "--steps", "20", "--out", str(out)]
            command("study", "geometry", *shlex.split(options), *fixed)
            for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines():
                record = {key: value for key, value in json.loads(line).items() if key not in BY_CLOCK}
                text = json.dumps(record, sort_keys=True)  # a number's text is the number, to its last bit
                yield record["key"], {"record": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def train(name: str, data: Path, run: Path, options: str = "") -> list[str]:
    places = ["--run", str(run), "--data.path", str(data), "--model.connection", name]
    return ["train", *places, *shlex.split(OPTIONS + options)]


def trained(name: str, data: Path, run: Path, options: str) -> Tensors:
    command(*train(name, data, run, options))
    return written(run)


def prepared(folder: Path) -> Path:
    """The same text for every version of Python, as tokens."""
    (folder / "text").mkdir()
    for i in range(200):
        words = " ".join(f"word{(i * j) % 97} is {(i + j) % 13}," for j in range(120))
        (folder / "text" / f"{i:03d}.txt").write_text(f"Page {i}. {words}\n", encoding="utf-8")
    command("prepare", "--source", str(folder / "text"), "--out", str(folder / "data"), "--vocab-size", "512")
    return folder / "data"


def written(run: Path) -> Tensors:
    """What a run folder says of losses, and the tensors of its checkpoint."""
    from safetensors.torch import load_file

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    values = {
        key: torch.tensor([row[key] for row in rows if key in row], dtype=torch.float64)
        for key in ("loss", "grad_norm", "val_loss")
    }
    files = sorted(run.rglob("*.safetensors"))
    if not files or not all(map(len, values.values())):
        raise RuntimeError(f"{run} must have losses and a checkpoint, got {sorted(values)} and {files}")
    return values | {f"{path.stem}.{name}": t for path in files for name, t in load_file(path).items()}


PARTS: dict[str, Callable[[], Results]] = {
    "models": models,
    "generation": generation,
    "copies": copies,
    "converted": converted,
    "authors": authors,
    "training": training,
    "ranks": ranks,
    "geometry": geometry,
}


def digest(tensors: Tensors) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def summary(tensors: Tensors) -> dict[str, Any]:
    """Tokens as they are; of others the norm, and the sum with random weights, which no permutation keeps."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name == "tokens":
            values[name] = tensor.tolist()
        elif name in ("output", "loss", "logits"):
            flat = tensor.detach().double().reshape(-1)
            weights = torch.randn(len(flat), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            values[name] = [flat.norm().item(), (flat @ weights).item()]
    gradients = [t.double().norm() for name, t in tensors.items() if name not in values]
    return values | ({"gradients": torch.stack(gradients).norm().item()} if gradients else {})


def numbers(part: str) -> dict[str, dict[str, Any]]:
    """What tests/guards.json keeps, in float64: it depends on the processor in the last digits only."""
    float64 = (torch.float64,)
    parts = {
        "models": lambda: models(presets(), float64),
        "generation": lambda: generation(KINDS),
        "converted": lambda: converted(("hc", "ddl-tc"), float64),
    }
    return {name: summary(tensors) for name, tensors in parts[part]()}


# Two commits.


@contextmanager
def checkout(revision: str | None) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed; without a revision, the working tree."""
    if revision is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(place), revision)
        try:
            yield place
        finally:
            git("worktree", "remove", "--force", str(place))


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def start(place: Path, *arguments: str) -> subprocess.Popen:
    """This file, as it is here, on the library of another place."""
    paths = os.pathsep.join([str(place / "src"), str(place / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    script = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--in", str(place), *arguments]
    return subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True)


def answers(*processes: subprocess.Popen) -> list[dict[str, Any]]:
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a commit could not be asked; the traceback is above")
    return [dict(map(json.loads, text.splitlines())) for text in texts]


def expect_library_of(place: Path) -> None:
    import residua

    if not Path(residua.__file__).is_relative_to(place):
        raise SystemExit(f"residua must be imported from {place}, got {residua.__file__}")


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    gone = [f"gone     {name}" for name in before if name not in after]
    changed = [f"changed  {name}" for name, value in after.items() if before.get(name, value) != value]
    return gone + changed


def compare(base: Path, head: Path, parts: list[str]) -> int:
    failures = 0
    for part in parts:
        began = time.monotonic()
        before, after = answers(start(base, "--digests", part), start(head, "--digests", part))
        lines = differences(before, after)
        failures += len(lines)
        new = sum(name not in before for name in after)
        for line in lines:
            print(line)
        print(
            f"{part}: {len(before.keys() & after.keys())} compared, {len(lines)} differ or are gone, {new} new,"
            f" {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return int(failures > 0)


# Times, as ratios.


def times() -> Iterator[tuple[str, float]]:
    import torch._dynamo as dynamo
    from transformers import LlamaConfig, LlamaForCausalLM

    import residua

    ids = torch.randint(2, VOCAB, (4, 64), generator=torch.Generator().manual_seed(0))
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128}
    for name in KINDS:
        model = tiny_of(name, sizes)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield f"{name} step", fastest(step, 6)
        yield f"{name} decode", fastest(lambda model=model: decode(model, ids[:1, :8]), 3)
        dynamo.reset()
        yield f"{name} breaks", dynamo.explain(model)(ids).graph_break_count
    for name in CONVERSIONS:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, intermediate_size=256, **sizes)).eval()
        residua.convert(model, name, start="fresh")
        yield f"converted {name} decode", fastest(lambda model=model: decode(model, ids[:1, :8]), 3)


def tiny_of(connection: str, sizes: dict[str, int]) -> Any:
    from residua.models import ResiduaConfig, ResiduaForCausalLM

    torch.manual_seed(0)
    return ResiduaForCausalLM(ResiduaConfig(vocab_size=VOCAB, connection=connection, **sizes))


def decode(model: Any, ids: Tensor) -> None:
    tokens = {"min_new_tokens": 24, "max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD}
    model.generate(ids, attention_mask=torch.ones_like(ids), **tokens)


def fastest(call: Callable[[], None], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def time_both(base: Path, head: Path, commits: list[str], rounds: int = 3) -> int:
    """Interleaved rounds, one process at a time: the median of the ratios, and their range."""
    pairs = []
    for number in range(rounds):
        order = (base, head) if number % 2 else (head, base)
        measured = {place: answers(start(place, "--measure"))[0] for place in order}
        pairs.append((measured[base], measured[head]))
    record: dict[str, Any] = {"commits": commits, "rounds": rounds, "load": os.getloadavg()[0], "ratios": {}}
    for name in pairs[0][0].keys() & pairs[0][1].keys():
        if name.endswith("breaks"):
            record["ratios"][name] = [pairs[0][0][name], pairs[0][1][name]]
        else:
            ratios = sorted(after[name] / before[name] for before, after in pairs)
            record["ratios"][name] = [round(x, 3) for x in (statistics.median(ratios), ratios[0], ratios[-1])]
    for name, values in sorted(record["ratios"].items()):
        print(f"{name:32}", *values)
    with TIMES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return 0


def write() -> int:
    blocks = []
    # A line for each value, so that a diff shows what changed.
    for key, values in {part: numbers(part) for part in NUMBERS}.items():
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        blocks.append(f"{json.dumps(key)}: {{\n{rows}\n}}")
    RECORD.write_text("{" + ",\n".join(blocks) + "}\n", encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="BASE [HEAD]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--write", action="store_true")
    for name in ("--in", "--digests"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if place := getattr(arguments, "in"):
        return answer(Path(place), arguments.digests)
    if arguments.write:
        return write()
    if not 1 <= len(arguments.revisions) <= 2:
        parser.error("one or two commits must be given")
    with checkout(arguments.revisions[0]) as base, checkout(dict(enumerate(arguments.revisions)).get(1)) as head:
        commits = [git("-C", str(place), "describe", "--always", "--dirty") for place in (base, head)]
        print("comparing", *commits, flush=True)
        if arguments.times:
            return time_both(base, head, commits)
        return compare(base, head, arguments.parts)


def answer(place: Path, part: str | None) -> int:
    """Print lines of JSON: a name, and a digest or seconds."""
    from transformers.utils import logging

    expect_library_of(place)
    logging.disable_progress_bar()
    pairs = ((name, digest(tensors)) for name, tensors in PARTS[part]()) if part else times()
    for pair in pairs:
        print(json.dumps(pair), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
