// The colours of style.css as the theme that is on has them, for what does not know CSS: the plotting library and canvas.

const root = document.documentElement;
const listeners = [];

/** Calls back after light has become dark, or dark light. */
export function onTheme(callback) {
  listeners.push(callback);
}

const tell = () => listeners.forEach((callback) => callback());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
new MutationObserver(tell).observe(root, {attributeFilter: ["data-theme"]});

/** The colour that a variable of style.css, such as "--reflection", has in the theme that is on. */
export function color(variable) {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const steps = (names) => names.map((name, i) => [i / (names.length - 1), color(name)]);

/** Colours of a gate between two ends, neutral in the middle: of beta from 0 to 2, or of one from -1 to 1. */
export function betaScale() {
  return steps(["--beta-0", "--beta-1", "--beta-2", "--beta-3", "--beta-4"]);
}

/** Colours of sizes, from nothing to much. */
export function sizeScale() {
  return steps(["--size-0", "--size-1", "--size-2", "--size-3"]);
}

/** The colours of lines, in the order in which they are to be used. */
export function lineColors() {
  return [1, 2, 3, 4, 5, 6, 7, 8].map((i) => color(`--line-${i}`));
}
