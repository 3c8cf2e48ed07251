// A gate between a rotation and a reflection: mixtures of the two are not orthogonal.

import {apply, cayley, cayleyStrength, deltaOperator, direction, gatePenalty, hybrid, norm, radians, singularValues} from "./math.js";
import {angleHandle, arrow, key, plane, shape} from "./marks.js";
import {pointing, python, tensor} from "./snippet.js";

const CIRCLE = Array.from({length: 73}, (_, i) => direction(5 * i));

function draw(stage, values, change) {
  const space = plane(1.5, {label: "The image of the unit circle", circle: true});
  const image = shape(space, "image", "area write");
  const arrows = {
    q: arrow(space, "q", "identity thin", {text: "Qx"}), h: arrow(space, "h", "reflection thin", {text: "Hx"}),
    x: arrow(space, "x", "x", {head: false}), k: arrow(space, "k", "k", {head: false}), result: arrow(space, "result", "write", {text: "Gx"}),
  };
  const moveK = angleHandle(space, "k-handle", "k", {label: "k, the direction that is reflected", text: "k"}, () => values().k, (k) => change({k}));
  const moveX = angleHandle(space, "x-handle", "x", {label: "x", text: "x"}, () => values().x, (x) => change({x}));
  stage.append(space.element, key(["area write", "image of the circle"], ["identity", "rotated"], ["reflection", "reflected"], ["write", "blend of the two"]));

  return ({gamma, theta, k, x}) => {
    const [along, at] = [direction(k), direction(x)];
    const q = cayley([1, 0], [0, 1], cayleyStrength(radians(theta)));
    const g = hybrid(q, along, gamma);
    const result = apply(g, at);
    image.move(CIRCLE.map((point) => apply(g, point)));
    arrows.q.move([0, 0], apply(q, at));
    arrows.h.move([0, 0], apply(deltaOperator(along, 2), at));
    arrows.x.move([0, 0], at);
    arrows.k.move([0, 0], along);
    arrows.result.move([0, 0], result, [-result[1], result[0]].map((part) => part / (norm(result) || 1)));
    moveK.move(along, `k at ${k} degrees`);
    moveX.move(at, `x at ${x} degrees`);
    const sigmas = singularValues(g);
    return {
      determinant: g[0][0] * g[1][1] - g[0][1] * g[1][0], defect: Math.max(...sigmas.map((s) => Math.abs(s * s - 1))),
      penalty: gatePenalty(gamma), least: sigmas[1], ratio: norm(result),
      active: gamma < 0.1 ? "Householder" : gamma > 0.9 ? "Cayley" : "a blend, not orthogonal",
    };
  };
}

export const blending = {
  name: "blending",
  title: "Gate blending",
  lead: "EDelta mixes a rotation and a reflection by a gate. Both ends are orthogonal; the middle is not.",
  formula: ["{write|*G*} = *γ* {identity|*Q*} + (1 − *γ*) {reflection|(*I* − 2 *k* *k*ᵀ)},  |*G*ᵀ*G* − *I*|₂ = 4*γ*(1 − *γ*),  det *G* = 2*γ* − 1  (in the plane)"],
  notice: "Slide *γ* through the middle: the circle becomes an ellipse, at ½ a mere segment, for every rotation and every *k*. The regulariser 4*γ*(1 − *γ*) is exactly the loss of orthogonality.",
  parameters: {
    gamma: {label: "gate *γ*", value: 0.8, min: 0, max: 1},
    theta: {label: "angle of *Q*", value: 60, min: -179, max: 179, step: 1, format: (x) => `${x}°`.replace("-", "−")},
    k: {label: "angle of *k*", value: 110, min: -180, max: 180, step: 1, format: (x) => `${x}°`.replace("-", "−")},
    x: {label: "angle of *x*", value: -20, min: -180, max: 180, step: 1, format: (x) => `${x}°`.replace("-", "−")},
  },
  presets: {
    "reflection, γ = 0": {gamma: 0},
    "singular, γ = ½": {gamma: 0.5},
    "rotation, γ = 1": {gamma: 1},
    "as EDelta starts, γ = 0.82": {gamma: 0.82},
  },
  readouts: {
    determinant: "det *G*",
    defect: "|*G*ᵀ*G* − *I*|₂",
    penalty: "4*γ*(1 − *γ*)",
    least: "smallest singular value",
    ratio: "{write||*Gx*|} / |*x*|",
    active: "active operator",
  },
  code: ({gamma, theta, k, x}) => python(
    "u, v = torch.eye(2)",
    `beta = torch.tensor(2 * math.tan(math.radians(${theta}) / 2))`,
    `x, k = ${pointing(x)}[:, None], ${pointing(k)}`,
    `ops.hybrid(x, u, v, beta, k, ${tensor(gamma)})`,
  ),
  draw,
};
