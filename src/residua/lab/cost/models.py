"""The language models that the benchmarks measure, and copies of them to check against."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residua.conversion import convert
from residua.errors import InputError, extra
from residua.lab.cost.settings import BASELINE, Settings
from residua.models import ResiduaConfig, ResiduaForCausalLM

with extra("lab"):
    from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Measured:
    """A record for each preset, complete in itself, and the columns of their table: what a record has in each."""

    rows: list[dict[str, Any]]
    columns: Mapping[str, Callable[[dict[str, Any]], str]]

    def records(self) -> list[dict[str, Any]]:
        return self.rows

    def table(self) -> tuple[list[str], list[list[str]]]:
        return list(self.columns), [[cell(row) for cell in self.columns.values()] for row in self.rows]


def model_and_tokens(settings: Settings, preset: str, *shape: int) -> tuple[Any, Tensor]:
    """Return the model of one preset, on the CPU, and random tokens of this shape; both follow from the seed.

    Raises:
        InputError: an option of the preset cannot be used.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        tokens = torch.randint(settings.vocab_size, shape)
        config = model_config(settings, preset)
        if settings.base == "llama":
            model = _llama(config)
            if preset != BASELINE:
                convert(model, preset, start="fresh")
        else:
            model = ResiduaForCausalLM(config)
        perturb(model)
    return model, tokens


def model_config(settings: Settings, preset: str) -> ResiduaConfig:
    try:
        return ResiduaConfig(connection=preset, **settings.sizes)
    except ValueError as error:
        raise InputError(str(error)) from error


def _llama(config: ResiduaConfig) -> LlamaForCausalLM:
    """Return a Llama with random weights and the sizes of `config`, without a cache."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    return LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in sizes}, use_cache=False))


def perturb(model: Any) -> None:
    """Add noise to every parameter: gates and filters start with many zeros, which would hide a wrong term."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def in_float64(model: Any) -> Any:
    """Return a copy of a model that computes with the plain definitions, in float64 end to end."""
    if not isinstance(model, ResiduaForCausalLM):  # a Hugging Face model, perhaps converted
        return copy.deepcopy(model).double()
    config = copy.deepcopy(model.config)
    config.state_dtype = None
    if "implementation" in config.connection:
        config.connection = {**config.connection, "implementation": "reference"}
    with torch.random.fork_rng(devices=[]):
        reference = ResiduaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    return reference.to(model.device, torch.float64).train(model.training)


def many_graphs(count: int) -> AbstractContextManager:
    """Let `torch.compile` make `count` graphs of the same code; by default it gives up after a few."""
    return torch._dynamo.config.patch(recompile_limit=4 * count)
