// Numbers, sizes and times as text, and helpers that put text into the page. They never write HTML:
// keys are untrusted input.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);

export const rate = (number) => (number >= 100 || number === 0 ? whole : short).format(number);

export function share(part, of) {
  if (!of) return "–";
  const percent = (100 * part) / of;
  // A part that is less than the whole is never shown as 100 %.
  if (part < of && percent > 99.9) return "99.9 %";
  return `${percent === 100 || percent === 0 ? whole.format(percent) : percent.toFixed(1)} %`;
}

export function size(bytes) {
  if (bytes < 1024) return `${whole.format(bytes)} B`;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    bytes /= 1024;
    if (bytes < 1023.95) return `${bytes.toFixed(1)} ${unit}`;
  }
  return `${(bytes / 1024).toFixed(1)} TiB`;
}

export function age(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

export const clock = (at, options = {}) =>
  new Date(at * 1000).toLocaleTimeString([], {
    hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false, ...options,
  });

/** Sets the text of an element if it has changed. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const byId = (id) => document.getElementById(id);

/** A new element with a class (optional) and with texts or elements inside. */
export function make(name, className, ...inside) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...inside);
  return element;
}

/** Makes `body` hold one row for each of `items`, in their order; existing rows are reused by name. */
export function rows(body, items, nameOf, build, update) {
  const old = new Map([...body.children].map((row) => [row.dataset.name, row]));
  items.forEach((item, place) => {
    const name = nameOf(item);
    let row = old.get(name);
    if (row) old.delete(name);
    else {
      row = build(item);
      row.dataset.name = name;
    }
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    update(row, item);
  });
  for (const row of old.values()) row.remove();
}
