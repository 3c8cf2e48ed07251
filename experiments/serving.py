"""What a residual scheme costs in serving: tokens per second of a converted model in vLLM, beside the plain model.

    python experiments/smollm2.py models/smollm2
    python experiments/serving.py models/smollm2 >> experiments/serving.jsonl    in the environment of `make vllm`

Eight prompts at once, greedy, one thread, not compiled. Every model has an engine and a process of its own; they
generate in turns, and the clock counts the CPU time of that process, so that others may compute beside. The plain model
is timed in vLLM's own code and, as converted models run, in that of transformers. One JSON line for each row.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

PRESETS = [
    "lambdas",
    "lambdas+tc",
    "residual+tc",
    "ddl-tc",
    "gated-delta",
    "attnres-block",
    "ihc",
    "hc",
    "mhc",
    "mhc-deepseek",
]
PLAIN, NATIVE = "unconverted", "unconverted, vLLM's own Llama"
PROMPTS, PROMPT, NEW, ROUNDS, WARMUP = 8, 32, 32, 7, 1
DTYPE = "bfloat16"


def generate_on_demand(folder: str, options: dict[str, Any], pipe: Any) -> None:
    """In a process: for everything that comes through the pipe generate once, and send back the CPU seconds."""
    from vllm import LLM, SamplingParams

    small = {"max_model_len": 128, "max_num_seqs": PROMPTS, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
    small |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "gpu_memory_utilization": 0.1}
    engine = LLM(folder, dtype=DTYPE, **small, **options)
    prompts = [{"prompt_token_ids": [100 + 7 * i + 31 * j for j in range(PROMPT)]} for i in range(PROMPTS)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    pipe.send(None)
    while pipe.recv():
        before = time.process_time()
        engine.generate(prompts, sampling, use_tqdm=False)
        pipe.send(time.process_time() - before)


def seconds(pipe: Any) -> float:
    pipe.send(True)
    return pipe.recv()


def converted(base: Path, preset: str, place: Path) -> tuple[Path, int]:
    """Write a converted model into a folder; return it and the number of its parameters."""
    from transformers import AutoModelForCausalLM

    import residua

    model = AutoModelForCausalLM.from_pretrained(base)
    if preset not in (PLAIN, NATIVE):
        residua.convert(model, preset, start="fresh")
    model.save_pretrained(place / preset)
    return place / preset, model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder that experiments/smollm2.py made")
    base = parser.parse_args().model
    # One process for an engine, which its clock sees whole; bound to one core they would wait for each other.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import torch

    from residua.lab.cost.timing import compare
    from residua.lab.records.provenance import circumstances

    context = multiprocessing.get_context("spawn")
    pipes, parameters = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for name in (PLAIN, NATIVE, *PRESETS):
            folder, parameters[name] = converted(base, name, Path(place))
            options = {"model_impl": "transformers"} if name == PLAIN else {}
            pipes[name], end = context.Pipe()
            context.Process(target=generate_on_demand, args=(str(folder), options, end), daemon=True).start()
            pipes[name].recv()
        candidates = {name: partial(seconds, pipe) for name, pipe in pipes.items()}
        timing = compare(candidates, PLAIN, rounds=ROUNDS, warmup=WARMUP, clock=lambda call: call())
    settings = {"prompts": PROMPTS, "prompt_length": PROMPT, "new_tokens": NEW, "precision": DTYPE, "eager": True}
    for name in candidates:
        record = {
            "benchmark": "serving",
            "engine": f"vllm {metadata.version('vllm-cpu')}",
            "model": base.name,
            "preset": name,
            **timing.record(name),
            "median_tokens_per_second": PROMPTS * NEW / timing.median_seconds(name),
            "parameters": parameters[name],
            "settings": settings,
            **circumstances(torch.device("cpu")),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
