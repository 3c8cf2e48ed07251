"""Attention over depth: a weighted mean of sources, with weights from a learned query."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import depth_mix, depth_read
from support.delta_cases import assert_equals_with_gradients, generator, leaves, normal
from support.tolerances import assert_close

seeds, numbers, dims = st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5)


def drawn(seed: int, n: int, d: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """n sources (2, 3, d) of sizes between a tenth and ten, and a query (d,)."""
    g = generator(seed)
    return [10 ** (2 * torch.rand((), generator=g).double() - 1) * normal(g, 2, 3, d) for _ in range(n)], normal(g, d)


def plain(sources, query, eps, heads=1):
    """The published form: a stack of the sources, their normalised keys, a softmax over depth, each head by itself."""
    values = torch.stack(list(sources))
    keys = values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    query, keys, values = (x.unflatten(-1, (heads, -1)) for x in (query, keys, values))
    weights = torch.einsum("hd,nbthd->nbth", query, keys).softmax(0)
    x = torch.einsum("nbth,nbthd->bthd", weights, values).flatten(-2)
    return x, weights.movedim(0, -1).squeeze(-2) if heads == 1 else weights.movedim(0, -1)


FLA = json.loads(Path(__file__).with_name("attnres-fla.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", FLA, ids=[f"{len(case['sources'])} sources" for case in FLA])
def test_the_read_agrees_with_flash_linear_attention(case):
    """Outputs, weights and gradients that its plain implementation of AttnRes computed, in float64."""
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in case.items()}
    sources, (query, gain) = leaves(*given["sources"]), leaves(given["query"], given["gain"])
    x, weights = depth_read(sources, query * gain, eps=case["eps"])
    assert_close(x, given["output"])
    assert_close(weights, given["weights"])
    *of_sources, of_query, of_gain = torch.autograd.grad(x, [*sources, query, gain], given["grad"])
    assert_close(torch.stack(of_sources), given["grad_sources"])
    assert_close(of_query, given["grad_query"])
    assert_close(of_gain, given["grad_gain"])


@given(numbers, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1e-5, 0.3]), seeds)
def test_the_read_and_its_gradients_are_those_of_the_published_form(n, heads, width, eps, seed):
    sources, query = drawn(seed, n, heads * width)
    assert_equals_with_gradients(
        lambda query, *sources: depth_read(sources, query, heads=heads, eps=eps)[0],
        lambda query, *sources: plain(sources, query, eps, heads)[0],
        *(query, *sources),
    )
    weights = depth_read(sources, query.requires_grad_(), heads=heads, eps=eps)[1]
    assert_close(weights, plain(sources, query, eps, heads)[1])
    assert not weights.requires_grad


@given(numbers, dims, seeds)
def test_a_zero_query_reads_the_mean(n, d, seed):
    sources, query = drawn(seed, n, d)
    x, weights = depth_read(sources, torch.zeros_like(query))
    assert_close(weights, torch.full_like(weights, 1 / n))
    assert_close(x, torch.stack(sources).mean(0))


@given(numbers, dims, seeds)
def test_the_read_lies_between_the_sources_in_any_order(n, d, seed):
    sources, query = drawn(seed, n, d)
    x, weights = depth_read(sources, query)
    stack = torch.stack(sources)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 3).double())
    slack = 1e-12 * stack.abs().max()
    assert (x <= stack.amax(0) + slack).all()
    assert (x >= stack.amin(0) - slack).all()
    other, turned = depth_read(sources[::-1], query)
    assert_close(other, x)
    assert_close(turned, weights.flip(-1))


@given(numbers, st.integers(2, 5), st.floats(0.01, 100.0), seeds)
def test_the_values_depend_on_the_size_of_a_source_and_the_keys_do_not(n, d, size, seed):
    sources, query = drawn(seed, n, d)
    scaled = [size * sources[0], *sources[1:]]
    before, after = depth_read(sources, query, eps=0.0), depth_read(scaled, query, eps=0.0)
    assert_close(after[1], before[1])
    assert_close(after[0] - before[0], (size - 1) * before[1][..., :1] * sources[0])


def test_every_token_reads_independently():
    sources, query = drawn(0, 3, 4)
    changed = [source.clone() for source in sources]
    changed[1][0, 1] += 1
    x, other = depth_read(sources, query)[0], depth_read(changed, query)[0]
    same = torch.ones(2, 3, dtype=torch.bool)
    same[0, 1] = False
    assert torch.equal(x[same], other[same])
    assert not torch.equal(x[~same], other[~same])


def test_large_logits_and_zero_sources_stay_finite():
    sources, query = drawn(0, 3, 4)
    for given_sources, given_query in ((sources, 1e6 * query), ([0 * sources[0], *sources[1:]], query)):
        inputs = leaves(given_query, *given_sources)
        x, weights = depth_read(inputs[1:], inputs[0])
        assert x.isfinite().all()
        assert weights.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(x.sum(), inputs))


def test_second_derivatives_of_bfloat16_sources():
    """A loss that is linear in the read: nothing but the inputs tells that the gradient is to be differentiated."""
    sources, query = drawn(0, 3, 8)

    def second(dtype):
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in (query, *sources)]
        grads = torch.autograd.grad(depth_read(inputs[1:], inputs[0])[0].double().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.double().square().sum() for grad in grads), inputs)

    for narrow, wide in zip(second(torch.bfloat16), second(torch.float64)):
        assert (narrow.double() - wide).norm() <= 0.03 * wide.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_sources_are_weighed_in_float32(dtype, autocast):
    """Logits or a softmax in the dtype of the sources would have errors of 1e-3 and more."""
    sources, query = drawn(0, 5, 16)
    sources = [source.to(dtype) for source in sources]
    query = 3 * query.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x, weights = depth_read(sources, query)
    expected, shares = plain([source.double() for source in sources], query.double(), 1e-5)
    assert (x.dtype, weights.dtype) == (dtype, torch.float32)
    assert_close(weights, shares, dtype=torch.float32)
    # One rounding, at the end: at most half a unit in the last place of each number, and float32's own errors.
    allowed = torch.finfo(dtype).eps / 2 * expected.abs() + 1e-5 * expected.abs().max()
    assert ((x.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_backward_pass_keeps_the_sources_themselves_and_two_numbers_for_each(dtype):
    n, tokens, dim = 4, 6, 32
    sources = [normal(generator(i), 2, 3, dim).to(dtype).requires_grad_() for i in range(n)]
    query = normal(generator(n), dim).to(dtype).requires_grad_()
    given_storages = {x.untyped_storage().data_ptr() for x in (query, *sources)}
    own = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in given_storages:
            own[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        depth_read(sources, query)
    assert sum(storage.nbytes() for storage in own.values()) == 2 * n * tokens * max(4, dtype.itemsize)


def test_wrong_shapes_are_refused():
    x = torch.zeros(2, 3, 4)
    for sources, query, message in (
        ([], x[0, 0], "must be at least one tensor, got none"),
        ([x, x[:, :2]], x[0, 0], r"sources must have the shape of the first, \(2, 3, 4\), got \(2, 2, 4\)"),
        ([x], x[0, 0, :3], r"query must be .*\(4,\), got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            depth_read(sources, query)
    for heads in (0, -1, 3):
        with pytest.raises(ValueError, match=f"^heads must be a positive number that divides the 4.*, got {heads}$"):
            depth_read([x], x[0, 0], heads=heads)


@pytest.mark.slow
@given(numbers, st.integers(1, 3), dims, st.sampled_from([1e-5, 0.3]), seeds)
def test_the_normalised_read_and_its_gradients_are_attention_over_normalised_sources(n, heads, width, eps, seed):
    sources, query = drawn(seed, n, heads * width)

    def in_heads(x):
        return x.unflatten(-1, (heads, width)).movedim(-2, -3)

    def attention(query, *sources):
        keys = torch.stack([source / (source.square().mean(-1, keepdim=True) + eps).sqrt() for source in sources], -2)
        arguments = map(in_heads, (query.expand(2, 3, 1, -1), keys, keys))
        return torch.nn.functional.scaled_dot_product_attention(*arguments, scale=1.0).flatten(-3)

    options = {"heads": heads, "normalise_values": True, "eps": eps}
    assert_equals_with_gradients(
        lambda query, *sources: depth_read(sources, query, **options)[0], attention, *(query, *sources)
    )
    weights = depth_read(sources, query.requires_grad_(), **options)[1]
    assert_close(weights.sum(-1), torch.ones((2, 3) if heads == 1 else (2, 3, heads)).double())
    assert not weights.requires_grad


def test_the_normalised_read_does_not_depend_on_the_size_of_any_source():
    sources, query = drawn(0, 3, 5)
    x, weights = depth_read(sources, query, normalise_values=True, eps=0.0)
    larger, same = depth_read([7 * source for source in sources], query, normalise_values=True, eps=0.0)
    assert_close(larger, x)
    assert_close(same, weights)
    narrow, _ = depth_read([source.bfloat16() for source in sources], query.bfloat16(), normalise_values=True)
    assert narrow.dtype == torch.float32


@given(numbers, dims, st.booleans(), seeds)
def test_the_weighted_sum_and_its_gradients_are_those_of_a_stack(n, d, shared, seed):
    sources, _ = drawn(seed, n, d)
    weights = normal(generator(seed + 2), n) if shared else normal(generator(seed + 2), 2, 3, n)
    assert_equals_with_gradients(
        lambda weights, *sources: depth_mix(sources, weights),
        lambda weights, *sources: torch.einsum("btn,nbtd->btd", weights.expand(2, 3, n), torch.stack(sources)),
        *(weights, *sources),
    )


def test_the_weighted_sum_of_bfloat16_sources_is_computed_in_float32():
    sources = [normal(generator(i), 2, 3, 8).to(torch.bfloat16) for i in range(4)]
    weights = normal(generator(9), 2, 3, 4).float()
    x = depth_mix(sources, weights)
    exact = sum(weights[..., i : i + 1].double() * source.double() for i, source in enumerate(sources))
    assert torch.equal(x, exact.float().to(torch.bfloat16))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("normalise_values", [False, True])
def test_gradients_of_one_source_can_be_batched(heads, normalise_values):
    """As the first read of a model has one; `vectorize` maps with the older vmap, which cannot take a whole axis."""
    query, source = normal(generator(0), 4), normal(generator(1), 3, 4)

    def read(query, source):
        return depth_read([source], query, heads=heads, normalise_values=normalise_values)[0]

    expected = torch.autograd.functional.jacobian(read, (query, source))
    for found, one in zip(torch.autograd.functional.jacobian(read, (query, source), vectorize=True), expected):
        assert_close(found, one)


def test_the_weighted_sum_refuses_wrong_shapes():
    sources = [torch.zeros(2, 3), torch.zeros(2, 4)]
    with pytest.raises(ValueError, match="must be at least one tensor"):
        depth_mix([], torch.zeros(0))
    with pytest.raises(ValueError, match=r"sources must have the shape of the first, .*, got"):
        depth_mix(sources, torch.zeros(2))
    with pytest.raises(ValueError, match="weights must"):
        depth_mix(sources[:1], torch.zeros(2))
