"""Serve converted models with vLLM: the plug-in that vLLM loads in each of its processes.

`vllm serve FOLDER` opens a folder that `save_pretrained` wrote. This file registers the architectures of such folders
with vLLM, and refuses a model that vLLM cannot run, before vLLM starts. The models themselves are in `vllm_model.py`.
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
from residua.errors import extra, installing

TESTED = ((0, 32), (0, 33))
"""The tested minor releases of vLLM; of the last one, only the Python code was tested. Older releases are refused."""

LANGUAGE_MODEL = f"{ARCHITECTURE}ForCausalLM"
LOOKING_BACK = f"{ARCHITECTURE}LookingBackForCausalLM"
"""The architecture that vLLM runs in place of `LANGUAGE_MODEL` if the scheme reads earlier tokens."""


def register() -> None:
    """Register the configuration and the architectures of converted models in this process of vLLM."""
    with extra("vllm"):
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    # By name, because importing the class initialises CUDA, which a process that forks later must not do.
    for architecture in (LANGUAGE_MODEL, LOOKING_BACK, f"{ARCHITECTURE}Model"):
        name = "LookingBackForCausalLM" if architecture == LOOKING_BACK else "ConvertedForCausalLM"
        ModelRegistry.register_model(architecture, f"residua.engines.vllm_model:{name}")
        MODELS_CONFIG_MAP[architecture] = Check


class Check:
    """The checks of the configuration that vLLM runs before it starts. vLLM finds them by the architecture."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Select `LOOKING_BACK` if the scheme reads earlier tokens; vLLM then keeps states for each request."""
        config = model_config.hf_config
        if config.architectures != [LANGUAGE_MODEL] or not window_in(config):
            return
        config.architectures = model_config.model_arch_config.architectures = [LOOKING_BACK]
        info, architecture = model_config.registry.inspect_model_cls([LOOKING_BACK], model_config)
        model_config._model_info, model_config._architecture = info, architecture
        if set(getattr(config, "layer_types", ()) or ()) == {"full_attention"}:
            config.layer_types = None  # vLLM keeps no states if all layers have full attention

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise NotImplementedError, which vLLM shows unchanged, for a configuration that vLLM cannot run correctly."""
        from vllm import __version__

        expect_tested(__version__)
        config = vllm_config.model_config.hf_config
        expect_served(config, is_moe=vllm_config.model_config.is_moe)
        if config.architectures == [LOOKING_BACK]:
            # Prefix caching of states needs Triton, and was not tested on GPUs.
            vllm_config.cache_config.enable_prefix_caching = False
            vllm_config.model_config.enforce_eager = True
            logger = logging.getLogger("vllm.residua")
            logger.info("Prefix caching and compilation are off for a scheme that reads earlier tokens")
            if vllm_config.speculative_config is not None:
                raise NotImplementedError(
                    "speculative_config must be None for a scheme that reads earlier tokens, got a configuration"
                )
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size must be 1 for a converted model, whose streams stay in one stage, got {stages}"
            )


def expect_tested(installed: str) -> None:
    """Raise NotImplementedError if vLLM is older than the tested releases; warn if it is newer or has no number."""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    version = tuple(map(int, numbers.groups())) if numbers else None
    if version in TESTED:
        return
    tested = " and ".join(".".join(map(str, release)) for release in TESTED)
    message = f"vllm {installed} was not tested with residua, {tested} were; {installing('vllm')} installs one"
    if version and version < TESTED[0]:
        raise NotImplementedError(message)
    logging.getLogger("residua").warning(message)


def expect_served(config: Any, *, is_moe: bool = False) -> None:
    """Raise NotImplementedError if vLLM would compute wrong results for this configuration of a converted model.

    vLLM packs the tokens of all requests into one row, and keeps only the earlier tokens that a `Filter` reads.
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
    """Return whether every part of a stream reads earlier tokens only by one of `FILTERS`, if at all."""
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
    """Return a stream of the scheme in a configuration, with two sublayers, on the meta device."""
    with torch.device("meta"):
        return scheme_in(config).build(config.hidden_size, 2)


def window_in(config: Any) -> int:
    """Return the largest number of earlier tokens that a connection of a converted model reads."""
    return max(map(window_of, stream_in(config).parts))


FILTERS = (TokenConv, TokenCompress, Smear)
"""The classes of modules that read earlier tokens; vLLM keeps one state per request for each such module."""


class Filter(Swapped):
    """Mixin for one of `FILTERS`: the module's memory calls it once for each request."""

    def forward(self, x: Tensor, memory: Any = None) -> State:
        read: Any = super().forward  # type: ignore[misc]
        return read(x) if memory is None else memory.each(read, x)


def make_filters(parts: Iterable[nn.Module]) -> None:
    """Add the mixin `Filter` to the filters in the parts of a stream."""
    for module in {id(module): module for part in parts for module in part.modules()}.values():
        if isinstance(module, FILTERS):
            swap(module, Filter)


class FilterMemory:
    """The `Memory` of a part in which only filters read earlier tokens.

    kv_cache: a tuple of one tensor (pages, numbers) in float32; a page is the state of a filter for one request.
    """

    keeps, padding, documents = True, None, None
    kv_cache: tuple[Tensor, ...] = ()
    calls = 0  # calls of filters with rows that belong to no request

    def batch(self) -> Any:
        """Return vLLM's metadata of the requests in this call; None if the row belongs to no request."""
        return None

    def each(self, read: Callable[[Tensor, Any], State], x: Tensor) -> State:
        """Return read(x, memory) for a row of tokens, (1, tokens, ...), computed separately for each request.

        Requests with one new token come first, then prompts. vLLM may pad the end of the row.
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
    """The `Memory` of a filter for several requests with the same number of new tokens.

    states: (requests, numbers), float32, the state of each request; None for new requests.
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
        """Write the states into `pages`, (all pages, numbers), at the indices `places`: (requests,)."""
        assert self.states is not None
        pages[places, : self.states.shape[1]] = self.states.to(pages.dtype)
