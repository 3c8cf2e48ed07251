// The simulations, one at a time: formula, picture, parameters, results, and the library call that computes the same.

import {h} from "./dom.js";
import {dashboard} from "./learn-results.js";
import {blending} from "./learn-blending.js";
import {depth} from "./learn-depth.js";
import {reads} from "./learn-reads.js";
import {streamsTopic} from "./learn-streams.js";
import {users} from "./learn-users.js";
import {drift} from "./learn-drift.js";
import {regularisation} from "./learn-regularisation.js";
import {rotation} from "./learn-rotation.js";
import {sinkhornTopic} from "./learn-sinkhorn.js";
import {skewTopic} from "./learn-skew.js";
import {spectrum} from "./learn-spectrum.js";
import {write} from "./learn-write.js";
import {control} from "./controls.js";
import {markup} from "./formula.js";
import {get, set, subscribe} from "./store.js";

/**
 * A simulation.
 * @typedef {object} Topic
 * @property {string} name in the address
 * @property {string} title
 * @property {string} lead one sentence
 * @property {string[]} formula lines in the notation of formula.js; two spaces mark the preferred line breaks
 * @property {string} notice a hint on what to observe
 * @property {Object<string, object>} parameters by name, with the initial `value`; those with a `label` get a control
 * @property {Object<string, object>} presets values by the button's text
 * @property {Object<string, (values: object) => object>} [actions] the values after a click on a button
 * @property {Object<string, string>} readouts the meaning of each read-out by name
 * @property {(values: object) => string} code Python whose last line computes the picture's numbers
 * @property {(stage: HTMLElement, values: () => object, change: (values: object) => void, more: HTMLElement) =>
 *   (values: object) => object} draw makes the picture, and may add another; it returns a function that moves the marks
 *   and returns the read-outs
 * @property {boolean} [wide] put the other picture under the read-outs if there is room, not under the picture
 * @property {(root: HTMLElement) => void} [page] replaces all of the above, for pages without a simulation
 */

/** @type {Topic[]} */
const topics = [
  write, depth, reads, sinkhornTopic, streamsTopic, drift, skewTopic, rotation, spectrum, blending, regularisation, users, dashboard,
];

/** @param {HTMLElement} root */
export async function learn(root) {
  const links = topics.map((topic, i) =>
    h("button", {type: "button", "data-topic": topic.name, onclick: () => choose(topic)}, h("span", null, i + 1), topic.title));
  const list = h("select", {"aria-label": "Topic", onchange: () => choose(topics[list.selectedIndex])},
    topics.map((topic, i) => h("option", {value: topic.name}, `${i + 1}  ${topic.title}`)));
  const article = h("article", {class: "topic"});
  root.append(h("nav", {class: "topics", "aria-label": "Topics"}, list, links), article);

  let shown = null;
  const open = () => {
    const topic = current();
    if (topic === shown) return;
    shown = topic;
    for (const link of links) link.setAttribute("aria-current", link.dataset.topic === topic.name ? "page" : "false");
    list.value = topic.name;
    const content = h("div", {class: "content"});
    article.replaceChildren(content);
    if (topic.page) topic.page(content, heading(topic));
    else simulation(topic, content);
    content.append(following(topic));
  };
  subscribe(["topic"], open);
  open();
}

const current = () => topics.find(({name}) => name === get("topic", topics[0].name)) ?? topics[0];

/** Opens a topic in its initial state, and removes the values of other topics from the URL. */
function choose(topic) {
  const old = Object.keys(current().parameters ?? {}).map((name) => [name, null]);
  set({...Object.fromEntries(old), topic: topic.name});
  scrollTo({top: 0});
}

function heading({title, lead}) {
  return h("header", null, h("h1", null, title), h("p", {class: "lead"}, lead));
}

function following(topic) {
  const next = topics[topics.indexOf(topic) + 1];
  return h("footer", null, next && h("button", {type: "button", class: "next", onclick: () => choose(next)},
    h("span", null, "Next"), next.title, " →"));
}

/** @param {Topic} topic @param {HTMLElement} root */
function simulation(topic, root) {
  const {parameters, presets, readouts, actions = {}} = topic;
  const names = Object.keys(parameters);
  const values = () => Object.fromEntries(names.map((name) => [name, limited(parameters[name], get(name, parameters[name].value))]));
  const change = (given) => set(Object.fromEntries(Object.entries(given).map(([name, value]) => [name, rounded(value)])));

  const stage = h("div", {class: "stage"});
  const controls = names.filter((name) => parameters[name].label).map((name) => control(name, parameters[name], change));
  const buttons = Object.entries(presets).map(([name, chosen]) =>
    h("button", {type: "button", "data-preset": name, onclick: () => change({...starts(parameters), ...chosen})}, name));
  const doers = Object.entries(actions).map(([name, act]) =>
    h("button", {type: "button", class: "action", "data-action": name, onclick: () => change(act(values()))}, name));
  const outputs = Object.keys(readouts).map((name) => h("output", {"data-readout": name}));
  const code = h("code");
  const more = h("div", {class: "stage more"});
  const panel = h("div", {class: "side"},
    h("div", {class: "sliders"}, controls.map(({element}) => element)),
    h("div", {class: "presets", role: "group", "aria-label": "Presets"}, doers, buttons),
    h("dl", {class: "readouts"}, Object.values(readouts).map((text, i) =>
      h("div", null, h("dt", null, markup(text)), h("dd", null, outputs[i])))),
  );
  root.append(
    heading(topic),
    h("div", {class: "formula"}, topic.formula.map((text) => h("p", null, text.split("  ").map((piece) => h("span", null, markup(piece), " "))))),
    h("div", {class: topic.wide ? "bench right" : "bench"}, stage, panel, more),
    h("div", {class: "notes"},
      h("section", {class: "notice"}, h("h2", null, "What to notice"), h("p", null, markup(topic.notice))),
      h("section", {class: "code"}, h("h2", null, "The same with residua"), h("pre", {tabindex: 0}, code))),
  );

  const move = topic.draw(stage, values, change, more);
  const update = () => {
    if (!root.isConnected) return;
    const now = values();
    for (const {show} of controls) show(now);
    const found = move(now);
    for (const output of outputs) readOut(output, found[output.dataset.readout]);
    code.textContent = topic.code(now);
  };
  subscribe(names, update);
  update();
}

const starts = (parameters) => Object.fromEntries(Object.keys(parameters).map((name) => [name, null]));

function limited({min = -Infinity, max = Infinity, options}, value) {
  if (options) return options.includes(value) ? value : options[0];
  return typeof value === "number" ? Math.min(max, Math.max(min, value)) : value;
}

/** Rounds to three decimals, the precision of a mouse, which keeps the URL short. */
function rounded(value) {
  if (typeof value === "number") return Number(value.toFixed(3));
  return Array.isArray(value) ? value.map(rounded) : value;
}

/** Shows a number with few digits, and keeps all digits in an attribute for programs. */
function readOut(output, value) {
  const text = typeof value === "number" ? shortened(value) : value;
  if (output.textContent !== text) output.textContent = text;
  output.dataset.value = value;
}

function shortened(value) {
  const size = Math.abs(value);
  if (size < 5e-16) return "0";
  if (size < 1e-3 || size >= 1e5) {
    const [digits, exponent] = value.toExponential(1).split("e");
    return `${digits.replace("-", "−")} × 10^${Number(exponent)}`.replace(/\^(-?)(\d+)/, (_, sign, number) =>
      (sign ? "⁻" : "") + [...number].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join(""));
  }
  return value.toFixed(size < 100 ? 4 : 1).replace("-", "−");
}
