"""What a token costs in a converted Llama, for every preset that starts as the plain model, as a ratio to that model.

Greedy decoding with a cache on one thread, CPU time of the process, the models in turns. The logits of every converted
model are compared with the plain model's first. One JSON line for each preset.

    python experiments/converted_generation.py >> experiments/bench-generate-converted.jsonl
"""

import json
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import residua
from residua.connections import PRESETS
from residua.lab.cost.timing import compare, process_clock
from residua.lab.records.provenance import circumstances
from residua.models.cache import CACHE

SHAPE = {"layers": 8, "dim": 512, "heads": 8, "vocab_size": 512}
PROMPT, NEW, ROUNDS, WARMUP = 64, 16, 15, 2
PLAIN = "unconverted"


@dataclass
class Decoding:
    """One model behind a prompt; a call generates NEW tokens, one after the other."""

    model: LlamaForCausalLM
    tokens: torch.Tensor

    @torch.inference_mode()
    def prepare(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.model(self.tokens, use_cache=True, **{CACHE: self.cache})

    @torch.inference_mode()
    def __call__(self) -> None:
        ids = self.tokens[:, -1:]
        for _ in range(NEW):
            ids = self.model(ids, use_cache=True, **{CACHE: self.cache}).logits[:, -1:].argmax(-1)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["dim"],
        intermediate_size=4 * SHAPE["dim"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
    )
    plain = LlamaForCausalLM(config).eval()
    tokens = torch.randint(SHAPE["vocab_size"], (1, PROMPT))
    decodings, errors = {PLAIN: Decoding(plain, tokens)}, {PLAIN: 0.0}
    with torch.inference_mode():
        logits = plain(tokens).logits
    for preset in PRESETS:
        model = deepcopy(plain)
        try:
            residua.convert(model, preset)
        except (TypeError, ValueError):
            continue  # it has no start that gives the plain model's outputs
        with torch.inference_mode():
            errors[preset] = ((model(tokens).logits - logits).norm() / logits.norm()).item()
        decodings[preset] = Decoding(model, tokens)

    def clock(decoding) -> float:
        decoding.prepare()
        return process_clock(decoding)

    timing = compare(decodings, PLAIN, rounds=ROUNDS, warmup=WARMUP, clock=clock)
    settings = SHAPE | {"prompt_length": PROMPT, "new_tokens": NEW, "precision": "float32"}
    for preset in decodings:
        record = {
            "benchmark": "generate-converted",
            "preset": preset,
            **timing.record(preset),
            "median_seconds_per_token": timing.median_seconds(preset) / NEW,
            "parameters": decodings[preset].model.num_parameters(),
            "error": errors[preset],
            "settings": settings,
            **circumstances(torch.device("cpu")),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
