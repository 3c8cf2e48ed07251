// Attention over depth in the plane: every sublayer has its own query, whose softmax weights the sources.

import {depthStack, norm} from "./math.js";
import {arrow, freeHandle, key, plane} from "./marks.js";
import {h, set, svg} from "./dom.js";
import {python, tensor} from "./snippet.js";

const READERS = 7; // six sublayers and the readout; the first reads the embedding, without a query
const SHORT = 0.48; // the fraction of a query's length that is drawn
const CELL = [52, 34];
const BELOW = "₀₁₂₃₄₅₆";
const QUERIES = [0, 0, 2, 1, -1, 3, -1.5, 3.5, 3, -2, 1, 4];

const pairs = (flat) => Array.from({length: flat.length / 2}, (_, i) => flat.slice(2 * i, 2 * i + 2));
const nameOf = (reader) => (reader === READERS ? "readout" : String(reader));

/** The weights of every reader as a matrix; a click on a row selects its reader. */
function matrix(change) {
  const [wide, high] = CELL;
  const rows = Array.from({length: READERS}, (_, i) => {
    const cells = Array.from({length: READERS}, (_, j) => {
      const fill = svg("rect", {class: "fill", x: j * wide + 1, y: i * high + 1, width: wide - 2, height: high - 2, rx: 4});
      const label = svg("text", {x: (j + 0.5) * wide, y: (i + 0.5) * high + 5, "text-anchor": "middle"});
      return {fill, label};
    });
    const name = svg("text", {x: -10, y: (i + 0.5) * high + 5, "text-anchor": "end"}, nameOf(i + 1));
    const element = svg("g", {class: i ? "row" : null}, cells.map(({fill, label}) => [fill, label]), name);
    if (i) element.addEventListener("click", () => change({reader: i + 1}));
    return {cells, element};
  });
  const heads = Array.from({length: READERS}, (_, j) =>
    svg("text", {x: (j + 0.5) * wide, y: -10, "text-anchor": "middle", class: "head"}, `V${BELOW[j]}`));
  const frame = svg("rect", {class: "chosen", x: -1, width: READERS * wide + 2, height: high, rx: 6});
  const element = svg("svg", {class: "plane weights", viewBox: `-84 -34 ${READERS * wide + 90} ${READERS * high + 40}`, role: "img",
    "aria-label": "The weights: a row for each sublayer that reads, a column for each source"}, rows.map((row) => row.element), frame, heads);
  return {
    element,
    show(reads, reader) {
      const count = reads.at(-1).sources.length;
      heads.forEach((head, j) => head.toggleAttribute("hidden", j >= count));
      rows.forEach(({cells}, i) => cells.forEach(({fill, label}, j) => {
        const weight = reads[i].weights[j];
        set(fill, {"fill-opacity": weight === undefined ? 1 : weight.toFixed(4), class: weight === undefined ? "fill none" : "fill"});
        set(label, {class: weight > 0.6 ? "inside" : "outside"});
        label.textContent = weight === undefined ? "" : weight.toFixed(2);
      }));
      set(frame, {y: (reader - 1) * high});
    },
  };
}

function draw(stage, values, change, more) {
  const space = plane(2.3, {label: "The sources, the query and the read vector in the plane"});
  const sources = Array.from({length: READERS}, (_, i) => arrow(space, `v${i}`, "x", {text: `V${BELOW[i]}`}));
  const result = arrow(space, "result", "result", {text: "x"});
  const shaft = arrow(space, "query", "k dashed", {head: false});
  const own = () => pairs(values().queries)[values().reader - 2];
  const query = freeHandle(space, "query-handle", "k", {label: "w, the query of the selected sublayer, shortened", text: "w"},
    () => own().map((x) => x * SHORT),
    (at) => change({queries: pairs(values().queries).flatMap((old, i) => (i === values().reader - 2 ? at.map((x) => x / SHORT) : old))}));
  const weights = matrix(change);
  stage.append(space.element, key(["x", "sources *V*_{i}, the fainter the less they are read"], ["k dashed", "query *w*, shortened"], ["result", "the read vector, *x*"]));
  more.append(weights.element, h("p", {class: "meaning"}, "A row reads, a column is read. Click a row to take its query."));

  return ({reader, queries, block, turn}) => {
    const reads = depthStack({queries: pairs(queries), block, turn});
    const {sources: vectors, weights: found, x} = reads[reader - 1];
    const most = Math.max(...found);
    sources.forEach((one, i) => {
      one.element.toggleAttribute("hidden", i >= vectors.length);
      if (i >= vectors.length) return;
      one.move([0, 0], vectors[i]);
      set(one.element, {opacity: (0.15 + 0.85 * (found[i] / most)).toFixed(3), "data-weight": found[i]});
    });
    result.move([0, 0], x);
    const at = pairs(queries)[reader - 2];
    shaft.move([0, 0], at.map((part) => part * SHORT));
    query.move(at.map((part) => part * SHORT), `w is ${at.map((part) => part.toFixed(2)).join(", ")}`);
    weights.show(reads, reader);
    const entropy = found.reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0);
    return {
      count: String(vectors.length), effective: Math.exp(entropy), most, embedding: found[0], newest: found.at(-1),
      x1: x[0], x2: x[1], size: norm(x),
    };
  };
}

export const reads = {
  name: "reads",
  wide: true,
  title: "Attention over depth",
  lead: "An attention residual does not add outputs up: every sublayer has a query, and reads a weighted mean of all that stood before it.",
  formula: ["*a*_{i} = softmax_{i}({k|*w*} · RMSNorm(*V*_{i})),  {result|*x*} = ∑_{i} *a*_{i} *V*_{i},  *V*_{l} = *F*_{l}(RMSNorm({result|*x*}))"],
  notice: "Drag the query: sources in its direction are read more, whatever their length, and the longer the query, the fewer sources are read. At *w* = 0 all weights are equal: that is the plain residual up to its scale, and where training starts.",
  parameters: {
    reader: {label: "sublayer that reads", value: 5, min: 2, max: READERS, step: 1, format: nameOf},
    block: {label: "outputs summed into a source", value: 1, min: 1, max: 3, step: 1},
    turn: {label: "turn of a sublayer", value: 50, min: 0, max: 120, step: 1, format: (x) => `${x}°`},
    queries: {value: QUERIES},
  },
  presets: {
    "the start, w = 0": {queries: QUERIES.map(() => 0)},
    "all want the embedding": {queries: QUERIES.map((_, i) => (i % 2 ? 0 : 4.5))},
    "sharp": {queries: [0, 4, 4, 2, -2, 4, 4, -1, -4, 1, 1, 4.5]},
    "blocks of three": {block: 3, reader: 7},
  },
  readouts: {
    count: "sources",
    effective: "sources read, in effect",
    most: "largest weight",
    embedding: "weight of the embedding *V*_{0}",
    newest: "weight of the newest source",
    x1: "{result|*x*}, first coordinate",
    x2: "{result|*x*}, second coordinate",
    size: "|{result|*x*}|",
  },
  code: ({reader, queries, block, turn}) => python(
    `c, s = math.cos(math.radians(${turn})), math.sin(math.radians(${turn}))`,
    "sublayer = torch.tensor([[c, -s], [s, c]]) / 2",
    `queries = ${tensor(pairs(queries).slice(0, reader - 1))}`,
    "x = torch.tensor([1.0, 0.0])  # the embedding",
    "sources = [x]",
    "for i, query in enumerate(queries):",
    "    y = sublayer @ torch.nn.functional.rms_norm(x, (2,), eps=1e-5)",
    ...(block === 1 ? ["    sources.append(y)"] : [`    sources = sources + [y] if i % ${block} == 0 else sources[:-1] + [sources[-1] + y]`]),
    "    x, weights = ops.depth_read(sources, query)",
    "weights, x",
  ),
  draw,
};
