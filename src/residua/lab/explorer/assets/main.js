// The frame: tabs, the switch between light and dark, and the current view.

import {compare} from "./compare.js";
import {payload} from "./data.js";
import {h} from "./dom.js";
import {inspect} from "./inspect.js";
import {learn} from "./learn.js";
import {get, release, set, subscribe} from "./store.js";

const {title, traces, comparison, home} = payload();
const views = [
  {name: "learn", label: "Learn", open: learn},
  ...(traces?.length ? [{name: "inspect", label: "Inspect", open: inspect}] : []),
  ...(comparison ? [{name: "compare", label: "Compare", open: compare}] : []),
];
const themes = ["auto", "light", "dark"];
const main = document.getElementById("main");
const first = views.at(traces?.length ? 1 : -1);

const tabs = views.map(({name, label}) =>
  h("button", {type: "button", "data-view": name, onclick: () => set({view: name})}, label));
const switches = themes.map((theme) =>
  h("button", {type: "button", "data-theme": theme, title: `${theme} colours`, onclick: () => set({theme: theme === "auto" ? null : theme})}, theme));

document.getElementById("top").append(
  h("a", {class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); }}, "Skip to the content"),
  h("div", {class: "name"}, home ? h("a", {href: home, title: "To the documentation"}, h("strong", null, "← residua")) : h("strong", null, "residua"), h("span", null, title && title !== "residua" ? title : "residual connections, seen")),
  h("nav", {class: "tabs", "aria-label": "Views", hidden: views.length < 2}, tabs),
  h("div", {class: "themes", role: "group", "aria-label": "Colours"}, switches),
);

function mark(buttons, key, chosen) {
  for (const button of buttons) button.setAttribute("aria-pressed", button.dataset[key] === chosen);
}

function colours() {
  const theme = themes.includes(get("theme", "auto")) ? get("theme", "auto") : "auto";
  document.documentElement.dataset.theme = theme;
  mark(switches, "theme", theme);
}

async function open() {
  const view = views.find(({name}) => name === get("view", first.name)) ?? first;
  mark(tabs, "view", view.name);
  release();
  const root = h("div", {class: `view ${view.name}`});
  main.replaceChildren(root);
  await view.open(root);
}

subscribe(["theme"], colours, true);
subscribe(["view"], open, true);
colours();
open();
