// Eigenvalues on the unit circle that a rotation and a gated reflection can have.

import {cayleyAngle, cayleyStrength} from "./math.js";
import {handle, key, line, plane, point, shape} from "./marks.js";
import {python, tensor} from "./snippet.js";

const MOST = 50;

function draw(stage, values, change) {
  const space = plane(1.5, {label: "Eigenvalues in the complex plane", circle: true});
  const gap = line(space, "gap", "faint dashed");
  const turned = shape(space, "turned", "identity", false);
  const scaled = line(space, "scaled", "reflection");
  const fixed = point(space, "one", "x", {text: "1"});
  const minus = point(space, "minus", "faint", {text: "−1"});
  const other = point(space, "conjugate", "identity", {radius: 7});
  const strength = (angle) => Math.min(MOST, Math.max(0, cayleyStrength(Math.min(angle, 3.1))));
  const rotation = handle(space, "cayley-handle", "identity", {
    label: "eigenvalue of the Cayley rotation",
    drag: ([x, y]) => change({beta: strength(Math.abs(Math.atan2(y, x)))}),
    nudge: (dx, dy) => change({beta: strength(cayleyAngle([1, 0], [0, 1], values().beta) + (dy || -dx) * 0.03)}),
  });
  const gate = handle(space, "householder-handle", "reflection", {
    label: "eigenvalue of the gated reflection",
    drag: ([x]) => change({gate: Math.min(2, Math.max(0, 1 - x))}),
    nudge: (dx, dy) => change({gate: Math.min(2, Math.max(0, values().gate - (dx || dy) * 0.02))}),
  });
  stage.append(space.element, key(["identity", "Cayley rotation"], ["reflection", "gated reflection"], ["x", "all other directions"]));

  return ({beta, gate: strength}) => {
    const angle = cayleyAngle([1, 0], [0, 1], beta);
    const at = [Math.cos(angle), Math.sin(angle)];
    rotation.move(at, `at ${((angle * 180) / Math.PI).toFixed(1)} degrees`);
    other.move([at[0], -at[1]]);
    turned.move(Array.from({length: 49}, (_, i) => [Math.cos((angle * (i - 24)) / 24), Math.sin((angle * (i - 24)) / 24)]));
    gap.move(at, [-1, 0]);
    scaled.move([1, 0], [1 - strength, 0]);
    gate.move([1 - strength, 0], `${(1 - strength).toFixed(2)}`);
    fixed.move([1, 0]);
    minus.move([-1, 0]);
    return {
      angle, distance: 2 / Math.sqrt(1 + (beta / 2) ** 2), real: at[0], imaginary: at[1],
      householder: 1 - strength, defect: Math.abs(strength * strength - 2 * strength),
    };
  };
}

export const spectrum = {
  name: "spectrum",
  title: "Cayley against Householder",
  lead: "Two ways to leave the identity: around the circle, or straight through its middle.",
  formula: [
    "{identity|Cayley: *e*^{±*iθ*}, *θ* = 2 arctan(*β* *μ* / 2), here *μ* = 1}",
    "{reflection|Householder: 1 − *β*′}, with 0 ≤ *β*′ ≤ 2; 1 in all other directions",
  ],
  notice: "The rotation stays on the circle and comes arbitrarily close to −1 without reaching it. The gated reflection reaches −1 at *β*′ = 2, but on the way it passes 0, where a direction is lost.",
  parameters: {
    beta: {label: "Cayley strength *β*", value: 2, min: 0, max: MOST, power: 3},
    gate: {label: "Householder gate *β*′", value: 0.6, min: 0, max: 2},
  },
  presets: {
    identity: {beta: 0, gate: 0},
    "quarter turn, projection": {beta: 2, gate: 1},
    "near −1": {beta: 20, gate: 2},
    "β = 50, still not −1": {beta: 50, gate: 2},
  },
  readouts: {
    angle: "{identity|Cayley angle}, radians",
    distance: "{identity|distance to −1}",
    real: "{identity|eigenvalues, real part}",
    imaginary: "{identity|imaginary part, ±}",
    householder: "{reflection|Householder eigenvalue}",
    defect: "{reflection|Householder |*H*ᵀ*H* − *I*|₂}",
  },
  code: ({beta, gate}) => python(
    "u, v = torch.eye(2)",
    `rotation = ops.cayley(u, v, ${tensor(beta)})`,
    `reflection = ops.delta_operator(u, ${tensor(gate)})`,
    "torch.linalg.eigvals(rotation), torch.linalg.eigvals(reflection)",
  ),
  draw,
};
