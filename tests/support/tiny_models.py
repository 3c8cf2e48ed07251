"""Language models small enough to compare number by number."""

from typing import Any

import torch
from torch import Tensor

from residua.lab.inspection.watch import ConnectionRecord, watching
from residua.models import ResiduaConfig, ResiduaForCausalLM
from support.variants import ALL, perturbed

VOCAB = 48
# The token that ends a text, and the one that fills a batch. Prompts below never contain either.
EOS, PAD = 0, 1
# Options of `residua train` for a model of one layer.
TINY_RUN = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.head_dim": 8,
    "model.vocab_size": 32,
    "train.sequence_length": 8,
    "train.batch_size": 2,
    "train.device": "cpu",
}


def tiny_config(connection: Any = "ddl", **options: Any) -> ResiduaConfig:
    """Two blocks of width 16 with two heads, for a scheme of `variants.ALL` by its name or for any other connection."""
    given = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "connection": ALL.get(connection, connection) if isinstance(connection, str) else connection,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    return ResiduaConfig(**(given | options))


def tiny_model(
    connection: Any = "ddl", dtype: torch.dtype = torch.float64, *, scale: float = 0.3, **options: Any
) -> ResiduaForCausalLM:
    """The model in evaluation mode, perturbed by `scale`: filters are no identity, gates depend on the token."""
    torch.manual_seed(0)
    return perturbed(ResiduaForCausalLM(tiny_config(connection, **options)), scale=scale).to(dtype).eval()


def prompt(*shape: int, seed: int = 0) -> Tensor:
    """Token ids without the padding and the end of text."""
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def passages(model: ResiduaForCausalLM, ids: Tensor) -> list[ConnectionRecord]:
    """All that passes the connections for one row of tokens, in order, with the batch axis of 1."""
    records: list[ConnectionRecord] = []
    with torch.no_grad(), watching(model.model.stream, records.append):
        model(ids[None])
    return records


def left_padded(prompts: list[Tensor], pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths as one batch: ids and attention mask, (batch, longest) each."""
    longest = max(len(ids) for ids in prompts)
    rows = [torch.cat([torch.full((longest - len(ids),), pad), ids]) for ids in prompts]
    masks = [torch.cat([torch.zeros(longest - len(ids)), torch.ones(len(ids))]) for ids in prompts]
    return torch.stack(rows), torch.stack(masks).long()
