// Python code to copy: the computation on the page, with its numbers.

const START = "import math\nimport torch\nfrom residua import ops\n\ntorch.set_default_dtype(torch.float64)";

/** @param {string[]} lines the last one is the expression that matters */
export function python(...lines) {
  const needed = lines.some((line) => line.includes("math.")) ? START : START.replace("import math\n", "");
  return [needed, ...lines].join("\n");
}

const float = (x) => (Number.isInteger(x) ? x.toFixed(1) : String(x));
const list = (value) => (Array.isArray(value) ? `[${value.map(list).join(", ")}]` : float(value));

/** @param {number | number[] | number[][]} value */
export const tensor = (value) => `torch.tensor(${list(value)})`;

/** The unit vector in the plane at an angle in degrees. */
export const pointing = (angle) => `torch.tensor([math.cos(math.radians(${angle})), math.sin(math.radians(${angle}))])`;
