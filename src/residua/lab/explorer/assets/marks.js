// The marks of simulations: a plane with movable arrows and points, and axes with curves.
// Marks are made once and then only moved, so that a drag changes only a few attributes per frame.

import {h, set, svg} from "./dom.js";
import {markup} from "./formula.js";

const STEP = 0.05; // the step of an arrow key in the plane; five times as much with shift
const DEGREES = 2; // the step of an arrow key on a circle
const HEAD = 11; // length of an arrow's head
const LABELLED = 34; // the shortest arrow with room for a name beside it
const fixed = (x) => (Math.abs(x) < 5e-4 ? 0 : x).toFixed(2).replace("-", "−");

/**
 * A square piece of the plane, from -reach to reach, y upwards.
 * @param {number} reach
 * @param {{label: string, size?: number, circle?: boolean}} options label: a description for screen readers; size: in
 *   units of the drawing, in which text is 14 high; circle: whether it has a unit circle
 */
export function plane(reach, {label, size = 440, circle = false}) {
  const unit = size / (2 * reach);
  const half = size / 2;
  const [grid, lines, handles] = [svg("g", {class: "grid"}), svg("g"), svg("g")];
  const element = svg("svg", {
    class: "plane", viewBox: `${-half} ${-half} ${size} ${size}`, role: "group", "aria-label": label, "data-unit": unit,
  }, grid, lines, handles);
  for (let i = -Math.floor(reach); i <= reach; i++) {
    const at = i * unit;
    const kind = i === 0 ? "axis" : null;
    grid.append(svg("line", {x1: -half, x2: half, y1: at, y2: at, class: kind}));
    grid.append(svg("line", {y1: -half, y2: half, x1: at, x2: at, class: kind}));
  }
  if (circle) grid.append(svg("circle", {r: unit, class: "unit"}));
  const to = ([x, y]) => [x * unit, -y * unit];

  /** Converts the position of the pointer to coordinates of the plane. */
  const from = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(element.getScreenCTM().inverse());
    return [point.x / unit, -point.y / unit];
  };
  return {element, to, from, unit, reach, lines, handles};
}

/** A line between two points; `way` is a class of style.css. */
export function line(space, name, way) {
  const element = svg("line", {class: `line ${way}`, "data-mark": name});
  space.lines.append(element);
  return {
    element,
    move(a, b) {
      const [[x1, y1], [x2, y2]] = [space.to(a), space.to(b)];
      set(element, {x1, y1, x2, y2});
    },
  };
}

/**
 * An arrow from one point to another. Its name is beside its middle, on the side that is passed to `move` as a
 * direction, or beyond its head. `head: false` is for an arrow that ends in a handle.
 */
export function arrow(space, name, way, {text = null, head = true} = {}) {
  const shaft = svg("line", {class: `line ${way}`, "data-mark": name});
  const end = head && svg("path", {class: `head ${way}`});
  const label = text && svg("text", {class: `label ${way}`}, text);
  const element = svg("g", null, shaft, end, label);
  space.lines.append(element);
  return {
    element,
    move(a, b, side = null) {
      const [[x1, y1], [x2, y2]] = [space.to(a), space.to(b)];
      const length = Math.hypot(x2 - x1, y2 - y1);
      const [dx, dy] = length ? [(x2 - x1) / length, (y2 - y1) / length] : [0, 0];
      const point = Math.min(HEAD, length);
      const [bx, by] = [x2 - point * dx, y2 - point * dy];
      const wide = point * 0.42;
      set(shaft, {x1, y1, x2: end ? (x2 + bx) / 2 : x2, y2: end ? (y2 + by) / 2 : y2, "data-to": b.join(" ")});
      if (end) end.setAttribute("d", `M${x2} ${y2}L${bx - wide * dy} ${by + wide * dx}L${bx + wide * dy} ${by - wide * dx}Z`);
      if (!label) return;
      label.toggleAttribute("hidden", length < (side ? LABELLED : 1));
      if (side) set(label, {x: (x1 + x2) / 2 + 24 * side[0], y: (y1 + y2) / 2 - 16 * side[1] + 5});
      else outwards(label, x2, y2);
    },
  };
}

/** Places a text beyond a point, as seen from the origin. */
function outwards(label, x, y) {
  const length = Math.hypot(x, y) || 1;
  set(label, {x: x + (18 * x) / length, y: y + (18 * (length > 1 ? y : -1)) / length + 5});
}

/** A dot, with a text on the side away from the origin. */
export function point(space, name, way, {text = null, radius = 5} = {}) {
  const dot = svg("circle", {class: `dot ${way}`, r: radius, "data-mark": name});
  const label = text && svg("text", {class: `label ${way}`}, text);
  space.lines.append(svg("g", null, dot, label ?? ""));
  return {
    element: dot,
    move(at) {
      const [x, y] = space.to(at);
      set(dot, {cx: x, cy: y});
      if (label) outwards(label, x, y);
    },
  };
}

/** A closed or open shape through points. */
export function shape(space, name, way, closed = true) {
  const element = svg("path", {class: `shape ${way}`, "data-mark": name});
  space.lines.append(element);
  return {
    element,
    move(points) {
      const path = points.map((at) => space.to(at).map((x) => x.toFixed(2)).join(" ")).join("L");
      element.setAttribute("d", `M${path}${closed ? "Z" : ""}`);
    },
  };
}

/**
 * A point that can be dragged with the mouse or a finger, or moved by the arrow keys if it has the focus.
 * @param {ReturnType<typeof plane>} space
 * @param {string} name
 * @param {string} way a class of style.css
 * @param {{label: string, text?: string, turn?: number, drag: (at: number[]) => void, nudge: (dx: number, dy: number) => void}} options
 *   label: a description for screen readers; text: the name in the picture, beyond the point as seen from the origin,
 *   or `turn` degrees to the right of that; drag gets coordinates of the plane; nudge gets the direction of an arrow
 *   key, 1 or -1 (5 with shift)
 */
export function handle(space, name, way, {label, text, turn = 0, drag, nudge}) {
  const mark = svg("text", {class: `label ${way}`}, text ?? "");
  const element = svg("g", {
    class: `handle ${way}`, "data-mark": name, tabindex: 0, role: "slider", "aria-label": label,
    "aria-valuemin": -space.reach, "aria-valuemax": space.reach,
  }, svg("circle", {r: 22, class: "reach"}), svg("circle", {r: 7.5, class: "grip"}), mark);
  space.handles.append(element);
  let at = [0, 0];
  held(element, {
    take: (event) => {
      const [x, y] = space.from(event);
      return [x - at[0], y - at[1]];
    },
    drag: (event, hold) => {
      const [x, y] = space.from(event);
      drag([x - hold[0], y - hold[1]]);
    },
    nudge: ([dx, dy], much) => nudge(dx * (much ? 5 : 1), dy * (much ? 5 : 1)),
  });
  return {
    element,
    move(to, said) {
      at = to;
      const [x, y] = space.to(to);
      element.setAttribute("transform", `translate(${x} ${y})`);
      const length = Math.hypot(x, y);
      const [c, s] = [Math.cos((turn * Math.PI) / 180), Math.sin((turn * Math.PI) / 180)];
      const beyond = length > 1 ? [(c * x - s * y) / length, (s * x + c * y) / length] : [0, -1];
      set(mark, {x: 20 * beyond[0], y: 20 * beyond[1] + 5});
      set(element, {"aria-valuenow": to[0].toFixed(3), "aria-valuetext": said ?? `${fixed(to[0])}, ${fixed(to[1])}`});
    },
  };
}

/**
 * Makes an element draggable with the mouse or a finger, and movable by the arrow keys.
 * @param {Element} element
 * @param {{take: (event: PointerEvent) => any, drag: (event: PointerEvent, hold: any) => void, nudge: (way: number[], much: boolean) => void}} options
 *   take returns data about the start of a drag for `drag`; nudge gets an arrow key's direction, and whether with shift
 */
export function held(element, {take, drag, nudge}) {
  let hold = null;
  // A finger on the element must move it and not the page; touch-action is not enough inside an SVG.
  element.addEventListener("touchstart", (event) => event.preventDefault(), {passive: false});
  element.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    event.preventDefault();
    element.focus({preventScroll: true});
    element.setPointerCapture(event.pointerId);
    hold = take(event);
    element.classList.add("held");
  });
  element.addEventListener("pointermove", (event) => {
    if (hold) drag(event, hold);
  });
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    element.addEventListener(end, () => {
      hold = null;
      element.classList.remove("held");
    });
  }
  element.addEventListener("keydown", (event) => {
    const way = arrowKey(event);
    if (!way) return;
    event.preventDefault();
    nudge(way, event.shiftKey);
  });
}

/** The direction of an arrow key, or null. */
function arrowKey({key}) {
  return {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}[key] ?? null;
}

/** A handle anywhere in the plane; `get` and `put` read and set its coordinates. */
export function freeHandle(space, name, way, options, get, put) {
  const limit = space.reach * 0.97;
  const within = (x) => Math.min(limit, Math.max(-limit, x));
  const drag = ([x, y]) => put([within(x), within(y)]);
  const nudge = (dx, dy) => drag([get()[0] + dx * STEP, get()[1] + dy * STEP]);
  return handle(space, name, way, {...options, drag, nudge});
}

/** A handle for a direction; `get` and `put` read and set its angle in degrees, from -180 to 180. */
export function angleHandle(space, name, way, options, get, put) {
  const wrap = (angle) => ((((angle + 180) % 360) + 360) % 360) - 180;
  const drag = ([x, y]) => put((Math.atan2(y, x) * 180) / Math.PI);
  const nudge = (dx, dy) => put(wrap(get() + (dy || -dx) * DEGREES));
  return handle(space, name, way, {...options, drag, nudge});
}

const POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const power = (n) => `10${n < 0 ? "⁻" : ""}${[...String(Math.abs(n))].map((digit) => POWERS[digit]).join("")}`;

/** Round numbers from low to high, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * base >= raw) * base;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

function tens(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((last - first) / 6));
  const found = [];
  for (let n = first; n <= last; n++) if ((n - first) % every === 0) found.push(10 ** n);
  return found;
}

const short = (x) => String(Number(x.toPrecision(6))).replace("-", "−");

/**
 * Axes for curves. `range` sets their ends, and redraws the ticks if these have changed.
 * @param {{label: string, x: string, y: string, log?: boolean, width?: number, height?: number}} options
 */
export function axes({label, x, y, log = false, width = 560, height = 400}) {
  const [left, right, top, bottom] = [56, 20, 38, 46];
  const [grid, lines, handles] = [svg("g", {class: "grid"}), svg("g"), svg("g")];
  const element = svg("svg", {class: "axes", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label},
    grid, lines, handles,
    svg("text", {class: "name", x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle"}, x),
    svg("text", {class: "name", x: 14, y: 21}, y));
  let limits = [0, 1, 0, 1];
  const up = (value) => (log ? Math.log10(value) : value);
  const across = (value) => left + ((value - limits[0]) / (limits[1] - limits[0])) * (width - left - right);
  const above = (value) => {
    const part = (up(value) - up(limits[2])) / (up(limits[3]) - up(limits[2]));
    return height - bottom - Math.min(1.02, Math.max(-0.02, part)) * (height - top - bottom);
  };
  const space = {
    element, lines, handles, reach: 1,
    to: ([a, b]) => [across(a), above(b)],
    from(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(element.getScreenCTM().inverse());
      const part = (height - bottom - at.y) / (height - top - bottom);
      const value = up(limits[2]) + part * (up(limits[3]) - up(limits[2]));
      return [limits[0] + ((at.x - left) / (width - left - right)) * (limits[1] - limits[0]), log ? 10 ** value : value];
    },
    range(...given) {
      if (given.every((value, i) => value === limits[i]) && grid.firstChild) return;
      limits = given;
      grid.replaceChildren();
      for (const value of log ? tens(limits[2], limits[3]) : ticks(limits[2], limits[3], 5)) {
        const at = above(value);
        grid.append(svg("line", {x1: left, x2: width - right, y1: at, y2: at}));
        grid.append(svg("text", {x: left - 8, y: at + 4, "text-anchor": "end"}, log ? power(Math.round(Math.log10(value))) : short(value)));
      }
      for (const value of ticks(limits[0], limits[1], 6)) {
        grid.append(svg("text", {x: across(value), y: height - bottom + 18, "text-anchor": "middle"}, short(value)));
      }
      grid.append(svg("line", {class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
    },
  };
  return space;
}

/** A curve through points of axes. */
export function curve(space, name, way) {
  return shape(space, name, `curve ${way}`, false);
}

/** The legend for the colours of a picture. */
export function key(...entries) {
  return h("ul", {class: "meaning"}, entries.map(([way, text]) => h("li", {class: way}, h("span", null, markup(text)))));
}
