"""An engine initialises and trains every preset: built on the meta device, sharded layer by layer, checkpointed."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import residua
from support.lanes import some
from support.processes import together
from support.tolerances import assert_close
from support.variants import KINDS, PRESETS, bare_sublayers, normal, perturbed

DIM, LAYERS = 8, 3
SUBLAYERS = bare_sublayers(DIM, 2)  # not on the meta device


class Layer(nn.Module):
    """Two connections around two sublayers."""

    def __init__(self, connections):
        super().__init__()
        self.connections = nn.ModuleList(connections)

    def forward(self, state):
        for connection, sublayer in zip(self.connections, SUBLAYERS):
            state = connection(state, sublayer)
        return state


class Network(nn.Module):
    """The layers of an engine's model, each with its connections, between the ends of the stream."""

    def __init__(self, name):
        super().__init__()
        stream = residua.build(name, DIM, 2 * LAYERS)
        self.expand, self.collapse = stream.expand, stream.collapse
        self.layers = nn.ModuleList(Layer(stream.connections[2 * i : 2 * i + 2]) for i in range(LAYERS))

    def forward(self, x):
        state = self.expand(x)
        for layer in self.layers:
            state = layer(state)
        return self.collapse(state)


def start_anew(network):
    torch.manual_seed(0)
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def sharded_as_alone(rank, names):
    """On each rank: the start and the gradients of every preset as a sharded network and as a whole one."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for name in names:
        whole = Network(name).double()
        start_anew(whole)
        with torch.device("meta"):
            sharded = Network(name).double()
        sharded.layers = nn.ModuleList(map(checkpoint_wrapper, sharded.layers))
        for unit in (*sharded.layers, sharded):
            fully_shard(unit, mesh=mesh)
        sharded.to_empty(device="cpu")
        pairs = list(zip(whole.named_parameters(), sharded.parameters(), strict=True))
        for _, ours in pairs:
            nn.init.constant_(ours, torch.nan)
        start_anew(sharded)
        for (path, alone), ours in pairs:
            assert torch.equal(ours.full_tensor(), alone), f"{name}: {path} starts differently"

        perturbed(whole)
        with torch.no_grad():
            for (_, alone), ours in pairs:
                ours.copy_(distribute_tensor(alone.detach(), mesh, ours.placements))
        for network in (whole, sharded):
            network(normal(2, 5, DIM)).square().mean().backward()
        for (path, alone), ours in pairs:
            assert_close(ours.grad.full_tensor(), alone.grad, what=f"{name}: the gradient of {path}")


@pytest.mark.parametrize(
    ("names", "size"), some([(KINDS, 2), (PRESETS, 1), (PRESETS, 2)], lambda case: case[0] is KINDS)
)
def test_every_preset_starts_and_trains_in_shards_as_in_one_process(start, tmp_path, names, size):
    """Under activation checkpointing inside each unit, no layer is replayed for another one whose weights are not
    gathered."""
    together(start, tmp_path, size, sharded_as_alone, [*names, "delta-attnres:read_gate=scalar"])
