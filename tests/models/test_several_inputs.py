"""A connection may read one input each for queries, keys and values."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import residua
from residua import Carry, Connection, Scheme, Stream
from residua.connections import RMSNorm, registry
from residua.connections.ends import Same
from residua.models import ResiduaForCausalLM
from support.tiny_models import prompt, tiny_config


class ThreeReads(Connection):
    """x + F(norm(q x), norm(k x), norm(v x)) around attention, x + F(norm(q x)) around an MLP."""

    def __init__(self, dim: int, inputs: int):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.scales = nn.Parameter(torch.ones(inputs, dim))

    def read(self, state, memory=None):
        inputs = tuple(self.norm(scale * state) for scale in self.scales)
        return inputs if len(inputs) > 1 else inputs[0], Carry(state, None)

    def write(self, y, carry):
        return carry.residual + y


@dataclass(frozen=True)
class Apart(Scheme):
    equation: ClassVar[str] = "x + F(norm(q x), norm(k x), norm(v x))"
    paper: ClassVar[str] = "none"

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        return Stream(Same(), [ThreeReads(dim, 1 if i % 2 else 3) for i in range(num_sublayers)], Same())


def test_attention_takes_an_input_for_queries_keys_and_values(monkeypatch):
    for table in ("SCHEMES", "PRESETS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    residua.register("apart", Apart)
    torch.manual_seed(0)
    ids, model = prompt(2, 6), ResiduaForCausalLM(tiny_config(connection="apart")).double().eval()
    torch.manual_seed(0)
    plain = ResiduaForCausalLM(tiny_config("residual")).double().eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "scales" not in k})
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        scales = model.model.stream.connections[0].scales
        for part, projection in enumerate(("q_proj", "k_proj", "v_proj")):
            scales[part, 0] = -1.0  # RMSNorm hands on the sign of a feature
            weight = getattr(plain.model.layers[0].attention, projection).weight
            weight[:, 0] *= -1
            assert torch.allclose(model(ids).logits, plain(ids).logits, rtol=1e-12, atol=1e-12), projection
