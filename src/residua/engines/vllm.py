"""Serve converted models with vLLM: the plug-in that it loads in each of its processes.

`vllm serve FOLDER` opens a folder of `save_pretrained`. Here stands how vLLM knows such folders, and which of them it
refuses before it starts; `vllm_model.py` is the model that it runs.
"""

import logging
import re
from typing import Any

import torch

from residua.connections import describe, resolve
from residua.connections.names import ALIASES
from residua.connections.parts.memory import window_of
from residua.connections.registry import schemes
from residua.conversion.anatomy import Conversion
from residua.conversion.configuration import ARCHITECTURE, KEY
from residua.errors import extra

TESTED = (0, 32)
"""The minor release of vLLM that the tests ran with; the extra `vllm` takes no other."""

LANGUAGE_MODEL = f"{ARCHITECTURE}ForCausalLM"


def register() -> None:
    """Teach this process of vLLM the configuration and the architecture of converted models."""
    with extra("vllm"):
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    # By name: the class is imported where it is used, and starts no CUDA in a process that forks.
    for architecture in (LANGUAGE_MODEL, f"{ARCHITECTURE}Model"):
        ModelRegistry.register_model(architecture, "residua.engines.vllm_model:ConvertedForCausalLM")
        MODELS_CONFIG_MAP[architecture] = Check


class Check:
    """The functions that vLLM calls with its configuration, by the name of the architecture, before it starts."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Let the model's own configuration be as it is."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise NotImplementedError, which vLLM passes on as it is, for what it would run wrongly or not at all."""
        from vllm import __version__

        expect_tested(__version__)
        config = vllm_config.model_config.hf_config
        expect_served(config, is_moe=vllm_config.model_config.is_moe)
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size must be 1 for a converted model, whose streams stay in one stage, got {stages}"
            )


def expect_tested(installed: str) -> None:
    """Raise NotImplementedError for a vLLM older than tested, and warn of a newer or unnumbered one."""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    version = tuple(map(int, numbers.groups())) if numbers else None
    if version == TESTED:
        return
    tested = ".".join(map(str, TESTED))
    message = f"vllm {installed} was not tested with residua, {tested} was; pip install 'residua[vllm]' installs it"
    if version and version < TESTED:
        raise NotImplementedError(message)
    logging.getLogger("residua").warning(message)


def expect_served(config: Any, *, is_moe: bool = False) -> None:
    """Raise NotImplementedError for the configuration of a converted model that vLLM cannot run rightly.

    vLLM packs the tokens of all requests into one row, and keeps nothing of them for a residual.
    """
    if config.architectures != [LANGUAGE_MODEL]:
        raise NotImplementedError(f"vLLM serves converted language models, got {', '.join(config.architectures)}")
    if is_moe:
        raise NotImplementedError("vLLM serves no converted model with experts; use residua.load(folder)")
    scheme = Conversion.from_json(getattr(config, KEY), "config.json").scheme
    with torch.device("meta"):
        stream = scheme.build(config.hidden_size, 2)
    if all(getattr(part, "causal", True) and not window_of(part) for part in stream.parts):
        return
    named = schemes() | {alias: resolve(alias) for alias in ALIASES}
    name = next((name for name, known in named.items() if known == scheme), describe(scheme)["scheme"])
    raise NotImplementedError(
        f"vLLM cannot serve {name}, which reads earlier tokens in its connections; use residua.load(folder)"
    )
