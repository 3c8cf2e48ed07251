// The sources that every sublayer read over depth: the embedding, outputs of earlier sublayers, or sums of outputs.

import {h} from "./dom.js";
import {brief, number, quantiles, visible} from "./inspect-trace.js";
import {canvas, chart, choice, mark, panel} from "./panels.js";
import {set} from "./store.js";
import {betaScale, color, onTheme, sizeScale} from "./theme.js";

const SAID = 4; // the number of sources in the line below the pictures
const MOST = 0.98; // the fraction of the weights below the end of the scale
const FAR = 1.25; // if the largest weight is at most this multiple of the end, the scale includes it

/** The weights of one read, or their mean over all reads, from `reads` times `sources` numbers. */
function ofRead(values, sources, read) {
  const reads = values.length / sources;
  const chosen = read < 0 ? Array.from({length: reads}, (_, i) => i) : [read];
  return Array.from({length: sources}, (_, j) => chosen.reduce((sum, i) => sum + values[i * sources + j], 0) / chosen.length);
}

/** The panel, or null for a trace whose sublayers read only the last state. */
export function depthReads(trace, tip, select) {
  const {depth_mean: mean, depth_weights: weights} = trace.fields;
  if (!mean) return null;
  const {sources, reads, sublayers} = trace.facts;
  const without = new Set(trace.facts.left_out.depth_weights ?? []);
  const all = (row) => Float64Array.from(mean.row(row));
  const at = (row, token) => weights.at(row, token);
  const near = (token) => weights.position(weights.column(token));
  const which = reads.length > 1 && choice("Read", "read", [["-1", "mean of all"], ...reads.map((name, i) => [i, name])], "-1", (value) => set({read: Number(value)}));

  const signed = (weights ?? mean).data.some((x) => x < 0);
  // A sublayer with a single source has the weight 1, which must not set the scale for all others.
  const sizes = (weights ?? mean).data.map(Math.abs).filter((x) => x && (signed || x < 1 - 1e-6));
  const [end, largest] = quantiles(sizes.length ? sizes : [1], [MOST, 1]);
  const top = largest > FAR * end ? end : largest;
  const [low, high, bar] = [signed ? -top : 0, top, h("span", {class: "bar"})];
  const scale = () => ({zmin: low, zmax: high, colorscale: signed ? betaScale() : sizeScale()});
  const legend = h("div", {class: "legend"}, h("span", {class: "scale"}, "weight ", h("span", null, number(low)), bar, h("span", null, number(high)), largest > top && `(a few are larger, up to ${number(largest)})`));
  const paint = () => {
    const stops = scale().colorscale.map(([place, shade]) => `${shade} ${100 * place}%`).join(", ");
    bar.style.background = `linear-gradient(90deg, ${stops})`;
  };
  onTheme(paint);

  const height = trace.depth > 24 ? "tall" : "";
  const pictures = [
    {place: canvas("depth-mean", height), of: all, title: () => "mean over all tokens"},
    weights && {
      place: canvas("depth-token", height), of: at,
      title: (token) => `token ${near(token)}, “${visible(trace.tokens[near(token)])}”`,
    },
  ].filter(Boolean);
  const titles = pictures.map(() => h("figcaption"));
  const readout = h("p", {class: "readout", "aria-live": "polite"});
  const element = panel(
    "depth-reads", "What is read over depth",
    "A row is a sublayer that reads, a column a source: the embedding, or outputs of earlier sublayers. Click a row to select its sublayer.",
    which,
    legend,
    h("div", {class: "plots"}, pictures.map(({place}, i) => h("figure", {class: "read"}, titles[i], place))),
    readout,
  );
  element.classList.add("wide");

  const every = Math.ceil(sources.length / 13);
  const names = Math.ceil(trace.depth / 24);
  const ticks = (texts, step) => {
    const tickvals = texts.map((_, i) => i).filter((i) => i % step === 0);
    return {tickvals, ticktext: tickvals.map((i) => texts[i]), range: [-0.5, texts.length - 0.5], showgrid: false, zeroline: false};
  };
  const outline = (sublayer) => [
    {type: "rect", x0: -0.5, x1: sources.length - 0.5, y0: sublayer - 0.5, y1: sublayer + 0.5, line: {color: color("--ink"), width: 1}},
  ];
  let drawn = "";
  let now = null;
  return {
    element,
    async update(selected, everything) {
      now = selected;
      const {sublayer, token, read} = selected;
      if (which) which.querySelector("select").value = read;
      readout.textContent = said(sublayer, token, read);
      paint();
      pictures.forEach(({title}, i) => { titles[i].textContent = title(token); });
      const state = `${token} ${read}`;
      if (!everything && drawn === state) return void (await Promise.all(pictures.map(({place}) => mark(place, outline(sublayer)))));
      drawn = state;
      await Promise.all(pictures.map(async ({place, of}) => {
        await chart(
          place,
          () => [{
            type: "heatmap", hoverinfo: "none", showscale: false, xgap: 1, ygap: 1, ...scale(),
            z: sublayers.map((_, row) => ofRead(of(row, now.token), sources.length, now.read).map((x) => x || null)),
          }],
          () => ({
            hovermode: "closest", margin: {l: 96, r: 8, t: 8, b: 104}, shapes: outline(now.sublayer),
            xaxis: {...ticks(sources.map((name) => name.split(" to ").map(brief).join("<br>to ")), every), tickangle: -45}, yaxis: ticks(sublayers.map(brief), names),
          }),
          ({y}) => select(y, null),
        );
        if (place.dataset.hovers) return;
        place.dataset.hovers = "1";
        place.on("plotly_hover", ({points: [{x, y}], event}) => {
          const weight = ofRead(of(y, now.token), sources.length, now.read)[x];
          tip.show(event, [sublayers[y], weight ? `reads ${sources[x]}` : `does not read ${sources[x]}`, weight ? `weight ${number(weight)}` : ""]);
        });
        place.on("plotly_unhover", () => tip.hide());
      }));
    },
  };

  function said(sublayer, token, read) {
    if (without.has(sublayer)) return `${sublayers[sublayer]} reads only the last state.`;
    const found = ofRead(weights ? at(sublayer, token) : all(sublayer), sources.length, read);
    const order = found.map((_, i) => i).filter((i) => found[i]).sort((a, b) => Math.abs(found[b]) - Math.abs(found[a]));
    const listed = order.slice(0, SAID).map((i) => `${sources[i]} ${number(found[i])}`).join(", ");
    const others = order.length > SAID ? ` and ${order.length - SAID} more` : "";
    return `${sublayers[sublayer]}${weights ? ` at token ${near(token)}` : ""}: ${listed}${others}.`;
  }
}
