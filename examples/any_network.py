"""Three networks that are no language models, with a stream: a ResNet, a vision and a diffusion Transformer.

Each plain network has norms and additions of its own. The network with a stream is made from a plain one, with its
weights: the norms move into the stream, and the stream adds. With the plain residual it computes the same to the last
bit. One step of training from adaLN-Zero shows which streams grow from the identity, and which leave it at once.

    python examples/any_network.py
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import residua

DIM, LAYERS, PATCH, CLASSES = 32, 3, 4, 3


def take_norms(blocks: Sequence[nn.Module], *names: str) -> list[nn.Module]:
    """Take the norms with these names out of the blocks, and return them in the order of the sublayers."""
    norms = [getattr(block, name) for block in blocks for name in names]
    for block in blocks:
        for name in names:
            delattr(block, name)
    return norms


# A ResNet with pre-activation, whose stages change the width


class Convolutions(nn.Module):
    """A block with pre-activation, (batch, width, rows, columns). It projects the shortcut if it changes the shape."""

    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.project = None if width == out else nn.Conv2d(width, out, 1, stride, bias=False)

    def branch(self, x: Tensor) -> Tensor:
        """Compute all behind the first norm."""
        return self.conv2(F.relu(self.bn2(self.conv1(F.relu(x)))))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.bn1(x)
        shortcut = x if self.project is None else self.project(F.relu(normed))
        return shortcut + self.branch(normed)


class ResNet(nn.Module):
    """Images (batch, 1, 16, 16) to logits. Every stage but the first doubles the width and halves the image."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        for width, out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            blocks = [Convolutions(width, out, stride), Convolutions(out, out, 1), Convolutions(out, out, 1)]
            self.stages.append(nn.ModuleList(blocks))
        self.norm, self.head = nn.BatchNorm2d(64), nn.Linear(64, CLASSES)

    def stage(self, number: int, x: Tensor) -> Tensor:
        for block in self.stages[number]:
            x = block(x)
        return x

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for number in range(len(self.stages)):
            x = self.stage(number, x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


def features_last(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of images for a state (batch, rows, columns, width)."""
    return lambda x: function(x.movedim(-1, 1)).movedim(1, -1)


class ChannelNorm(nn.Module):
    """A norm of images for a state (batch, rows, columns, width)."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return features_last(self.norm)(x)


class StreamResNet(ResNet):
    """The ResNet with a stream for each width. A block that changes it has no identity to replace, and still adds."""

    def __init__(self, plain: ResNet, scheme: residua.Scheme):
        super().__init__()
        self.load_state_dict(plain.state_dict())
        self.streams = nn.ModuleList()
        for stage in self.stages:
            blocks = [block for block in stage if block.project is None]
            norms = [ChannelNorm(norm) for norm in take_norms(blocks, "bn1")]
            self.streams.append(scheme.build(stage[-1].conv2.out_channels, len(norms), norm=norms.__getitem__))

    def stage(self, number: int, x: Tensor) -> Tensor:
        blocks = list(self.stages[number])
        if blocks[0].project is not None:
            x = blocks.pop(0)(x)
        branches = [features_last(block.branch) for block in blocks]
        return self.streams[number](x.movedim(1, -1), branches).movedim(-1, 1)


# A vision Transformer


class Attention(nn.Module):
    """Self-attention without a mask, (batch, tokens, DIM) -> the same shape."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """x + attention, then x + MLP, both of the normalised x."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM, eps=1e-6), Attention()
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images (batch, 1, 16, 16) to logits, read from a class token."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM, eps=1e-6), nn.Linear(DIM, CLASSES)

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.trunk(tokens)[:, 0]))


class StreamVisionTransformer(VisionTransformer):
    """The vision Transformer with one stream."""

    def __init__(self, plain: VisionTransformer, scheme: residua.Scheme):
        super().__init__()
        self.load_state_dict(plain.state_dict())
        norms = take_norms(self.blocks, "norm1", "norm2")
        self.stream = scheme.build(DIM, len(norms), norm=norms.__getitem__)

    def trunk(self, x: Tensor) -> Tensor:
        return self.stream(x, [part for block in self.blocks for part in (block.attn, block.mlp)])


# A diffusion Transformer, whose blocks know the time and the class by adaLN-Zero


def modulated(sublayer: Callable[[Tensor], Tensor], shift: Tensor, scale: Tensor, gate: Tensor) -> Callable:
    """Return a sublayer with the shift and the scale before it, behind the norm, and the gate behind it."""
    return lambda x: gate * sublayer(x * (1 + scale) + shift)


class Modulation(nn.Sequential):
    """Condition (batch, DIM) to `count` modulations (batch, 1, DIM), all zero at the start."""

    def __init__(self, count: int):
        super().__init__(nn.SiLU(), nn.Linear(DIM, count * DIM))
        self.count = count
        nn.init.zeros_(self[1].weight)
        nn.init.zeros_(self[1].bias)

    def forward(self, condition: Tensor) -> Sequence[Tensor]:
        return super().forward(condition).unsqueeze(1).chunk(self.count, -1)


class ConditionedBlock(Block):
    """The block of a vision Transformer whose norms have no parameters, and whose sublayers are modulated."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(DIM, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.modulation = Modulation(6)

    def sublayers(self, condition: Tensor) -> list[Callable[[Tensor], Tensor]]:
        parts = self.modulation(condition)
        return [modulated(self.attn, *parts[:3]), modulated(self.mlp, *parts[3:])]

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        attn, mlp = self.sublayers(condition)
        x = x + attn(self.norm1(x))
        return x + mlp(self.norm2(x))


class DiffusionTransformer(nn.Module):
    """Noisy images (batch, 1, 16, 16), times (batch,) in [0, 1] and classes (batch,) to the noise."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 16, DIM))
        self.time = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.label = nn.Embedding(CLASSES, DIM)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(LAYERS))
        self.norm, self.modulation = nn.LayerNorm(DIM, eps=1e-6, elementwise_affine=False), Modulation(2)
        self.head = nn.Linear(DIM, PATCH * PATCH)

    def trunk(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x

    def tokens(self, images: Tensor, times: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patches and the condition."""
        angles = times.unsqueeze(1) * torch.logspace(0, 3, DIM // 2)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.label(labels)
        return self.patches(images).flatten(2).mT + self.pos_embed, condition

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x, condition = self.tokens(images, times, labels)
        shift, scale = self.modulation(condition)
        x = self.head(self.norm(self.trunk(x, condition)) * (1 + scale) + shift)
        return F.fold(x.mT, images.shape[-2:], PATCH, stride=PATCH)


class StreamDiffusionTransformer(DiffusionTransformer):
    """The diffusion Transformer with one stream, whose connections know nothing of the condition."""

    def __init__(self, plain: DiffusionTransformer, scheme: residua.Scheme):
        super().__init__()
        self.load_state_dict(plain.state_dict())
        norms = take_norms(self.blocks, "norm1", "norm2")
        self.stream = scheme.build(DIM, len(norms), norm=norms.__getitem__)

    def trunk(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.stream(x, [part for block in self.blocks for part in block.sublayers(condition)])


# Training, and the first step from adaLN-Zero


def images(batch: int) -> tuple[Tensor, Tensor]:
    """Noisy images (batch, 1, 16, 16) that vary by row, by column or by both, and which of the three: (batch,)."""
    labels = torch.randint(CLASSES, (batch,))
    rows, columns = torch.randn(batch, 16, 1), torch.randn(batch, 1, 16)
    kinds = torch.stack([rows.expand(-1, -1, 16), columns.expand(-1, 16, -1), rows * columns])
    return (kinds[labels, torch.arange(batch)] + 0.5 * torch.randn(batch, 16, 16)).unsqueeze(1), labels


def noisy(batch: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the inputs of a diffusion Transformer, and the noise that it has to find."""
    (clean, labels), times = images(batch), torch.rand(batch)
    noise, share = torch.randn_like(clean), times.view(-1, 1, 1, 1)
    return ((1 - share) * clean + share * noise, times, labels), noise


def loss_of(network: nn.Module, batch: int) -> Tensor:
    """Return the loss on new images: of the noise for a diffusion Transformer, of the class for the others."""
    if isinstance(network, DiffusionTransformer):
        inputs, noise = noisy(batch)
        return F.mse_loss(network(*inputs), noise)
    inputs, labels = images(batch)
    return F.cross_entropy(network(inputs), labels)


def train(network: nn.Module, steps: int, lr: float) -> list[float]:
    """Return the losses of the steps."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of(network, 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def moved(network: DiffusionTransformer) -> float:
    """Return how far the trunk takes its tokens from their multiples, in parts of their norm: 0 for c x."""
    torch.manual_seed(2)
    x, condition = network.tokens(*noisy(4)[0])
    y = network.trunk(x, condition)
    y = y * (x * y).sum() / y.square().sum()
    return ((x - y).norm() / x.norm()).item()


def first_step(connection: str) -> tuple[float, float]:
    """Return how far a diffusion Transformer moves its tokens at its start, and after a step of 1e-4."""
    torch.manual_seed(0)
    network = StreamDiffusionTransformer(DiffusionTransformer(), residua.resolve(connection))
    start = moved(network)
    train(network, steps=1, lr=1e-4)
    return start, moved(network)


NETWORKS = {
    "ResNet": (ResNet, StreamResNet),
    "vision Transformer": (VisionTransformer, StreamVisionTransformer),
    "diffusion Transformer": (DiffusionTransformer, StreamDiffusionTransformer),
}


def main() -> None:
    for name, (make_plain, with_stream) in NETWORKS.items():
        for connection in ("residual", "ddl-cc:k_eps=1.0", "mhc"):
            torch.manual_seed(0)
            network = with_stream(make_plain(), residua.resolve(connection))
            losses = train(network, steps=30, lr=3e-3)
            print(
                f"{name}, {connection}: loss {losses[0]:.2f} at the first step, {sum(losses[-5:]) / 5:.2f} at the last"
            )
    for connection in ("residual", "gated-delta", "mhc", "ddl", "ddl:k_eps=1.0", "ddl-v"):
        start, after = first_step(connection)
        print(f"adaLN-Zero, {connection}: the trunk is {start:.1g} from the identity, {after:.1g} after one step")


if __name__ == "__main__":
    main()
