// The matrices of a state with several rows: how a sublayer reads the rows, mixes them, and writes its output.

import {h} from "./dom.js";
import {number} from "./inspect-trace.js";
import {choice, panel} from "./panels.js";
import {set} from "./store.js";

const PARTS = [
  ["h_pre", "H_pre", "the weight of each row in the sublayer's input"],
  ["h_res", "H_res", "how the rows are mixed: row i makes the new row i"],
  ["h_post", "H_post", "the weight of the sublayer's output in each row"],
];
const ERRORS = [
  ["row_error", "rows"],
  ["column_error", "columns"],
  ["orthogonality_error", "‖HᵀH − I‖"],
];

function table(name, note, values, rows) {
  const columns = values.length / rows;
  const most = Math.max(...Array.from(values, Math.abs).filter(Number.isFinite), 1e-12);
  const cell = (value) => {
    const share = Number.isFinite(value) ? Math.round((70 * Math.abs(value)) / most) : 0;
    const shade = value < 0 ? "--reflection" : "--identity";
    const text = Number.isFinite(value) ? value.toFixed(3).replace("-", "−") : number(value);
    return h(
      "td",
      {style: `background: color-mix(in srgb, var(${shade}) ${share}%, transparent)`, title: number(value)},
      text,
    );
  };
  return h(
    "figure",
    {class: "matrix"},
    h(
      "table",
      {"data-matrix": name},
      Array.from({length: rows}, (_, i) =>
        h("tr", null, Array.from(values.slice(i * columns, (i + 1) * columns), cell)),
      ),
    ),
    h("figcaption", null, h("b", null, name), " ", note),
  );
}

/** The panel, or null for a trace without streams. */
export function matrices(trace) {
  if (!PARTS.some(([name]) => trace.fields[name])) return null;
  const of = choice(
    "Of",
    "of",
    [
      ["token", "the selected token"],
      ["mean", "the mean over all tokens"],
    ],
    "token",
    (value) => set({of: value}),
  );
  const place = h("div", {class: "matrices"});
  const errors = h("p", {class: "readout"});
  const element = panel(
    "streams",
    "Mixing",
    "How the selected sublayer reads, mixes and writes the rows of the state.",
    of,
    place,
    errors,
  );
  element.classList.add("wide");
  return {
    element,
    update({sublayer, token, mean}) {
      of.querySelector("select").value = mean ? "mean" : "token";
      const values = (name) => (mean ? trace.fields[name].mean(sublayer) : trace.fields[name].at(sublayer, token));
      place.replaceChildren(
        ...PARTS.filter(([name]) => trace.fields[name]).map(([name, title, note]) => {
          const {inner} = trace.fields[name];
          return table(title, note, values(name), inner.length > 1 ? inner[0] : name === "h_post" ? inner[0] : 1);
        }),
      );
      const known = ERRORS.filter(([name]) => trace.fields[name]);
      errors.textContent = known.length
        ? `Errors of H_res: ${known
            .map(([name, title]) => {
              const field = trace.fields[name];
              return `${title} ${number(mean ? field.mean(sublayer)[0] : field.at(sublayer, token))}`;
            })
            .join(", ")}`
        : "";
    },
  };
}
