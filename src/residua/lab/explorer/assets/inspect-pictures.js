// The pictures of a trace: gates, norms, directions and mixing matrices.

import {h} from "./dom.js";
import {depthAxis, overDepth, rowsOf, spread} from "./inspect-depth.js";
import {composite, gates, regimes, spectrum, training} from "./inspect-gates.js";
import {number, quantiles} from "./inspect-trace.js";
import {canvas, chart, mark, panel} from "./panels.js";
import {color, sizeScale} from "./theme.js";

/** All pictures for which this trace has data. */
export function pictures(trace, tip, select) {
  const makers = [regimes, spectrum, gates, similarity, constraints, alignment, training, composite, norms];
  return makers.map((make) => make(trace, tip, select)).filter(Boolean);
}

function norms(trace, tip, select) {
  const {
    state_norm: state,
    output_norm: output,
    change_norm: change,
    erase_norm: erase,
    write_norm: write,
  } = trace.fields;
  const plots = [];
  if (state)
    plots.push([
      "state-norm",
      ({token}) => spread(state, token, {name: "‖X‖", shade: color("--line-1")}),
      () => ({xaxis: depthAxis(trace, state.rows - 1), yaxis: {title: {text: "state ‖X‖"}, rangemode: "tozero"}}),
    ]);
  const lines =
    (parts) =>
    ({token}) =>
      parts.flatMap(([field, name, variable]) => {
        const line = {x: rowsOf(field), type: "scatter", line: {color: color(variable), width: 2}};
        return [
          {
            ...line,
            y: rowsOf(field).map((row) => quantiles(field.row(row), [0.5])[0]),
            mode: "lines+markers",
            marker: {size: 5},
            name,
            hovertemplate: `${name}: %{y:.4g}<extra></extra>`,
          },
          {
            ...line,
            y: rowsOf(field).map((row) => field.at(row, token)),
            mode: "markers",
            marker: {symbol: "circle-open", size: 8, color: color(variable)},
            showlegend: false,
            hovertemplate: `${name}, this token: %{y:.4g}<extra></extra>`,
          },
        ];
      });
  const parts = [
    [erase, "erase β‖kᵀX‖", "--erase"],
    [write, "write β‖v‖", "--write"],
    [change, "change ‖ΔX‖", "--line-1"],
  ].filter(([field]) => field);
  if (parts.length)
    plots.push(["parts", lines(parts), () => ({yaxis: {title: {text: "norm"}, rangemode: "tozero"}})]);
  if (output)
    plots.push([
      "output-norm",
      lines([[output, "output ‖y‖", "--line-6"]]),
      () => ({showlegend: true, yaxis: {title: {text: "output ‖y‖"}, rangemode: "tozero"}}),
    ]);
  return overDepth(
    trace,
    "norms",
    "Norms",
    "The state before each sublayer and at the end; its change in each sublayer; the output of attention or the MLP. Lines: median over the tokens, rings: the selected token.",
    plots,
    select,
    true,
  );
}

function similarity(trace, tip, select) {
  const {stream_similarity: cosine} = trace.fields;
  if (!cosine) return null;
  const least = quantiles(cosine.data, [0])[0] || 0;
  const room = 0.1 * Math.max(1 - least, 0.01);
  return overDepth(
    trace,
    "similarity",
    "How alike the streams are",
    "The mean cosine between two streams, before each sublayer and at the end. At 1 they are copies, and together hold no more than one.",
    [
      [
        "similarity",
        ({token}) => spread(cosine, token, {name: "cosine", shade: color("--line-1")}),
        () => ({
          xaxis: depthAxis(trace, cosine.rows - 1),
          yaxis: {title: {text: "mean cosine"}, range: [least - room, 1 + room]},
        }),
      ],
    ],
    select,
  );
}

function alignment(trace, tip, select) {
  const {alignment: cosines} = trace.fields;
  if (!cosines) return null;
  const rank = trace.lists.effective_rank;
  const place = canvas("alignment", "square");
  const readout = h("p", {class: "readout"});
  const element = panel(
    "alignment",
    "Alignment of the directions",
    "|cos(kᵢ, kⱼ)| between sublayers, mean over the sampled tokens. Where it is high, one sublayer overwrites what another wrote.",
    place,
    readout,
  );
  const names = trace.facts.sublayers;
  const outline = (sublayer) => [
    {
      type: "rect",
      x0: -0.5,
      x1: cosines.columns - 0.5,
      y0: sublayer - 0.5,
      y1: sublayer + 0.5,
      line: {color: color("--ink"), width: 1},
    },
  ];
  return {
    element,
    async update({sublayer, token}, all) {
      const others = names.map((_, i) => i).filter((i) => i !== sublayer);
      const nearest = others.reduce(
        (best, i) => (best === null || cosines.at(sublayer, i) > cosines.at(sublayer, best) ? i : best),
        null,
      );
      const [low, middle, high] = rank ? quantiles(rank, [0, 0.5, 1]) : [];
      readout.textContent = [
        nearest === null
          ? ""
          : `Nearest to ${names[sublayer]}: ${names[nearest]}, ${number(cosines.at(sublayer, nearest))}.`,
        rank
          ? `Effective rank of the directions, ${Math.min(trace.depth, trace.facts.dim)} at most: ${number(middle)} (from ${number(low)} to ${number(high)}); at this token ${number(rank[trace.fields.determinant ? trace.fields.determinant.column(token) : 0])}.`
          : "",
      ].join(" ");
      if (!all && element.dataset.drawn) return mark(place, outline(sublayer));
      element.dataset.drawn = "1";
      await chart(
        place,
        () => [
          {
            type: "heatmap",
            z: rowsOf(cosines).map((row) => cosines.row(row)),
            zmin: 0,
            zmax: 1,
            colorscale: sizeScale(),
            hoverinfo: "none",
            showscale: true,
            colorbar: {thickness: 10, outlinewidth: 0, tickvals: [0, 0.5, 1]},
          },
        ],
        () => {
          const axis = {...depthAxis(trace), constrain: "domain"};
          return {
            hovermode: "closest",
            margin: {l: 96, r: 8, t: 8, b: 72},
            xaxis: axis,
            yaxis: {...axis, tickangle: 0, scaleanchor: "x"},
            shapes: outline(sublayer),
          };
        },
        ({y}) => select(y, null),
      );
      if (place.dataset.hovers) return;
      place.dataset.hovers = "1";
      place.on("plotly_hover", ({points: [{x, y}], event}) =>
        tip.show(event, [`${names[y]} and ${names[x]}`, `|cos| = ${number(cosines.at(y, x))}`]),
      );
      place.on("plotly_unhover", () => tip.hide());
    },
  };
}

function constraints(trace, tip, select) {
  const parts = [
    ["row_error", "rows", "--line-1"],
    ["column_error", "columns", "--line-2"],
    ["orthogonality_error", "‖HᵀH − I‖", "--line-3"],
  ].filter(([name]) => trace.fields[name]);
  if (!parts.length) return null;
  const positive = (value) => (value > 0 ? value : null);
  return overDepth(
    trace,
    "constraints",
    "Constraints of H_res",
    "How far rows and columns are from summing to 1, and H_res from a rotation. Lines: the largest over the tokens, rings: the selected token; exact zeros are not drawn.",
    [
      [
        "constraints",
        ({token}) =>
          parts.flatMap(([name, title, variable]) => {
            const field = trace.fields[name];
            const line = {x: rowsOf(field), type: "scatter", line: {color: color(variable), width: 2}};
            return [
              {
                ...line,
                mode: "lines+markers",
                marker: {size: 5},
                y: rowsOf(field).map((row) => positive(quantiles(field.row(row), [1])[0])),
                name: title,
                hovertemplate: `${title}, largest: %{y:.2e}<extra></extra>`,
              },
              {
                ...line,
                mode: "markers",
                marker: {symbol: "circle-open", size: 8, color: color(variable)},
                y: rowsOf(field).map((row) => positive(field.at(row, token))),
                showlegend: false,
                hovertemplate: `${title}, this token: %{y:.2e}<extra></extra>`,
              },
            ];
          }),
        () => ({yaxis: {type: "log", title: {text: "error"}, exponentformat: "power", dtick: 1}}),
      ],
    ],
    select,
  );
}
