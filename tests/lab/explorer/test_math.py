"""assets/math.js in the browser against residua.ops in float64, to 1e-9."""

import re
import shutil

import pytest
import torch

from residua import AttentionResiduals, ops
from residua.lab.explorer.page import ASSETS, bundle
from residua.lab.inspection.measure import stream_similarity

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
EXPORTS = re.findall(
    r"^export (?:function|const) (\w+)", (ASSETS / "math.js").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.fixture(scope="module")
def call(browser, tmp_path_factory):
    """`call(name, *arguments)` is a function of math.js; `call.all(name, list of arguments)` is many at once."""
    folder = tmp_path_factory.mktemp("math")
    shutil.copy(ASSETS / "math.js", folder)
    names = ", ".join(EXPORTS)
    (folder / "main.js").write_text(f'import {{{names}}} from "./math.js";\nwindow.math = {{{names}}};\n', "utf-8")
    context = browser.new_context()
    page = context.new_page()
    page.set_content(f"<!doctype html><script type='module'>{bundle(folder, 'main.js')}</script>")
    page.wait_for_function("window.math !== undefined")

    def many(name, arguments):
        return page.evaluate("([name, all]) => all.map((given) => math[name](...given))", [name, plain(arguments)])

    def once(name, *arguments):
        return many(name, [arguments])[0]

    once.all = many
    once.page = page
    yield once
    context.close()


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def draws(count, *shapes, seed=0, spread=1.0):
    """Lists of `count` tensors in float64, one list for each shape, over several magnitudes where spread is larger."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        sizes = torch.logspace(-spread, spread, count, dtype=torch.float64) if spread > 1 else torch.ones(count)
        found.append([
            torch.randn(shape, generator=generator, dtype=torch.float64) * size for size in sizes[torch.randperm(count)]
        ])  # fmt: skip
    return found


def double(value):
    return torch.tensor(value, dtype=torch.float64)


def same(found, expected):
    torch.testing.assert_close(double(found), expected.double(), **TOLERANCE)


def test_the_delta_write_and_its_operator(call):
    xs, ks, vs, betas = draws(40, (5,), (5,), (), ())
    ks = [ops.unit(k) for k in ks]
    same(
        call.all("deltaWrite", list(zip(xs, ks, vs, betas))),
        torch.stack([ops.delta_write(x[None], k, v[None], b)[0] for x, k, v, b in zip(xs, ks, vs, betas)]),
    )
    same(
        call.all("deltaOperator", list(zip(ks, betas))),
        torch.stack([ops.delta_operator(k, b) for k, b in zip(ks, betas)]),
    )


def test_the_composition_and_singular_values(call):
    for n, beta, rho in [(1, 0.5, 0.0), (5, 0.4, 0.3), (9, 1.0, 0.5), (16, 1.7, 0.9), (16, 2.0, 1.0), (12, 0.1, 0.0)]:
        k = torch.tensor(call("alignedDirections", n, rho), dtype=torch.float64)
        cosines = k @ k.T
        same(cosines.tolist(), torch.full((n, n), rho, dtype=torch.float64).fill_diagonal_(1))
        expected = ops.compose(k, torch.full((n,), beta, dtype=torch.float64)).operator()
        found = call("compose", k, beta)
        same(found, expected)
        same(call("singularValues", found), torch.linalg.svdvals(expected))
        same(call("orthogonalityDefect", found), torch.linalg.matrix_norm(expected.T @ expected - torch.eye(n + 1), 2))
        determinant = torch.linalg.svdvals(expected).prod()
        assert abs(determinant - ops.determinant(double(beta), n).abs()) < 1e-9
        spread = torch.linalg.eigvalsh(cosines / n).clamp_min(0)
        entropy = torch.special.entr(spread).sum()
        same(call("effectiveRank", torch.linalg.eigvalsh(cosines).clamp_min(0)), entropy.exp())


def test_singular_values_of_any_matrix(call):
    matrices = [m for n in (1, 2, 5, 17) for m in draws(6, (n, n), seed=n, spread=3)[0]]
    for matrix in matrices:
        same(call("singularValues", matrix), torch.linalg.svdvals(matrix))
    same(call("singularValues", [[1.0, 1.0], [1.0, 1.0]]), torch.tensor([2.0, 0.0]))
    same(call("singularValues", [[0.0, 0.0], [0.0, 0.0]]), torch.zeros(2))


def test_cayley_rotations_of_all_sizes(call):
    for n in (2, 4, 16):
        us, vs, betas = draws(30, (n,), (n,), (), seed=n, spread=1.5)
        vs[0] = 3 * us[0]  # parallel: the identity
        vs[1] = us[1] + 1e-9 * vs[1]
        betas[2] = double(0.0)
        given = list(zip(us, vs, betas))
        q = call.all("cayley", given)
        same(q, torch.stack([ops.cayley(*one) for one in given]))
        same(call.all("cayleyAngle", given), torch.stack([ops.cayley_angle(*one) for one in given]))
        skew = [[torch.outer(u, v) - torch.outer(v, u)] for u, v in zip(us, vs)]
        same(call.all("skew", list(zip(us, vs))), torch.stack([one[0] for one in skew]))
        assert max(call.all("orthogonalityDefect", [[one] for one in q])) < 1e-9
    angle = torch.linspace(-3.1, 3.1, 9).double()
    strength = call.all("cayleyStrength", [[a] for a in angle.tolist()])
    u, v = torch.eye(2).double()
    same([ops.cayley_angle(u, v, double(b)).item() for b in strength], angle)


def test_the_iteration_that_stands_for_cayley(call):
    for alpha, steps in [(0.1, 2), (0.5, 2), (1.3, 0), (1.0, 5)]:
        (raw,) = draws(1, (4, 4))[0]
        w = raw - raw.T
        same(call("iterativeCayley", w, alpha, steps), ops.iterative_cayley(w, alpha, steps))


def test_the_hybrid_and_its_penalty(call):
    u, v, k = (ops.unit(x[0]) for x in draws(1, (4,), (4,), (4,)))
    for gamma in (0.0, 0.3, 0.5, 0.82, 1.0):
        q = ops.cayley(u, v, double(1.4))
        eye, gate = torch.eye(4).double(), double(gamma)
        expected = ops.hybrid(eye, u, v, double(1.4), k, gate)
        same(call("hybrid", q, k, gamma), expected)
        same(call("gatePenalty", gamma), ops.gate_penalty(gate))


@pytest.mark.parametrize(
    ("start", "gradient", "penalty", "rate"), [(0.3, 0.2, 0.5, 0.1), (0.5, 0.0, 1.0, 0.5), (0.9, -1.0, 2.0, 0.3)]
)
def test_descent_on_the_gate_is_what_autograd_does(call, start, gradient, penalty, rate):
    z = torch.logit(double(start)).requires_grad_()
    gammas = [start]
    for _ in range(60):
        gamma = torch.sigmoid(z)
        (slope,) = torch.autograd.grad(gradient * gamma + penalty * ops.gate_penalty(gamma), z)
        z = (z - rate * slope).detach().requires_grad_()
        gammas.append(torch.sigmoid(z).item())
    same(call("gateDescent", start, gradient, penalty, rate, 60), double(gammas))


def test_sinkhorn_step_by_step(call):
    for n, spread in ((4, 1.0), (4, 6.0), (3, 30.0)):
        logits = draws(1, (n, n), seed=n)[0][0] * spread
        for iterations in (1, 3, 20):
            same(call("sinkhorn", logits, iterations), ops.sinkhorn(logits, iterations))
        halves = call("sinkhornSteps", logits, 3)
        same(halves[1], logits.log_softmax(1))
        same(halves[2], logits.log_softmax(1).log_softmax(0))
        same(halves[3], logits.log_softmax(1).log_softmax(0).log_softmax(1))
        matrix = ops.sinkhorn(logits, 2)
        same(call("rowSums", matrix), matrix.sum(1))
        same(call("rowError", matrix), (matrix.sum(1) - 1).abs().max())


def test_reads_over_depth(call):
    for n, spread in ((1, 1.0), (5, 3.0)):
        sources, (query, *_) = draws(n, (4,), seed=n, spread=spread)[0], draws(2, (4,), seed=9)[0]
        x, weights = ops.depth_read(sources, query)
        found = call("depthRead", sources, query)
        same(found["x"], x)
        same(found["weights"], weights)
        same(call("rmsNorm", query), torch.nn.functional.rms_norm(query, (4,), eps=1e-5))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_stack_of_attention_residuals(call, block):
    queries = torch.stack(draws(6, (2,), seed=block)[0])
    stream = AttentionResiduals(block_size=block).build(2, 6).double()
    reading = [*stream.connections[1:], stream.collapse]
    for part, query in zip(reading, queries, strict=True):
        part.attend.query.data = query
    turn = torch.tensor(25.0).double().deg2rad()
    sublayer = torch.stack([torch.stack([turn.cos(), -turn.sin()]), torch.stack([turn.sin(), turn.cos()])]) / 2
    found = call("depthStack", {"queries": queries.tolist(), "block": block, "turn": 25})
    state = stream.expand(double([[[1.0, 0.0]]]))
    for i, connection in enumerate(stream.connections):
        x, carry = connection.read(state)
        same(found[i]["weights"], connection.depth_weights(carry).weights.flatten())
        same(found[i]["sources"], torch.stack(state)[:, 0, 0])
        state = connection.write(x @ sublayer.T, carry)
    same(found[6]["x"], stream.collapse(state)[0, 0])


def test_the_mean_cosine_of_streams(call):
    for n in (2, 4):
        streams = draws(1, (n, 3), seed=n)[0][0]
        same(call("meanCosine", streams), stream_similarity(streams[None, None])[0])
    same(call("meanCosine", [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]), double(1 / 3))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("mixing", [0.0, 0.4])
def test_training_of_streams_is_what_autograd_does(call, one_hot, mixing):
    start, (target, *_) = draws(1, (4, 2), seed=1)[0][0], draws(2, (2,), seed=2)[0]
    depth, rate, steps = 5, 0.05, 12
    h_res = (1 - mixing) * torch.eye(4).double() + mixing / 4
    a = torch.eye(4).double()[torch.arange(depth) % 4] if one_hot else torch.full((depth, 4), 0.25).double()
    b = torch.ones(depth, 4).double()

    def run(a, b):
        states = [start]
        for h_pre, h_post in zip(a, b, strict=True):
            x = torch.nn.functional.rms_norm(ops.hyper_read(states[-1], h_pre), (2,), eps=1e-5)
            y = torch.stack([-x[1], x[0]]) / 2  # a turn of 90 degrees
            states.append(ops.hyper_write(states[-1], y, h_res, h_post))
        return torch.stack(states)

    first = run(a, b)
    for _ in range(steps):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        slopes = torch.autograd.grad((run(a, b)[-1].mean(0) - target).square().sum() / 2, (a, b))
        a, b = a - rate * slopes[0], b - rate * slopes[1]
    last = run(a, b).detach()
    options = {"start": start.tolist(), "depth": depth, "oneHot": one_hot, "mixing": mixing, "turn": 90}
    found = call("trainStreams", options | {"target": target.tolist(), "steps": steps, "rate": rate})
    same(found["first"], first)
    same(found["states"], last)
    same(found["out"], last[-1].mean(0))
    same(found["loss"], (last[-1].mean(0) - target).square().sum() / 2)


def test_random_directions_are_spread_over_the_sphere(call):
    found = call.page.evaluate(
        "(() => { const draw = math.randomDirections(3, 4); return Array.from({length: 4000}, draw); })()"
    )
    points = torch.tensor(found, dtype=torch.float64)
    same(points.norm(dim=1).tolist(), torch.ones(4000))
    assert points.mean(0).abs().max() < 0.05
    assert (points.T @ points / 4000 - torch.eye(4) / 4).abs().max() < 0.02


def test_a_branch_has_the_size_and_the_cosine_that_are_asked_for(call):
    x, noise = (one[0] for one in draws(1, (6,), (6,)))
    for size, cosine in [(0.3, 0.5), (0.1, -1.0), (0.2, 1.0), (0.0, 0.3)]:
        branch = double(call("branchOutput", x, noise, size, cosine))
        same(branch.norm().item(), size * x.norm())
        same((branch @ x).item(), cosine * size * x.norm() ** 2)


@pytest.mark.parametrize("shared", [False, True])
def test_norms_through_the_layers(call, shared):
    """The same layers through the library, with the page's own random numbers."""
    depth, beta, size, cosine = 12, 0.7, 0.15, 0.4
    options = {"depth": depth, "beta": beta, "size": size, "cosine": cosine, "shared": shared, "seed": 7}
    found = call("normDrift", options)
    draw = "(count) => { const draw = math.randomDirections(7, 16); return Array.from({length: count}, draw); }"
    vectors = iter(torch.tensor(call.page.evaluate(draw, 1 + 4 * depth), dtype=torch.float64))
    first = next(vectors)
    states = {"standard": first, "delta": first, "cayley": first}
    norms = {name: [1.0] for name in states}
    one = double(1.0)
    for _ in range(depth):
        k, u, v, noise = (next(vectors) for _ in range(4))
        branch = {name: double(call("branchOutput", x, noise, size, cosine)) for name, x in states.items()}
        written = ops.delta_write(states["delta"][None], k, double([0.0]), double(beta))[0]
        turned = ops.cayley_apply(states["cayley"][:, None], u, v, one)[:, 0]
        states = {
            "standard": states["standard"] + branch["standard"],
            "delta": written + shared * branch["delta"],
            "cayley": turned + shared * branch["cayley"],
        }
        for name, state in states.items():
            norms[name].append(state.norm().item())
    for name, expected in norms.items():
        same(found[name], double(expected))
    if not shared:
        same(found["cayley"], torch.ones(depth + 1))


def test_every_function_of_the_module_is_there(call):
    assert set(EXPORTS) == set(call.page.evaluate("Object.keys(math)"))
