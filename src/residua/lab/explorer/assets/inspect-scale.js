// The colour scale of a quantity. One sublayer or a few tokens with very large values must not make all others look
// equal. Numbers in tooltips are not affected.

import {number, quantiles} from "./inspect-trace.js";

const MOST = 0.98; // the fraction of the numbers between the ends of the scale
const FAR = 1.25; // if the largest number is at most this multiple of the upper end, the scale includes it
const WIDE = 10; // if the upper end is above this multiple of the median, the scale is logarithmic
const DECADES = 4; // the largest number of decades of a logarithmic scale

const percent = (share) => (share < 0.001 ? "under 0.1 %" : `${Number((100 * share).toPrecision(2))} %`);

/**
 * The scale of a quantity for all its numbers. `low` and `high` are its ends; `on` maps a number to the axis between
 * `on(low)` and `on(high)`, `part` maps it to [0, 1]; `notes` are caveats for a reader of the colours.
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
