"""How far do gradients under bfloat16 autocast differ from those in float64, by scheme, before training?

One JSON line for each scheme and seed: over all parameters of attention and MLP, the norm of the difference in parts of
the norm of the gradient in float64. A model of 8 layers of width 64 and random tokens. Takes a minute.

    python experiments/bfloat16_gradients.py
"""

import json
from copy import deepcopy
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from residua.lab.records.provenance import circumstances
from residua.models import ResiduaConfig, ResiduaForCausalLM

RECORD = Path(__file__).with_name("bfloat16-gradients.jsonl")
SCHEMES = "residual", "ddl", "ddl-v", "ddl-cc", "ddl-tc", "hc", "mhc", "lambdas"
MODEL = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 256}
SEEDS = 1, 2, 3


def gradients(model: ResiduaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the gradients of all parameters of attention and MLP, one after the other, in float64."""
    model.train()
    model(tokens, labels=tokens).loss.backward()
    found = [parameter.grad for name, parameter in model.named_parameters() if ".attention." in name or ".mlp." in name]
    return torch.cat([gradient.double().flatten() for gradient in found])


def error(scheme: str, seed: int) -> float:
    """Return the difference under autocast in parts of the gradient."""
    torch.manual_seed(seed)
    model = ResiduaForCausalLM(ResiduaConfig(**MODEL, connection=scheme))
    tokens = torch.randint(MODEL["vocab_size"], (4, 128))
    exact = gradients(deepcopy(model).double(), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(model, tokens)
    return float((rounded - exact).norm() / exact.norm())


def main() -> None:
    here = circumstances(torch.device("cpu"))  # before the record changes, which would make the commit a dirty one
    lines = []
    for scheme, seed in product(SCHEMES, SEEDS):
        lines.append({"scheme": scheme, "seed": seed, "error": error(scheme, seed), "model": MODEL} | here)
        print(f"{scheme:10} {seed} {lines[-1]['error']:.4f}", flush=True)
    RECORD.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
