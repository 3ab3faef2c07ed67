// The points of the last 15 minutes, one per second, and their sums.

const KEPT_SECONDS = 15 * 60;
export const BUCKET_SECONDS = 10;
const WINDOWS_MINUTES = [3, 5, 10, 15];

export class History {
  #points = [];

  replace(points) {
    this.#points = points;
    this.#forget();
  }

  add(point) {
    const last = this.#points.at(-1);
    if (!last || point.at > last.at) this.#points.push(point);
    this.#forget();
  }

  #forget() {
    const first = (this.#points.at(-1)?.at ?? 0) - KEPT_SECONDS;
    let past = 0;
    while (past < this.#points.length && this.#points[past].at <= first) past += 1;
    if (past) this.#points.splice(0, past);
  }

  /** The age of the oldest point in seconds before `now`; KEPT_SECONDS at most. */
  span(now) {
    const first = this.#points[0];
    return first ? Math.min(KEPT_SECONDS, now - first.at + first.seconds) : 0;
  }

  /** Sums over the last `seconds`: hits, misses, and misses by reason. */
  sums(now, seconds = KEPT_SECONDS) {
    const sums = { hits: 0, misses: 0, reasons: new Map(), seconds: 0 };
    for (let place = this.#points.length - 1; place >= 0; place -= 1) {
      const point = this.#points[place];
      if (point.at <= now - seconds) break;
      gather(sums, point);
    }
    return sums;
  }

  /** The minutes that a chart shows: the shortest window that has all points. */
  window(now) {
    const span = this.span(now);
    return WINDOWS_MINUTES.find((minutes) => span <= 60 * minutes) ?? KEPT_SECONDS / 60;
  }

  /** One sum for each `length` seconds of the last `minutes`, the newest last; null without a
   *  point. */
  buckets(now, minutes, length = BUCKET_SECONDS) {
    const count = (60 * minutes) / length;
    const newest = Math.floor(now / length);
    const buckets = new Array(count).fill(null);
    for (const point of this.#points) {
      const place = count - 1 - (newest - Math.floor(point.at / length));
      if (place < 0 || place >= count) continue;
      buckets[place] ??= { hits: 0, misses: 0, reasons: new Map(), bytes: new Map(), seconds: 0 };
      gather(buckets[place], point);
      for (const [way, bytes] of Object.entries(point.bytes)) {
        buckets[place].bytes.set(way, (buckets[place].bytes.get(way) ?? 0) + bytes);
      }
    }
    return buckets;
  }
}

function gather(sums, point) {
  sums.hits += point.hits;
  sums.seconds += point.seconds;
  for (const [reason, number] of Object.entries(point.misses)) {
    sums.misses += number;
    sums.reasons.set(reason, (sums.reasons.get(reason) ?? 0) + number);
  }
}
