"""Language models small enough to look into, and what passes through their connections."""

from typing import Any

import torch
from torch import Tensor

from residua.lab.inspection.watch import ConnectionRecord, watching
from residua.models import ResiduaConfig, ResiduaForCausalLM
from support.variants import ALL, perturbed

VOCAB = 48


def small_model(
    connection: Any = "ddl", dtype: torch.dtype = torch.float64, *, scale: float = 0.3, **options: Any
) -> ResiduaForCausalLM:
    """Two layers of width 16 in evaluation mode, `scale` of noise on every parameter; a name is one of `variants`."""
    scheme = ALL.get(connection, connection) if isinstance(connection, str) else connection
    given = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "connection": scheme,
        "pad_token_id": 1,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    return perturbed(ResiduaForCausalLM(ResiduaConfig(**(given | options))), scale=scale).to(dtype).eval()


def words(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def passages(model: ResiduaForCausalLM, ids: Tensor) -> list[ConnectionRecord]:
    """All that passed the connections, in order, with the batch axis of 1."""
    seen: list[ConnectionRecord] = []
    with torch.no_grad(), watching(model.model.stream, seen.append):
        model(ids[None])
    return seen
