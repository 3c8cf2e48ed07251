"""Networks of images with a stream, of examples/any_network.py, and what docs/any-network.md says of them."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import residua
from residua.connections import PRESETS

ROOT = Path(__file__).parents[1]
NAMES = ("ResNet", "vision Transformer", "diffusion Transformer")


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "any_network.py")))


def plain_network(example: SimpleNamespace, name: str) -> nn.Module:
    """Return a plain network whose parameters, gates of adaLN-Zero too, are not those of a start."""
    torch.manual_seed(0)
    network = example.NETWORKS[name][0]()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


def inputs_of(example: SimpleNamespace, name: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return example.noisy(3)[0] if name == "diffusion Transformer" else example.images(3)[:1]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_with_the_plain_residual_a_network_is_unchanged(name, training, example):
    """Outputs, buffers and the gradients of all parameters, to the last bit."""
    plain = plain_network(example, name)
    ours = example.NETWORKS[name][1](plain, residua.Residual())
    outputs = []
    for network in (plain.train(training), ours.train(training)):
        outputs.append(network(*inputs_of(example, name)))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    assert outputs[0].std() > 0.01
    state, theirs = plain.state_dict(keep_vars=True), ours.state_dict(keep_vars=True)
    assert sum("norm" in key or "bn1" in key for key in theirs) == sum("norm" in key or "bn1" in key for key in state)
    for key, value in state.items():
        moved = [other for other in theirs.values() if other.shape == value.shape and torch.equal(other, value)]
        assert moved, key
        if value.requires_grad:
            assert any(torch.equal(other.grad, value.grad) for other in moved), key


@pytest.mark.parametrize("connection", ["residual", "ddl-cc"])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_has_every_parameter_once(name, connection, example, tmp_path):
    """safetensors refuses tensors with two names. The file opens in a new network, made from a new plain one."""
    make_plain, with_stream = example.NETWORKS[name]
    plain, scheme = plain_network(example, name), residua.resolve(connection)
    ours = with_stream(plain, scheme).eval()
    own = sum(p.numel() for p in ours.parameters()) - sum(p.numel() for p in plain.parameters())
    assert own == 0 if connection == "residual" else own > 0
    save_file(ours.state_dict(), tmp_path / "network.safetensors")
    again = with_stream(make_plain(), scheme).eval()
    again.load_state_dict(load_file(tmp_path / "network.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(*inputs_of(example, name)), ours(*inputs_of(example, name)))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_network_with_delta_learning_gets_a_gradient(name, example):
    network = example.NETWORKS[name][1](plain_network(example, name), residua.resolve("ddl-cc"))
    network(*inputs_of(example, name)).square().sum().backward()
    assert [key for key, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_first_connection_of_a_stage_may_write_the_branch_beside_the_projection(example):
    plain = plain_network(example, "ResNet")
    widen, *blocks = plain.stages[1]
    x = torch.randn(2, 16, 8, 8)
    expected = plain.stage(1, x)
    norms = [nn.LayerNorm(32), *map(example.ChannelNorm, example.take_norms(blocks, "bn1"))]
    normed = widen.bn1(x)
    branches = [lambda _: widen.branch(normed).movedim(1, -1), *(example.features_last(b.branch) for b in blocks)]
    for connection, same in (("residual", True), ("ddl", False)):
        stream = residua.build(connection, dim=32, num_sublayers=3, norm=norms.__getitem__)
        result = stream(widen.project(torch.relu(normed)).movedim(1, -1), branches).movedim(-1, 1)
        assert result.shape == expected.shape
        assert torch.equal(result, expected) is same


def kind_of_start(preset: str) -> str:
    """Return what a stream of eight sublayers that return 0 makes of its input, in the words of the page."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    stream = residua.build(preset, dim=32, num_sublayers=8, norm=lambda i: nn.LayerNorm(32, elementwise_affine=False))
    with torch.no_grad():
        y = stream.double()(x, [lambda x, *others: torch.zeros_like(x)] * 8)
    if torch.equal(x, y):
        return "x, to the last bit"
    scale = (x * y).sum() / x.square().sum()
    if (y - x).norm() < 1e-10 * x.norm():
        return "x, up to rounding"
    if (y - scale * x).norm() < 1e-10 * y.norm():
        return "x times a constant, which the norm before the output layer removes"
    return "nearly x" if (y - x).norm() < 1e-3 * x.norm() else "another function of x"


def test_the_page_says_which_presets_start_as_the_identity():
    """They do so if the gates of adaLN-Zero are 0."""
    page = (ROOT / "docs" / "any-network.md").read_text(encoding="utf-8")
    table = page.split("| result | presets |\n|---|---|\n")[1].split("\n\n")[0]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    said = {preset: kind for kind, presets in rows for preset in re.findall(r"`([\w-]+)`", presets)}
    assert said == {preset: kind_of_start(preset) for preset in PRESETS}


@pytest.mark.parametrize(
    ("connection", "slow"),
    [("residual", True), ("gated-delta", True), ("mhc", True), ("ddl:k_eps=1.0", True), ("ddl", False)],
)
def test_after_one_step_delta_learning_is_far_from_the_identity_of_adaln_zero(connection, slow, example):
    start, after = example.first_step(connection)
    assert start < 1e-6
    assert after < 0.01 if slow else after > 0.5


@pytest.mark.nightly
def test_the_example_trains_every_network(capsys):
    runpy.run_path(str(ROOT / "examples" / "any_network.py"), run_name="__main__")
    losses = re.findall(r"loss ([\d.]+) at the first step, ([\d.]+) at the last", capsys.readouterr().out)
    assert len(losses) == 9
    assert all(float(last) < 0.8 * float(first) for first, last in losses)
