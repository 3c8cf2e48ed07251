"""A deep graph network: a stack without a sequence axis, with the plain residual and with Deep Delta Learning.

The nodes of a random graph belong to three communities; eight labels of each are known, and the others are to be found.
Nodes are no sequence, so the scheme is pointwise: `compress="channel"`.

    python examples/graph.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import residua

DIM, SUBLAYERS, NODES, COMMUNITIES = 32, 16, 300, 3


class Convolution(nn.Module):
    """The mean over the neighbours of a node, then an MLP: (1, nodes, dim) -> the same shape. It knows no residual."""

    def __init__(self, neighbours: Tensor):
        super().__init__()
        self.register_buffer("neighbours", neighbours)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.neighbours @ x)


class GraphNetwork(nn.Module):
    """Features (nodes, 8) to logits (nodes, communities)."""

    def __init__(self, scheme: residua.Scheme, neighbours: Tensor):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, DIM), nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, COMMUNITIES))
        self.sublayers = nn.ModuleList(Convolution(neighbours) for _ in range(SUBLAYERS))
        self.stream = scheme.build(DIM, SUBLAYERS)

    def forward(self, features: Tensor) -> Tensor:
        x = self.encode(features).unsqueeze(0)  # one graph
        return self.decode(self.stream(x, self.sublayers)).squeeze(0)


def random_graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features, row-normalised adjacency and communities. Edges are four times as likely within a community."""
    labels = torch.arange(NODES) % COMMUNITIES
    likely = torch.where(labels[:, None] == labels, 0.08, 0.02)
    edges = torch.bernoulli(likely).triu(1)
    adjacency = edges + edges.T + torch.eye(NODES)
    features = torch.randn(NODES, 8) + 0.5 * F.one_hot(labels, 8)
    return features, adjacency / adjacency.sum(1, keepdim=True), labels


def main() -> None:
    torch.manual_seed(0)
    features, neighbours, labels = random_graph()
    known = torch.arange(NODES) < 8 * COMMUNITIES
    schemes = {
        "residual": residua.Residual(),
        "ddl, one channel": residua.DeepDelta(),
        "ddl, two channels": residua.DeepDelta(value_channels=2, compress="channel"),
    }
    for name, scheme in schemes.items():
        torch.manual_seed(1)
        model = GraphNetwork(scheme, neighbours)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        for _ in range(60):
            loss = F.cross_entropy(model(features)[known], labels[known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = (model(features).argmax(-1) == labels)[~known].float().mean()
        print(f"{name:18} {SUBLAYERS} sublayers: {right:.1%} of the hidden labels found")


if __name__ == "__main__":
    main()
