"""A Llama of transformers whose layers read and write a residual state of your choice.

With the plain residual the rebuilt model returns the original logits to the last bit. Any other scheme then trains in
its place: here channel-compressed Deep Delta Learning, on a task of copying.

    python examples/llama.py
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import residua


class Layer(nn.Module):
    """The two sublayers of a Llama layer between their connections. The state takes the place of hidden_states."""

    def __init__(self, layer, attention, mlp):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.connections = nn.ModuleList([attention, mlp])

    def forward(self, state, **arguments):
        state = self.connections[0](state, lambda x: self.self_attn(x, **arguments)[0])
        return self.connections[1](state, self.mlp)


def rebuild(model: LlamaForCausalLM, connection: residua.Scheme) -> LlamaForCausalLM:
    """Replace the residual connections of `model` in place. The connections take over the norms of its layers."""
    trunk = model.model
    norms = [norm for layer in trunk.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    stream = connection.build(model.config.hidden_size, len(norms), norm=norms.__getitem__)
    pairs = zip(stream.connections[::2], stream.connections[1::2])
    trunk.layers = nn.ModuleList(Layer(layer, *pair) for layer, pair in zip(trunk.layers, pairs))
    trunk.embed_tokens = nn.Sequential(trunk.embed_tokens, stream.expand)
    trunk.norm = nn.Sequential(stream.collapse, trunk.norm)
    return model


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def copying(batch: int) -> torch.Tensor:
    """Random tokens, and the same tokens once more: only the second half can be predicted."""
    half = torch.randint(16, (batch, 12))
    return torch.cat([half, half], dim=1)


def main() -> None:
    tokens = copying(2)
    with torch.no_grad():
        expected = tiny_llama()(tokens).logits
        logits = rebuild(tiny_llama(), residua.Residual())(tokens).logits
    print(f"plain residual: largest difference of the logits {(logits - expected).abs().max():g}")

    model = rebuild(tiny_llama(), residua.PRESETS["ddl-cc"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(101):
        loss = model(tokens := copying(32), labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"ddl-cc, step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
