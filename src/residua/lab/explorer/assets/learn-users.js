// The schemes of released models, family by family, from public sources, which are linked.

import {h, svg} from "./dom.js";
import {set} from "./store.js";

const transformers = (name) => [`transformers, models/${name}`, `https://github.com/huggingface/transformers/tree/main/src/transformers/models/${name}`];
const github = (path, text = path) => [text, `https://github.com/${path}`];

/** Facts as in docs/scheme_pages.py; state: numbers per token before and after 24 sublayers, in widths d. */
const FAMILIES = [
  {
    name: "one", title: "One stream", see: "write",
    what: "x + F(x), or the same with scales: the least that a scheme must beat.",
    rows: [
      {who: "nearly every Transformer", preset: "residual", state: "d", does: "adds the output of each sublayer"},
      {who: "nanochat", preset: "lambdas", state: "3d", does: "scales the state, adds the embedding again, takes the middle back out", source: github("karpathy/nanochat")},
      {who: "modded-nanogpt", preset: "lambdas", state: "3d", does: "the same idea, with gates for each token in addition to the scalars", source: github("KellerJordan/modded-nanogpt")},
    ],
  },
  {
    name: "mixed", title: "Streams that are mixed", see: "sinkhorn",
    what: "Several streams, and in every sublayer a matrix whose rows and columns sum to 1 mixes them: mHC.",
    rows: [
      {who: "DeepSeek-V4", preset: "mhc-deepseek", state: "4d", does: "reads the streams out with weights of its own", source: transformers("deepseek_v4")},
      {who: "GLM-5.3-Flash", preset: "mhc-glm", state: "4d", does: "reads out their mean", source: transformers("glm5_next")},
    ],
  },
  {
    name: "apart", title: "Streams that are not mixed", see: "streams",
    what: "Several streams with weights that read and write them, and no matrix between them.",
    rows: [
      {who: "Hy4", preset: "ihc", state: "4d", does: "a gate for each stream, by token", source: transformers("hy_v4")},
      {who: "Qwen3.8-Flash-Next", preset: "gated-residual", state: "4d", does: "a gate for each feature of each stream", source: transformers("qwen4_exp")},
    ],
  },
  {
    name: "predicted", title: "Streams that are predicted", see: "streams",
    what: "Attention and MLP update one stream; the others are predicted, and corrected by how far the prediction was off.",
    rows: [{who: "Gemma 3n", preset: "altup", state: "4d", does: "AltUp, with a low-rank map in parallel to the attention (LAuReL)", source: transformers("gemma3n")}],
  },
  {
    name: "depth", title: "Reads over depth", see: "reads",
    what: "A sublayer reads a weighted mean of what stood before it, in place of a sum.",
    rows: [
      {who: "Kimi K3", preset: "attnres-block", state: "d to 3d", does: "attends over sums of whole blocks of layers", source: github("pytorch/torchtitan/issues/4312", "torchtitan #4312")},
      {who: "Inkling-2", preset: "attnres-inkling", state: "d to 3d", does: "over normalised sources; some layers read separately for queries, keys and values", source: transformers("inkling2")},
      {who: "MUDDFormer-2.8B, MUDDPythia", preset: "mudd", state: "d to 13d", does: "averages by token, one each for queries, keys, values and the residual", source: github("Caiyun-AI/MUDDFormer")},
    ],
  },
];

/** A sketch of a family: lines are streams, a box is a sublayer, arcs are reads. */
function glyph(name) {
  const line = (y, more = {}) => svg("path", {d: `M2 ${y}H94`, ...more});
  const box = svg("rect", {x: 40, y: 16, width: 16, height: 16, rx: 3});
  const four = [6, 18, 30, 42].map((y) => line(y));
  const drawn = {
    one: [line(38), svg("path", {d: "M24 38V24H40M56 24H72V38"})],
    mixed: [...four, svg("path", {d: "M62 6C78 6 74 30 90 30M62 30C78 30 74 6 90 6M62 18C78 18 74 42 90 42M62 42C78 42 74 18 90 18"})],
    apart: four,
    predicted: [line(6), ...[18, 30, 42].map((y) => line(y, {"stroke-dasharray": "4 4"}))],
    depth: [svg("path", {d: "M10 40C10 4 84 4 84 40M34 40C34 16 84 16 84 40M60 40C60 26 84 26 84 40"}), ...[10, 34, 60, 84].map((x) => svg("circle", {cx: x, cy: 40, r: 4}))],
  }[name];
  return svg("svg", {class: "glyph", viewBox: "0 0 96 48", "aria-hidden": "true"}, drawn, ["depth"].includes(name) ? null : box);
}

function row({who, preset, state, does, source}) {
  return h("li", {"data-runs": preset, "data-state": state},
    h("span", {class: "who"}, who), h("span", {class: "does"}, does),
    h("span", {class: "preset"}, h("code", null, preset), h("small", null, ` ${state}`)),
    source ? h("a", {class: "source", href: source[1], rel: "noreferrer", target: "_blank"}, source[0]) : h("span"));
}

/** @param {HTMLElement} root @param {HTMLElement} head */
function page(root, head) {
  root.append(
    head,
    h("div", {class: "groups"}, FAMILIES.map(({name, title, what, see, rows}) =>
      h("section", {class: "group family", "data-family": name, "aria-label": title},
        h("div", {class: "about"}, glyph(name), h("div", null, h("h2", null, title), h("p", null, what),
          h("button", {type: "button", class: "source", "data-see": see, onclick: () => { set({topic: see}); scrollTo({top: 0}); }}, "Try it →"))),
        h("ul", {class: "runs"}, rows.map(row))))),
    h("div", {class: "notes"},
      h("section", {class: "notice"}, h("h2", null, "What to notice"), h("p", null,
        "Three families are in production at once: streams with and without mixing, and attention over depth. Of the four models that run " +
        "hyper-connections, two leave the matrix out. Of Deep Delta Learning, KromHC, JPmHC, EDelta, DenseFormer and Delta AttnRes no model released by another group is known.")),
      h("section", {class: "code"}, h("h2", null, "The same with residua"), h("pre", {tabindex: 0}, h("code", null,
        "residua schemes\nresidua train --run runs/mine --config tiny --model.connection ihc")))),
  );
}

export const users = {
  name: "users",
  title: "Which scheme runs where",
  lead: "The residual streams of released models and public training code, by November 2026. Each has the preset that computes it here, with its state per token in widths d, from the first to the last of 24 sublayers if it grows.",
  page,
};
