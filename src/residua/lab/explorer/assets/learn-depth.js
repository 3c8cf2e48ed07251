// The product of the shortcuts over depth: its determinant does not depend on the angles between the k's, its singular
// values do.

import {alignedDirections, compose, effectiveRank, singularValues} from "./math.js";
import {axes, curve, key, point} from "./marks.js";
import {python} from "./snippet.js";

const MOST = 16;
const FLOOR = 1e-6;

/** The singular values of A_l ... A_1 on the span of the k's, largest first, for l = 1 ... depth. */
function courses({depth, beta, rho}) {
  return Array.from({length: depth}, (_, l) => singularValues(compose(alignedDirections(l + 1, rho), beta)));
}

function draw(stage) {
  const chart = axes({label: "Singular values of the product after each sublayer", x: "sublayers", y: "singular values", log: true, width: 560, height: 450});
  const determinant = curve(chart, "determinant", "dashed x");
  const least = curve(chart, "least", "reflection");
  const most = curve(chart, "most", "identity");
  const dots = Array.from({length: (MOST * (MOST + 1)) / 2 + MOST}, (_, i) => point(chart, `s${i}`, "soft", {radius: 3}));
  stage.append(chart.element, key(["identity", "largest"], ["reflection", "smallest"], ["x dashed", "|det|, whatever the alignment"], ["soft dots", "the others"]));

  return ({depth, beta, rho}) => {
    const all = courses({depth, beta, rho});
    const size = Math.abs(1 - beta);
    const low = 10 ** Math.floor(Math.log10(Math.min(0.1, size ** depth)) + 1e-9);
    chart.range(0, Math.max(2, depth), Math.max(FLOOR, low), 1);
    const span = depth + 1;
    const shown = (value) => Math.max(FLOOR, value);
    let used = 0;
    all.forEach((values, l) => {
      for (const value of values.slice(0, l + 2)) dots[used++].move([l + 1, shown(value)]);
    });
    for (const dot of dots.slice(used)) dot.move([0, 1]);
    least.move([[0, 1], ...all.map((values, l) => [l + 1, shown(values.at(-1))])]);
    most.move([[0, 1], ...all.map((values, l) => [l + 1, shown(values[0])])]);
    determinant.move(Array.from({length: span}, (_, l) => [l, shown(size ** l)]));
    const last = all.at(-1);
    const gram = [1 + (depth - 1) * rho, ...Array(depth - 1).fill(1 - rho)];
    return {
      determinant: (1 - beta) ** depth, most: last[0], least: last[span - 1],
      defect: Math.max(...last.map((sigma) => Math.abs(sigma * sigma - 1))), rank: effectiveRank(gram),
    };
  };
}

export const depth = {
  name: "depth",
  title: "Shortcuts over depth",
  lead: "What many gates in a row leave of the state depends on β, and as much on whether their directions agree.",
  formula: ["*P* = (*I* − *β* *k*_{L}*k*_{L}ᵀ) ⋯ (*I* − *β* *k*_{1}*k*_{1}ᵀ),  det *P* = (1 − *β*)^{*L*}"],
  notice: "Move the alignment: the determinant does not change. Orthogonal directions each shrink once, by |1 − *β*|, so much of the state changes a little; one shared direction shrinks *L* times and all others stay.",
  parameters: {
    beta: {label: "gate *β*", value: 0.4, min: 0, max: 2},
    rho: {label: "alignment |cos(*k*_{i}, *k*_{j})|", value: 0.2, min: 0, max: 1},
    depth: {label: "sublayers *L*", value: 10, min: 1, max: MOST, step: 1},
  },
  presets: {
    orthogonal: {rho: 0},
    identical: {rho: 1},
    "all projections": {beta: 1, rho: 0.3},
    "all reflections": {beta: 2, rho: 0.3},
    "the plain residual": {beta: 0},
  },
  readouts: {
    determinant: "det *P*",
    most: "largest singular value",
    least: "smallest singular value",
    defect: "|*P*ᵀ*P* − *I*|₂",
    rank: "effective rank of the *k*’s",
  },
  code: ({beta, rho, depth: n}) => python(
    `shared = torch.full((${n}, 1), ${rho} ** 0.5)`,
    `k = torch.cat([shared, (1 - ${rho}) ** 0.5 * torch.eye(${n})], 1)  # every two have the cosine ${rho}`,
    `product = ops.compose(k, torch.full((${n},), float(${beta})))`,
    "torch.linalg.svdvals(product.operator())",
  ),
  draw,
};
