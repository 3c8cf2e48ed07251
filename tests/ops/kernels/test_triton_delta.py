"""The delta write in Triton against its plain definition in float64; without a GPU the kernels are interpreted."""

from functools import partial

import pytest
import torch

from residua.ops import K_NORMS, delta_write
from support.kernel_cases import DEVICE, assert_as_good, normal, write_arguments

triton = pytest.importorskip("triton")

from residua.ops.kernels.delta import write_backward_op, write_op  # noqa: E402
from residua.ops.kernels.launch import tiling  # noqa: E402
from residua.ops.kernels.replay import replay_op  # noqa: E402

kernel = partial(delta_write, implementation="triton")

CASES = [  # batch, seq, value channels, dim: rows and columns of a tile that are full or padded, one block or three
    (2, 3, 1, 64),
    (1, 7, 2, 5),
    (2, 2, 3, 300),
    (1, 3, 4, 48),
    (1, 3, 8, 5),
    (1, 3, 16, 48),
    *([(1, 5, 4, 768)] if DEVICE == "cuda" else []),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_good_as_the_plain_definition(case, dtype):
    inputs = write_arguments(*case, dtype)
    assert_as_good(partial(kernel, k_norm="rms"), partial(delta_write, k_norm="rms"), inputs)


@pytest.mark.parametrize("k_norm", [None, *K_NORMS])
def test_every_k_norm_also_where_it_holds_the_norm(k_norm):
    """eps = 0.5 lies among the norms of the directions, so that `clamp` takes both of its branches."""
    state, k, v, beta = write_arguments(2, 5, 2, 48, torch.float32)
    k = k * torch.linspace(0, 0.2, 10, device=DEVICE).reshape(2, 5, 1)
    assert (k.norm(dim=-1) > 0.5).any()
    assert (k.norm(dim=-1) < 0.5).any()
    options = {"k_norm": k_norm, "eps": 0.5}
    assert_as_good(partial(kernel, **options), partial(delta_write, **options), [state, k, v, beta])


def test_float16_and_mixed_dtypes():
    """A float32 state written by a low-precision sublayer, and the other way round; gradients keep their dtypes."""
    for state_dtype, k_dtype in [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ]:
        state, k, v, beta = write_arguments(1, 5, 2, 48, torch.float32)
        inputs = [state.to(state_dtype), k.to(k_dtype), v.to(k_dtype), beta]
        assert_as_good(partial(kernel, k_norm="rms"), partial(delta_write, k_norm="rms"), inputs)


def test_repeated_and_strided_states_need_no_copy():
    x = normal(2, 3, 48)
    _, k, v, beta = write_arguments(2, 3, 4, 48, torch.float32)
    repeated = x.unsqueeze(-2).expand(2, 3, 4, 48)
    expected = kernel(repeated.contiguous(), k, v, beta, k_norm="rms")
    assert torch.equal(kernel(repeated, k, v, beta, k_norm="rms"), expected)
    stored = torch.empty(4, 2, 3, 48, device=DEVICE).permute(1, 2, 0, 3).copy_(repeated)
    wide_k = torch.cat([k, k], -1)[..., :48]
    assert torch.equal(kernel(stored, wide_k, v, beta, k_norm="rms"), expected)

    state = normal(2, 3, 4, 48).requires_grad_()
    kernel(state, k, v, beta, k_norm="rms").sum().backward()  # a gradient of stride 0 everywhere
    (plain,) = torch.autograd.grad(delta_write(state, k, v, beta, k_norm="rms").sum(), state)
    torch.testing.assert_close(state.grad, plain)


def test_leading_axes_of_any_number_and_no_tokens():
    state, k, v, beta = write_arguments(1, 1, 2, 48, torch.float32)
    single = kernel(state[0, 0], k[0, 0] + 1, v[0, 0], beta[0, 0], k_norm="rms")
    assert torch.equal(single, kernel(state, k + 1, v, beta, k_norm="rms")[0, 0])
    none = [x[:, :0] for x in (state, k, v, beta)]
    assert kernel(*none, k_norm="rms").shape == (1, 0, 2, 48)


def test_what_is_kept_for_the_backward_pass():
    kept = []
    inputs = [x.requires_grad_() for x in write_arguments(1, 5, 4, 48, torch.bfloat16)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernel(*inputs, k_norm="rms")
    numbers = sum(x.numel() * x.itemsize for x in kept)
    tokens, channels, dim = 5, 4, 48
    assert numbers == tokens * (2 * (channels + 1) * dim + 4 * (2 * channels + 2))


def test_the_operator_is_registered_as_torch_demands():
    state, k, v, beta = write_arguments(1, 2, 2, 48, torch.float32)
    torch.library.opcheck(write_op, (state, k, v, beta, "rms", 1e-5))
    written, error, scale = write_op(state, k, v, beta, "rms", 1e-5)
    since = [k, scale, beta, error]
    torch.library.opcheck(replay_op, (state, since))
    torch.library.opcheck(write_backward_op, (written, state, since, k, v, beta, error, scale, "rms", 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [(1, 5, 4, 48), (1, 3, 3, 300)], ids=str)
def test_a_replay_makes_the_same_bits(case, dtype):
    first, k, v, beta = write_arguments(*case, dtype)
    state, since = first, []
    for _ in range(3):
        state, error, scale = write_op(state, k, v, beta, "rms", 1e-5)
        since += [k, scale, beta, error]
        assert torch.equal(replay_op(first, since), state)
        k = k.roll(1, -1)


def test_a_second_derivative_is_an_error():
    inputs = [x.requires_grad_() for x in write_arguments(1, 2, 2, 48, torch.float32)]
    written = kernel(*inputs, k_norm="rms")
    with pytest.raises(RuntimeError, match="implementation='reference' to differentiate twice"):
        torch.autograd.grad(written.sum(), inputs[0], create_graph=True)


def test_what_the_kernel_does_not_take_is_an_error():
    state, k, v, beta = write_arguments(1, 2, 2, 48, torch.float32)
    with pytest.raises(TypeError, match=r"state: .*float64.*'reference'"):
        kernel(state.double(), k, v, beta)
    with pytest.raises(ValueError, match="1 to 16 value channels, got 17"):
        kernel(normal(1, 2, 17, 48), k, normal(1, 2, 17), beta)
    with pytest.raises(ValueError, match=r"v must be .*\(1, 2, 2\)"):
        kernel(state, k, v[..., :1], beta)
    with pytest.raises(ValueError, match="k_norm must be None or one of rms"):
        kernel(state, k, v, beta, k_norm="rsm")


@pytest.mark.parametrize(
    ("dim", "block", "blocks"),
    [(48, 64, 1), (200, 256, 1), (300, 128, 3), (768, 256, 3), (1024, 1024, 1), (1536, 512, 3), (1600, 256, 7)],
)
def test_tiles_waste_few_lanes(dim, block, blocks):
    assert tiling(3, dim) == (4, block, blocks)
