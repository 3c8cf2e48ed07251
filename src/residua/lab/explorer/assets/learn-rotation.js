// The Cayley transform of the generator: an exact rotation for every beta.

import {apply, cayley, cayleyAngle, determinant2, direction, iterativeCayley, norm, orthogonalityDefect, scale, skew} from "./math.js";
import {angleHandle, arrow, key, plane, shape} from "./marks.js";
import {pointing, python, tensor} from "./snippet.js";

const STEPS = 2;

/** Points of an arc that begins at an angle and extends by `turn`, in radians. */
function arc(from, turn, radius) {
  return Array.from({length: 33}, (_, i) => scale(direction(from + (turn * 180 * i) / (32 * Math.PI)), radius));
}

function draw(stage, values, change) {
  const space = plane(1.5, {label: "The unit circle with x and its image", circle: true});
  const way = shape(space, "arc", "thin result", false);
  const arrows = {
    truncated: arrow(space, "truncated", "erase"), u: arrow(space, "u", "faint", {text: "u"}), v: arrow(space, "v", "k", {head: false}),
    result: arrow(space, "result", "result", {text: "Qx"}), x: arrow(space, "x", "x", {head: false}),
  };
  const moveV = angleHandle(space, "v-handle", "k", {label: "v, of the generator; u points to the right", text: "v"},
    () => values().phi, (phi) => change({phi}));
  const moveX = angleHandle(space, "x-handle", "x", {label: "x", text: "x"}, () => values().x, (x) => change({x}));
  const legend = key(["faint", "u"], ["k", "v"], ["x", "x"], ["result", "Qx"], ["erase", "two steps of the iteration"]);
  stage.append(space.element, legend);

  return ({beta, phi, x, truncated}) => {
    const [u, v, at] = [[1, 0], direction(phi), direction(x)];
    const q = cayley(u, v, beta);
    const sign = Math.sin((phi * Math.PI) / 180) < 0 ? -1 : 1;
    const angle = sign * cayleyAngle(u, v, beta);
    const iterated = iterativeCayley(skew(u, v).map((row) => scale(row, -1)), beta, STEPS);
    arrows.u.move([0, 0], u);
    arrows.v.move([0, 0], v);
    arrows.x.move([0, 0], at);
    arrows.result.move([0, 0], apply(q, at));
    const end = truncated ? apply(iterated, at) : [0, 0];
    arrows.truncated.move([0, 0], norm(end) > 3 ? scale(end, 3 / norm(end)) : end);
    way.move(arc(x, angle, 0.4));
    moveV.move(v, `v at ${phi} degrees`);
    moveX.move(at, `x at ${x} degrees`);
    return {
      angle: sign * angle, degrees: (sign * angle * 180) / Math.PI, defect: orthogonalityDefect(q), determinant: determinant2(q),
      real: Math.cos(angle), imaginary: Math.abs(Math.sin(angle)), iterated: orthogonalityDefect(iterated),
    };
  };
}

export const rotation = {
  name: "rotation",
  title: "Cayley rotation",
  lead: "A skew generator becomes a rotation by one division, exactly orthogonal for every strength.",
  formula: ["*Q* = (*I* + *M*)^{−1}(*I* − *M*),  *M* = (*β*/2)({faint|*u*}{k|*v*}ᵀ − {k|*v*}{faint|*u*}ᵀ),  *θ* = 2 arctan(*β* *μ* / 2)"],
  notice: "However strong *β* is, |*Qx*| = |*x*| and the angle stays below 180°: the half turn is a limit that is never reached. Two steps of an iteration (switch them on) are a rotation only for small angles.",
  parameters: {
    beta: {label: "strength *β*", value: 2, min: -10, max: 10, step: 0.05},
    phi: {label: "angle from *u* to *v*", value: 70, min: -180, max: 180, step: 1, format: (x) => `${x}°`.replace("-", "−")},
    x: {label: "angle of *x*", value: 15, min: -180, max: 180, step: 1, format: (x) => `${x}°`.replace("-", "−")},
    truncated: {label: "show two steps of the iteration", value: false},
  },
  presets: {
    "quarter turn": {beta: 2, phi: 90},
    "almost half": {beta: 10, phi: 90},
    "no plane": {beta: 5, phi: 0},
    backwards: {beta: -2, phi: 90},
    "iteration, far off": {beta: 2.5, phi: 90, truncated: true},
  },
  readouts: {
    angle: "{result|angle *θ* from *u* to *v*}, radians",
    degrees: "{result|the same}, degrees",
    defect: "|*Q*ᵀ*Q* − *I*|₂",
    determinant: "det *Q*",
    real: "eigenvalues *e*^{±*iθ*}, real part",
    imaginary: "their imaginary part, ±",
    iterated: "{erase|defect after two steps}",
  },
  code: ({beta, phi, x}) => python(
    `u, v = torch.tensor([1.0, 0.0]), ${pointing(phi)}`,
    `x = ${pointing(x)}[:, None]`,
    `ops.cayley_apply(x, u, v, ${tensor(beta)})`,
  ),
  draw,
};
