// A trace in the page: arrays over sublayers and tokens, and descriptions of their values.

import {arrays, payload} from "./data.js";

/** Descriptions of known gates; other gates are described by their names. */
const GATES = {
  beta: {label: "β", note: "the gate: 0 keeps the state, 1 projects, 2 reflects"},
  gamma: {label: "γ", note: "the gate between reflection (0) and rotation (1)"},
  angle: {note: "the Cayley rotation's angle in radians"},
  cayley_beta: {label: "Cayley β", note: "the strength of the Cayley rotation"},
  gate: {note: "1 removes the whole component of the update along the state, 0 nothing; −1 doubles it"},
};

/**
 * The quantities with a value for every sublayer and token, in the order of display, after the gates. `label` is short,
 * `note` explains. `limits` are the ends of the scale if they are fixed. `own`: a plain residual lacks this quantity.
 */
const QUANTITIES = [
  {name: "mixing", label: "‖H_res − I‖", note: "how far the mixing of the rows is from the identity", own: true},
  {name: "sources_read", label: "sources read", note: "how many earlier sources the sublayer reads, in effect", own: true},
  {name: "stream_similarity", label: "cos(Xᵢ, Xⱼ)", note: "the mean cosine between two streams of the state, 1 for copies", own: true},
  {name: "change", label: "‖ΔX‖ / ‖X‖", note: "how much the sublayer changes the state, relative to its norm"},
  {name: "erase_norm", label: "erase", note: "β ‖kᵀX‖, the part taken out of the state"},
  {name: "write_norm", label: "write", note: "β ‖v‖, the part put into the state"},
  {name: "discrepancy_norm", label: "‖v − kᵀX‖", note: "how far the state is from holding v along k"},
  {name: "output_norm", label: "‖y‖", note: "the norm of the sublayer's output"},
  {name: "state_norm", label: "‖X‖", note: "the norm of the state before the sublayer"},
  {name: "lens_loss", label: "lens", note: "the loss of the next token, in nats, if the model ended after the sublayer"},
];

/** The quantities that a trace with these facts has. */
export function quantitiesOf({facts, arrays: there}) {
  const gates = Object.entries(facts.gates).map(([name, {range}]) => ({
    name,
    label: name,
    note: "a gate of the connection",
    ...(name !== "gate" || range?.[0] < 0 ? GATES[name.replace(/_\d+$/, "")] : {}), // another scheme's gate writes
    ...(/_\d+$/.test(name) && {label: name}),
    limits: range,
    gate: true,
    own: true,
  }));
  return [...gates, ...QUANTITIES].filter(({name}) => name in there);
}

export const REGIMES = ["identity", "projection", "reflection", "enlarging"];

/** Numbers over sublayers (or depth), tokens and perhaps rows and columns; some only at a sample of the tokens. */
export class Field {
  /** @param {Float32Array & {shape: number[]}} data @param {number[] | null} tokens the positions, null for all */
  constructor(data, tokens) {
    this.data = data;
    [this.rows, this.columns] = data.shape;
    this.inner = data.shape.slice(2);
    this.size = this.inner.reduce((product, n) => product * n, 1);
    this.tokens = tokens;
  }

  /** The column of a token, or of the nearest sampled token. */
  column(token) {
    if (!this.tokens) return Math.min(token, this.columns - 1);
    let best = 0;
    this.tokens.forEach((position, i) => {
      if (Math.abs(position - token) < Math.abs(this.tokens[best] - token)) best = i;
    });
    return best;
  }

  /** The token of a column. */
  position(column) {
    return this.tokens ? this.tokens[column] : column;
  }

  positions() {
    return this.tokens ?? Array.from({length: this.columns}, (_, i) => i);
  }

  /** The number in a row at a token; for a matrix, an array of its numbers. */
  at(row, token) {
    const start = (row * this.columns + this.column(token)) * this.size;
    return this.inner.length ? this.data.subarray(start, start + this.size) : this.data[start];
  }

  /** All numbers of a row. */
  row(row) {
    const width = this.columns * this.size;
    return this.data.subarray(row * width, (row + 1) * width);
  }

  /** The mean over the tokens of each number in a row. */
  mean(row) {
    const all = this.row(row);
    return Float64Array.from({length: this.size}, (_, i) => {
      let sum = 0;
      for (let j = i; j < all.length; j += this.size) sum += all[j];
      return sum / this.columns;
    });
  }
}

/** Loads trace `index` with all its arrays: `fields` by name, and one-dimensional `lists`. */
export async function loadTrace(number) {
  const described = payload().traces[number];
  const entries = Object.entries(described.arrays);
  const loaded = await Promise.all(entries.map(([, {key}]) => arrays(key)));
  const fields = {};
  const lists = {};
  entries.forEach(([name, {tokens}], i) => {
    if (loaded[i].shape.length === 1) lists[name] = loaded[i];
    else fields[name] = new Field(loaded[i], tokens);
  });
  for (const name of ["determinant", "singular_max", "singular_min", "defect", "depth_weights"]) {
    if (fields[name]) fields[name].tokens = described.facts.sampled;
  }
  return {
    ...described,
    fields,
    lists,
    thinned: entries.some(([, {tokens}]) => tokens !== null),
    depth: described.facts.sublayers.length,
    length: described.tokens.length,
    quantities: quantitiesOf(described),
  };
}

/** The regime of a gate: identity below the first threshold, reflection above the second, projection between them;
 * enlarging if it is below minus the first threshold. */
export function regime(beta, {identity, reflection}) {
  if (Number.isNaN(beta)) return "not a number";
  if (beta < -identity) return "enlarging";
  if (beta < identity) return "identity";
  return beta > reflection ? "reflection" : "projection";
}

/** The shares of the tokens in each regime, and of tokens without a finite number, in a row of gates. */
export function shares(betas, thresholds) {
  const counts = {identity: 0, projection: 0, reflection: 0, enlarging: 0, "not a number": 0};
  for (const beta of betas) counts[regime(beta, thresholds)] += 1;
  return Object.fromEntries(Object.entries(counts).map(([name, count]) => [name, count / betas.length]));
}

/** The quantiles of the finite numbers for the given fractions; NaN if there are none. */
export function quantiles(numbers, parts) {
  const sorted = Float64Array.from(numbers)
    .filter((x) => !Number.isNaN(x))
    .sort();
  if (!sorted.length) return parts.map(() => NaN);
  return parts.map((part) => {
    const place = part * (sorted.length - 1);
    const low = Math.floor(place);
    const high = Math.ceil(place);
    return low === high ? sorted[low] : sorted[low] + (sorted[high] - sorted[low]) * (place - low);
  });
}

/** Formats a number with at most four digits. */
export function number(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "not a number";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = x === 0 ? "0" : size < 1e-3 || size >= 1e5 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
  return text.replaceAll("-", "−");
}

const LONGEST = 12; // letters beside an axis

/** The name of a sublayer for an axis, shortened: in a converted model it is the name of a norm, which may be long. */
export const brief = (name) => (name.length > LONGEST ? `${name.slice(0, LONGEST - 1)}…` : name);

/** Formats a token, with visible newlines and tabs. */
export function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "∅";
}
