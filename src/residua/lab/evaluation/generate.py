"""Generate text after a prompt."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from residua.errors import InputError, extra
from residua.lab.opening import context_of, prompt_tokens
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TextStreamer

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedTokenizerBase

DEFAULT_NEW_TOKENS = 200


def complete(
    model: "GenerationMixin",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    min_new_tokens: int = 0,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    greedy: bool = False,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Continue `prompt` until the end-of-text token or `max_new_tokens`; return the new text without the prompt.

    Only the arguments matter; the model's own generation_config has no effect.

    Args:
        model: a transformers causal language model.
        tokenizer: the tokenizer that the model was trained with.
        prompt: the text to continue, after the tokens that the tokenizer puts before a text; "" starts a new document,
            after these tokens or an end-of-text token.
        max_new_tokens: the upper limit; None for 200, or fewer if the model's context is shorter.
        min_new_tokens: number of tokens before the end-of-text token is allowed.
        temperature: divides the logits, above 0; lower is more predictable.
        top_p: sample among the most probable tokens that together reach this probability, in (0, 1]; 1 for all.
        top_k: sample among the k most probable tokens; 0 for all.
        greedy: always take the most probable token; temperature, top_p, top_k and seed then have no effect.
        seed: seed of the sampling. The global random state of PyTorch does not change.
        on_text: called with each piece of new text as soon as it is final, to stream the output.

    Raises:
        InputError: prompt and new tokens do not fit into the model's context, or logits are not finite.
    """
    tokens = prompt_tokens(tokenizer, prompt)
    context = context_of(model) or sys.maxsize
    room = context - len(tokens)
    if max_new_tokens is None:
        max_new_tokens = min(DEFAULT_NEW_TOKENS, room)
    if max_new_tokens > room or room < 1:
        raise InputError(
            f"prompt and new text must be within the model's {context} positions, got "
            f"{len(tokens)} + {max(max_new_tokens, 1)} tokens: shorten the prompt or ask for fewer new tokens"
        )

    rows = model.config.get_text_config().vocab_size
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        do_sample=not greedy,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        # Some rows of the head may belong to no token: at the end, or in gaps between ids. They are untrained.
        suppress_tokens=sorted({*range(rows)} - {*tokenizer.get_vocab().values()}) or None,
        **({} if greedy else {"temperature": temperature, "top_p": top_p, "top_k": top_k}),
    )
    input_ids = torch.tensor([tokens], device=model.device)
    with evaluating(model), _alone(model):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([_Numbers()]),
            streamer=None if on_text is None else _Pieces(tokenizer, tokens, on_text),
        )
    # Some tokenizers drop the space before the first token of a text, so decode the prompt too.
    before, whole = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (tokens, output[0]))
    return whole[len(before) :]


@contextmanager
def _alone(model: "GenerationMixin") -> Iterator[None]:
    """Replace the model's generation_config by defaults while the `with` block runs, because `generate` reads it."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _Numbers(LogitsProcessor):
    """Raise InputError for logits that are NaN or infinite; transformers would generate text from them."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if (scores.isnan() | (scores == torch.inf)).any():
            raise InputError(
                "the logits of the model must be finite, got NaN or infinity; try another checkpoint or dtype"
            )
        return scores


class _Pieces(TextStreamer):
    """Pass each finished piece of the text after a prompt to a callback instead of printing it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", prompt: list[int], on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.token_cache, self.print_len = list(prompt), len(tokenizer.decode(prompt, skip_special_tokens=True))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)
