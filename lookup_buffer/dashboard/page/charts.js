// The chart of the hit rate, with hits and misses per second below it; and small bar charts of bytes.

import { BUCKET_SECONDS } from "./history.js";
import { clock, make, rate, share } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46;
const BOTTOM = 20;
const STRIP = 54; // height of the columns
const GAP = 16;

function draw(name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

export class RateChart {
  #box;
  #svg = draw("svg", { role: "img" });
  #tip = make("div", "tip");
  #buckets = [];
  #now = 0;
  #pointer = null;

  constructor(box) {
    this.#box = box;
    this.#tip.hidden = true;
    box.append(this.#svg, this.#tip);
    new ResizeObserver(() => this.#draw()).observe(box);
    box.addEventListener("pointermove", (event) => {
      this.#pointer = event.clientX - box.getBoundingClientRect().left;
      this.#point();
    });
    box.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.#point();
    });
  }

  show(buckets, now) {
    this.#buckets = buckets;
    this.#now = now;
    this.#draw();
  }

  get #step() {
    return (this.#box.clientWidth - LEFT) / this.#buckets.length;
  }

  #draw() {
    const width = this.#box.clientWidth;
    const height = this.#box.clientHeight;
    if (!this.#now || width < 100) return;
    const floor = height - BOTTOM;
    const foot = floor - STRIP - GAP; // the bottom of the curve
    const parts = [hatch()];
    for (const percent of [0, 50, 100]) {
      const y = 8 + (foot - 8) * (1 - percent / 100);
      parts.push(draw("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }));
      parts.push(draw("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, `${percent} %`));
    }
    parts.push(...this.#times(width, height));
    parts.push(...this.#columns(floor, width));
    parts.push(...this.#curve(foot));
    if (!this.#buckets.some((sums) => sums && sums.hits + sums.misses)) {
      const middle = { x: (LEFT + width) / 2, y: foot / 2, "text-anchor": "middle" };
      parts.push(draw("text", middle, "no lookups yet"));
    }
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#svg.setAttribute("aria-label", this.#words());
    this.#svg.replaceChildren(...parts);
    this.#point();
  }

  #times(width, height) {
    const parts = [];
    const seconds = this.#buckets.length * BUCKET_SECONDS;
    const every = 60 * Math.ceil(seconds / 60 / (width < 480 ? 3 : 5));
    const newest = (Math.floor(this.#now / BUCKET_SECONDS) + 1) * BUCKET_SECONDS;
    for (let at = Math.floor(newest / every) * every; at > newest - seconds; at -= every) {
      const x = width - ((newest - at) / BUCKET_SECONDS) * this.#step;
      if (x < LEFT + 16) continue;
      const anchor = x > width - 18 ? "end" : "middle";
      const words = clock(at, { second: undefined });
      parts.push(draw("text", { x, y: height - 4, "text-anchor": anchor }, words));
    }
    return parts;
  }

  #columns(floor, width) {
    const speeds = this.#buckets.map((sums) => (sums ? (sums.hits + sums.misses) / sums.seconds : 0));
    const most = Math.max(...speeds);
    const parts = [draw("line", { class: "grid", x1: LEFT, x2: width, y1: floor, y2: floor })];
    if (most === 0) return parts;
    parts.push(draw("text", { x: LEFT - 8, y: floor - STRIP + 8, "text-anchor": "end" }, `${rate(most)}/s`));
    this.#buckets.forEach((sums, place) => {
      if (!speeds[place]) return;
      const x = LEFT + place * this.#step + 0.5;
      const wide = Math.max(1, this.#step - 1);
      const hits = (STRIP * sums.hits) / sums.seconds / most;
      const misses = (STRIP * sums.misses) / sums.seconds / most;
      parts.push(draw("rect", { class: "hit-bar", x, y: floor - hits, width: wide, height: hits }));
      parts.push(draw("rect", { class: "miss-bar", x, y: floor - hits - misses, width: wide, height: misses }));
    });
    return parts;
  }

  #curve(foot) {
    const parts = [];
    let path = "";
    let begun = null;
    const end = () => {
      if (begun && begun.length === 1) {
        parts.push(draw("circle", { class: "rate-dot", cx: begun[0][0], cy: begun[0][1], r: 2.5 }));
      } else if (begun) {
        path += `M${begun.map((point) => point.map((n) => n.toFixed(1)).join(" ")).join("L")}`;
      }
      begun = null;
    };
    this.#buckets.forEach((sums, place) => {
      if (!sums || !(sums.hits + sums.misses)) return end();
      const found = sums.hits / (sums.hits + sums.misses);
      (begun ??= []).push([LEFT + (place + 0.5) * this.#step, 8 + (foot - 8) * (1 - found)]);
      return null;
    });
    end();
    if (path) parts.push(draw("path", { class: "rate-line", d: path }));
    return parts;
  }

  #words() {
    const asked = this.#buckets.filter((sums) => sums && sums.hits + sums.misses);
    if (!asked.length) return "Hit rate: no lookups yet";
    const rates = asked.map((sums) => sums.hits / (sums.hits + sums.misses));
    const [least, most, last] = [Math.min(...rates), Math.max(...rates), rates.at(-1)];
    return `Hit rate: ${share(last, 1)} now, between ${share(least, 1)} and ${share(most, 1)}`;
  }

  #point() {
    this.#svg.querySelector(".cursor")?.remove();
    const place = this.#pointer === null ? -1 : Math.floor((this.#pointer - LEFT) / this.#step);
    this.#tip.hidden = place < 0 || place >= this.#buckets.length;
    if (this.#tip.hidden) return;
    const x = LEFT + (place + 0.5) * this.#step;
    const height = this.#box.clientHeight - BOTTOM;
    this.#svg.append(draw("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: height }));
    const sums = this.#buckets[place];
    const back = this.#buckets.length - 1 - place;
    const at = (Math.floor(this.#now / BUCKET_SECONDS) - back) * BUCKET_SECONDS;
    const values = sums
      ? `hit rate ${share(sums.hits, sums.hits + sums.misses)}\n${rate(sums.hits / sums.seconds)} hits/s\n${rate(sums.misses / sums.seconds)} misses/s`
      : "no lookups";
    this.#tip.textContent = `${clock(at)}\n${values}`;
    const right = x > this.#box.clientWidth / 2;
    this.#tip.style.left = right ? "" : `${x + 10}px`;
    this.#tip.style.right = right ? `${this.#box.clientWidth - x + 10}px` : "";
  }
}

function hatch() {
  const pattern = draw("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(draw("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 5 }));
  const definitions = draw("defs");
  definitions.append(pattern);
  return definitions;
}

/** Draws one column per number into an existing SVG element. */
export function sparkline(svg, numbers, words) {
  svg.setAttribute("viewBox", `0 0 ${numbers.length} 22`);
  const most = Math.max(...numbers, 1e-9);
  const path = numbers
    .map((number, place) => (number > 0 ? `M${place} 22h.8v-${Math.max(0.7, (22 * number) / most).toFixed(1)}h-.8z` : ""))
    .join("");
  svg.firstChild.setAttribute("d", path);
  svg.setAttribute("aria-label", words);
}

export function sparkSvg() {
  const svg = draw("svg", { class: "spark", preserveAspectRatio: "none", role: "img" });
  svg.append(draw("path"));
  return svg;
}
