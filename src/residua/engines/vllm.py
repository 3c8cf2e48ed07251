"""Serve converted models with vLLM: the plug-in that it loads in each of its processes.

`vllm serve FOLDER` opens a folder of `save_pretrained`. This file teaches vLLM to know such folders and to refuse some
before it starts; `vllm_model.py` has the models that it runs.
"""

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from residua.connections import Scheme, Stream
from residua.connections.base import State
from residua.connections.parts.ends import Smear, TokenCompress, TokenConv
from residua.connections.parts.memory import window_of
from residua.connections.registry import name_of
from residua.conversion.anatomy import Conversion
from residua.conversion.configuration import ARCHITECTURE, KEY
from residua.conversion.flow import Swapped, swap
from residua.errors import extra

TESTED = ((0, 32), (0, 33))
"""The minor releases of vLLM that were tested, the last only in its Python code. Older ones are refused."""

LANGUAGE_MODEL = f"{ARCHITECTURE}ForCausalLM"
LOOKING_BACK = f"{ARCHITECTURE}LookingBackForCausalLM"
"""The architecture that vLLM runs in place of `LANGUAGE_MODEL` if the scheme reads earlier tokens."""


def register() -> None:
    """Teach this process of vLLM the configuration and the architecture of converted models."""
    with extra("vllm"):
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    # By name: a process that forks must not import the class, which starts CUDA.
    for architecture in (LANGUAGE_MODEL, LOOKING_BACK, f"{ARCHITECTURE}Model"):
        name = "LookingBackForCausalLM" if architecture == LOOKING_BACK else "ConvertedForCausalLM"
        ModelRegistry.register_model(architecture, f"residua.engines.vllm_model:{name}")
        MODELS_CONFIG_MAP[architecture] = Check


class Check:
    """The functions that vLLM calls with its configuration before it starts, found by the name of the architecture."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Choose the class of models whose schemes read earlier tokens: for it vLLM keeps states of each request."""
        config = model_config.hf_config
        if config.architectures != [LANGUAGE_MODEL] or not window_in(config):
            return
        config.architectures = model_config.model_arch_config.architectures = [LOOKING_BACK]
        info, architecture = model_config.registry.inspect_model_cls([LOOKING_BACK], model_config)
        model_config._model_info, model_config._architecture = info, architecture
        if set(getattr(config, "layer_types", ()) or ()) == {"full_attention"}:
            config.layer_types = None  # if all are of this type, vLLM keeps no states

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise NotImplementedError, which vLLM shows unchanged, for a configuration that it cannot run rightly."""
        from vllm import __version__

        expect_tested(__version__)
        config = vllm_config.model_config.hf_config
        expect_served(config, is_moe=vllm_config.model_config.is_moe)
        if config.architectures == [LOOKING_BACK]:
            vllm_config.cache_config.enable_prefix_caching = False  # it needs Triton and was tried on no GPU
            vllm_config.model_config.enforce_eager = True
            logger = logging.getLogger("vllm.residua")
            logger.info("Prefix caching and compilation are off for a scheme that reads earlier tokens")
            if vllm_config.speculative_config is not None:
                raise NotImplementedError(
                    "speculative_config must be None for a scheme that reads earlier tokens, got one"
                )
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size must be 1 for a converted model, whose streams stay in one stage, got {stages}"
            )


def expect_tested(installed: str) -> None:
    """Raise NotImplementedError for a vLLM older than tested, and warn of a newer or unnumbered one."""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    version = tuple(map(int, numbers.groups())) if numbers else None
    if version in TESTED:
        return
    tested = " and ".join(".".join(map(str, release)) for release in TESTED)
    message = f"vllm {installed} was not tested with residua, {tested} were; pip install 'residua[vllm]' installs one"
    if version and version < TESTED[0]:
        raise NotImplementedError(message)
    logging.getLogger("residua").warning(message)


def expect_served(config: Any, *, is_moe: bool = False) -> None:
    """Raise NotImplementedError for the configuration of a converted model that vLLM cannot run rightly.

    vLLM packs the tokens of all requests into one row. It keeps only the earlier tokens that `Filter`s read.
    """
    if config.architectures not in ([LANGUAGE_MODEL], [LOOKING_BACK]):
        raise NotImplementedError(f"vLLM serves converted language models, got {', '.join(config.architectures)}")
    if is_moe:
        raise NotImplementedError("vLLM serves no converted model with experts; use residua.load(folder)")
    stream = stream_in(config)
    if not all(getattr(part, "causal", True) for part in stream.parts) or not reads_by_filters(stream):
        raise NotImplementedError(
            f"vLLM cannot serve {name_of(scheme_in(config))}, which reads other tokens than its short convolutions do; "
            "use residua.load(folder)"
        )


def reads_by_filters(stream: Stream) -> bool:
    """Return whether each part of a stream on the meta device reads earlier tokens by one of `FILTERS`, or none."""
    memories = [FilterMemory() if window_of(part) else None for part in stream.parts]
    if not any(memories):
        return True
    make_filters(stream.parts)
    try:
        state = stream.expand(torch.empty(1, 1, stream.dim, device="meta"), memories[0])  # type: ignore[arg-type]
        for connection, memory in zip(stream.connections, memories[1:]):
            state = connection.write(*connection.read(state, memory))
        stream.collapse(state, memories[-1])
    except NotImplementedError:
        return False
    return all(memory.calls == 1 for memory in memories if memory is not None)


def scheme_in(config: Any) -> Scheme:
    """Return the scheme in the configuration of a converted model."""
    return Conversion.from_json(getattr(config, KEY), "config.json").scheme


def stream_in(config: Any) -> Stream:
    """Return a stream of two sublayers of that scheme, without memory for its parameters."""
    with torch.device("meta"):
        return scheme_in(config).build(config.hidden_size, 2)


def window_in(config: Any) -> int:
    """Return how many earlier tokens the connections of a converted model read at most."""
    return max(map(window_of, stream_in(config).parts))


FILTERS = (TokenConv, TokenCompress, Smear)
"""The modules that read earlier tokens, for each of which vLLM keeps a state of every request."""


class Filter(Swapped):
    """One of `FILTERS` that lets its memory call it, once for each request."""

    def forward(self, x: Tensor, memory: Any = None) -> State:
        read: Any = super().forward  # type: ignore[misc]
        return read(x) if memory is None else memory.each(read, x)


def make_filters(parts: Iterable[nn.Module]) -> None:
    """Move the filters in parts of a stream to `Filter`."""
    for module in {id(module): module for part in parts for module in part.modules()}.values():
        if isinstance(module, FILTERS):
            swap(module, Filter)


class FilterMemory:
    """The memory of a part (`connections.Memory`) in which only filters read earlier tokens.

    kv_cache: one tensor, (pages, numbers), float32: a page is the state of a filter for one request.
    """

    keeps, padding, documents = True, None, None
    kv_cache: tuple[Tensor, ...] = ()
    calls = 0  # of filters, with rows without requests

    def batch(self) -> Any:
        """Return vLLM's description of the requests that have tokens in this call; None for a row without requests."""
        return None

    def each(self, read: Callable[[Tensor, Any], State], x: Tensor) -> State:
        """Return read(x, memory) of a row of tokens, (1, tokens, ...), called for each request by itself.

        The tokens of requests with one new token come first, then those of prompts; vLLM may fill the row up.
        """
        batch = self.batch()
        if batch is None:
            self.calls += 1
            return read(x, RequestMemory(None))
        (pages,) = self.kv_cache
        single, results = batch.num_decodes, []
        if single:
            places = batch.state_indices_tensor_d[:single, 0]
            memory = RequestMemory(pages[places])
            result = read(x[:, :single].transpose(0, 1), memory)
            results.append(tree_map(lambda rows: rows.transpose(0, 1), result))
            memory.write(pages, places)
        end = single
        if batch.num_prefills:
            lengths = batch.query_start_loc_p.diff().tolist()
            for length, place, begun in zip(
                lengths, batch.state_indices_tensor_p.split(1), batch.has_initial_states_p.tolist()
            ):
                memory = RequestMemory(pages[place] if begun else None)
                results.append(read(x[:, end : end + length], memory))
                memory.write(pages, place)
                end += length
        if end < x.shape[1]:
            results.append(read(x[:, end:], RequestMemory(None)))
        return tree_map(lambda *rows: torch.cat(rows, 1), *results)

    def extend(self, x: Tensor, window: int) -> NoReturn:
        raise NotImplementedError

    def recall(self, like: Tensor) -> NoReturn:
        raise NotImplementedError

    def keep(self, rows: Tensor) -> NoReturn:
        raise NotImplementedError


class RequestMemory:
    """The memory of a filter (`connections.Memory`) for some requests with equally many new tokens.

    states: (requests, numbers), float32, the state of each request; None at the start.
    """

    keeps, padding, documents = True, None, None

    def __init__(self, states: Tensor | None):
        self.states = states

    def extend(self, x: Tensor, window: int) -> Tensor:
        before = x.new_zeros(x.shape[0], window, *x.shape[2:])
        if self.states is not None:
            before = self.states[:, : before[0].numel()].view(before.shape).to(x.dtype)
        extended = torch.cat([before, x], 1)
        self.states = extended[:, -window:].flatten(1)
        return extended

    def recall(self, like: Tensor) -> Tensor | None:
        if self.states is None:
            return None
        return self.states[:, : like[0, 0].numel()].view(-1, 1, *like.shape[2:]).to(like.dtype)

    def keep(self, rows: Tensor) -> None:
        self.states = rows[:, -1].flatten(1)

    def write(self, pages: Tensor, places: Tensor) -> None:
        """Write the states into pages, (all pages, numbers), at places: (requests,)."""
        assert self.states is not None
        pages[places, : self.states.shape[1]] = self.states.to(pages.dtype)
