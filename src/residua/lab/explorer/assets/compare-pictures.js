// Losses, differences to a baseline, and the cost of a loss.

import {h} from "./dom.js";
import {canvas, chart, faded, panel} from "./panels.js";
import {color} from "./theme.js";

const TITLES = {step: "training step", tokens: "training tokens", seconds: "wall-clock seconds of training"};
const UNITS = {step: "steps", tokens: "tokens", seconds: "seconds"};
const PLACE = {step: 0, tokens: 1, seconds: 2};
const LOSS = 3;
// Losses fall so much at the start of a run that later differences would be invisible. The start may leave the frame.
const UNSETTLED = {difference: 0.3, loss: 0.1};
const FEW_POINTS = 24;
const COLOURS = 6; // in addition to that of the plain residual
// When the colours repeat, lines get another dash and points another shape.
const DASHES = ["solid", "dash", "dot"];
const SYMBOLS = ["circle", "diamond", "cross"];

/**
 * The style of each group, which does not depend on the baseline. `residua compare` numbers the colours.
 * @returns {Object<string, {shade: string, dash: string, symbol: string}>} by name
 */
function looks(comparison, of = color) {
  const look = ({name, colour}) => {
    const turn = Math.floor(Math.max(0, colour - 1) / COLOURS) % DASHES.length;
    const number = colour === 0 ? 0 : 1 + ((colour - 1) % COLOURS);
    return [name, {shade: of(`--scheme-${number}`), dash: DASHES[turn], symbol: SYMBOLS[turn]}];
  };
  return Object.fromEntries(comparison.groups.map(look));
}

/** The ends of an axis for the points after the unsettled part; points: [[x, low, high], ...]. */
function settled(points, unsettled) {
  const end = Math.max(...points.map(([x]) => x).filter(Number.isFinite), 0);
  const later = points.filter(([x]) => x >= unsettled * end);
  const numbers = (later.length ? later : points).flatMap(([, low, high]) => [low, high]).filter(Number.isFinite);
  if (!numbers.length) return undefined;
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const room = 0.06 * (high - low) || 0.01;
  return [low - room, high + room];
}

const marks = (points) => (points.length <= FEW_POINTS ? {mode: "lines+markers", marker: {size: 5}} : {mode: "lines"});
const zoomable = () => ({dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom"});

/** @param {object} comparison */
export function differencePicture(comparison) {
  const place = canvas("difference", "tall");
  const note = h("p", {class: "note"});
  const element = panel("difference", "Difference in validation loss", null, note, place);
  element.classList.add("wide");
  return {
    element,
    async update({baseline, axis}) {
      const {differences, unit, refused} = comparison.against[baseline];
      const lines = comparison.groups.map(({name}) => [
        name,
        differences[name][axis].filter(([, mean]) => mean !== null),
      ]);
      const banded = lines.some(([, points]) => points.some(([, , deviation]) => deviation !== null));
      const empty = lines.filter(([name, points]) => name !== baseline && !points.length).map(([name]) => name);
      const apart = empty.filter((name) => !refused.includes(name));
      const nothing = empty.length > 0 && empty.length === lines.length - 1;
      const none = `No common ${UNITS[axis]} with ${baseline}`;
      const never = `Cannot be compared with ${baseline}`;
      const text = apart.length ? none : never;
      note.textContent = [
        `Loss minus that of ${baseline}, ${unit}; below 0 is better.`,
        banded ? "Bands: ± 1 standard deviation over the seeds." : "One seed each: the noise is not measured.",
        "The scale is fitted to what comes after the first 30 %; drag to look closer, double-click for the whole.",
        apart.length ? `${none}: ${apart.join(", ")}.` : "",
        refused.length ? `${never}: ${refused.join(", ")}.` : "",
      ].join(" ");
      const others = lines
        .filter(([name]) => name !== baseline)
        .flatMap(([, points]) =>
          points.map(([at, mean, deviation]) => [at, mean - (deviation ?? 0), mean + (deviation ?? 0)]),
        );
      const reach = settled([...others, [Infinity, 0, 0]], UNSETTLED.difference);
      await chart(
        place,
        () => {
          const look = looks(comparison);
          return lines.flatMap(([name, points]) => {
            const {shade, dash} = look[name];
            const x = points.map(([at]) => at);
            const edge = (sign, more) => ({
              x,
              y: points.map(([, mean, deviation]) => mean + sign * (deviation ?? 0)),
              mode: "lines",
              line: {width: 0},
              hoverinfo: "skip",
              showlegend: false,
              ...more,
            });
            const band = points.some(([, , deviation]) => deviation !== null)
              ? [edge(-1, {}), edge(1, {fill: "tonexty", fillcolor: faded(shade, 0.15)})]
              : [];
            return [
              ...band,
              {
                x,
                y: points.map(([, mean]) => mean),
                type: "scatter",
                ...marks(points),
                line: {color: shade, width: 2, dash},
                name: name === baseline ? `${name} (baseline)` : name,
                meta: name,
                hovertemplate: `%{y:+.4f} %{customdata}<extra>%{fullData.name}</extra>`,
                customdata: points.map(([, , deviation, count]) =>
                  deviation === null ? "" : `± ${deviation.toFixed(4)}${count ? `, ${count} seeds` : ""}`,
                ),
              },
            ];
          });
        },
        () => ({
          ...zoomable(),
          uirevision: `${baseline} ${axis}`,
          xaxis: {title: {text: TITLES[axis]}, fixedrange: false, rangemode: "tozero"},
          yaxis: {title: {text: "difference"}, zeroline: true, range: reach, fixedrange: false, tickformat: ".3~f"},
          annotations: nothing
            ? [
                {
                  text,
                  xref: "paper",
                  yref: "paper",
                  x: 0.5,
                  y: 0.75,
                  showarrow: false,
                  font: {size: 14},
                  bgcolor: color("--raised"),
                },
              ]
            : [],
        }),
      );
    },
  };
}

export function lossPicture(comparison) {
  const place = canvas("loss");
  const element = panel("loss", "Loss", "Strong: validation, one line for each seed. Pale: training, averaged.", place);
  element.classList.add("wide");
  return {
    element,
    async update({axis}) {
      const column = PLACE[axis];
      const curves = comparison.groups.flatMap(({name, runs}) => runs.map((run) => ({name, ...run})));
      const points = curves.flatMap(({validation, training}) =>
        (validation.length ? validation : training).map((point) => [point[column], point[LOSS], point[LOSS]]),
      );
      const first = new Set();
      await chart(
        place,
        () => {
          first.clear();
          const look = looks(comparison);
          return curves.flatMap(({name, seed, validation, training}) => {
            const {shade, dash} = look[name];
            const strong = validation.length ? validation : training;
            const line = (rows, more) => ({
              x: rows.map((row) => row[column]),
              y: rows.map((row) => row[LOSS]),
              type: "scatter",
              mode: "lines",
              legendgroup: name,
              ...more,
            });
            const lead = !first.has(name);
            first.add(name);
            return [
              line(training, {line: {color: faded(shade, 0.2), width: 1}, hoverinfo: "skip", showlegend: false}),
              line(strong, {
                ...marks(strong),
                line: {color: shade, width: 1.75, dash},
                name,
                showlegend: lead,
                hovertemplate: `%{y:.4f}, seed ${seed}<extra>%{fullData.name}</extra>`,
              }),
            ];
          });
        },
        () => ({
          ...zoomable(),
          hovermode: "closest",
          uirevision: axis,
          xaxis: {title: {text: TITLES[axis]}, fixedrange: false, rangemode: "tozero"},
          yaxis: {title: {text: "loss (nats per token)"}, range: settled(points, UNSETTLED.loss), fixedrange: false},
        }),
      );
    },
  };
}

/** Loss against throughput, time and size, as far as the runs have recorded them. */
export function pricePictures(comparison) {
  const of = (group, key) => (typeof group[key] === "number" ? group[key] : (group[key]?.mean ?? null));
  const plots = [
    ["tokens_per_second", "tokens per second"],
    ["seconds", TITLES.seconds],
    ["parameters", "parameters"],
  ].filter(([key]) => comparison.groups.some((group) => of(group, key) !== null && group.val_loss));
  const places = plots.map(([key]) => canvas(`price-${key}`));
  const keys = Object.entries(looks(comparison, (name) => `var(${name})`));
  const legend = h(
    "p",
    {class: "keys"},
    keys.map(([name, {shade, symbol}]) =>
      h("span", null, h("i", {class: `key ${symbol}`, style: `background: ${shade}`}), name),
    ),
  );
  const element = panel(
    "price",
    "What it costs",
    "The last validation loss against speed, time and size; bars: ± 1 standard deviation over the seeds. Lower is better, and faster is to the right in the first picture, to the left in the second.",
    legend,
    plots.length
      ? h("div", {class: "plots"}, places)
      : h("p", null, "No run has recorded both a validation loss and its speed."),
    h(
      "p",
      {class: "note", "data-note": "memory"},
      "Memory is not recorded while a model trains; ",
      h("code", null, "residua cost step"),
      " measures it.",
    ),
  );
  element.classList.add("wide");
  return [
    {
      element,
      async update() {
        await Promise.all(
          plots.map(([key, title], i) =>
            chart(
              places[i],
              () => {
                const look = looks(comparison);
                return comparison.groups
                  .filter((group) => of(group, key) !== null && group.val_loss?.mean)
                  .map((group) => ({
                    x: [of(group, key)],
                    y: [group.val_loss.mean],
                    type: "scatter",
                    mode: "markers",
                    marker: {size: 11, color: look[group.name].shade, symbol: look[group.name].symbol},
                    name: group.name,
                    error_y: {
                      array: [group.val_loss.deviation ?? 0],
                      visible: group.val_loss.deviation !== null,
                      color: look[group.name].shade,
                      thickness: 1.5,
                    },
                    error_x: {
                      array: [group[key]?.deviation ?? 0],
                      visible: Boolean(group[key]?.deviation),
                      color: look[group.name].shade,
                      thickness: 1.5,
                    },
                    hovertemplate: `%{y:.4f} at %{x:,.4~g}<extra>%{fullData.name}</extra>`,
                  }));
              },
              () => ({
                hovermode: "closest",
                showlegend: false,
                xaxis: {title: {text: title}, tickformat: "~s"},
                yaxis: {title: {text: "validation loss"}, tickformat: ".3~f"},
              }),
            ),
          ),
        );
      },
    },
  ];
}
