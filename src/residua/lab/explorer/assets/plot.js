// Plotly, unpacked when the first curve is drawn, in the page's fonts and colours.

import {plotlySource} from "./data.js";
import {color, lineColors, onTheme} from "./theme.js";

const drawn = new Map();
let library = null;

/** @returns {Promise<any>} the plotting library */
export function plotly() {
  library ??= load();
  return library;
}

async function load() {
  const source = await plotlySource();
  if (source === null) throw new Error("this page was written without its plotting library");
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  script.remove();
  return globalThis.Plotly;
}

function themed(layout) {
  const font = {family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--soft")};
  const axis = {gridcolor: color("--hair"), linecolor: color("--rule"), zerolinecolor: color("--rule"), automargin: true};
  const axes = Object.fromEntries(
    Object.keys({xaxis: 1, yaxis: 1, ...layout}).filter((key) => /^[xy]axis\d*$/.test(key))
      .map((key) => [key, {...axis, ...layout[key]}]),
  );
  return {
    font, paper_bgcolor: "transparent", plot_bgcolor: "transparent", colorway: lineColors(),
    margin: {l: 56, r: 16, t: layout.title ? 40 : 12, b: 44}, autosize: true,
    hoverlabel: {font: {family: font.family, color: color("--ink")}, bgcolor: color("--raised"), bordercolor: color("--rule")},
    legend: {orientation: "h", y: -0.2, ...layout.legend},
    ...layout, ...axes,
  };
}

/**
 * Draws `traces` into `element`. A later call updates the drawing, and a change of the theme redraws it in the other
 * colours. If traces contain colours themselves, pass functions that make traces and layout.
 * @param {HTMLElement} element
 * @param {object[] | (() => object[])} traces
 * @param {object | (() => object)} layout
 */
export async function plot(element, traces, layout = {}) {
  const Plotly = await plotly();
  drawn.set(element, {traces, layout});
  const made = typeof traces === "function" ? traces() : traces;
  const look = themed(typeof layout === "function" ? layout() : layout);
  const config = {responsive: true, displaylogo: false, displayModeBar: false};
  await Plotly.react(element, made, look, config);
}

function again() {
  for (const [element, {traces, layout}] of [...drawn]) {
    if (element.isConnected) plot(element, traces, layout);
    else drawn.delete(element);
  }
}

onTheme(again);
