// Inspect: the connections of a trained model on a text. The selection (trace, sublayer, token, quantity, thresholds)
// is in the URL, and every panel follows it.

import {payload} from "./data.js";
import {h} from "./dom.js";
import {card} from "./inspect-card.js";
import {pictures} from "./inspect-pictures.js";
import {depthReads} from "./inspect-sources.js";
import {matrices} from "./inspect-streams.js";
import {tokensAndMap} from "./inspect-text.js";
import {loadTrace, quantitiesOf, visible} from "./inspect-trace.js";
import {choice, slider, Tip} from "./panels.js";
import {get, set, subscribe} from "./store.js";

const whole = (value, length) => Math.min(length - 1, Math.max(0, Math.round(value)));

/** The trace to show first: the first with gates or mixing, because a plain residual has little to show. */
function beginning(traces) {
  return Math.max(0, traces.findIndex((trace) => quantitiesOf(trace).some(({own}) => own)));
}

/** @param {HTMLElement} root */
export async function inspect(root) {
  const traces = payload().traces;
  const tip = new Tip();
  const place = h("div", {class: "inspected"});
  root.append(h("h1", {class: "sr-only"}, "Inspect"), place);
  let opened = -1;

  async function open() {
    const number = whole(get("trace", beginning(traces)), traces.length);
    if (number === opened) return;
    opened = number;
    const trace = await loadTrace(number);
    if (number !== opened || !root.isConnected) return;
    tip.hide();
    build(place, trace, number, tip, () => opened === number && root.isConnected);
  }

  subscribe(["trace"], open);
  await open();
}

/** The selection, restricted to values that this trace has. */
function selection(trace) {
  const names = trace.quantities.map(({name}) => name);
  const shown = get("show", names[0]);
  return {
    sublayer: whole(get("sublayer", 0), trace.depth),
    token: whole(get("token", 0), trace.length),
    shown: trace.quantities[Math.max(0, names.indexOf(shown))],
    thresholds: {identity: get("identity", 0.5), reflection: get("reflection", 1.5)},
    mean: get("of", "token") === "mean",
    read: whole(get("read", -1) + 1, (trace.facts.reads ?? []).length + 1) - 1, // -1: the mean of all
  };
}

function build(place, trace, number, tip, current) {
  const select = (sublayer, token) =>
    set({
      sublayer: sublayer === null ? selection(trace).sublayer : whole(sublayer, trace.depth),
      token: token === null ? selection(trace).token : whole(token, trace.length),
    });
  const parts = [
    controls(trace, number),
    card(trace),
    tokensAndMap(trace, tip, select),
    matrices(trace),
    depthReads(trace, tip, select),
    ...pictures(trace, tip, select),
  ].filter(Boolean);
  place.replaceChildren(...parts.map(({element}) => element));
  const narrow = [...place.children].filter((part) => !part.matches(".wide, .controls"));
  if (narrow.length % 2) narrow.at(-1).classList.add("wide");
  place.onkeydown = (event) => arrows(event, trace, select);

  // Draw one part after the other, so that the first can be used while the others are being drawn.
  let latest = 0;
  let everything = false;
  const update = async (all) => {
    everything ||= all;
    const run = ++latest;
    const selected = selection(trace);
    const outdated = () => run !== latest || !current();
    for (const part of parts) {
      if (outdated()) return;
      await part.update?.(selected, everything);
      await new Promise((resolve) => setTimeout(resolve));
    }
    if (outdated()) return;
    everything = false;
    place.dataset.drawn = `${number} ${selected.sublayer} ${selected.token} ${selected.shown.name}`;
  };
  subscribe(["sublayer", "token", "of", "read"], () => current() && update(false));
  subscribe(["show", "identity", "reflection"], () => current() && update(true));
  update(true);
}

/** Moves the selection by arrow keys while the text or the map has the focus. */
function arrows(event, trace, select) {
  if (!event.target.closest("[data-moves]") || event.altKey || event.ctrlKey || event.metaKey) return;
  const {sublayer, token} = selection(trace);
  const moves = {
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    ArrowUp: [1, 0],
    ArrowDown: [-1, 0],
    Home: [0, -token],
    End: [0, trace.length],
  };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  select(sublayer + move[0], token + move[1]);
}

function controls(trace, number) {
  const {facts} = trace;
  const names = payload().traces.map(({name}, i) => [i, name]);
  const sublayer = choice(
    "Sublayer",
    "sublayer",
    facts.sublayers.map((name, i) => [i, name]),
    0,
    (value) => set({sublayer: value}),
  );
  const token = h("input", {
    type: "number",
    min: 0,
    max: trace.length - 1,
    "data-control": "token",
    onchange: (event) => set({token: whole(Number(event.target.value) || 0, trace.length)}),
  });
  const piece = h("code", {class: "piece"});
  const shown = choice(
    "Colour",
    "show",
    trace.quantities.map(({name, label}) => [name, label]),
    "",
    (value) => set({show: value}),
  );
  const sliders = trace.fields.beta
    ? [
        slider("identity below", "identity", {min: 0, max: 1, step: 0.01}, (value) => set({identity: value})),
        slider("reflection above", "reflection", {min: 1, max: 2, step: 0.01}, (value) => set({reflection: value})),
      ]
    : [];
  const element = h(
    "div",
    {class: "controls"},
    names.length > 1 && choice("Trace", "trace", names, number, (value) => set({trace: value})),
    sublayer,
    h("label", {class: "control"}, h("span", null, "Token"), h("span", null, token, piece)),
    shown,
    sliders.map((one) => one.element),
  );
  return {
    element,
    update({sublayer: row, token: position, shown: {name}, thresholds}) {
      sublayer.querySelector("select").value = row;
      token.value = position;
      piece.textContent = visible(trace.tokens[position]);
      shown.querySelector("select").value = name;
      sliders.forEach((one, i) => one.show([thresholds.identity, thresholds.reflection][i]));
    },
  };
}
