"""Every scheme under torch.func and the other ways to differentiate: what loops over plain autograd compute."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from residua import Scheme, ops
from residua.connections import PRESETS
from residua.ops import transforms
from support.tolerances import assert_close
from support.variants import ALL, KINDS, bare_sublayers, perturbed

DIM, SUBLAYERS, SEQ = 8, 2, 3
every_preset = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.variant) for name in PRESETS]
)


class Alone(nn.Module):
    """A perturbed stream around two sublayers, on one sequence (seq, dim), in float64."""

    def __init__(self, scheme: Scheme):
        super().__init__()
        torch.manual_seed(0)
        self.stream = perturbed(scheme.build(DIM, SUBLAYERS), scale=0.2).double()
        self.sublayers = bare_sublayers(DIM, SUBLAYERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.stream(x.unsqueeze(0), self.sublayers).squeeze(0)


def sequences(count: int) -> Tensor:
    return torch.randn(count, SEQ, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@every_preset
def test_transforms_equal_loops(name):
    model = Alone(ALL[name])
    batch, tangent = sequences(2), sequences(3)[2]
    x = batch[0]
    assert_close(vmap(model)(batch), torch.stack([model(one) for one in batch]), what="vmap")

    jacobian = torch.autograd.functional.jacobian(model, x)
    assert_close(jacrev(model)(x), jacobian, what="jacrev")
    pushed = (jacobian * tangent).sum((-2, -1))
    assert_close(jvp(model, (x,), (tangent,))[1], pushed, what="jvp")
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent
    assert_close(found, pushed, what="forward mode")
    batched = torch.autograd.functional.jacobian(model, x, vectorize=True)
    assert_close(batched, jacobian, what="a batch of gradients")


@every_preset
def test_every_parameter_has_a_gradient_for_every_sequence(name):
    model, batch = Alone(ALL[name]), sequences(2)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, batch)
    for i, x in enumerate(batch):
        model.zero_grad()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert_close(found[name][i], parameter.grad, what=name)


@pytest.mark.parametrize("name", ["ddl-tc", "ddl-v", "hc", "mhc", "jpmhc", "edelta", "pooled-householder", "attnres"])
def test_hessians_of_torch_func_equal_those_of_autograd(name):
    scheme = ALL[name]
    # Plain autograd differentiates twice only through states that were kept; transforms keep them all.
    kept = replace(scheme, recompute="none") if hasattr(scheme, "recompute") else scheme
    model, plain, x = Alone(scheme), Alone(kept), sequences(1)[0, :2]

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    expected = torch.autograd.functional.hessian(lambda x: plain(x).square().sum(), x)
    assert_close(hessian(loss)(x), expected, factor=10, what="hessian")  # large second derivatives of a norm
    assert_close(jacfwd(jacfwd(loss))(x), expected, factor=10, what="forward over forward")


@pytest.mark.parametrize("k_norm", ops.K_NORMS)
def test_a_zero_direction_has_the_same_derivative_as_in_training(k_norm):
    k = torch.zeros(3, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda k: ops.unit(k, k_norm=k_norm, eps=0.5), k)
    assert_close(jacrev(lambda k: ops.unit(k, k_norm=k_norm, eps=0.5))(k), expected)


def test_every_autograd_function_has_a_plain_form():
    """A new autograd function in `residua.ops` must derive from `transforms.Function`; kernels have no plain form."""
    found, stack = [], [torch.autograd.Function]
    while stack:
        stack += (derived := stack.pop().__subclasses__())
        found += [cls for cls in derived if cls.__module__.startswith("residua.ops.")]
    reference = [cls for cls in found if ".kernels." not in cls.__module__ and cls is not transforms.Function]
    assert len(reference) >= 10
    for cls in reference:
        assert issubclass(cls, transforms.Function), cls
        assert cls.plain is not transforms.Function.plain, cls


def test_kernels_refuse_transforms_in_one_line():
    streams, h_pre = torch.randn(2, 3, 4), torch.randn(2, 3)

    def read(streams: Tensor, implementation: str) -> Tensor:
        return ops.hyper_read(streams, h_pre, implementation=implementation).sum()

    with pytest.raises(ValueError, match=r"torch\.func.*'reference'"):
        grad(read)(streams, "triton")
    assert_close(grad(read)(streams, "auto"), grad(read)(streams, "reference"))
