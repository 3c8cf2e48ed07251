// Gradient descent on the logit of the gate gamma, under a regulariser and a task.

import {GATE_PENALTIES, gateDescent, hilltop} from "./math.js";
import {axes, curve, handle, key, point} from "./marks.js";
import {python, tensor} from "./snippet.js";

const STEPS = 500;
const OTHERS = [0.02, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.98];
const EVERY = 5; // steps between the points of a curve
const GRID = Array.from({length: 101}, (_, i) => i / 100);
const CODE = {
  published: "ops.gate_penalty(gamma)",
  squared: "ops.gate_penalty(gamma) ** 2",
  entropy: "(torch.special.entr(gamma) + torch.special.entr(1 - gamma)) / math.log(2)",
};

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
  const ground = axes({label: "The potential over the gate", x: "γ", y: "gγ + λf(γ)", height: 210});
  const potential = curve(ground, "potential", "x");
  const first = point(ground, "from", "faint", {radius: 6});
  const last = point(ground, "to", "result", {radius: 7});
  stage.append(chart.element, key(["result", "γ"], ["soft thin", "from other starts"], ["faint dashed", "γ∗, where no force acts"]));
  more.append(ground.element);

  return ({lambda, gradient, start: from, rate, shape}) => {
    const {value, slope} = GATE_PENALTIES[shape];
    const force = (gamma) => gradient + lambda * slope(gamma);
    const course = (gamma) => gateDescent(gamma, force, rate, STEPS);
    const thin = (gammas) => gammas.map((gamma, step) => [step, gamma]).filter(([step]) => step % EVERY === 0);
    const gammas = course(from);
    const end = gammas.at(-1);
    chart.range(0, STEPS, 0, 1);
    path.move(thin(gammas));
    others.forEach((other, i) => other.move(thin(course(OTHERS[i]))));
    start.move([0, from], `γ starts at ${from}`);
    const balance = hilltop(force);
    const inside = !Number.isNaN(balance);
    rest.move(inside ? [[0, balance], [STEPS, balance]] : [[0, -1], [0, -1]]);
    const level = (gamma) => gradient * gamma + lambda * value(gamma);
    const levels = GRID.map(level);
    const [low, high] = [Math.min(0, ...levels), Math.max(0.1, ...levels)];
    ground.range(0, 1, low * 1.05, high * 1.05);
    potential.move(GRID.map((gamma, i) => [gamma, levels[i]]));
    first.move([from, level(from)]);
    last.move([end, level(end)]);
    return {
      end, penalty: value(end), middle: slope(0.5), force: force(from),
      balance: inside ? balance : "none between 0 and 1",
      decides: inside ? "the start" : gradient === 0 ? "nothing" : "the task, from every start",
    };
  };
}

export const regularisation = {
  name: "regularisation",
  title: "Regularisation dynamics",
  lead: "A penalty on blending drives the gate to an end. To which one?",
  formula: [
    "*z* ← *z* − *η* [*g* + *λ* *f*′(*γ*)] *γ*(1 − *γ*),  *γ* = *σ*(*z*)",
    "*f*(*γ*) = 4*γ*(1 − *γ*) as published,  its square,  or the entropy in bits",
  ],
  notice: "The resting point *γ*^{∗} is the top of a hill: a gate that starts above it moves up, and one that starts below it moves down. Unless the task pulls harder than the penalty pushes anywhere (4*λ* as published), the start decides. Every smooth *f* with *f*(*γ*) = *f*(1 − *γ*) has *f*′(½) = 0: no such penalty moves a gate off ½ or prefers a side.",
  parameters: {
    shape: {label: "penalty *f*", value: "published", options: Object.keys(GATE_PENALTIES)},
    lambda: {label: "its weight *λ*", value: 0.5, min: 0, max: 2},
    gradient: {label: "pull of the task *g* = d*L*/d*γ*", value: 0, min: -1, max: 1},
    start: {label: "*γ* at the start", value: 0.55, min: 0.01, max: 0.99},
    rate: {label: "learning rate *η*", value: 0.1, min: 0.01, max: 0.5},
  },
  presets: {
    "exactly on top": {start: 0.5},
    "on top of the entropy": {start: 0.5, shape: "entropy"},
    "a little above": {start: 0.51, lambda: 1},
    "published λ = 0.1": {lambda: 0.1, start: 0.5, gradient: 0.1},
    "the task decides": {lambda: 0.1, gradient: -0.8, start: 0.2, rate: 0.3},
    "the start decides": {lambda: 1, gradient: 0.5, start: 0.6, rate: 0.3},
  },
  readouts: {
    end: "{result|*γ* after 500 steps}",
    penalty: "penalty *f* there",
    middle: "slope *f*′ at ½",
    force: "gradient by *γ* at the start",
    balance: "resting point *γ*^{∗}",
    decides: "what decides",
  },
  code: ({lambda, gradient, start, rate, shape}) => python(
    `z = torch.logit(${tensor(start)}).requires_grad_()`,
    `descent = torch.optim.SGD([z], lr=${rate})`,
    `for _ in range(${STEPS}):`,
    "    gamma = torch.sigmoid(z)",
    "    descent.zero_grad()",
    `    (${gradient} * gamma + ${lambda} * ${CODE[shape]}).backward()`,
    "    descent.step()",
    "torch.sigmoid(z)",
  ),
  draw,
};
