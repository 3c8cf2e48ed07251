// Where the colours of a quantity begin and end. One sublayer that dwarfs the others, or a few tokens, must not leave all
// else blank; the numbers that are said of a point stay what they are.

import {number, quantiles} from "./inspect-trace.js";

const MOST = 0.98; // of the numbers lie between the ends
const FAR = 1.25; // times that end: where the largest is no farther, the scale goes on to it
const WIDE = 10; // times the median: from here on most of a linear scale would be for few
const DECADES = 4; // that a logarithmic scale has at most

const percent = (share) => (share < 0.001 ? "under 0.1 %" : `${Number((100 * share).toPrecision(2))} %`);

/**
 * The scale of a quantity over all its numbers: `low` and `high` are its ends; `on` brings a number to the axis between
 * `on(low)` and `on(high)`, `part` to [0, 1]; `notes` say what a reader of the colours has to know.
 * @param {Field} field @param {{limits?: number[]}} quantity
 */
export function scale(field, quantity) {
  const linear = (low, high, notes = []) => ({
    low,
    high,
    on: (value) => value,
    part: (value) => (value - low) / (high - low),
    notes,
  });
  if (quantity.limits) return linear(...quantity.limits);
  const numbers = field.data.filter(Number.isFinite);
  const [least, largest] = quantiles(numbers, [0, 1]);
  if (Number.isNaN(least)) return linear(0, 1);
  const share = (beyond) => percent(numbers.filter(beyond).length / numbers.length);
  const positive = numbers.filter((value) => value > 0);
  const [few, middle, most] = quantiles(positive, [1 - MOST, 0.5, MOST]);
  if (least >= 0 && most > WIDE * middle) {
    const low = Math.max(few, largest / 10 ** DECADES);
    const on = (value) => Math.log10(Math.max(value, low));
    const width = Math.log10(largest) - Math.log10(low);
    const notes = ["logarithmic"];
    if (least < low) notes.push(`${share((value) => value < low)} are smaller, down to ${number(least)}`);
    return {low, high: largest, on, part: (value) => (on(value) - Math.log10(low)) / width, notes};
  }
  const end = quantiles(numbers, [MOST])[0];
  const high = end > 0 && largest > FAR * end ? end : largest > 0 ? largest : 1;
  const beyond = `${share((value) => value > high)} are larger, up to ${number(largest)}`;
  return linear(Math.min(0, least), high, largest > high ? [beyond] : []);
}
