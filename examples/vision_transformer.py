"""A small vision transformer with three residual schemes, on images of stripes: horizontal, vertical or diagonal.

Every token of an image sees every other one, so nothing is causal and the compression must be `channel`: `token` is a
convolution over the earlier tokens of a sequence.

    python examples/vision_transformer.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import residua

DIM, LAYERS, PATCH = 48, 3, 4


class Attention(nn.Module):
    """Self-attention without a mask, (batch, patches, dim) -> the same shape. It knows no norm and no residual."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class VisionTransformer(nn.Module):
    """Images (batch, 1, 16, 16) to logits (batch, 3)."""

    def __init__(self, connection: str):
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(16, DIM))
        self.sublayers = nn.ModuleList()
        for _ in range(LAYERS):
            self.sublayers += [Attention(), nn.Sequential(nn.Linear(DIM, 96), nn.GELU(), nn.Linear(96, DIM))]
        self.stream = residua.build(connection, DIM, 2 * LAYERS)
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.positions
        return self.head(self.stream(x, self.sublayers).mean(1))


def stripes(batch: int) -> tuple[Tensor, Tensor]:
    """Noisy waves of random length and phase whose direction is the class."""
    labels = torch.randint(3, (batch,))
    angles = torch.tensor([0, math.pi / 2, math.pi / 4])[labels].view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    length, phase = 4 + 4 * torch.rand(batch, 1, 1), 2 * math.pi * torch.rand(batch, 1, 1)
    waves = torch.sin(2 * math.pi * (x * angles.sin() + y * angles.cos()) / length + phase)
    return (waves + 2 * torch.randn(batch, 16, 16)).unsqueeze(1), labels


def main() -> None:
    for connection in ("residual", "ddl-cc", "mhc"):
        torch.manual_seed(0)
        model = VisionTransformer(connection)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(60):
            images, labels = stripes(64)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        images, labels = stripes(500)
        with torch.no_grad():
            accuracy = (model.eval()(images).argmax(-1) == labels).float().mean()
        print(f"{connection:10} accuracy {accuracy:.1%} on 500 new images")


if __name__ == "__main__":
    main()
