// Formulas, and texts with symbols, in a one-line notation:
// *x* is a symbol, _{..} and ^{..} are subscripts and superscripts, ᵀ transposes, `..` is code, {way|x} gives x the
// colour of the arrows with the class `way`.

import {h} from "./dom.js";

const PARTS = /(ᵀ)|\*([^*]+)\*|_\{([^}]*)\}|\^\{([^}]*)\}|`([^`]+)`|\{(\w+)\|((?:[^{}]|\{[^}]*\})*)\}/g;

/** @param {string} text @returns {(string | HTMLElement)[]} */
export function markup(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(PARTS)) {
    const [whole, transposed, symbol, below, above, code, way, inner] = match;
    parts.push(text.slice(end, match.index));
    end = match.index + whole.length;
    if (transposed) parts.push(h("sup", {class: "transposed"}, "T"));
    else if (symbol) parts.push(h("i", null, symbol));
    else if (below !== undefined) parts.push(h("sub", null, markup(below)));
    else if (above !== undefined) parts.push(h("sup", null, markup(above)));
    else if (code) parts.push(h("code", null, code));
    else parts.push(h("span", {class: `c-${way}`}, markup(inner)));
  }
  return [...parts, text.slice(end)];
}
