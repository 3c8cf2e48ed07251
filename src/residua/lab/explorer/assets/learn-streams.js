// Several streams in a stack during training: whether they become different, and how mixing reduces the differences.

import {meanCosine, scale, trainStreams} from "./math.js";
import {arrow, axes, curve, freeHandle, key, plane, point, shape} from "./marks.js";
import {python, tensor} from "./snippet.js";

const STEPS = 100;
const DEPTH = 8;
const RATE = 0.1;
const TURN = 40;
const EMBEDDING = [1, -0.6];
const WAYS = ["identity", "reflection", "v", "k"];
// Gains near 1 for each stream and feature, as drawn by learned symmetry breaking.
const GAINS = [[1.35, 0.7], [0.8, 1.4], [1.1, 0.95], [0.75, 0.95]];
const N = GAINS.length;

const startOf = (gains) => GAINS.map((own) => EMBEDDING.map((x, i) => (gains ? own[i] * x : x)));

function draw(stage, values, change, more) {
  const space = plane(3, {label: "Four streams in the plane, from the embedding to the end of the stack"});
  const trails = WAYS.map((way, i) => shape(space, `trail${i}`, `${way} thin`, false));
  const ends = WAYS.map((way, i) => point(space, `end${i}`, way, {radius: 6}));
  const embedding = point(space, "embedding", "soft", {radius: 4});
  const mean = arrow(space, "mean", "x");
  const target = freeHandle(space, "target-handle", "erase", {label: "target, to which the mean of the streams is trained", text: "target"},
    () => values().target, (at) => change({target: at}));
  const chart = axes({label: "How alike the streams are after each sublayer", x: "sublayers", y: "mean cosine between two streams", width: 440, height: 220});
  const before = curve(chart, "before", "faint dashed");
  const after = curve(chart, "after", "result");
  const dots = Array.from({length: DEPTH + 1}, (_, i) => point(chart, `cosine${i}`, "result", {radius: 3.5}));
  stage.append(space.element, key(...WAYS.map((way, i) => [way, `stream ${i + 1}`]), ["x", "their mean"]));
  more.append(chart.element, key(["result", "now"], ["faint dashed", "before training"]));

  return ({gains, onehot, mixing, depth, steps, target: wanted}) => {
    const {states, first, out, loss} = trainStreams({
      start: startOf(gains), depth, oneHot: onehot, mixing, turn: TURN, target: wanted, steps, rate: RATE,
    });
    const cosines = states.map(meanCosine);
    trails.forEach((trail, s) => trail.move(states.map((state) => state[s])));
    ends.forEach((end, s) => end.move(states[depth][s]));
    embedding.move(EMBEDDING);
    mean.move([0, 0], out);
    target.move(wanted, `target at ${wanted.map((x) => x.toFixed(2)).join(", ")}`);
    const old = first.map(meanCosine);
    chart.range(0, depth, Math.min(0, Math.floor(5 * Math.min(...cosines, ...old)) / 5), 1);
    before.move(old.map((cosine, l) => [l, cosine]));
    after.move(cosines.map((cosine, l) => [l, cosine]));
    dots.forEach((dot, l) => dot.move([Math.min(l, depth), cosines[Math.min(l, depth)]]));
    const centre = scale(states[depth].reduce((a, b) => a.map((x, i) => x + b[i])), 1 / N);
    const apart = Math.max(...states[depth].map((x) => Math.hypot(x[0] - centre[0], x[1] - centre[1])));
    return {start: cosines[0], end: cosines[depth], apart, left: (1 - mixing) ** depth, loss};
  };
}

export const streamsTopic = {
  name: "streams",
  wide: true,
  title: "Streams that part or collapse",
  lead: "Four streams start from one embedding. Whether they ever hold different things depends on the start, and on how they are mixed.",
  formula: ["*X* ← *H* *X* + *b*_{l} *F*_{l}(RMSNorm(*a*_{l}ᵀ*X*)),  *H* = (1 − *t*) *I* + *t*/4"],
  notice: "Train copies that are read equally: their gradients are equal too, so four streams stay one, and the target may be out of its reach. If each sublayer reads one stream, or the streams start with gains, they become different; every mixing removes the share *t* of their differences.",
  parameters: {
    steps: {label: "steps of training", value: 60, min: 0, max: STEPS, step: 1},
    mixing: {label: "mixing *t* in each sublayer", value: 0, min: 0, max: 1},
    depth: {label: "sublayers", value: 6, min: 1, max: DEPTH, step: 1},
    onehot: {label: "each sublayer reads one stream", value: true},
    gains: {label: "the embedding times gains of each stream", value: false},
    target: {value: [0.8, 2.2]},
  },
  actions: {"ten steps": ({steps}) => ({steps: steps < STEPS ? Math.min(STEPS, steps + 10) : 0})},
  presets: {
    "copies, read equally": {steps: STEPS, onehot: false},
    "one stream each": {steps: STEPS},
    "gains": {steps: STEPS, onehot: false, gains: true},
    "strong mixing": {steps: STEPS, gains: true, mixing: 0.6},
  },
  readouts: {
    start: "mean cosine at the start",
    end: "mean cosine at the end",
    apart: "farthest from their mean at the end",
    left: "(1 − *t*)^{*L*}, what mixing leaves of a difference",
    loss: "loss, |mean − target|² / 2",
  },
  code: ({gains, onehot, mixing, depth, steps, target}) => python(
    `c, s = math.cos(math.radians(${TURN})), math.sin(math.radians(${TURN}))`,
    "sublayer = torch.tensor([[c, -s], [s, c]]) / 2",
    `target, h_res = ${tensor(target)}, ${1 - mixing} * torch.eye(4) + ${mixing} / 4`,
    `start = ${gains ? `${tensor(GAINS)} * ` : "torch.ones(4, 1) * "}${tensor(EMBEDDING)}`,
    `a = ${onehot ? `torch.eye(4)[torch.arange(${depth}) % 4]` : `torch.full((${depth}, 4), 0.25)`}`,
    `b = torch.ones(${depth}, 4)`,
    "def run(a, b, streams):",
    "    for h_pre, h_post in zip(a, b):",
    "        x = torch.nn.functional.rms_norm(ops.hyper_read(streams, h_pre), (2,), eps=1e-5)",
    "        streams = ops.hyper_write(streams, sublayer @ x, h_res, h_post)",
    "    return streams",
    `for _ in range(${steps}):`,
    "    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()",
    "    ((run(a, b, start).mean(0) - target).square().sum() / 2).backward()",
    `    a, b = a - ${RATE} * a.grad, b - ${RATE} * b.grad`,
    "run(a, b, start)",
  ),
  draw,
};
