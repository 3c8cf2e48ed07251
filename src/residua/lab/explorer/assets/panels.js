// The building blocks of Inspect and Compare: panels, controls, tooltips, and colour scales.

import {h} from "./dom.js";
import {plot, plotly} from "./plot.js";
import {color} from "./theme.js";

/** A part of a view, with a heading and a line of explanation. */
export function panel(name, title, note, ...children) {
  return h(
    "section",
    {class: "panel", "data-panel": name, "aria-label": title},
    h("h2", null, title),
    note && h("p", {class: "note"}, note),
    children,
  );
}

/** A container for a picture; `kind` determines its height. */
export function canvas(name, kind = "") {
  return h("div", {class: `plot ${kind}`, "data-plot": name});
}

/** A choice of texts: [[value, text], ...]. */
export function choice(label, name, options, chosen, onchange) {
  const select = h(
    "select",
    {"data-control": name, onchange: () => onchange(select.value)},
    options.map(([value, text]) => h("option", {value, selected: String(value) === String(chosen)}, text)),
  );
  return h("label", {class: "control"}, h("span", null, label), select);
}

/** A slider that shows its value: `element`, and `show(value)` to set it. */
export function slider(label, name, {min, max, step}, oninput) {
  const output = h("output");
  const input = h("input", {
    type: "range",
    min,
    max,
    step,
    "data-control": name,
    oninput: () => {
      tell();
      oninput(Number(input.value));
    },
  });
  const tell = () => {
    output.textContent = Number(input.value).toFixed(2);
  };
  const show = (value) => {
    input.value = value;
    tell();
  };
  return {element: h("label", {class: "control"}, h("span", null, label, " ", output), input), show};
}

const STILL = 8; // pixels; moving farther with the button down is a drag, not a click

/**
 * Reports the position of a click or tap in the units of the axes, which are linear. It is computed from the pointer
 * event, because plotly samples the pointer at most every 50 ms, and reports a quick click at the last sample.
 * @param {HTMLElement} element a picture that plotly has drawn @param {(place: {x: number, y: number}) => void} told
 */
function onPress(element, told) {
  element.addEventListener("pointerdown", (down) => {
    if (!down.isPrimary || down.button !== 0 || down.ctrlKey) return;
    const done = new AbortController();
    const up = (event) => {
      done.abort();
      if (Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) > STILL) return;
      const {left, bottom, width, height} = element.querySelector(".nsewdrag").getBoundingClientRect();
      const [across, above] = [(event.clientX - left) / width, (bottom - event.clientY) / height];
      if (Math.min(across, above) < 0 || Math.max(across, above) > 1) return;
      const {xaxis, yaxis} = element.layout;
      const within = ([low, high], part) => low + part * (high - low);
      told({x: within(xaxis.range, across), y: within(yaxis.range, above)});
    };
    // Plotly covers the page while the button is down, so listen for its release on the window.
    addEventListener("pointerup", up, {signal: done.signal});
    addEventListener("pointercancel", () => done.abort(), {signal: done.signal});
  });
}

/** Draws lines and bars as `plot` does, and reports clicks as {x, y} on its axes. */
export async function chart(element, traces, layout, onclick = null) {
  const fixed = () => {
    const made = layout();
    const axes = Object.keys({xaxis: 1, yaxis: 1, ...made}).filter((key) => /^[xy]axis/.test(key));
    return {
      dragmode: false,
      hovermode: "x unified",
      margin: {l: 64, r: 12, t: made.showlegend === false ? 12 : 34, b: made.xaxis?.tickangle ? 76 : 48},
      ...made,
      legend: {
        orientation: "h",
        traceorder: "normal",
        x: 0,
        y: 1.02,
        yanchor: "bottom",
        font: {size: 11},
        itemclick: false,
        itemdoubleclick: false,
        ...made.legend,
      },
      ...Object.fromEntries(axes.map((key) => [key, {fixedrange: true, automargin: false, ...made[key]}])),
    };
  };
  await plot(element, traces, fixed);
  if (onclick && !element.dataset.clickable) {
    element.dataset.clickable = "1";
    onPress(element, onclick);
  }
}

/** Moves the marks of the selection in a picture, without redrawing the rest. */
export async function mark(element, shapes) {
  if (element.isConnected && element.layout) await (await plotly()).relayout(element, {shapes});
}

/** The tooltip for the point under the mouse. Its texts are text nodes, so markup in a token stays text. */
export class Tip {
  constructor() {
    this.element = h("div", {class: "tip", role: "tooltip", hidden: true});
    document.querySelectorAll("body > .tip").forEach((old) => old.remove());
    document.body.append(this.element);
  }

  /** @param {MouseEvent} event @param {any[]} lines */
  show(event, lines) {
    this.element.replaceChildren(...lines.map((line) => h("div", null, line)));
    this.element.hidden = false;
    const {width, height} = this.element.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - width - 8);
    const below = event.clientY + 18 + height < innerHeight;
    this.element.style.left = `${Math.max(8, left)}px`;
    this.element.style.top = `${below ? event.clientY + 18 : event.clientY - height - 12}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

const channels = (rgb) =>
  rgb
    .match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);

/** A function from [0, 1] to the colour of a scale [[position, colour], ...], with a text colour of enough contrast. */
export function shades(scale) {
  const stops = scale.map(([place, shade]) => [place, channels(shade)]);
  return (value) => {
    const x = Math.min(1, Math.max(0, value));
    const next = Math.max(
      1,
      stops.findIndex(([place]) => place >= x),
    );
    const [[from, low], [to, high]] = [stops[next - 1], stops[next]];
    const mixed = low.map((c, i) => c + ((high[i] - c) * (x - from)) / (to - from));
    const light = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2];
    return {background: `rgb(${mixed.map(Math.round).join(",")})`, ink: light > 140 ? "#16171a" : "#ffffff"};
  };
}

/** The same colour, partly transparent. */
export function faded(shade, alpha) {
  return `rgba(${channels(shade).join(",")},${alpha})`;
}

/** A vertical line that marks a position of the horizontal axis. */
export function vertical(x) {
  return {
    type: "line",
    x0: x,
    x1: x,
    yref: "paper",
    y0: 0,
    y1: 1,
    layer: "below",
    line: {color: color("--accent"), width: 1.5, dash: "dot"},
  };
}
