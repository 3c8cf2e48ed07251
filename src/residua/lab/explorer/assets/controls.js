// Sliders, switches and choices for the parameters of a simulation.

import {h} from "./dom.js";
import {markup} from "./formula.js";

/**
 * @param {string} name
 * @param {{label: string, value: number|boolean|string, min?: number, max?: number, step?: number, power?: number,
 *   options?: string[], format?: (value: number) => string}} parameter
 *   power: the value is max times the slider's place (0 to 1) to this power, for a range over magnitudes
 * @param {(values: object) => void} change
 * @returns {{element: HTMLElement, show: (values: object) => void}}
 */
export function control(name, parameter, change) {
  if (typeof parameter.value === "boolean") return toggle(name, parameter, change);
  if (parameter.options) return choice(name, parameter, change);
  return slider(name, parameter, change);
}

function slider(name, {label, min = 0, max, step = 0.01, power, format}, change) {
  const [inside, outside] = power
    ? [(value) => (value / max) ** (1 / power), (place) => Number((max * place ** power).toPrecision(4))]
    : [(value) => value, (place) => place];
  const output = h("output", {"data-param": name});
  const input = h("input", {
    type: "range", id: `slider-${name}`, "data-slider": name, min: power ? 0 : min, max: power ? 1 : max, step: power ? 0.002 : step,
    oninput: () => change({[name]: outside(input.valueAsNumber)}),
  });
  const element = h("div", {class: "slider"}, h("label", {for: input.id}, markup(label)), output, input);
  const show = ({[name]: value}) => {
    const text = format ? format(value) : String(Number(value.toFixed(3))).replace("-", "−");
    if (document.activeElement !== input || Math.abs(input.valueAsNumber - inside(value)) > 1e-6) input.valueAsNumber = inside(value);
    input.style.setProperty("--part", `${100 * (inside(value) - input.min) / (input.max - input.min)}%`);
    input.setAttribute("aria-valuetext", text);
    output.textContent = text;
    output.dataset.value = value;
  };
  return {element, show};
}

function toggle(name, {label}, change) {
  const input = h("input", {type: "checkbox", role: "switch", "data-toggle": name, onchange: () => change({[name]: input.checked})});
  return {
    element: h("label", {class: "toggle"}, input, h("span", null, markup(label))),
    show: ({[name]: value}) => { input.checked = value; },
  };
}

function choice(name, {label, options}, change) {
  const select = h("select", {"data-choice": name, onchange: () => change({[name]: select.value})},
    options.map((option) => h("option", {value: option}, option)));
  return {
    element: h("label", {class: "choice"}, h("span", null, markup(label)), select),
    show: ({[name]: value}) => { select.value = value; },
  };
}
