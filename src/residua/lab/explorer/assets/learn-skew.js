// The generator of a rotation: A = u v^T - v u^T.

import {area, skew} from "./math.js";
import {arrow, freeHandle, key, plane, shape} from "./marks.js";
import {python, tensor} from "./snippet.js";

function draw(stage, values, change) {
  const space = plane(2.2, {label: "The vectors u and v and the area between them"});
  const between = shape(space, "area", "area");
  const arrows = {u: arrow(space, "u", "k", {head: false}), v: arrow(space, "v", "v", {head: false})};
  const handles = {
    u: freeHandle(space, "u-handle", "k", {label: "u", text: "u"}, () => values().u, (u) => change({u})),
    v: freeHandle(space, "v-handle", "v", {label: "v", text: "v"}, () => values().v, (v) => change({v})),
  };
  stage.append(space.element, key(["identity", "area from u to v, anticlockwise: positive"], ["reflection", "clockwise: negative"]));

  return ({u, v}) => {
    const [[a00, a01], [a10, a11]] = skew(u, v);
    for (const [name, at] of [["u", u], ["v", v]]) {
      arrows[name].move([0, 0], at);
      handles[name].move(at);
    }
    between.move([[0, 0], u, [u[0] + v[0], u[1] + v[1]], v]);
    between.element.classList.toggle("negative", a01 < 0);
    return {a01, a10, symmetric: Math.max(Math.abs(2 * a00), Math.abs(a01 + a10), Math.abs(2 * a11)), eigenvalue: Math.abs(a01), mu: area(u, v)};
  };
}

export const skewTopic = {
  name: "skew",
  title: "The skew-symmetric generator",
  lead: "Two vectors span a plane and say how fast to turn in it.",
  formula: ["*A* = {k|*u*}{v|*v*}ᵀ − {v|*v*}{k|*u*}ᵀ,  *A*ᵀ = −*A*,  eigenvalues ± *i* *μ*,  *μ*² = |*u*|²|*v*|² − (*u*ᵀ*v*)²"],
  notice: "*A* is nothing but the signed area between *u* and *v*: swap them and it changes its sign, make them parallel and it vanishes. Lengths and angle matter only through that area.",
  parameters: {u: {value: [1.4, 0.3]}, v: {value: [0.4, 1.2]}},
  presets: {
    "unit square": {u: [1, 0], v: [0, 1]},
    swapped: {u: [0.4, 1.2], v: [1.4, 0.3]},
    parallel: {u: [1.2, 0.8], v: [-0.6, -0.4]},
    "small and large": {u: [0.2, 0], v: [0, 2]},
  },
  readouts: {
    a01: "*A*_{01} = *u*₁*v*₂ − *u*₂*v*₁",
    a10: "*A*_{10}",
    symmetric: "max |*A*ᵀ + *A*|",
    eigenvalue: "eigenvalues ± *i* ×",
    mu: "*μ*, the area between them",
  },
  code: ({u, v}) => python(
    `u, v = ${tensor(u)}, ${tensor(v)}`,
    "angle = ops.cayley_angle(u, v, torch.tensor(1.0))  # 2 arctan(mu / 2)",
    "2 * torch.tan(angle / 2)",
  ),
  draw,
};
