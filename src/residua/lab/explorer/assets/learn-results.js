// Published numbers, our numbers and references: side by side, never mixed, each with its source.

import {results} from "./data.js";
import {h} from "./dom.js";
import {get, set, subscribe} from "./store.js";

const KINDS = {
  published: "quoted from the publication",
  ours: "measured by this library",
  reference: "no training: from the task itself",
};
const LEAST = 1e-9; // smaller values are exact up to rounding, and would compress the rest of the axis

/** @param {HTMLElement} root @param {HTMLElement} head */
function page(root, head) {
  const {views, sources} = results();
  const buttons = views.map(({name, title}) =>
    h("button", {type: "button", "data-task": name, onclick: () => set({task: name})}, title));
  const what = h("p", {class: "what"});
  const best = h("p", {class: "best"});
  const groups = h("div", {class: "groups"});
  const cited = h("section", {class: "sources"}, h("h2", null, "Sources"), h("ul", null, Object.entries(sources).map(([key, source]) =>
    h("li", {id: `source-${key}`, class: `kind-${kindOf(key)}`, tabindex: -1}, cite(source)))));
  root.append(
    head,
    h("div", {class: "choose", role: "group", "aria-label": "Task"}, buttons),
    what,
    h("div", {class: "legend"},
      h("ul", {class: "meaning"}, Object.entries(KINDS).map(([kind, text]) => h("li", {class: `kind-${kind}`}, h("b", null, kind), ` ${text}`)))),
    groups,
    best,
    h("div", {class: "notes"}, cited,
      h("section", {class: "notice"}, h("h2", null, "What to notice"), h("p", null,
        "Compare inside a group only: sizes differ between them. A model that is not causal has seen the inputs it is asked to predict. " +
        "If a reference, or a network without layers, is ahead of every scheme, the task cannot tell the schemes apart.")),
      h("section", {class: "code"}, h("h2", null, "The same with residua"), h("pre", {tabindex: 0}, h("code", null,
        "residua study geometry reflection\nresidua study geometry quick")))),
  );

  const update = () => {
    if (!root.isConnected) return;
    const view = views.find(({name}) => name === get("task", views[0].name)) ?? views[0];
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.task === view.name);
    what.textContent = view.what;
    const shown = view.groups.map(({title, rows}) => ({title, rows: sorted(rows, view)})).filter(({rows}) => rows.length);
    const place = axis(view, shown.flatMap(({rows}) => rows));
    groups.replaceChildren(...shown.map((group) => table(group, view, place, sources)));
    best.replaceChildren(...shown.map((group) => h("span", null, sentence(group, view))));
  };
  subscribe(["task"], update);
  update();
}

const kindOf = (source) => ({research: "published", quick: "ours", reflection: "ours"})[source] ?? source;

function cite({label, text, url, command}) {
  return [h("b", null, label), " ", url ? h("a", {href: url, rel: "noreferrer", target: "_blank"}, text) : text,
    command && [" · ", h("code", null, command)]];
}

const sorted = (rows, {least}) => [...rows].sort((a, b) => (least ? a.mean - b.mean : b.mean - a.mean));

/** The position of a value on the axis, from 0 to 1. */
function axis({log}, rows) {
  const values = rows.map(({mean}) => mean).filter((value) => !log || value >= LEAST);
  if (!log) return {at: (value) => (value + 1) / 2, ticks: [-1, -0.5, 0, 0.5, 1]};
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  const at = (value) => Math.min(1, Math.max(0, (Math.log10(Math.max(value, 1e-300)) - low) / (high - low)));
  return {at, ticks: Array.from({length: high - low + 1}, (_, i) => 10 ** (low + i))};
}

const percent = (part) => `${(100 * part).toFixed(2)}%`;

function table({title, rows}, view, place, sources) {
  return h("section", {class: "group"}, h("h2", null, title, h("small", null, ` ${view.measure}`)),
    h("ol", {class: "rows"},
      rows.map((row) => item(row, view, place, sources)),
      h("li", {class: "scale", "aria-hidden": "true"}, h("span", {class: "track"},
        place.ticks.map((tick) => h("span", {class: "tick", style: `left: ${percent(place.at(tick))}`}, written(tick, view, true)))))));
}

function item(row, view, place, sources) {
  const {name, kind, source, mean, deviation, causal, seeds, parameters} = row;
  const exact = view.log && mean < LEAST;
  const [from, to] = [mean - (deviation ?? 0), mean + (deviation ?? 0)].map((value) => place.at(value));
  const facts = [seeds && `${seeds} ${seeds === 1 ? "seed" : "seeds"}`, parameters && `${parameters.toLocaleString("en")} parameters`].filter(Boolean);
  const text = exact ? "exact" : spread(mean, deviation, view);
  return h("li", {class: `row kind-${kind}`, "data-name": name, "data-kind": kind, "data-mean": mean, title: [plain(name), text, ...facts].join(" · ")},
    h("span", {class: "who"}, h("span", {class: "model"}, plain(name)), badge(causal)),
    h("span", {class: "track"},
      place.ticks.map((tick) => h("span", {class: "line", style: `left: ${percent(place.at(tick))}`})),
      h("span", {class: "spread", style: `left: ${percent(from)}; width: ${percent(to - from)}`}),
      h("span", {class: "mean", style: `left: ${percent(place.at(mean))}`})),
    h("span", {class: "value"}, text, facts.length > 0 && h("small", null, facts[0])),
    link(source, sources[source]));
}

function badge(causal) {
  if (causal === null) return null;
  return h("span", {class: causal ? "badge" : "badge ahead"}, causal ? "causal" : "not causal");
}

/** The link of a row to its source: a publication, or the note on how the numbers were made. */
function link(key, {label, url}) {
  if (url) return h("a", {class: "source", href: url, rel: "noreferrer", target: "_blank"}, label);
  const show = () => {
    const target = document.getElementById(`source-${key}`);
    target.scrollIntoView({block: "center", behavior: "smooth"});
    target.focus({preventScroll: true});
  };
  return h("button", {type: "button", class: "source", onclick: show}, label);
}

const SUPERSCRIPT = {"-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹"};

function written(value, {log}, tick = false) {
  if (!log) return (tick ? String(value) : value.toFixed(3)).replace("-", "−");
  const [digits, exponent] = value.toExponential(2).split("e");
  const power = `10${[...exponent.replace("+", "")].map((character) => SUPERSCRIPT[character]).join("")}`;
  return tick ? power : `${digits} × ${power}`;
}

/** Formats a mean and its deviation with a common power of ten. */
function spread(mean, deviation, view) {
  if (deviation === null) return written(mean, view);
  if (!view.log) return `${written(mean, view)} ± ${deviation.toFixed(3)}`;
  const [digits, power] = written(mean, view).split(" × ");
  return `(${digits} ± ${(deviation / 10 ** Math.floor(Math.log10(mean) + 1e-12)).toFixed(2)}) × ${power}`;
}

const plain = (name) => name.replace("x_t", "xₜ");

/** A sentence on the best rows of a group. */
function sentence({title, rows}, view) {
  const of = (...kinds) => rows.find(({kind}) => kinds.includes(kind));
  const parts = [["the best model", of("published", "ours")], ["the best reference", of("reference")]]
    .filter(([, row]) => row)
    .map(([what, row]) => `${what} is ${plain(row.name)}, ${view.log && row.mean < LEAST ? "exact" : written(row.mean, view)}`);
  return `${title}: ${parts.join("; ")}.`;
}

export const dashboard = {
  name: "results",
  title: "Results of the geometric benchmarks",
  lead: "Four small tasks from arXiv 2605.06729: published results, our measurements, and references without any network.",
  parameters: {task: {value: ""}},
  page,
};
