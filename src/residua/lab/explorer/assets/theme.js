// The colours of style.css in the current theme, for code that cannot use CSS: the plotting library and canvas.

const root = document.documentElement;
const listeners = [];

/** Calls `callback` after a switch between light and dark. */
export function onTheme(callback) {
  listeners.push(callback);
}

const tell = () => listeners.forEach((callback) => callback());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
new MutationObserver(tell).observe(root, {attributeFilter: ["data-theme"]});

/** The colour of a variable of style.css, such as "--reflection", in the current theme. */
export function color(variable) {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const steps = (names) => names.map((name, i) => [i / (names.length - 1), color(name)]);

/** A colour scale for a gate between two ends, neutral in the middle: beta from 0 to 2, or a gate from -1 to 1. */
export function betaScale() {
  return steps(["--beta-0", "--beta-1", "--beta-2", "--beta-3", "--beta-4"]);
}

/** A colour scale for sizes, from 0 up. */
export function sizeScale() {
  return steps(["--size-0", "--size-1", "--size-2", "--size-3"]);
}

/** The colours of lines, in order of use. */
export function lineColors() {
  return [1, 2, 3, 4, 5, 6, 7, 8].map((i) => color(`--line-${i}`));
}
