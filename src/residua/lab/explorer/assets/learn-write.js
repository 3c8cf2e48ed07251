// The delta write in the plane, once or repeatedly.

import {deltaWrite, direction, dot, norm, scale} from "./math.js";
import {angleHandle, arrow, axes, curve, freeHandle, handle, key, line, plane, point, shape} from "./marks.js";
import {h} from "./dom.js";
import {pointing, python, tensor} from "./snippet.js";

const MOST = 24;

/** x_0, x_1, ..., x_n. */
function trail({x, k, v, beta, n}) {
  const along = direction(k);
  const states = [x];
  for (let i = 0; i < n; i++) states.push(deltaWrite(states[i], along, v, beta));
  return states;
}

function draw(stage, values, change, more) {
  const space = plane(2.4, {label: "The state x, the direction k and the value v in the plane"});
  const through = line(space, "k-line", "faint thin");
  const target = line(space, "target", "v dashed");
  const path = shape(space, "trail", "result thin", false);
  const dots = Array.from({length: MOST + 1}, (_, i) => point(space, `x${i}`, "result", {radius: 3}));
  const state = arrow(space, "x", "x", {head: false});
  const erase = arrow(space, "erase", "erase", {text: "erase"});
  const write = arrow(space, "write", "write", {text: "write"});
  const result = arrow(space, "result", "result", {text: "x′"});
  const direct = arrow(space, "k", "k", {head: false});
  const value = handle(space, "v-handle", "v", {
    label: "v, the value to write along k", text: "v", turn: 40,
    drag: (at) => change({v: Math.min(2, Math.max(-2, dot(at, direction(values().k))))}),
    nudge: (dx, dy) => change({v: Math.min(2, Math.max(-2, values().v + (dx || dy) * 0.05))}),
  });
  const moveK = angleHandle(space, "k-handle", "k", {label: "k, the direction", text: "k", turn: 80}, () => values().k, (k) => change({k}));
  const moveX = freeHandle(space, "x-handle", "x", {label: "x, the state", text: "x"}, () => values().x, (x) => change({x}));

  const chart = axes({label: "What is left of the discrepancy after each write", x: "writes", y: "v − kᵀx", width: 440, height: 190});
  const zero = curve(chart, "zero", "faint");
  const course = curve(chart, "course", "result thin");
  const left = Array.from({length: MOST + 1}, (_, i) => point(chart, `left${i}`, "result", {radius: 3.5}));
  stage.append(space.element, key(["k", "direction k"], ["v dashed", "where kᵀx = v"], ["erase", "erased"], ["write", "written"], ["result", "after the write"]));
  more.append(chart.element);

  return (now) => {
    const k = direction(now.k);
    const states = trail(now);
    const [before, after] = states.slice(-2);
    const readout = dot(k, before);
    const aside = ([x, y], by) => [x - by * k[1], y + by * k[0]];
    through.move(scale(k, -4), scale(k, 4));
    target.move(aside(scale(k, now.v), -4), aside(scale(k, now.v), 4));
    path.move(states);
    dots.forEach((dot, i) => dot.move(states[Math.min(i, now.n)]));
    state.move([0, 0], now.x);
    const middle = before.map((x, i) => x - now.beta * readout * k[i]);
    const across = aside([0, 0], 1);
    erase.move(aside(before, 0.06), aside(middle, 0.06), across);
    write.move(aside(middle, -0.06), aside(after, -0.06), scale(across, -1));
    result.move([0, 0], after);
    direct.move([0, 0], k);
    value.move(scale(k, now.v), `v is ${now.v}`);
    moveK.move(k, `k at ${now.k} degrees`);
    moveX.move(now.x);

    const errors = states.map((x) => now.v - dot(k, x));
    const most = Math.max(0.1, ...errors.map(Math.abs)) * 1.1;
    chart.range(0, Math.max(8, now.n), Math.min(...errors) < 0 ? -most : 0, Math.max(...errors) > 0 ? most : 0);
    zero.move([[0, 0], [Math.max(8, now.n), 0]]);
    course.move(errors.map((error, i) => [i, error]));
    left.forEach((dot, i) => dot.move([Math.min(i, now.n), errors[Math.min(i, now.n)]]));
    return {
      readout, discrepancy: now.v - readout, erase: -now.beta * readout, write: now.beta * now.v,
      x1: after[0], x2: after[1], left: now.v - dot(k, after), determinant: 1 - now.beta, size: norm(after),
    };
  };
}

export const write = {
  name: "write",
  title: "The delta write",
  lead: "One sublayer reads the state's component along a direction k, erases a part of it and writes v in its place.",
  formula: ["{result|*x*′} = *x* + *β* {k|*k*} ({v|*v*} − {k|*k*}ᵀ*x*) = *x* − {erase|*β* *k* (*k*ᵀ*x*)} + {write|*β* *k* *v*}"],
  notice: "Only the component along *k* changes. At *β* = 1 one write lands on the dashed line, where *k*ᵀ*x* = *v*. Below 1 it comes nearer with every write; above 1 it overshoots; at 2 it is reflected back and forth for ever. Press “one more write”.",
  parameters: {
    beta: {label: "gate *β*", value: 0.7, min: 0, max: 2},
    v: {label: "value *v*", value: 1.4, min: -2, max: 2},
    k: {label: "angle of *k*", value: 20, min: -180, max: 180, step: 1, format: (x) => `${x}°`.replace("-", "−")},
    n: {label: "writes", value: 1, min: 1, max: MOST, step: 1},
    x: {value: [-1.2, 0.7]},
  },
  actions: {"one more write": ({n}) => ({n: n < MOST ? n + 1 : 1})},
  presets: {
    "keep, β = 0": {beta: 0},
    "replace, β = 1": {beta: 1},
    "mirror, β = 2": {beta: 2},
    "oscillate": {beta: 1.9, n: 12},
    "erase only": {beta: 1, v: 0},
  },
  readouts: {
    readout: "{k|*k*}ᵀ*x*, the component that it reads",
    discrepancy: "{v|*v*} − {k|*k*}ᵀ*x*, before",
    erase: "{erase|− *β* *k*ᵀ*x*, erased along *k*}",
    write: "{write|*β* *v*, written along *k*}",
    x1: "{result|*x*′}, first coordinate",
    x2: "{result|*x*′}, second coordinate",
    left: "{v|*v*} − {k|*k*}ᵀ{result|*x*′}, after",
    size: "|{result|*x*′}|",
    determinant: "det(*I* − *β* *k* *k*ᵀ) = 1 − *β*",
  },
  code: ({x, k, v, beta, n}) => python(
    `k = ${pointing(k)}`,
    `x = ${tensor([x])}  # one value channel`,
    `for _ in range(${n}):`,
    `    x = ops.delta_write(x, k, ${tensor([v])}, ${tensor(beta)})`,
    "x",
  ),
  draw,
};
