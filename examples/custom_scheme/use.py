"""Train two language models, one with the scheme beside this file and one with the plain residual.

An installed package needs no registration: its entry point declares the name.

    python examples/custom_scheme/use.py
"""

import torch
from momentum_residual import Momentum

import residua
from residua.models import ResiduaConfig, ResiduaForCausalLM


def losses(connection: str) -> list[float]:
    """Losses of a tiny model that learns to count: from a random number on, modulo 16."""
    torch.manual_seed(0)
    config = ResiduaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, connection=connection
    )
    model = ResiduaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(31):
        tokens = (torch.randint(16, (16, 1)) + torch.arange(12)) % 16
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    residua.register("momentum", Momentum)
    for connection in ("residual", "momentum"):
        found = losses(connection)
        print(f"{connection:9} loss at step 0: {found[0]:.4f}, at step 30: {found[-1]:.4f}")


if __name__ == "__main__":
    main()
