"""One interface for the analysis of residua language models and of converted models."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections import Scheme, Stream
from residua.conversion.configuration import conversion_of
from residua.conversion.rebuild import is_converted, stream_of
from residua.errors import InputError, require
from residua.lab.inspection.watch import ConnectionRecord, as_written, watching
from residua.lab.opening import context_of
from residua.models import ResiduaForCausalLM, ResiduaModel
from residua.ops import at_least_float32

# Compute logits for this many tokens at a time; with a large vocabulary they are the largest tensors of a pass.
LOGITS_AT_A_TIME = 256

TakeRecord = Callable[[ConnectionRecord], None]


@dataclass(frozen=True)
class Subject:
    """A language model whose connections can be watched.

    sublayers: the names of the sublayers, in order. context: the largest number of tokens, or None. vocabulary: the
    number of token ids. head: whether the model predicts tokens.
    """

    model: nn.Module
    scheme: Scheme
    stream: Stream
    dim: int
    sublayers: tuple[str, ...]
    context: int | None
    vocabulary: int
    head: bool

    @classmethod
    def of(cls, model: nn.Module) -> "Subject":
        """Return the subject of a model. Raises InputError if it is neither a residua model nor converted."""
        if isinstance(model, (ResiduaForCausalLM, ResiduaModel)):
            trunk = model.model if isinstance(model, ResiduaForCausalLM) else model
            config = trunk.config
            kinds = [(i, kind) for i in range(len(trunk.layers)) for kind in ("attention", "mlp")]
            scheme, stream, head = config.scheme, trunk.stream, isinstance(model, ResiduaForCausalLM)
        elif is_converted(model):
            conversion = conversion_of(model)
            config = model.config.get_text_config()  # type: ignore[union-attr, operator]
            kinds = [(i, part.readers[0]) for i, layer in enumerate(conversion.anatomy) for part in layer]
            scheme, stream = conversion.scheme, stream_of(model)
            head = getattr(model, "get_output_embeddings", lambda: None)() is not None
        else:
            raise InputError(
                f"trace needs a model with a residual scheme, a residua model or a converted model, got "
                f"{type(model).__name__}; residua convert gives it one"
            )
        return cls(
            model,
            scheme,
            stream,
            config.hidden_size,
            tuple(f"{i + 1} {kind}" for i, kind in kinds),
            context_of(model),
            config.vocab_size,
            head,
        )

    def token_ids(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Return T token ids as a tensor (T) on the device of the embedding; tokens may be a batch of one text, (1, T).

        Raises InputError for other shapes, for numbers that are not ids, and for more than the model's context.
        """
        ids = torch.as_tensor(tokens)
        if ids.dim() == 2 and len(ids) == 1:  # as a tokenizer returns it
            ids = ids[0]
        require(ids.dim() == 1, "tokens", "the ids of one text, (T) or (1, T)", tuple(ids.shape))
        longest, last = self.context or len(ids), self.vocabulary - 1
        require(0 < len(ids) <= longest, "the number of tokens", f"1 to {longest}, the model's context", len(ids))
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        require(whole, "tokens", "the ids of a text, integers", ids.dtype)
        ends = ids.min().item(), ids.max().item()
        require(0 <= ends[0] <= ends[1] <= last, "the smallest and largest token id", f"from 0 to {last}", ends)
        return ids.long().to(self.model.get_input_embeddings().weight.device)  # type: ignore[operator]

    def run(self, ids: Tensor, record: TakeRecord, *, logits_to_keep: int = 0, **options: Any) -> Any:
        """Run the model on token ids (rows, T), and call `record` after every write. Return the model's output.

        logits_to_keep: the number of last tokens for which logits are computed, if the model has this argument; 0 for
        all. options: further arguments of the model.
        """
        options |= {"input_ids": ids, "use_cache": False}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            options["logits_to_keep"] = logits_to_keep
        with torch.no_grad(), as_written(self.model), watching(self.stream, record):
            return self.model(**options)

    def losses(self, ids: Tensor, record: TakeRecord) -> Tensor:
        """Run the model on T token ids as `run` does; return -log p of the next token, (T).

        NaN for the last token, and for all tokens if the model has no head.
        """
        losses = torch.full((len(ids),), torch.nan, dtype=torch.float64, device=ids.device)
        if isinstance(self.model, ResiduaForCausalLM):
            trunk = Subject.of(self.model.model)
            hidden, logits_of = trunk.run(ids[None], record).last_hidden_state, self.model.logits
        else:
            output = self.run(ids[None], record)
            if not self.head:
                return losses
            hidden, logits_of = output.logits, nn.Identity()
        with torch.no_grad():
            for start in range(0, len(ids) - 1, LOGITS_AT_A_TIME):
                labels = ids[start + 1 : start + 1 + LOGITS_AT_A_TIME]
                logits = at_least_float32(logits_of(hidden[:, start : start + len(labels)])[0])
                losses[start : start + len(labels)] = F.cross_entropy(logits, labels, reduction="none").double()
        return losses
