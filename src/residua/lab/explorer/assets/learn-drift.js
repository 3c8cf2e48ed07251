// The effect of a shortcut on the norm of the state, layer by layer.

import {normDrift} from "./math.js";
import {axes, curve, key} from "./marks.js";
import {python, tensor} from "./snippet.js";

const SEED = 7;
const DIM = 16;

function draw(stage) {
  const chart = axes({label: "Norm of the state after each layer", x: "layers", y: "norm of the state", log: true, height: 440});
  const one = curve(chart, "one", "faint");
  const expected = curve(chart, "expected", "reflection dashed");
  const curves = {standard: curve(chart, "standard", "soft"), delta: curve(chart, "delta", "reflection"), cayley: curve(chart, "cayley", "identity")};
  stage.append(chart.element, key(["soft", "plain residual"], ["reflection", "delta operator"], ["reflection dashed", "its mean over all k, without F"], ["identity", "Cayley rotation"]));

  return ({depth, beta, size, cosine, shared}) => {
    const norms = normDrift({depth, beta, size, cosine, shared, seed: SEED, n: DIM});
    const rate = Math.sqrt(1 + (beta * beta - 2 * beta) / DIM);
    const mean = Array.from({length: depth + 1}, (_, layer) => [layer, rate ** layer]);
    const all = [...Object.values(norms).flat(), rate ** depth];
    const [low, high] = [Math.min(...all), Math.max(...all)];
    chart.range(0, depth, Math.min(0.1, 10 ** Math.floor(Math.log10(Math.max(low, 1e-12)))), Math.max(10, 10 ** Math.ceil(Math.log10(high))));
    one.move([[0, 1], [depth, 1]]);
    expected.move(mean);
    for (const [name, path] of Object.entries(curves)) path.move(norms[name].map((value, layer) => [layer, value]));
    return {
      standard: norms.standard.at(-1), delta: norms.delta.at(-1), cayley: norms.cayley.at(-1), expected: rate ** depth,
    };
  };
}

export const drift = {
  name: "drift",
  title: "Norm drift",
  lead: "Whether the state grows, shrinks or keeps its length on the way through the layers.",
  formula: [
    "plain: *x* + *F*(*x*),  delta: (*I* − *β* *k* *k*ᵀ) *x*,  Cayley: *Q* *x*",
    "|(*I* − *β* *k* *k*ᵀ) *x*|² = |*x*|² + (*β*² − 2*β*) (*k*ᵀ*x*)²",
  ],
  notice: "The usual comparison adds *F* only to the plain residual. Switch it on for all three: rotations and reflections keep |*x*|, but the additions of the sublayers still make the state grow.",
  parameters: {
    beta: {label: "gate *β* of the delta operator", value: 0.5, min: 0, max: 2.5},
    size: {label: "size of *F*(*x*), relative to |*x*|", value: 0.1, min: 0, max: 0.3, step: 0.005},
    cosine: {label: "cosine of *F*(*x*) with *x*", value: 0.5, min: -1, max: 1},
    depth: {label: "layers", value: 32, min: 1, max: 64, step: 1},
    shared: {label: "add the same *F* to all three", value: false},
  },
  presets: {
    "as usually drawn": {},
    "the same F for all": {shared: true},
    "reflections, β = 2": {beta: 2},
    "β beyond 2 expands": {beta: 2.5},
    "F against x": {cosine: -1, shared: true},
  },
  readouts: {
    standard: "plain residual, final norm",
    delta: "delta operator, final norm",
    cayley: "Cayley rotation, final norm",
    expected: "delta, mean over *k*, without *F*",
  },
  code: ({beta, depth}) => python(
    `x = torch.ones(1, ${DIM}) / ${DIM} ** 0.5`,
    `u, v, k = (torch.nn.functional.normalize(torch.randn(${depth}, ${DIM}), dim=-1) for _ in range(3))`,
    "rotated, written = x.mT, x",
    `for layer in range(${depth}):`,
    "    rotated = ops.cayley_apply(rotated, u[layer], v[layer], torch.tensor(1.0))",
    `    written = ops.delta_write(written, k[layer], torch.zeros(1), ${tensor(beta)})`,
    "rotated.norm(), written.norm()",
  ),
  draw,
};
