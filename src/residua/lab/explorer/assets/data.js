// The data of the page: small values as JSON, large ones gzipped and in base64, unpacked on request.

const TYPES = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array,
  uint16: Uint16Array, int32: Int32Array, float16: Uint16Array,
};
const parsed = new Map();
const unpacked = new Map();

/** @param {string} id */
function json(id) {
  if (!parsed.has(id)) parsed.set(id, JSON.parse(document.getElementById(id).textContent));
  return parsed.get(id);
}

/** The payload of the page: {title, traces, comparison}. */
export function payload() {
  return json("payload");
}

/** The rows of the results: published, ours and references. */
export function results() {
  return json("results");
}

/** @param {Element} element @returns {Promise<ArrayBuffer>} */
function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** The numbers with these bits as 16-bit floats. */
export function widen(halves) {
  return Float32Array.from(halves, (bits) => {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return exponent ? sign * (1024 + fraction) * 2 ** (exponent - 25) : sign * fraction * 2 ** -24;
  });
}

/**
 * The array under `key`, with its sizes as `shape`; rejects if there is none.
 * @param {string} key
 * @returns {Promise<Float32Array|Float64Array|Int32Array|Int16Array|Uint16Array|Int8Array|Uint8Array>}
 */
export function arrays(key) {
  if (!unpacked.has(key)) unpacked.set(key, read(key));
  return unpacked.get(key);
}

async function read(key) {
  const element = document.querySelector(`script[data-array="${CSS.escape(key)}"]`);
  if (!element) throw new Error(`this page holds no array ${key}`);
  const {type, shape} = element.dataset;
  const stored = new TYPES[type](await unpack(element));
  const array = type === "float16" ? widen(stored) : stored;
  array.shape = shape ? shape.split(",").map(Number) : [];
  return array;
}

/** The source of the plotting library, or null if the page was written without it. */
export async function plotlySource() {
  const element = document.getElementById("plotly");
  return element && new TextDecoder().decode(await unpack(element));
}
