"""Arguments for kernels, and the comparison of a kernel with its plain definition."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def results(op: Callable, inputs: Sequence[Tensor], seed: int = 7) -> list[Tensor]:
    """What `op` makes of the inputs, and their gradients for random gradients of every result."""
    inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    made = op(*inputs)
    made = [made] if isinstance(made, Tensor) else list(made)
    grads = [normal(*x.shape, seed=seed + i).to(torch.bfloat16).to(x.dtype) for i, x in enumerate(made)]
    return [*made, *torch.autograd.grad(made, inputs, grads)]


def assert_as_good(kernel: Callable, plain: Callable, inputs: Sequence[Tensor]) -> None:
    """The kernel's results and gradients are at most twice as far from float64 as those of the plain definition."""
    truth = results(plain, [x.double() for x in inputs])
    ours, theirs = results(kernel, inputs), results(plain, inputs)
    for i, (a, b, t) in enumerate(zip(ours, theirs, truth, strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.isfinite().all()
        error = (a - t).norm().item()
        # Where the plain definition happens to be nearly exact, a few float32 roundings are still right.
        allowed = 2 * (b - t).norm().item() + 5e-7 * t.norm().item()
        assert error <= allowed, f"number {i} of results and gradients: {error:.3g}, allowed {allowed:.3g}"
