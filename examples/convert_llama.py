"""A Llama of transformers with another residual connection, by `residua.convert`.

With the plain residual it returns its logits to the last bit, and with streams that start as the plain residual up to
rounding. Then it trains on a task of copying, is saved and opened, and gives its connections away as an adapter.

    python examples/convert_llama.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import residua


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
    expected = tiny_llama()(tokens).logits
    for name in ("residual", "ihc"):
        logits = residua.convert(tiny_llama(), name)(tokens).logits
        print(f"{name}: largest difference of the logits {(logits - expected).abs().max():.0g}")

    model = residua.convert(tiny_llama(), "ihc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(101):
        loss = model(tokens := copying(32), labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"ihc, step {step}: loss {loss:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        opened = residua.load(folder)
        print(
            f"opened: largest difference of the logits {(opened(tokens).logits - model(tokens).logits).abs().max():.0g}"
        )
        residua.save_connection(model, folder)
        plain = residua.unconvert(model, lossy=True)
        adapted = residua.load_connection(plain, folder)
        same = torch.allclose(adapted(tokens).logits, opened(tokens).logits, atol=1e-4)
        print(f"adapter: the logits are the same: {same}")


if __name__ == "__main__":
    main()
