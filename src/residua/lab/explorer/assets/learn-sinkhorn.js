// Sinkhorn's iteration on a 4 x 4 matrix, one division at a time.

import {exponential, rowError, rowSums, singularValues, sinkhorn, sinkhornSteps, transpose} from "./math.js";
import {axes, curve, held, key, point} from "./marks.js";
import {set, svg} from "./dom.js";
import {python, tensor} from "./snippet.js";

const N = 4;
const HALVES = 40;
const CELL = 78;
const FLOOR = 1e-8;
const LONG = 200; // the number of iterations to approximate the limit
const RANDOM = [0.9, -1.4, 0.3, 0.7, -0.2, 0.5, 1.6, -1.1, 1.2, 0.1, -0.8, 0.4, -1.5, 1.1, 0.6, -0.3];
const UNEVEN = [0, 3, 2.5, 2, -3, 0, 3, 2.5, -2.5, -3, 0, 3, -2, -2.5, -3, 0];

const rows = (flat) => Array.from({length: N}, (_, i) => flat.slice(N * i, N * i + N));
const logitsOf = ({logits, diagonal}) => rows(logits).map((row, i) => row.map((x, j) => (i === j ? x + diagonal : x)));
const number = (x) => (x >= 1000 ? "> 999" : x >= 99.5 ? x.toFixed(0) : x.toFixed(x >= 9.995 ? 1 : 2));

/** A cell whose logit changes when it is dragged up or down, or by the arrow keys. */
function cell(i, j, values, change) {
  const square = svg("rect", {class: "fill", x: 2, y: 2, width: CELL - 4, height: CELL - 4, rx: 6});
  const label = svg("text", {"text-anchor": "middle"});
  const element = svg("g", {
    class: "cell", transform: `translate(${j * CELL} ${i * CELL})`, tabindex: 0, role: "slider", "data-mark": `cell-${i}${j}`,
    "aria-label": `logit of row ${i + 1}, column ${j + 1}`, "aria-valuemin": -9, "aria-valuemax": 9,
  }, svg("rect", {class: "frame", x: 2, y: 2, width: CELL - 4, height: CELL - 4, rx: 6}), square, label);
  const index = N * i + j;
  const put = (logit) => change({logits: values().logits.map((x, other) => (other === index ? Math.min(9, Math.max(-9, logit)) : x))});
  held(element, {
    take: (event) => ({y: event.clientY, logit: values().logits[index]}),
    drag: (event, hold) => put(hold.logit + (hold.y - event.clientY) / 30),
    nudge: ([dx, dy], much) => put(values().logits[index] + (dy || dx) * (much ? 1 : 0.2)),
  });
  return {
    element,
    show(entry, most, logit) {
      const part = Math.min(1, entry / most);
      set(square, {"fill-opacity": part.toFixed(4), "data-entry": entry});
      set(label, {x: CELL / 2, y: CELL / 2 + 5, class: part > 0.75 ? "inside" : "outside"});
      label.textContent = number(entry);
      set(element, {"aria-valuenow": logit.toFixed(2), "aria-valuetext": `logit ${logit.toFixed(2)}, entry ${number(entry)}`});
    },
  };
}

/** A bar with the sum of a row or a column. */
function sum(name) {
  const bar = svg("rect", {class: "bar", "data-mark": name});
  const label = svg("text", {"text-anchor": "middle"});
  return {element: svg("g", {class: "sum"}, bar, label), bar, label};
}

/** The second singular value after LONG iterations, cached for equal logits, because it is slow. */
function remembering() {
  let [key, value] = ["", 0];
  return (logits) => {
    if (String(logits) !== key) [key, value] = [String(logits), singularValues(sinkhorn(logits, LONG))[1]];
    return value;
  };
}

function draw(stage, values, change, more) {
  const wide = N * CELL;
  const second = remembering();
  const cells = Array.from({length: N}, (_, i) => Array.from({length: N}, (_, j) => cell(i, j, values, change)));
  const across = Array.from({length: N}, (_, i) => sum(`row-${i}`));
  const below = Array.from({length: N}, (_, j) => sum(`column-${j}`));
  const matrix = svg("svg", {class: "plane cells", viewBox: `-8 -8 ${wide + 88} ${wide + 100}`, role: "group", "aria-label": "The matrix with the sums of its rows and columns"},
    cells.flat().map(({element}) => element), across.map(({element}) => element), below.map(({element}) => element));

  const chart = axes({label: "Distance of the sums from 1", x: "divisions, rows and columns in turn", y: "max |sum − 1|", log: true, width: 440, height: 220});
  const slope = curve(chart, "slope", "faint dashed");
  const course = curve(chart, "course", "soft");
  const here = point(chart, "here", "result", {radius: 6});
  stage.append(matrix);
  more.append(chart.element, key(["result", "now"], ["faint dashed", "falls by σ₂² per iteration"]));

  return (now) => {
    const logits = logitsOf(now);
    const all = sinkhornSteps(logits, HALVES).map(exponential);
    const current = all[now.steps];
    const columns = transpose(current);
    const most = Math.max(1, ...current.flat());
    cells.forEach((line, i) => line.forEach((one, j) => one.show(current[i][j], most, now.logits[N * i + j])));
    rowSums(current).forEach((total, i) => {
      const long = 30 * Math.min(2, total);
      set(across[i].bar, {x: wide + 6, y: i * CELL + CELL / 2 - 20, width: long, height: 12, rx: 3, class: off(total)});
      set(across[i].label, {x: wide + 36, y: i * CELL + CELL / 2 + 16});
      across[i].label.textContent = number(total);
    });
    rowSums(columns).forEach((total, j) => {
      const long = 28 * Math.min(2, total);
      set(below[j].bar, {x: j * CELL + CELL / 2 - 6, y: wide + 6, width: 12, height: long, rx: 3, class: off(total)});
      set(below[j].label, {x: j * CELL + CELL / 2, y: wide + 80});
      below[j].label.textContent = number(total);
    });
    const errors = all.map((matrix) => Math.max(rowError(matrix), rowError(transpose(matrix))));
    chart.range(0, HALVES, FLOOR, 10);
    course.move(errors.map((error, half) => [half, Math.max(FLOOR, error)]));
    here.move([now.steps, Math.max(FLOOR, errors[now.steps])]);
    const limit = second(logits);
    const anchor = errors[6];
    slope.move([6, HALVES].map((half) => [half, Math.max(FLOOR, anchor * limit ** (half - 6))]));
    const sigmas = singularValues(current);
    return {
      rows: rowError(current), columns: rowError(columns), most: sigmas[0], second: limit, rate: limit * limit,
      state: now.steps === 0 ? "exp of the logits" : now.steps % 2 ? "rows divided last" : "columns divided last",
    };
  };
}

const off = (total) => (Math.abs(total - 1) < 0.005 ? "bar fair" : "bar unfair");

export const sinkhornTopic = {
  name: "sinkhorn",
  wide: true,
  title: "Sinkhorn iterations",
  lead: "mHC mixes its streams by a matrix whose rows and columns sum to 1. This is how one is made.",
  formula: ["*H*⁰ = exp *L*,  then in turn: divide each row by its sum, divide each column by its sum"],
  notice: "A well-mixed matrix needs two or three iterations. Near the identity or any permutation *σ*₂ is near 1 and each iteration helps little: twenty may leave the row sums visibly off. Drag a cell up or down to change its logit.",
  parameters: {
    steps: {label: "divisions done", value: 0, min: 0, max: HALVES, step: 1},
    diagonal: {label: "added to the logits of the diagonal", value: 0, min: 0, max: 8, step: 0.1},
    logits: {value: RANDOM},
  },
  actions: {"one division": ({steps}) => ({steps: steps < HALVES ? steps + 1 : 0})},
  presets: {
    "all equal": {logits: Array(N * N).fill(0), steps: 2},
    "random logits": {logits: RANDOM, steps: 4},
    "near the identity": {logits: UNEVEN, diagonal: 5, steps: 20},
    "near a permutation": {logits: [-2, 5, -1, 0, 0, -1, 6, -2, -2, 0, -1, 5, 6, -3, 0, -1], steps: 40},
  },
  readouts: {
    rows: "rows, max |sum − 1|",
    columns: "columns, max |sum − 1|",
    most: "largest singular value now",
    second: "*σ*₂ after 200 iterations",
    rate: "*σ*₂², what an iteration leaves",
    state: "now",
  },
  code: (now) => python(
    `logits = ${tensor(logitsOf(now).map((row) => row.map((x) => Number(x.toFixed(6)))))}`,
    `mixing = ops.sinkhorn(logits, iterations=${Math.max(1, Math.floor(now.steps / 2))})`,
    "mixing.sum(-1), mixing.sum(-2), mixing",
  ),
  draw,
};
