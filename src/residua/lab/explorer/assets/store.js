// The state of the page is the part of the URL after #, so a view can be shared, and survives a reload.

const WRITE_EVERY = 150; // milliseconds; browsers refuse much more frequent changes of the URL

const state = new Map();
let subscriptions = [];
let changed = new Set();
let frame = 0;
let timer = 0;
let address = ""; // as it was last read or written

function read() {
  address = location.hash;
  return new Map(new URLSearchParams(address.slice(1)));
}

for (const [key, value] of read()) state.set(key, value);

addEventListener("hashchange", () => {
  const now = read();
  for (const key of new Set([...state.keys(), ...now.keys()])) {
    if (state.get(key) === now.get(key)) continue;
    if (now.has(key)) state.set(key, now.get(key));
    else state.delete(key);
    tell(key);
  }
});
addEventListener("pagehide", write);

/**
 * The value of `key`, of the type of `fallback`: a number, a boolean, an array of numbers or a string.
 * If the value cannot be read as this type, the fallback is returned.
 * @template T
 * @param {string} key
 * @param {T} fallback
 * @returns {T}
 */
export function get(key, fallback) {
  const text = state.get(key);
  if (text === undefined) return fallback;
  if (typeof fallback === "number") return finite(text) ?? fallback;
  if (typeof fallback === "boolean") return text === "1";
  if (!Array.isArray(fallback)) return text;
  const numbers = text.split(",").map(finite);
  return numbers.length === fallback.length && !numbers.includes(undefined) ? numbers : fallback;
}

function finite(text) {
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : undefined;
}

/** Sets values; null removes a key. Subscribers are called once, before the next frame. */
export function set(values) {
  for (const [key, value] of Object.entries(values)) {
    const text = value === null || value === undefined ? undefined : value === true ? "1" : value === false ? "0" : String(value);
    if (state.get(key) === text) continue;
    if (text === undefined) state.delete(key);
    else state.set(key, text);
    tell(key);
  }
  if (!timer) write();
}

/** Writes the state at once; changes soon after that are written together. */
function write() {
  const text = new URLSearchParams([...state]).toString().replaceAll("%2C", ",");
  timer = 0;
  // If the URL was changed from outside, the event that follows reads it.
  if (text === address.slice(1) || location.hash !== address) return;
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
  address = location.hash;
  timer = setTimeout(write, WRITE_EVERY);
}

function tell(key) {
  changed.add(key);
  frame ||= requestAnimationFrame(() => {
    const keys = changed;
    changed = new Set();
    frame = 0;
    for (const {keys: wanted, callback} of [...subscriptions]) {
      if (wanted.some((one) => keys.has(one))) callback();
    }
  });
}

/**
 * Calls `callback` after any of `keys` has changed. Ends when another view opens, unless it is `lasting`.
 * @param {string[]} keys
 * @param {() => void} callback
 */
export function subscribe(keys, callback, lasting = false) {
  subscriptions.push({keys, callback, lasting});
}

/** Ends all subscriptions that are not lasting. */
export function release() {
  subscriptions = subscriptions.filter((subscription) => subscription.lasting);
}
