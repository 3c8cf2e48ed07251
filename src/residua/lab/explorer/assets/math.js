// The mathematics of the simulations, in float64: the same functions as residua.ops, tested against them.
// A vector is an array of numbers, a matrix an array of rows.

export const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
export const norm = (a) => Math.sqrt(dot(a, a));
export const scale = (a, s) => a.map((x) => x * s);
export const add = (a, b) => a.map((x, i) => x + b[i]);
export const subtract = (a, b) => a.map((x, i) => x - b[i]);
export const radians = (degrees) => (degrees * Math.PI) / 180;
export const degrees = (angle) => (angle * 180) / Math.PI;

/** The unit vector in the plane at an angle given in degrees. */
export const direction = (angle) => [Math.cos(radians(angle)), Math.sin(radians(angle))];

export const eye = (n) => Array.from({length: n}, (_, i) => Array.from({length: n}, (_, j) => (i === j ? 1 : 0)));
export const transpose = (a) => a[0].map((_, j) => a.map((row) => row[j]));
export const apply = (a, x) => a.map((row) => dot(row, x));

export function multiply(a, b) {
  const columns = transpose(b);
  return a.map((row) => columns.map((column) => dot(row, column)));
}

/** X' = X + beta k (v - k^T X) for a state of one row: residua.ops.delta_write. */
export function deltaWrite(x, k, v, beta) {
  return add(x, scale(k, beta * (v - dot(k, x))));
}

/** I - beta k k^T: residua.ops.delta_operator. */
export function deltaOperator(k, beta) {
  return eye(k.length).map((row, i) => row.map((one, j) => one - beta * k[i] * k[j]));
}

/** A_n ... A_1 x, the operators of the rows of `ks` applied one after the other: residua.ops.compose(k, beta). */
export function compose(ks, beta) {
  return ks.reduce((product, k) => {
    const read = apply(transpose(product), k);
    return product.map((row, i) => row.map((x, j) => x - beta * k[i] * read[j]));
  }, eye(ks[0].length));
}

/** n unit vectors in R^(n+1), each two with the cosine rho in [0, 1]. */
export function alignedDirections(n, rho) {
  const own = Math.sqrt(1 - rho);
  return Array.from({length: n}, (_, i) => Array.from({length: n + 1}, (_, j) =>
    j === 0 ? Math.sqrt(rho) : j === i + 1 ? own : 0));
}

/** exp of the entropy of eigenvalues scaled to a sum of 1: the effective number of directions. */
export function effectiveRank(values) {
  const total = values.reduce((sum, x) => sum + x, 0);
  const entropy = values.reduce((sum, x) => (x > 0 ? sum - (x / total) * Math.log(x / total) : sum), 0);
  return Math.exp(entropy);
}

/** Singular values, largest first, by one-sided Jacobi rotations, which keep the digits of the small ones. */
export function singularValues(matrix) {
  const columns = transpose(matrix);
  for (let sweep = 0; sweep < 60; sweep++) {
    let turned = false;
    for (let p = 0; p < columns.length; p++) {
      for (let q = p + 1; q < columns.length; q++) turned = rotateColumns(columns, p, q) || turned;
    }
    if (!turned) break;
  }
  return columns.map(norm).sort((a, b) => b - a);
}

/** Makes columns p and q orthogonal; false if they already are. In place, because it runs in every frame of a drag. */
function rotateColumns(columns, p, q) {
  const [a, b] = [columns[p], columns[q]];
  let [aa, bb, ab] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    aa += a[i] * a[i];
    bb += b[i] * b[i];
    ab += a[i] * b[i];
  }
  if (Math.abs(ab) <= 1e-15 * Math.sqrt(aa * bb)) return false;
  const zeta = (bb - aa) / (2 * ab);
  const t = (zeta < 0 ? -1 : 1) / (Math.abs(zeta) + Math.hypot(1, zeta));
  const c = 1 / Math.sqrt(1 + t * t);
  for (let i = 0; i < a.length; i++) {
    const [x, y] = [a[i], b[i]];
    a[i] = c * (x - t * y);
    b[i] = c * (y + t * x);
  }
  return true;
}

/** |M^T M - I|_2, the largest |sigma^2 - 1|. */
export function orthogonalityDefect(matrix) {
  return Math.max(...singularValues(matrix).map((sigma) => Math.abs(sigma * sigma - 1)));
}

export const determinant2 = ([[a, b], [c, d]]) => a * d - b * c;

/** A = u v^T - v u^T. */
export function skew(u, v) {
  return u.map((_, i) => v.map((_, j) => u[i] * v[j] - v[i] * u[j]));
}

/** v without its component along u: gives the same A, without cancellation if the two are almost parallel. */
function sheared(u, v) {
  const along = (w) => subtract(w, scale(u, dot(u, w) / Math.max(dot(u, u), Number.MIN_VALUE)));
  return along(along(v));
}

/** mu = sqrt(|u|^2 |v|^2 - (u . v)^2), the area between u and v. */
export function area(u, v) {
  return norm(u) * norm(sheared(u, v));
}

/** Q = (I + M)^-1 (I - M), M = beta/2 A, in closed form: residua.ops.cayley. */
export function cayley(u, v, beta) {
  const w = sheared(u, v);
  const h = beta / 2;
  const [a, b, c] = [dot(u, u), dot(w, w), dot(u, w)];
  const step = (2 * h) / (1 + h * h * (a * b - c * c));
  return u.map((_, i) => u.map((_, j) => {
    const skewed = u[i] * w[j] - w[i] * u[j];
    const squared = c * (u[i] * w[j] + w[i] * u[j]) - b * u[i] * u[j] - a * w[i] * w[j];
    return (i === j ? 1 : 0) - step * skewed + step * h * squared;
  }));
}

/** 2 arctan(beta mu / 2), the angle from u towards v: residua.ops.cayley_angle. */
export function cayleyAngle(u, v, beta) {
  return 2 * Math.atan((beta * area(u, v)) / 2);
}

/** The beta that rotates by an angle in (-pi, pi) if mu = 1. */
export const cayleyStrength = (angle) => 2 * Math.tan(angle / 2);

/** `steps` times Y <- I + alpha/2 W (I + Y) from I + alpha W: residua.ops.iterative_cayley. */
export function iterativeCayley(w, alpha, steps) {
  const one = eye(w.length);
  let y = one.map((row, i) => add(row, scale(w[i], alpha)));
  for (let step = 0; step < steps; step++) {
    const turned = multiply(w, y);
    y = one.map((row, i) => add(row, scale(add(w[i], turned[i]), alpha / 2)));
  }
  return y;
}

/** G = gamma Q + (1 - gamma) (I - 2 k k^T): residua.ops.hybrid of the identity. */
export function hybrid(q, k, gamma) {
  const reflection = deltaOperator(k, 2);
  return q.map((row, i) => row.map((x, j) => gamma * x + (1 - gamma) * reflection[i][j]));
}

/** 4 gamma (1 - gamma): residua.ops.gate_penalty. */
export const gatePenalty = (gamma) => 4 * gamma * (1 - gamma);

const binaryEntropy = (gamma) => -[gamma, 1 - gamma].reduce((sum, p) => sum + (p > 0 ? p * Math.log2(p) : 0), 0);

/** Smooth penalties with f(gamma) = f(1 - gamma), f(0) = 0 and f(1/2) = 1, and their slopes. */
export const GATE_PENALTIES = {
  published: {value: gatePenalty, slope: (gamma) => 4 * (1 - 2 * gamma)},
  squared: {value: (gamma) => gatePenalty(gamma) ** 2, slope: (gamma) => 8 * gatePenalty(gamma) * (1 - 2 * gamma)},
  entropy: {value: binaryEntropy, slope: (gamma) => Math.log2(1 - gamma) - Math.log2(gamma)},
};

/** gamma after each of `steps` steps of gradient descent on its logit, for a loss with this derivative by gamma. */
export function gateDescent(start, slope, rate, steps) {
  let logit = Math.log(start / (1 - start));
  const gammas = [start];
  for (let step = 0; step < steps; step++) {
    const gamma = 1 / (1 + Math.exp(-logit));
    logit -= rate * slope(gamma) * gamma * (1 - gamma);
    gammas.push(1 / (1 + Math.exp(-logit)));
  }
  return gammas;
}

/** The gamma at which a derivative falls through 0 (a maximum), by bisection on the logit; NaN if there is none. */
export function hilltop(slope) {
  const rises = (logit) => slope(1 / (1 + Math.exp(-logit))) > 0;
  const logits = Array.from({length: 1001}, (_, i) => (i - 500) / 25);
  const right = logits.findIndex((logit, i) => i > 0 && rises(logits[i - 1]) && !rises(logit));
  if (right < 0) return NaN;
  let [low, high] = [logits[right - 1], logits[right]];
  for (let step = 0; step < 60; step++) {
    const middle = (low + high) / 2;
    if (rises(middle)) low = middle; else high = middle;
  }
  return 1 / (1 + Math.exp(-high));
}

const logSumExp = (values) => {
  const top = Math.max(...values);
  return top + Math.log(values.reduce((sum, x) => sum + Math.exp(x - top), 0));
};

/** The logits before and after each of `halves` half iterations, by rows and columns in turn: `halves` + 1 matrices. */
export function sinkhornSteps(logits, halves) {
  const steps = [logits];
  for (let half = 0; half < halves; half++) {
    const rows = half % 2 ? transpose(steps[half]) : steps[half];
    const scaled = rows.map((row) => { const total = logSumExp(row); return row.map((x) => x - total); });
    steps.push(half % 2 ? transpose(scaled) : scaled);
  }
  return steps;
}

/** residua.ops.sinkhorn, with row and column factors in place of logits, which is fast enough for many iterations. */
export function sinkhorn(logits, iterations) {
  const top = Math.max(...logits.flat());
  const kernel = logits.map((row) => row.map((x) => Math.exp(x - top)));
  const [n, rows, columns] = [logits.length, logits.map(() => 1), logits.map(() => 1)];
  for (let iteration = 0; iteration < iterations; iteration++) {
    for (let i = 0; i < n; i++) {
      let total = 0;
      for (let j = 0; j < n; j++) total += kernel[i][j] * columns[j];
      rows[i] = 1 / total;
    }
    for (let j = 0; j < n; j++) {
      let total = 0;
      for (let i = 0; i < n; i++) total += rows[i] * kernel[i][j];
      columns[j] = 1 / total;
    }
  }
  return kernel.map((row, i) => row.map((x, j) => rows[i] * x * columns[j]));
}

export const exponential = (matrix) => matrix.map((row) => row.map(Math.exp));
export const rowSums = (matrix) => matrix.map((row) => row.reduce((sum, x) => sum + x, 0));

/** max |row sum - 1|. */
export const rowError = (matrix) => Math.max(...rowSums(matrix).map((sum) => Math.abs(sum - 1)));

/** x / sqrt(mean(x^2) + eps): an RMSNorm without a gain. */
export const rmsNorm = (x, eps = 1e-5) => scale(x, 1 / Math.sqrt(dot(x, x) / x.length + eps));

/** The gradient of rmsNorm at x; g: the gradient of its result. */
function rmsNormGradient(x, g, eps = 1e-5) {
  const z = rmsNorm(x, eps);
  const along = dot(z, g) / x.length;
  return scale(subtract(g, scale(z, along)), 1 / Math.sqrt(dot(x, x) / x.length + eps));
}

const combined = (weights, vectors) => vectors.reduce((sum, v, i) => add(sum, scale(v, weights[i])), vectors[0].map(() => 0));

/** a = softmax_i(w . RMSNorm(V_i)) and x = sum_i a_i V_i: residua.ops.depth_read. */
export function depthRead(sources, query, eps = 1e-5) {
  const logits = sources.map((source) => dot(query, rmsNorm(source, eps)));
  const total = logSumExp(logits);
  const weights = logits.map((logit) => Math.exp(logit - total));
  return {weights, x: combined(weights, sources)};
}

/** Half the rotation by an angle in degrees: the sublayers of two simulations apply it to their normalised input. */
const turning = (turn) => {
  const [c, s] = direction(turn);
  return [[c / 2, -s / 2], [s / 2, c / 2]];
};

/**
 * A stack of attention residuals in the plane, from the embedding (1, 0): residua.AttentionResiduals. A sublayer
 * returns half its normalised input, rotated; `block` outputs are summed into a source; `queries` are those of
 * sublayers 2, 3, ... and of the readout. Returns {sources, weights, x} for sublayers 1, 2, ... and the readout.
 */
export function depthStack({queries, block, turn}) {
  const f = turning(turn);
  const sources = [[1, 0]];
  const reads = [{sources: [...sources], weights: [1], x: sources[0]}];
  queries.forEach((query, l) => {
    const y = apply(f, rmsNorm(reads[l].x));
    if (l % block) sources.push(add(sources.pop(), y));
    else sources.push(y);
    reads.push({sources: [...sources], ...depthRead(sources, query)});
  });
  return reads;
}

/** The mean cosine between different rows: residua.lab.inspection.measure.stream_similarity. */
export function meanCosine(streams) {
  const directions = streams.map((x) => scale(x, 1 / Math.max(norm(x), 1e-12)));
  const all = directions.reduce(add);
  const own = directions.reduce((sum, x) => sum + dot(x, x), 0);
  return (dot(all, all) - own) / (streams.length * (streams.length - 1));
}

/**
 * Streams in the plane through sublayers that read them with weights a_l and are written with weights b_l:
 * X <- H X + b_l F(RMSNorm(a_l X)) with H = (1 - mixing) I + mixing / n and the F of depthStack; hyper-connections with
 * these mappings. `steps` of gradient descent at `rate` on all a_l and b_l minimise |mean of streams - target|^2 / 2.
 * a_l starts at 1 / n, or with `oneHot` at 1 for stream l mod n and 0 for the others; b_l starts at 1.
 * Returns the states X_0 ... X_depth after the last step and before the first, and the loss.
 */
export function trainStreams({start, depth, oneHot, mixing, turn, target, steps, rate}) {
  const n = start.length;
  const f = turning(turn);
  const back = transpose(f);
  const h = eye(n).map((row) => row.map((one) => (1 - mixing) * one + mixing / n));
  const layers = Array.from({length: depth}, (_, l) => ({
    a: start.map((_, s) => (oneHot ? Number(s === l % n) : 1 / n)), b: start.map(() => 1),
  }));
  const run = () => {
    const states = [start];
    const seen = layers.map(({a, b}, l) => {
      const read = combined(a, states[l]);
      const y = apply(f, rmsNorm(read));
      states.push(h.map((row, o) => add(combined(row, states[l]), scale(y, b[o]))));
      return {read, y};
    });
    const out = scale(states[depth].reduce(add), 1 / n);
    return {states, seen, out, loss: dot(subtract(out, target), subtract(out, target)) / 2};
  };
  const first = run().states;
  for (let step = 0; step < steps; step++) {
    const {states, seen, out} = run();
    let grads = start.map(() => scale(subtract(out, target), 1 / n));
    for (let l = depth - 1; l >= 0; l--) {
      const {a, b} = layers[l];
      const before = states[l];
      const read = rmsNormGradient(seen[l].read, apply(back, combined(b, grads)));
      layers[l] = {
        a: a.map((weight, s) => weight - rate * dot(read, before[s])),
        b: b.map((weight, o) => weight - rate * dot(grads[o], seen[l].y)),
      };
      grads = before.map((_, s) => add(combined(h.map((row) => row[s]), grads), scale(read, a[s])));
    }
  }
  const {states, out, loss} = run();
  return {states, first, out, loss};
}

/** Random numbers in (0, 1) that are the same in every browser (and in the tests): mulberry32. */
export function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return (((t ^ (t >>> 14)) >>> 0) + 0.5) / 4294967296;
  };
}

/** A generator of unit vectors of R^n, uniform on the sphere. */
export function randomDirections(seed, n) {
  const draw = uniform(seed);
  const normal = () => Math.sqrt(-2 * Math.log(draw())) * Math.cos(2 * Math.PI * draw());
  return () => {
    const vector = Array.from({length: n}, normal);
    return scale(vector, 1 / norm(vector));
  };
}

/**
 * The norms through `depth` layers of three shortcuts in R^n, from norm 1: the plain residual, x + F(x); the delta
 * operator; a Cayley rotation. With `shared`, the last two also add F(x). F(x) has the norm `size` |x| and the cosine
 * `cosine` with x.
 */
export function normDrift({depth, beta, size, cosine, shared, seed, n = 16, strength = 1}) {
  const draw = randomDirections(seed, n);
  const start = draw();
  const states = {standard: start, delta: start, cayley: start};
  const norms = {standard: [1], delta: [1], cayley: [1]};
  for (let layer = 0; layer < depth; layer++) {
    const [k, u, v, noise] = [draw(), draw(), draw(), draw()];
    const branch = (x) => branchOutput(x, noise, size, cosine);
    const nothing = (x) => x.map(() => 0);
    const other = shared ? branch : nothing;
    states.standard = add(states.standard, branch(states.standard));
    states.delta = add(deltaWrite(states.delta, k, 0, beta), other(states.delta));
    states.cayley = add(apply(cayley(u, v, strength), states.cayley), other(states.cayley));
    for (const name of Object.keys(norms)) norms[name].push(norm(states[name]));
  }
  return norms;
}

/** A vector with the norm `size` |x| and the cosine `cosine` with x; its component off x is along `noise`. */
export function branchOutput(x, noise, size, cosine) {
  const length = norm(x);
  const along = scale(x, 1 / Math.max(length, Number.MIN_VALUE));
  const aside = subtract(noise, scale(along, dot(along, noise)));
  const across = Math.sqrt(1 - cosine * cosine) / Math.max(norm(aside), Number.MIN_VALUE);
  return add(scale(along, size * length * cosine), scale(aside, size * length * across));
}
