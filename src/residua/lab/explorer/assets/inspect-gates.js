// The gates of a trace: their regimes, the spectra of single shortcuts and of products over depth, and the gates during
// training.

import {h} from "./dom.js";
import {depthAxis, overDepth, rowsOf, spread} from "./inspect-depth.js";
import {quantiles, REGIMES, shares} from "./inspect-trace.js";
import {canvas, chart, faded, mark, panel, vertical} from "./panels.js";
import {color, lineColors} from "./theme.js";

/** The share of the tokens in each regime of beta; null for a trace without beta. The other panels do likewise. */
export function regimes(trace, tip, select) {
  const {beta} = trace.fields;
  if (!beta) return null;
  const names = [...REGIMES, "not a number"];
  const variables = {
    identity: "--identity",
    projection: "--projection",
    reflection: "--reflection",
    enlarging: "--line-4",
    "not a number": "--rule",
  };
  const found = panel(
    "regimes",
    "Regimes",
    "The share of the tokens at which a sublayer keeps the state, projects, reflects or, below zero, enlarges; the sliders above set where one ends.",
  );
  const total = h("table", {class: "numbers", "data-table": "regimes"});
  const place = canvas("regimes");
  found.append(h("div", {class: "scroll"}, total), place);
  return {
    element: found,
    async update({thresholds, sublayer}, all) {
      const rows = rowsOf(beta).map((row) => shares(beta.row(row), thresholds));
      const whole = shares(beta.data, thresholds);
      const shown = names.filter((name, i) => i < 3 || whole[name] > 0);
      const percent = (share) => `${(100 * share).toFixed(1)} %`;
      total.replaceChildren(
        h(
          "tr",
          null,
          h("th"),
          shown.map((name) =>
            h("th", {scope: "col"}, h("i", {class: "key", style: `background: var(${variables[name]})`}), name),
          ),
        ),
        h(
          "tr",
          null,
          h("th", {scope: "row"}, "all sublayers"),
          shown.map((name) => h("td", {"data-regime": name}, percent(whole[name]))),
        ),
        h(
          "tr",
          null,
          h("th", {scope: "row"}, trace.facts.sublayers[sublayer]),
          shown.map((name) => h("td", null, percent(rows[sublayer][name]))),
        ),
      );
      const shapes = () => [vertical(sublayer)];
      if (!all) return mark(place, shapes());
      await chart(
        place,
        () =>
          shown.map((name) => ({
            type: "bar",
            name,
            x: rowsOf(beta),
            y: rows.map((row) => row[name]),
            marker: {color: color(variables[name]), line: {width: 0}},
            hovertemplate: `${name}: %{y:.1%}<extra></extra>`,
          })),
        () => ({
          barmode: "stack",
          bargap: 0.15,
          showlegend: false,
          xaxis: depthAxis(trace),
          yaxis: {range: [0, 1], tickformat: ".0%"},
          shapes: shapes(),
        }),
        ({x}) => select(x, null),
      );
    },
  };
}

/** The gates over depth, except beta, which is in the spectrum. */
export function gates(trace, tip, select) {
  const shown = trace.quantities.filter(({name, gate}) => gate && name !== "beta");
  if (!shown.length) return null;
  const plots = shown.map(({name, label, limits}, i) => [
    name,
    ({token}) => spread(trace.fields[name], token, {name: label, shade: color(`--line-${(i % 8) + 1}`)}),
    () => ({yaxis: {title: {text: label}, ...(limits ? {range: widened(limits, 0.03)} : {rangemode: "tozero"})}}),
  ]);
  const said = trace.fields.gamma
    ? "γ blends a reflection (0) with a Cayley rotation (1), and in between the state shrinks; the angle is that of the rotation, in radians."
    : "What the connection decides for each token.";
  return overDepth(
    trace,
    "gates",
    trace.fields.gamma ? "Rotation and reflection" : "Gates",
    `${said} Bands: 90 % and 50 % of the tokens.`,
    plots,
    select,
    plots.length > 1,
  );
}

/** A range, extended at both ends by a fraction of its width. */
const widened = ([low, high], share) => [low - share * (high - low), high + share * (high - low)];

/** The eigenvalue 1 - beta over depth. */
export function spectrum(trace, tip, select) {
  const {beta} = trace.fields;
  if (!beta) return null;
  const [low, high] = trace.facts.gates.beta.range ?? [0, 2];
  return overDepth(
    trace,
    "spectrum",
    "Spectrum of the shortcut",
    "1 − β, the eigenvalue along k of I − β k kᵀ; all others are 1. Bands: 90 % and 50 % of the tokens.",
    [
      [
        "spectrum",
        ({token}) => spread(beta, token, {name: "1 − β", shade: color("--line-1"), of: (value) => 1 - value}),
        () => ({yaxis: {title: {text: "1 − β"}, range: widened([1 - high, 1 - low], 0.04), zeroline: true}}),
      ],
    ],
    select,
  );
}

/** Singular values, determinant and defect of the product of all shortcuts so far. */
export function composite(trace, tip, select) {
  const {singular_max: largest, singular_min: smallest, determinant, defect, singular_values: last} = trace.fields;
  if (!determinant) return null;
  const space = trace.fields.direction || trace.fields.beta ? "the span of the k's" : "the streams";
  const plots = [
    [
      "singular",
      ({token}) => [
        ...spread(largest, token, {name: "largest", shade: color("--line-2")}),
        ...spread(smallest, token, {name: "smallest", shade: color("--line-1"), legend: false}),
      ],
      () => ({yaxis: {title: {text: "singular values"}, rangemode: "tozero"}}),
    ],
    [
      "determinant",
      ({token}) => spread(determinant, token, {name: "determinant", shade: color("--line-4")}),
      () => ({yaxis: {title: {text: "determinant"}, exponentformat: "power"}}),
    ],
    [
      "defect",
      ({token}) => spread(defect, token, {name: "defect", shade: color("--line-3")}),
      () => ({yaxis: {title: {text: "‖MᵀM − I‖"}, rangemode: "tozero"}}),
    ],
  ];
  if (last) {
    plots.push([
      "singular-values",
      ({token}) => {
        const column = determinant.column(token);
        const values = Array.from(last.data.subarray(column * last.columns, (column + 1) * last.columns));
        return [
          {
            type: "bar",
            x: values.map((_, i) => i + 1),
            y: values,
            name: "singular values",
            marker: {color: color("--line-1")},
            hovertemplate: "%{y:.4g}<extra></extra>",
          },
        ];
      },
      () => ({
        xaxis: {
          title: {text: "singular values at the end, this token"},
          showgrid: false,
          range: [0.4, last.columns + 0.6],
        },
        yaxis: {rangemode: "tozero"},
        shapes: [],
        showlegend: false,
        hovermode: "closest",
      }),
    ]);
  }
  const note = `M = the product of all shortcuts so far, on ${space}: the remaining part of the first state. At ${trace.facts.sampled.length} sampled tokens; bands: 90 % and 50 % of them.`;
  return overDepth(trace, "composite", "All shortcuts together", note, plots, select, true);
}

/** The gates of every sublayer by training step. */
export function training(trace, tip, select) {
  const gates = trace.quantities.filter(({name}) => trace.fields[`training.${name}.mean`]);
  if (!gates.length) return null;
  const places = gates.map(({name}) => canvas(`training-${name}`));
  const element = panel(
    "training",
    "During training",
    "The mean over the tokens of each sublayer, by training step; strong: the selected sublayer, with the band of 90 % of its tokens.",
    places,
  );
  return {
    element,
    async update({sublayer}) {
      await Promise.all(
        gates.map(async ({name, label, limits}, i) => {
          const mean = trace.fields[`training.${name}.mean`];
          const low = trace.fields[`training.${name}.q05`];
          const high = trace.fields[`training.${name}.q95`];
          const steps = Array.from(trace.lists[`training.${name}.steps`]);
          const column = (field, s) => Array.from({length: field.rows}, (_, row) => field.at(row, s));
          await chart(
            places[i],
            () => {
              const strong = lineColors()[0];
              const line = (y, more) => ({
                x: steps,
                y,
                type: "scatter",
                mode: "lines",
                line: {width: 0},
                hoverinfo: "skip",
                showlegend: false,
                ...more,
              });
              const band =
                low && high
                  ? [
                      line(column(low, sublayer), {}),
                      line(column(high, sublayer), {fill: "tonexty", fillcolor: faded(strong, 0.16)}),
                    ]
                  : [];
              const others = Array.from({length: mean.columns}, (_, s) => s).filter((s) => s !== sublayer);
              return [
                ...band,
                ...others.map((s) =>
                  line(column(mean, s), {
                    line: {color: faded(color("--projection"), 0.45), width: 1},
                    hoverinfo: "all",
                    hovertemplate: "%{y:.4g}",
                    name: trace.facts.sublayers[s],
                  }),
                ),
                line(column(mean, sublayer), {
                  mode: "lines+markers",
                  marker: {size: 4},
                  line: {color: strong, width: 2.5},
                  hoverinfo: "all",
                  hovertemplate: "%{y:.4g}",
                  name: trace.facts.sublayers[sublayer],
                }),
              ];
            },
            () => ({
              showlegend: false,
              hovermode: "closest",
              xaxis: {title: {text: "step"}, rangemode: "tozero"},
              yaxis: {title: {text: label}, range: tight(mean, limits)},
            }),
            ({x, y}) => select(nearest(mean, steps, x, y), null),
          );
        }),
      );
    },
  };
}

/** The sublayer whose mean is nearest to y at the step nearest to x. */
function nearest(mean, steps, x, y) {
  const least = (numbers, from) => {
    const apart = Array.from(numbers, (value) => (Number.isNaN(value) ? Infinity : Math.abs(value - from)));
    return apart.indexOf(Math.min(...apart));
  };
  return least(mean.row(least(steps, x)), y);
}

/** The ends of an axis for gates: their values with a margin, but within their bounds if they have bounds. */
function tight(field, limits) {
  const [low, high] = limits ?? [-Infinity, Infinity];
  const [least, most] = quantiles(field.data, [0, 1]);
  const room = Math.max(0.05, 0.15 * (most - least));
  return [Math.max(low - 0.02, least - room), Math.min(high + 0.02, most + room)];
}
