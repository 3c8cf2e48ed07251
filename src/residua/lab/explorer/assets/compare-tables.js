// Tables of the results of runs, and of the settings in which they differ.

import {h} from "./dom.js";
import {panel} from "./panels.js";

const signed = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(4)}`;
const grouped = (x, digits = 0) =>
  x.toLocaleString("en", {maximumFractionDigits: digits, minimumFractionDigits: digits});

/** A mean with its deviation over seeds, if there is one. */
export function spreadText(estimate, form) {
  if (!estimate || estimate.mean === null) return "–";
  return estimate.deviation === null
    ? form(estimate.mean)
    : `${form(estimate.mean)} ± ${form(Math.abs(estimate.deviation))}`;
}

/** @param {object} comparison */
export function summaryTable(comparison) {
  const table = h("table", {class: "numbers", "data-table": "summary"});
  const element = panel(
    "summary",
    "What they reached",
    "Validation loss in nats per token, mean ± standard deviation over the seeds; differences, in bits per byte if the tokenizers differ, are taken seed by seed where seeds are shared, and in colour where their 95 % interval (Student's t) leaves out 0.",
    h("div", {class: "scroll"}, table),
  );
  element.classList.add("wide");
  return {
    element,
    update({baseline}) {
      const {final, clear} = comparison.against[baseline];
      const difference = (name) => {
        const found = final[name];
        if (name === baseline) return h("td", null, "baseline");
        if (!found || found[1] === null) return h("td", null, "–");
        const [, mean, deviation] = found;
        return h(
          "td",
          {class: clear.includes(name) && (mean < 0 ? "better" : "worse")},
          signed(mean) + (deviation === null ? "" : ` ± ${deviation.toFixed(4)}`),
        );
      };
      table.replaceChildren(
        h(
          "tr",
          null,
          [
            "run",
            "seed(s)",
            "validation loss",
            `difference to ${baseline}`,
            "parameters",
            "tokens",
            "tokens/s",
            "seconds",
          ].map((name) => h("th", {scope: "col"}, name)),
        ),
        ...comparison.groups.map((group) =>
          h(
            "tr",
            {"data-group": group.name},
            h("th", {scope: "row"}, group.name),
            h("td", null, `seed${group.seeds.length > 1 ? "s" : ""} ${group.seeds.join(", ")}`),
            h(
              "td",
              null,
              spreadText(group.val_loss, (x) => x.toFixed(4)),
            ),
            difference(group.name),
            h("td", null, group.parameters === null ? "–" : grouped(group.parameters)),
            h("td", null, group.tokens === null ? "–" : grouped(group.tokens)),
            h(
              "td",
              null,
              spreadText(group.tokens_per_second && {...group.tokens_per_second, deviation: null}, (x) => grouped(x)),
            ),
            h(
              "td",
              null,
              spreadText(group.seconds && {...group.seconds, deviation: null}, (x) => grouped(x, 1)),
            ),
          ),
        ),
      );
    },
  };
}

export function settingsTable(comparison) {
  const {rows, equal} = comparison.settings;
  const names = comparison.groups.map(({name}) => name);
  const note = rows.length
    ? `Equal in all of them: ${equal} other settings.`
    : `None: all ${equal} settings are equal, except the seeds.`;
  const element = panel(
    "settings",
    "What differs in the configurations",
    note,
    rows.length > 0 &&
      h(
        "div",
        {class: "scroll"},
        h(
          "table",
          {class: "numbers", "data-table": "settings"},
          h(
            "tr",
            null,
            h("th", {scope: "col"}, "setting"),
            names.map((name) => h("th", {scope: "col"}, name)),
          ),
          rows.map(([key, ...values]) =>
            h(
              "tr",
              null,
              h("th", {scope: "row"}, h("code", null, key)),
              values.map((value) => h("td", null, value)),
            ),
          ),
        ),
      ),
  );
  element.classList.add("wide");
  return {element};
}
