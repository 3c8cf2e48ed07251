// Builds elements. Strings become text nodes, so markup in a token's text stays text.

const SVG = "http://www.w3.org/2000/svg";

/**
 * @param {Element} element
 * @param {Object<string, any>} attributes `onclick` and the like take functions; null, undefined and false are left out
 * @param {any[]} children nodes, strings, numbers or arrays of these; null, undefined and false are left out
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** @returns {HTMLElement} */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** @returns {SVGElement} */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets attributes of an existing element, as a drag does sixty times a second. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}
