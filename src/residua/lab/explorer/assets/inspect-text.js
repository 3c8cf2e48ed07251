// The text, with tokens coloured by a value at the selected sublayer, and the map of all sublayers and tokens.

import {h} from "./dom.js";
import {scale} from "./inspect-scale.js";
import {brief, number, regime, visible} from "./inspect-trace.js";
import {canvas, chart, mark, panel, shades} from "./panels.js";
import {betaScale, color, onTheme, sizeScale} from "./theme.js";

const coloursOf = ({name, limits}) => (name === "beta" || limits?.[0] < 0 ? betaScale() : sizeScale());

/** The tooltip for one sublayer at one token. */
function said(trace, sublayer, token, {shown, thresholds}) {
  const value = trace.fields[shown.name].at(sublayer, token);
  const predicted = shown.name === "lens_loss" ? trace.facts.lens?.[sublayer]?.[token] : undefined;
  const near = trace.fields[shown.name].position(trace.fields[shown.name].column(token));
  return [
    `“${visible(trace.tokens[token])}”, token ${token}`,
    trace.facts.sublayers[sublayer],
    `${shown.label} = ${number(value)}${near === token ? "" : ` (of token ${near})`}`,
    ...(predicted === undefined ? [] : [`predicts “${visible(predicted)}”`]),
    ...(shown.name === "beta" && !Number.isNaN(value) ? [regime(value, thresholds)] : []),
  ];
}

/** @param {object} trace @param {Tip} tip @param {(sublayer: number|null, token: number|null) => void} select */
export function tokensAndMap(trace, tip, select) {
  const words = trace.tokens.map((token, i) => h("span", {"data-token": i}, visible(token)));
  // Break the line after a token that ends with a newline.
  const text = h(
    "div",
    {
      class: "text",
      tabindex: 0,
      "data-moves": true,
      role: "group",
      "aria-label": "The tokens of the text; arrow keys move the selection",
    },
    words.map((word, i) => (trace.tokens[i].includes("\n") ? [word, h("br")] : word)),
  );
  const map = canvas("map", trace.depth > 24 ? "tall" : "");
  const field = h(
    "div",
    {
      tabindex: 0,
      "data-moves": true,
      role: "group",
      "aria-label": "Map of sublayers and tokens; arrow keys move the selection",
    },
    map,
  );
  const readout = h("p", {class: "readout", "aria-live": "polite"});
  const legend = h("div", {class: "legend"});
  const element = panel("map", "Text and map", null, readout, legend, text, field);
  element.classList.add("wide");

  const scales = new Map();
  const scaleOf = (shown) => {
    if (!scales.has(shown.name)) scales.set(shown.name, scale(trace.fields[shown.name], shown));
    return scales.get(shown.name);
  };

  let selected = null;
  const tokenOf = (event) => event.target.closest?.("[data-token]")?.dataset.token;
  text.addEventListener("click", (event) => {
    const token = tokenOf(event);
    if (token !== undefined) select(null, Number(token));
  });
  text.addEventListener("mousemove", (event) => {
    const token = tokenOf(event);
    if (token === undefined || !selected) tip.hide();
    else tip.show(event, said(trace, selected.sublayer, Number(token), selected));
  });
  text.addEventListener("mouseleave", () => tip.hide());
  map.addEventListener("mouseleave", () => tip.hide());

  function paint() {
    const {sublayer, shown} = selected;
    const values = trace.fields[shown.name];
    const {low, high, part, notes} = scaleOf(shown);
    const shade = shades(coloursOf(shown));
    words.forEach((word, i) => {
      const value = values.at(sublayer, i);
      const {background, ink} = Number.isFinite(value)
        ? shade(part(value))
        : {background: "none", ink: "inherit"};
      word.style.background = background;
      word.style.color = ink;
      word.classList.toggle("missing", !Number.isFinite(value));
    });
    const stops = coloursOf(shown)
      .map(([place, c]) => `${c} ${place * 100}%`)
      .join(", ");
    legend.replaceChildren(
      h("span", null, `${shown.label}: ${shown.note}`),
      h(
        "span",
        {class: "scale"},
        h("span", null, number(low)),
        h("span", {class: "bar", style: `background: linear-gradient(90deg, ${stops})`}),
        h("span", null, number(high)),
        notes.length > 0 && h("span", {"data-note": "scale"}, `(${notes.join("; ")})`),
      ),
    );
  }
  onTheme(() => {
    if (selected && element.isConnected) paint();
  });

  const outline = () => {
    const {sublayer, token, shown} = selected;
    const values = trace.fields[shown.name];
    const column = values.position(values.column(token));
    const half = values.tokens ? Math.max(0.5, trace.length / values.columns / 2) : 0.5;
    const box = (x0, x1, y0, y1, width) => ({type: "rect", x0, x1, y0, y1, line: {color: color("--ink"), width}});
    return [
      box(-0.5, trace.length - 0.5, sublayer - 0.5, sublayer + 0.5, 1),
      box(column - half, column + half, -0.5, trace.depth - 0.5, 1),
    ];
  };

  let drawn = null;
  async function draw() {
    const {shown} = selected;
    const values = trace.fields[shown.name];
    const {low, high, on} = scaleOf(shown);
    const names = trace.facts.sublayers;
    const every = Math.ceil(trace.depth / 24);
    const ticks = names.map((_, i) => i).filter((i) => i % every === 0);
    const rows = names.map((_, i) => values.row(i).map(on));
    await chart(
      map,
      () => [
        {
          type: "heatmap",
          z: rows,
          x: values.positions(),
          y: names.map((_, i) => i),
          zmin: on(low),
          zmax: on(high),
          colorscale: coloursOf(shown),
          showscale: false,
          hoverinfo: "none",
          hoverongaps: true,
        },
      ],
      () => ({
        hovermode: "closest",
        shapes: outline(),
        showlegend: false,
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
        margin: {l: 96, r: 8, t: 8, b: 40},
        xaxis: {
          title: {text: "token"},
          range: [-0.5, trace.length - 0.5],
          showgrid: false,
          zeroline: false,
          fixedrange: false,
        },
        yaxis: {
          tickvals: ticks,
          ticktext: ticks.map((i) => brief(names[i])),
          range: [-0.5, trace.depth - 0.5],
          showgrid: false,
          zeroline: false,
        },
      }),
      ({x, y}) => {
        field.focus({preventScroll: true});
        const values = trace.fields[selected.shown.name];
        select(y, values.position(values.column(Math.max(0, Math.round(x)))));
      },
    );
    if (!map.dataset.hovers) {
      map.dataset.hovers = "1";
      map.on("plotly_hover", ({points: [{x, y}], event}) => tip.show(event, said(trace, y, x, selected)));
      map.on("plotly_unhover", () => tip.hide());
    }
  }

  return {
    element,
    async update(now, all) {
      const other = !selected || selected.sublayer !== now.sublayer;
      selected = now;
      if (all || other) paint();
      text.querySelector("[aria-current]")?.removeAttribute("aria-current");
      const word = words[now.token];
      word.setAttribute("aria-current", "true");
      const [top, height] = [word.offsetTop - text.offsetTop, text.clientHeight];
      if (top < text.scrollTop || top > text.scrollTop + height - 24) text.scrollTop = top - height / 2;
      const loss = trace.lists.token_loss?.[now.token];
      readout.replaceChildren(
        said(trace, now.sublayer, now.token, now).join(" · "),
        loss === undefined || Number.isNaN(loss) ? "" : ` · loss of the next token ${number(loss)} nats`,
      );
      if (drawn === now.shown.name) await mark(map, outline());
      else {
        drawn = now.shown.name;
        await draw();
      }
    },
  };
}
