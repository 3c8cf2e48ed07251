// The card: the origin of a trace, and warnings for the reader.

import {h} from "./dom.js";
import {number} from "./inspect-trace.js";
import {panel} from "./panels.js";

const SHORTCUTS = {
  "rank-one": "writes or erases along one direction",
  mixing: "mixes the rows of its state",
};

/** The checks that were made, for a trace without warnings. */
function sound({checked, quantities}) {
  const last = checked.length - 1;
  const text = `No warnings: ${checked.slice(0, last).join(", ")} and ${checked[last]}.`;
  const own = quantities.some(({own}) => own);
  return own ? text : `${text} This connection has neither gates nor mixing: there is nothing more to look at.`;
}

/** @param {object} trace */
export function card(trace) {
  const {facts, warnings} = trace;
  const {scheme, ...options} = typeof facts.scheme === "object" && facts.scheme ? facts.scheme : {scheme: facts.scheme};
  const rows = [
    ["connection", facts.preset ?? scheme],
    ["kind", SHORTCUTS[facts.shortcut] ?? (trace.fields.depth_mean && "reads what earlier sublayers gave, by weights")],
    ["run", facts.run],
    ["checkpoint", facts.checkpoint === null ? null : `step ${facts.checkpoint.toLocaleString("en")}`],
    [
      "size",
      `${trace.depth} sublayer${trace.depth === 1 ? "" : "s"} of width ${facts.dim}${facts.rows > 1 ? `, ${trace.fields.depth_mean ? `${facts.rows} sources at the end` : `a state of ${facts.rows} × ${facts.dim} numbers per token`}` : ""}`,
    ],
    [
      "text",
      `${facts.read ?? `${trace.length.toLocaleString("en")} tokens`}${facts.loss === null ? "" : `, loss ${number(facts.loss)} nats per token`}`,
    ],
    ["made", [facts.date?.slice(0, 10), facts.residua && `residua ${facts.residua}`].filter(Boolean).join(", ")],
  ];
  const list = (name, pairs) =>
    h(
      "dl",
      {class: name},
      pairs.map(([key, value]) => [h("dt", null, key), h("dd", null, value)]),
    );
  const plain = (value) =>
    typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? "none");
  const element = panel(
    "card",
    trace.name,
    null,
    h(
      "div",
      {class: "halves"},
      list(
        "facts",
        rows.filter(([, value]) => value),
      ),
      h(
        "div",
        null,
        warnings.length
          ? h(
              "ul",
              {class: "warnings"},
              warnings.map((text) => h("li", null, text)),
            )
          : h("p", {class: "note"}, sound(trace)),
        trace.thinned &&
          h(
            "p",
            {class: "note"},
            `Some quantities are kept at ${facts.sampled.length} tokens only, to keep this page small; those of other tokens are of the nearest one.`,
          ),
        Object.keys(options).length > 0 &&
          h(
            "details",
            null,
            h("summary", null, "All options of the connection"),
            list(
              "facts small",
              Object.entries(options).map(([key, value]) => [key, plain(value)]),
            ),
          ),
      ),
    ),
  );
  element.classList.add("wide");
  return {element};
}
