// Pictures over the depth of a model: values of most tokens and of the selected token, and the selected sublayer.

import {h} from "./dom.js";
import {brief, quantiles} from "./inspect-trace.js";
import {canvas, chart, faded, mark, panel, vertical} from "./panels.js";
import {color} from "./theme.js";

const PARTS = [0.05, 0.25, 0.5, 0.75, 0.95];

/** The numbers of the rows of a field. */
export const rowsOf = (field) => Array.from({length: field.rows}, (_, i) => i);

/** The axis of the sublayers, with as many names as fit. */
export function depthAxis(trace, last = trace.depth - 1) {
  const every = Math.ceil((last + 1) / 12);
  const tickvals = Array.from({length: last + 1}, (_, i) => i).filter((i) => i % every === 0);
  return {
    tickvals,
    ticktext: tickvals.map((i) => brief(trace.facts.sublayers[i] ?? "end")),
    range: [-0.5, last + 0.5],
    tickangle: -45,
    showgrid: false,
    zeroline: false,
  };
}

const hover = (text) => `${text}: %{y:.4g}<extra></extra>`;

/** Values by depth: a band for most tokens, their median, and a line for the selected token. */
export function spread(field, token, {name, shade, of = (value) => value, legend = true}) {
  const x = rowsOf(field);
  const at = rowsOf(field).map((row) => quantiles(Float64Array.from(field.row(row), of), PARTS));
  const line = (part, more) => ({
    x,
    y: at.map((q) => q[part]),
    mode: "lines",
    type: "scatter",
    line: {width: 0},
    hoverinfo: "skip",
    showlegend: false,
    ...more,
  });
  return [
    line(0, {}),
    line(4, {fill: "tonexty", fillcolor: faded(shade, 0.13)}),
    line(1, {}),
    line(3, {fill: "tonexty", fillcolor: faded(shade, 0.25)}),
    {
      ...line(2, {}),
      line: {color: shade, width: 2},
      name: `${name}, median`,
      showlegend: true,
      hoverinfo: "all",
      hovertemplate: hover("median"),
      ...dots(x),
    },
    {
      x,
      y: rowsOf(field).map((row) => of(field.at(row, token))),
      type: "scatter",
      mode: "lines+markers",
      marker: {size: 5, color: color("--ink")},
      line: {color: color("--ink"), width: 1, dash: "dot"},
      showlegend: legend,
      name: `token ${field.position(field.column(token))}`,
      hovertemplate: hover("this token"),
    },
  ];
}

/** Markers for a single point, because it draws no line. */
const dots = (x) => (x.length === 1 ? {mode: "markers"} : {});

/** A panel of charts over depth that follow the selection; plots: [name, traces(selected), layout()]. */
export function overDepth(trace, name, title, note, plots, select, wide = false) {
  const places = plots.map(([key]) => canvas(key));
  const element = panel(
    name,
    title,
    note,
    plots.length > 1 ? h("div", {class: plots.length === 4 ? "plots pairs" : "plots"}, places) : places,
  );
  if (wide) element.classList.add("wide");
  let selected = null;
  let token = -1;
  return {
    element,
    async update(now, all) {
      selected = now;
      const again = token !== now.token;
      token = now.token;
      await Promise.all(
        places.map(async (place, i) => {
          const [, traces, layout] = plots[i];
          const depth = !layout().shapes; // pictures with their own shapes have another axis
          if (!all && !again) return depth && mark(place, [vertical(selected.sublayer)]);
          await chart(
            place,
            () => traces(selected),
            () => ({
              xaxis: depthAxis(trace),
              shapes: [vertical(selected.sublayer)],
              ...layout(),
            }),
            depth ? ({x}) => select(x, null) : null,
          );
        }),
      );
    },
  };
}
