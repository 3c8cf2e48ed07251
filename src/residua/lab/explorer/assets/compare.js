// Compare: several runs side by side. All numbers, including means and deviations over seeds, come from
// `residua.lab.evaluation.compare`. The choices on the page (baseline, axis) only select the numbers to show.

import {settingsTable, summaryTable} from "./compare-tables.js";
import {differencePicture, lossPicture, pricePictures} from "./compare-pictures.js";
import {payload} from "./data.js";
import {h} from "./dom.js";
import {choice} from "./panels.js";
import {get, set, subscribe} from "./store.js";

const AXES = [
  ["step", "steps"],
  ["tokens", "tokens"],
  ["seconds", "seconds (wall clock)"],
];

/** @param {HTMLElement} root */
export async function compare(root) {
  const {comparison} = payload();
  const names = comparison.groups.map(({name}) => name);
  const selection = () => {
    const baseline = get("baseline", comparison.baseline);
    const axis = get("axis", "step");
    return {
      baseline: names.includes(baseline) ? baseline : comparison.baseline,
      axis: AXES.some(([name]) => name === axis) ? axis : "step",
    };
  };
  const baseline = choice(
    "Baseline",
    "baseline",
    names.map((name) => [name, name]),
    selection().baseline,
    (value) => set({baseline: value}),
  );
  const axis = choice("Along", "axis", AXES, selection().axis, (value) => set({axis: value}));
  const notes = h("ul", {class: "warnings"});
  const parts = [
    differencePicture(comparison),
    summaryTable(comparison),
    lossPicture(comparison),
    ...pricePictures(comparison),
    settingsTable(comparison),
  ];
  const place = h(
    "div",
    {class: "compared"},
    h("div", {class: "controls"}, baseline, axis),
    parts.map(({element}) => element),
  );
  const summary = parts[1].element;
  summary.append(notes);
  root.append(h("h1", {class: "sr-only"}, "Compare"), place);

  async function update() {
    if (!root.isConnected) return;
    const chosen = selection();
    baseline.querySelector("select").value = chosen.baseline;
    axis.querySelector("select").value = chosen.axis;
    notes.replaceChildren(...comparison.against[chosen.baseline].notes.map((note) => h("li", null, note)));
    await Promise.all(parts.map((part) => part.update?.(chosen)));
    place.dataset.drawn = `${chosen.baseline} ${chosen.axis}`;
  }
  subscribe(["baseline", "axis"], update);
  await update();
}
