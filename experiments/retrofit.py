"""Another residual in a pretrained model: does it preserve the model, and does it pay in continued training?

    python experiments/smollm2.py models/smollm2
    python experiments/resbench_corpus.py resbench.jsonl
    python experiments/retrofit.py models/smollm2 resbench.jsonl --out runs/retrofit --steps 32 128 --seeds 0 1 2

Everything goes into one folder, one JSON line for each finished run. A kill at any moment loses no finished run, and
the same command continues. More `--steps` and `--seeds` join what is there. `connections/` has the connections trained
over frozen weights, for `residua.load_connection`.

preserve  every preset: the change of the logits, in float32 and float64, of the loss, and of greedy text
tune      the learning rate of the weights, on the plain model, and of each scheme's connections, on text of its own
train     each scheme, and the plain model beside it: connections alone, over frozen weights, and all weights
time      a step of each, in interleaved rounds

A window is 128 tokens from the middle of a document, and each has a document of its own. The hashes of the lines decide
which, so no run sees a token twice, and tuning, training and validation share no document. Equal seeds have equal
batches.
"""

import argparse
import copy
import hashlib
import json
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import residua
from residua.connections import PRESETS, describe
from residua.errors import InputError, RunError, first_line
from residua.lab.cost.timing import compare, process_clock
from residua.records import jsonlines
from residua.records.durable import file_sha256, replacing
from residua.records.jobs import Job, Record, open_runs, run_jobs
from residua.records.provenance import circumstances

SCHEMES = ("hc", "mhc", "attnres-block", "gated-orthogonal", "gated-delta")
PLAIN = {"connections": "norms", "all": "residual"}
"""What stands beside the schemes in each mode: over frozen weights the plain model, of which the gains of its norms are
trained, 35,136 numbers in SmolLM2-135M; else the plain model."""
TUNED = (*(("connections", name) for name in ("norms", *SCHEMES)), ("all", "residual"))
"""What has a learning rate of its own. Where all weights are trained, the plain model's and a scheme's are combined."""
LENGTH, BATCH = 128, 2
WARMUP = 4
CLIP = 1.0
BETAS = (0.9, 0.95)
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST = {"connections": 3e-3, "all": 1e-4}
"""Where the search for a learning rate begins: here and at its neighbours, then on while the best is at the edge."""
TUNING_STEPS = 16
SEED_STEPS = 1024
"""Steps for which each seed has text of its own."""
VALIDATION, TUNING = 32, 16  # windows
PRESERVED = 8  # of the windows of validation
SAVE_EVERY = 64  # steps
PROMPTS = ("The capital of France is", "The function returns")
NEW_TOKENS = 20
ROUNDS = 7


class Text:
    """Windows of a corpus, a file of JSON lines with a `text`, in an order that depends on its lines alone."""

    SHORTEST = 4000  # bytes of a line that has a window

    def __init__(self, corpus: Path, model: Path):
        from transformers import AutoTokenizer

        self._corpus = corpus
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        places, place = [], 0
        with corpus.open("rb") as file:
            for line in file:
                if len(line) >= self.SHORTEST:
                    places.append((hashlib.sha256(line).digest(), place))
                place += len(line)
        self._places = [place for _, place in sorted(places)]

    def windows(self, first: int, count: int) -> Tensor:
        """Return the token ids of windows `first` to `first + count`: (count, LENGTH + 1). Raises InputError."""
        if first + count > len(self._places):
            raise InputError(
                f"{self._corpus} must be {first + count} documents of {self.SHORTEST} bytes, got "
                f"{len(self._places)}; ask for fewer steps or seeds"
            )
        with self._corpus.open("rb") as file:
            rows = [self._window(file, place) for place in self._places[first : first + count]]
        return torch.tensor(rows)

    def _window(self, file: Any, place: int) -> list[int]:
        """Return tokens from the first paragraph after the middle of a document, or from the middle itself."""
        file.seek(place)
        text = json.loads(file.readline())["text"]
        middle = len(text) // 2
        begin = text.find("\n\n", middle, middle + 1000)
        text = text[middle if begin < 0 else begin + 2 :][: 16 * LENGTH]
        ids = self._tokenizer(text, add_special_tokens=False).input_ids[: LENGTH + 1]
        if len(ids) <= LENGTH:
            raise InputError(f"{self._corpus} must be {LENGTH + 1} tokens in {text[:40]!r}..., got {len(ids)}")
        return ids

    def validation(self) -> Tensor:
        return self.windows(0, VALIDATION)

    def tuning(self) -> tuple[Tensor, Tensor]:
        """Return the windows that tuning is judged by, and those that it trains on."""
        found = self.windows(VALIDATION, TUNING + TUNING_STEPS * BATCH)
        return found[:TUNING], found[TUNING:]

    def training(self, seed: int, steps: int) -> Tensor:
        first = VALIDATION + TUNING + TUNING_STEPS * BATCH + seed * SEED_STEPS * BATCH
        return self.windows(first, steps * BATCH)


opened = lru_cache(Text)


@lru_cache(maxsize=1)
def plain_model(folder: Path) -> Any:
    """Return the model in `folder`, in float32; nothing may change it. Raises InputError."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} must be a folder of transformers: {first_line(error)}") from error


def trainable(model: nn.Module, mode: str, scheme: str) -> list[list[nn.Parameter]]:
    """Return the weights and the connections that are trained; all others are frozen."""
    named = dict(model.named_parameters())
    connections = [parameter for name, parameter in named.items() if ".stream." in name]
    if mode == "all":
        weights = [parameter for name, parameter in named.items() if ".stream." not in name]
    else:
        weights = [parameter for name, parameter in named.items() if scheme == "norms" and "norm" in name]
    model.requires_grad_(False)
    for parameter in (*weights, *connections):
        parameter.requires_grad_(True)
    return [weights, connections]


def built(base: Any, scheme: str, own: str | None) -> Any:
    """Return a copy of `base` with another residual, which shares all weights but those with `own` in their names."""
    shared = {id(parameter): parameter for name, parameter in base.named_parameters() if own is None or own not in name}
    model = copy.deepcopy(base, shared)
    return residua.convert(model, scheme) if scheme in SCHEMES else model


def loss_of(model: nn.Module, windows: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of windows: (n, LENGTH + 1); matrix products in bfloat16, as autocast has it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    # Tokens are along axis 1, where cross_entropy expects the classes.
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), windows[:, 1:], reduction=reduction)


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> list[float]:
    """Return the loss of each window."""
    model.eval()
    parts = [loss_of(model, part, reduction="none").double().mean(1) for part in windows.split(4)]
    return torch.cat(parts).tolist()


def optimizer_of(weights: list, connections: list, lr: float, connection_lr: float | None) -> torch.optim.AdamW:
    groups = [{"params": found, "lr": rate} for found, rate in ((weights, lr), (connections, connection_lr)) if found]
    for group in groups:
        group["initial_lr"] = group["lr"]
    return torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0, fused=True)


def take_step(model: nn.Module, batch: Tensor, optimizer: torch.optim.AdamW) -> float:
    model.train()
    loss = loss_of(model, batch)
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    model_folder: Path,
    corpus: Path,
    key: str,
    mode: str,
    scheme: str,
    rates: tuple[float | None, float | None],
    steps: int,
    seed: int | None,
    *,
    place: Path | None,
    report: Callable[[int], None],
) -> Record:
    """Train with batches of a seed, or of tuning for None. The learning rate is constant after warmup.

    So every point of the curve is what a run of that length gives, and a scheme can be read off at fewer steps.
    """
    text = opened(corpus, model_folder)
    judged, batches = text.tuning() if seed is None else (text.validation(), text.training(seed, steps))
    torch.manual_seed(0 if seed is None else seed)
    own = "" if mode == "all" else "norm" if scheme == "norms" else None
    model = built(plain_model(model_folder), scheme, own)
    groups = trainable(model, mode, scheme)
    trained = [parameter for group in groups for parameter in group]
    optimizer = optimizer_of(groups[0], groups[1], *rates)
    judge_at = {steps} if seed is None else {math.ceil(steps * part / 4) for part in (2, 3, 4)}
    losses: list[float] = []
    curve: list[dict[str, float]] = []
    if place is not None and place.is_file():
        state = torch.load(place, weights_only=True)
        losses, curve = state["losses"], state["curve"]
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for parameter, saved in zip(trained, state["trained"], strict=True):
                parameter.copy_(saved)
    report(len(losses))
    found: list[float] = []
    for step, batch in enumerate(batches.split(BATCH), 1):
        if step <= len(losses):
            continue
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1.0, step / WARMUP)
        losses.append(take_step(model, batch, optimizer))
        if not math.isfinite(losses[-1]):
            found = [math.nan]
            break
        if step in judge_at:
            found = evaluate(model, judged)
            curve.append({"step": step, "loss": math.fsum(found) / len(found)})
        if place is not None and step % SAVE_EVERY == 0 and step < steps:
            state = {"losses": losses, "curve": curve, "optimizer": optimizer.state_dict(), "trained": trained}
            with replacing(place) as file:
                torch.save(state, file)
        report(step)
    if place is not None and mode == "connections" and scheme in SCHEMES and seed is not None:
        residua.save_connection(model, place.parent.with_name("connections") / f"{scheme}-{steps}-{seed}")
    return {
        "key": key,
        "kind": "tune" if seed is None else "train",
        "mode": mode,
        "scheme": scheme,
        "steps": steps,
        "seed": seed,
        "lr": rates[0],
        "connection_lr": rates[1],
        "tokens": len(losses) * BATCH * LENGTH,
        "parameters": sum(parameter.numel() for parameter in trained),
        "train_losses": losses,
        "curve": curve,
        "val_loss": math.fsum(found) / len(found),
        "window_losses": found,
        **circumstances(torch.device("cpu")),
    }


def untrained(model_folder: Path, corpus: Path, key: str, *, place: Path | None, report: Callable) -> Record:
    """Return the loss of the model as it is, on the text and by the code that judge the runs."""
    report(0)
    found = evaluate(plain_model(model_folder), opened(corpus, model_folder).validation())
    return {"key": key, "kind": "untrained", "val_loss": math.fsum(found) / len(found), "window_losses": found,
            **circumstances(torch.device("cpu"))}  # fmt: skip


def measure(model_folder: Path, corpus: Path, key: str, mode: str, *, place: Path | None, report: Callable) -> Record:
    """Time a training step of every scheme: process time of one thread, in rounds in which all take turns.

    The models share their weights, and the optimizer of the weights, which is the same work for all.
    """
    report(0)
    windows = opened(corpus, model_folder).training(0, 1)
    base = built(plain_model(model_folder), "residual", "")
    names = (PLAIN[mode], *SCHEMES)
    models = {name: built(base, name, None) for name in names}
    groups = {name: trainable(models[name], mode, name) for name in reversed(names)}
    optimizers = {name: optimizer_of([], found[1], 0.0, 0.0) for name, found in groups.items() if found[1]}
    of_weights = optimizer_of(groups[PLAIN[mode]][0], [], 0.0, None)

    def step(name: str) -> None:
        weights, connections = trainable(models[name], mode, name)
        loss_of(models[name].train(), windows).backward()
        nn.utils.clip_grad_norm_([*weights, *connections], CLIP)
        if weights:
            of_weights.step()
        if connections:
            optimizers[name].step()
        models[name].zero_grad()

    calls: dict[str, Callable[[], None]] = {name: lambda name=name: step(name) for name in names}
    timing = compare(calls, PLAIN[mode], rounds=ROUNDS, warmup=1, clock=process_clock)
    return {
        "key": key,
        "kind": "time",
        "mode": mode,
        "baseline": PLAIN[mode],
        "tokens": BATCH * LENGTH,
        "seconds": {name: list(timing.seconds[name]) for name in names},
        "ratio": {name: timing.ratio(name)._asdict() for name in names},
        "parameters": {name: sum(p.numel() for group in groups[name] for p in group) for name in names},
        **circumstances(torch.device("cpu")),
    }


@torch.no_grad()
def preserve(model_folder: Path, corpus: Path, key: str, scheme: str, *, place: Any, report: Callable) -> Record:
    """Convert the model to a preset and compare what it computes; or say why the preset cannot preserve it.

    `rounding` is how far the plain model in float32 is from itself in float64, on the same tokens: what float32 gives.
    """
    report(0)
    before, facts = _before(model_folder, corpus)
    record = {"key": key, "kind": "preserve", "scheme": scheme, "prompts": PROMPTS, **facts}
    try:
        model = residua.convert(copy.deepcopy(plain_model(model_folder)), scheme)
    except InputError as error:
        return {**record, "preserves": False, "reason": first_line(error), **circumstances(torch.device("cpu"))}
    after = _computed(model, before.windows, before.prompts)
    wide = residua.convert(in_float64(plain_model(model_folder)), scheme)
    logits64 = wide(before.windows[:1, :-1], use_cache=False).logits
    return {
        **record,
        "preserves": True,
        "options": describe(PRESETS[scheme].preserving()),
        "change": float((after.logits - before.logits).abs().max()),
        "change_float64": float((logits64 - before.logits64).abs().max()),
        "loss": after.loss,
        "texts": after.texts,
        "same_text": after.texts == before.texts,
        **circumstances(torch.device("cpu")),
    }


class Computed(NamedTuple):
    """What a model computes in float32: logits and loss of some windows, and greedy tokens after each prompt."""

    logits: Tensor
    loss: float
    texts: list[list[int]]
    windows: Tensor
    prompts: list[Tensor]
    logits64: Tensor | None = None  # in float64, of the first window


def _computed(model: Any, windows: Tensor, prompts: list[Tensor]) -> Computed:
    logits = model(windows[:, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.double().transpose(1, 2), windows[:, 1:])
    return Computed(logits, loss.item(), [greedy(model, prompt) for prompt in prompts], windows, prompts)


@lru_cache(maxsize=1)
def _before(model_folder: Path, corpus: Path) -> tuple[Computed, Record]:
    """Return what the plain model computes, and the facts of it that every record has."""
    from transformers import AutoTokenizer

    model, tokenizer = plain_model(model_folder), AutoTokenizer.from_pretrained(model_folder)
    prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    found = _computed(model, opened(corpus, model_folder).validation()[:PRESERVED], prompts)
    logits64 = in_float64(model)(found.windows[:1, :-1], use_cache=False).logits
    facts = {
        "tokens": found.windows[:, 1:].numel(),
        "largest_logit": float(found.logits.abs().max()),
        "rounding": float((found.logits[:1] - logits64).abs().max()),
        "loss_before": found.loss,
        "texts_before": found.texts,
    }
    return found._replace(logits64=logits64), facts


def in_float64(model: Any) -> Any:
    """Return a copy that computes in float64 throughout: the RMSNorm of Llama is in float32 in every model."""
    model = copy.deepcopy(model).double()
    for name, norm in list(model.named_modules()):
        if type(norm).__name__ == "LlamaRMSNorm":
            own = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
            own.load_state_dict(norm.state_dict())
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, own)
    return model


def greedy(model: Any, prompt: Tensor) -> list[int]:
    """Return the ids of the most probable next tokens, one after the other."""
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return ids[0, prompt.shape[1] :].tolist()


def waiting(losses: Mapping[float, float | None], first: float) -> list[float]:
    """Return the learning rates to try next: `first` and its neighbours, then those of the best; none at the end."""
    best = RATES.index(first)
    if all(rate in losses for rate in RATES[max(0, best - 1) : best + 2]):
        best = RATES.index(chosen(losses))
    return [rate for rate in RATES[max(0, best - 1) : best + 2] if rate not in losses]


def chosen(losses: Mapping[float, float | None]) -> float:
    """Return the learning rate with the smallest loss; one that diverged has none."""
    return min(losses, key=lambda rate: math.inf if losses[rate] is None else losses[rate])


def tuned(records: Mapping[Hashable, Record]) -> dict[tuple[str, str], dict[float, float | None]]:
    """Return the losses of tuning by mode and scheme, then by learning rate."""
    found: dict[tuple[str, str], dict[float, float | None]] = {}
    for row in records.values():
        if row["kind"] == "tune":
            rate = row["lr"] if row["connection_lr"] is None else row["connection_lr"]
            found.setdefault((row["mode"], row["scheme"]), {})[rate] = row["val_loss"]
    return found


def plan(arguments: argparse.Namespace) -> Callable[[Mapping[Hashable, Record]], list[Job]]:
    """Return what says which runs there are, given the finished ones: training waits for its learning rates."""
    paths = arguments.model, arguments.corpus

    def jobs(finished: Mapping[Hashable, Record]) -> list[Job]:
        return [job for part in arguments.parts for job in parts[part](finished)]

    def preserving(finished: Mapping[Hashable, Record]) -> Iterator[Job]:
        for name in PRESETS:
            yield Job(key := f"preserve {name}", preserve, (*paths, key, name), cost=20)

    def timing(finished: Mapping[Hashable, Record]) -> Iterator[Job]:
        for mode in PLAIN:
            yield Job(key := f"time {mode}", measure, (*paths, key, mode), cost=100, order=(2,))

    def training(finished: Mapping[Hashable, Record]) -> Iterator[Job]:
        if "residual" in arguments.schemes:
            yield Job("untrained", untrained, (*paths, "untrained"), cost=10, order=(0,))
        others = {row["key"]: row for folder in arguments.also for row in jsonlines.read(folder / "records.jsonl")}
        losses = tuned({**others, **finished})
        rates: dict[tuple[str, str], float] = {}
        for mode, scheme in TUNED:
            own = losses.get((mode, scheme), {})
            left = waiting(own, FIRST[mode])
            for rate in left if scheme in arguments.schemes else ():
                key = f"tune {mode} {scheme} {rate:g}"
                run = key, mode, scheme, (None, rate) if scheme in SCHEMES else (rate, None), TUNING_STEPS, None
                yield Job(key, train, (*paths, *run), TUNING_STEPS, order=(1,))
            if not left:
                rates[mode, scheme] = chosen(own)
        for i, steps in enumerate(arguments.steps):
            for seed in arguments.seeds:
                for j, (mode, scheme) in enumerate((m, s) for m in PLAIN for s in (PLAIN[m], *SCHEMES)):
                    if scheme not in arguments.schemes:
                        continue
                    weights = (mode, PLAIN[mode]) if mode == "all" or scheme not in SCHEMES else None
                    connections = ("connections", scheme) if scheme in SCHEMES else None
                    if {weights, connections} <= {*rates, None}:
                        pair = weights and rates[weights], connections and rates[connections]
                        key = f"train {mode} {scheme} {steps} {seed}"
                        run = key, mode, scheme, pair, steps, seed
                        yield Job(key, train, (*paths, *run), steps, 1.0 + (mode == "all") / 2, (3 + i, seed, j))

    parts = {"preserve": preserving, "train": training, "time": timing}
    return jobs


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what all runs of a folder have in common. Raises InputError for files that are not there."""
    source = arguments.model / "source.json"
    try:
        weights = file_sha256(arguments.model / "model.safetensors")
        found = json.loads(source.read_text(encoding="utf-8")) if source.exists() else {}
        corpus = file_sha256(arguments.corpus)
    except (OSError, ValueError) as error:
        raise InputError(
            f"expected a model that experiments/smollm2.py made and a corpus of experiments/resbench_corpus.py, got: "
            f"{first_line(error)}"
        ) from error
    return {
        "gguf_sha256": found.get("gguf_sha256"),
        "model_sha256": weights,
        "corpus_sha256": corpus,
        "length": LENGTH,
        "batch": BATCH,
        "warmup": WARMUP,
        "clip": CLIP,
        "betas": list(BETAS),
        "rates": list(RATES),
        "first": FIRST,
        "tuning_steps": TUNING_STEPS,
        "seed_steps": SEED_STEPS,
        "validation": VALIDATION,
        "tuning": TUNING,
        "precision": "matrix products in bfloat16, weights in float32",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder that experiments/smollm2.py made")
    parser.add_argument("corpus", type=Path, help="the file that experiments/resbench_corpus.py made")
    parser.add_argument("--out", type=Path, default=Path("runs/retrofit"))
    parser.add_argument("--steps", type=int, nargs="+", default=[32], help=f"lengths of runs, at most {SEED_STEPS}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parts = ("preserve", "train", "time")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to do, of what is above")
    names = (*PLAIN.values(), *SCHEMES)
    parser.add_argument("--schemes", nargs="+", choices=names, default=list(names), help="which of them to train")
    parser.add_argument(
        "--also", type=Path, nargs="+", default=[], help="folders of other processes, whose tuning counts here too"
    )
    arguments = parser.parse_args(argv)
    if not all(4 <= steps <= SEED_STEPS for steps in arguments.steps) or min(arguments.seeds) < 0:
        parser.error(f"give --steps from 4 to {SEED_STEPS} and --seeds from 0")
    try:
        common = settings(arguments)
        with open_runs(arguments.out, common) as records:
            facts = {name: common[name] for name in ("gguf_sha256", "corpus_sha256")}
            run_jobs(plan(arguments), records, finish=lambda job, record: {**record, **facts})
    except (InputError, RunError, KeyboardInterrupt) as error:
        print(f"retrofit: {first_line(error)}", file=sys.stderr)
        return {InputError: 2, RunError: 1}.get(type(error), 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
