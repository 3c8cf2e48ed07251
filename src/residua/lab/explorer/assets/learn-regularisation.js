// The gate under its regulariser and a task: gradient descent on the logit of gamma.

import {gateDescent, gatePenalty} from "./math.js";
import {axes, curve, handle, key, point} from "./marks.js";
import {python, tensor} from "./snippet.js";

const STEPS = 500;
const OTHERS = [0.02, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.98];
const EVERY = 5; // steps between the points of a curve
const GRID = Array.from({length: 101}, (_, i) => i / 100);

function draw(stage, values, change, more) {
  const chart = axes({label: "The gate during training", x: "steps", y: "γ", height: 300});
  const rest = curve(chart, "rest", "faint dashed");
  const others = OTHERS.map((_, i) => curve(chart, `other${i}`, "soft thin"));
  const path = curve(chart, "path", "result");
  const start = handle(chart, "start-handle", "result", {
    label: "γ at the start",
    drag: ([, y]) => change({start: Math.min(0.99, Math.max(0.01, y))}),
    nudge: (dx, dy) => change({start: Math.min(0.99, Math.max(0.01, values().start + (dy || dx) * 0.02))}),
  });
  const ground = axes({label: "The potential over the gate", x: "γ", y: "gγ + 4λγ(1 − γ)", height: 210});
  const potential = curve(ground, "potential", "x");
  const first = point(ground, "from", "faint", {radius: 6});
  const last = point(ground, "to", "result", {radius: 7});
  stage.append(chart.element, key(["result", "γ"], ["soft thin", "from other starts"], ["faint dashed", "γ∗, where no force acts"]));
  more.append(ground.element);

  return ({lambda, gradient, start: from, rate}) => {
    const course = (gamma) => gateDescent(gamma, gradient, lambda, rate, STEPS);
    const thin = (gammas) => gammas.map((gamma, step) => [step, gamma]).filter(([step]) => step % EVERY === 0);
    const gammas = course(from);
    const end = gammas.at(-1);
    chart.range(0, STEPS, 0, 1);
    path.move(thin(gammas));
    others.forEach((other, i) => other.move(thin(course(OTHERS[i]))));
    start.move([0, from], `γ starts at ${from}`);
    const balance = lambda > 0 ? 0.5 + gradient / (8 * lambda) : NaN;
    const inside = balance > 0 && balance < 1;
    rest.move(inside ? [[0, balance], [STEPS, balance]] : [[0, -1], [0, -1]]);
    const level = (gamma) => gradient * gamma + lambda * gatePenalty(gamma);
    const levels = GRID.map(level);
    const [low, high] = [Math.min(0, ...levels), Math.max(0.1, ...levels)];
    ground.range(0, 1, low * 1.05, high * 1.05);
    potential.move(GRID.map((gamma, i) => [gamma, levels[i]]));
    first.move([from, level(from)]);
    last.move([end, level(end)]);
    return {
      end, penalty: gatePenalty(end), force: gradient + 4 * lambda * (1 - 2 * from),
      balance: inside ? balance : "none between 0 and 1",
      decides: Math.abs(gradient) > 4 * lambda ? "the task, from every start" : gradient === 0 && lambda === 0 ? "nothing" : "the start",
    };
  };
}

export const regularisation = {
  name: "regularisation",
  title: "Regularisation dynamics",
  lead: "A penalty on blending drives the gate to an end. To which one?",
  formula: ["*z* ← *z* − *η* [*g* + 4*λ*(1 − 2*γ*)] *γ*(1 − *γ*),  *γ* = *σ*(*z*),  {faint|*γ*^{∗} = ½ + *g* / 8*λ*}"],
  notice: "The resting point *γ*^{∗} is the top of a hill: whoever starts above it ends at 1, whoever starts below ends at 0. Unless the task pulls harder than 4*λ*, the gate’s choice is that of its initial value.",
  parameters: {
    lambda: {label: "penalty *λ*", value: 0.5, min: 0, max: 2},
    gradient: {label: "pull of the task *g* = d*L*/d*γ*", value: 0, min: -1, max: 1},
    start: {label: "*γ* at the start", value: 0.55, min: 0.01, max: 0.99},
    rate: {label: "learning rate *η*", value: 0.1, min: 0.01, max: 0.5},
  },
  presets: {
    "exactly on top": {start: 0.5},
    "a little above": {start: 0.51, lambda: 1},
    "published λ = 0.1": {lambda: 0.1, start: 0.5, gradient: 0.1},
    "the task decides": {lambda: 0.1, gradient: -0.8, start: 0.2, rate: 0.3},
    "the start decides": {lambda: 1, gradient: 0.5, start: 0.6, rate: 0.3},
  },
  readouts: {
    end: "{result|*γ* after 500 steps}",
    penalty: "penalty 4*γ*(1 − *γ*) there",
    force: "gradient by *γ* at the start",
    balance: "resting point *γ*^{∗}",
    decides: "what decides",
  },
  code: ({lambda, gradient, start, rate}) => python(
    `z = torch.logit(${tensor(start)}).requires_grad_()`,
    `descent = torch.optim.SGD([z], lr=${rate})`,
    `for _ in range(${STEPS}):`,
    "    gamma = torch.sigmoid(z)",
    "    descent.zero_grad()",
    `    (${gradient} * gamma + ${lambda} * ops.gate_penalty(gamma)).backward()`,
    "    descent.step()",
    "torch.sigmoid(z)",
  ),
  draw,
};
