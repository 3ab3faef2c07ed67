// The panels of the page, filled from the node's events.

import { RateChart, sparkSvg, sparkline } from "./charts.js";
import { age, byId, clock, count, make, put, rate, rows, share, size } from "./format.js";

const NOW_SECONDS = 10;
const REASONS = {
  absent: "no node has it: never inserted, evicted or expired",
  owner_dead: "the node that had it is dead",
  stale: "the record named a copy that was absent",
  checksum: "the transferred bytes differed from the stored ones",
  peer_failed: "the node that has it was not reached",
  store_down: "the store was not reached",
  timeout: "it did not arrive in time",
  no_room: "too much of the arena is pinned",
  taken: "a hand-off that another taker took",
  busy: "too many transfers were ahead of it",
};
const WAYS = {
  "received shm": "from engines of the node's host",
  "received tcp": "from other nodes",
  "sent tcp": "to other nodes",
  "received gloo": "from device to device, by a lane",
  "received nccl": "from device to device, by a lane",
};

let chart = null;

export function show(now, history, ask) {
  chart ??= new RateChart(byId("chart"));
  const minutes = history.window(now.at);
  const buckets = history.buckets(now.at, minutes);
  const long = history.sums(now.at);
  showTiles(now, history.sums(now.at, NOW_SECONDS), long, history.span(now.at));
  put(byId("rate-span"), `the last ${minutes} minutes, by 10 seconds`);
  chart.show(buckets, now.at);
  showMinutes(history.buckets(now.at, minutes, 60), now.at);
  showMisses(now.misses, long);
  showNodes(now.nodes);
  showTransfers(now.transfers, buckets);
  showHottest(now.hottest, ask);
  put(byId("source"), `Read from Redis by node ${now.node} at ${clock(now.at)}, in ${count(now.asked_seconds * 1000)} ms.`);
}

function showTiles(now, recent, long, span) {
  const lookups = recent.hits + recent.misses;
  const seconds = recent.seconds || 1;
  put(byId("rate"), share(recent.hits, lookups));
  const since = span < 890 ? age(span) : "15 min";
  const all = long.hits + long.misses;
  const none = lookups ? "" : all ? "none within 10 s; " : "no lookups yet; ";
  put(byId("miss-since"), `In ${since}`);
  put(byId("rate-note"), all ? `${none}${share(long.hits, all)} in ${since}` : "no lookups yet");
  unit(byId("lookups"), rate(lookups / seconds), " /s");
  put(byId("lookups-note"), `${rate(recent.hits / seconds)} hits, ${rate(recent.misses / seconds)} misses a second`);

  const nodes = now.nodes.filter((one) => one.state !== "stopped");
  const lost = nodes.filter((one) => one.state !== "alive");
  unit(byId("alive"), count(nodes.length - lost.length), ` of ${nodes.length} alive`);
  const names = lost.slice(0, 2).map((one) => one.node).join(", ");
  put(byId("alive-note"), lost.length ? `dead: ${names}${lost.length > 2 ? ` and ${lost.length - 2} more` : ""}` : nodes.length ? "none is dead" : "none has joined yet");
  byId("alive-note").classList.toggle("bad", lost.length > 0);

  const arenas = nodes.filter((one) => one.state === "alive" && one.capacity_bytes);
  const fullest = arenas.reduce((most, one) => (!most || fill(one) > fill(most) ? one : most), null);
  put(byId("fill"), fullest ? share(fullest.used_bytes, fullest.capacity_bytes) : "–");
  put(byId("fill-note"), fullest ? `${fullest.node}; all: ${share(sum(arenas, "used_bytes"), sum(arenas, "capacity_bytes"))} of ${size(sum(arenas, "capacity_bytes"))}` : "no arena is known");
  put(byId("claims"), count(now.claims));
  put(byId("saved"), size(now.hit_bytes));
  put(byId("saved-note"), `${count(now.hits)} hits since the nodes started`);
}

const fill = (node) => node.used_bytes / node.capacity_bytes;
const sum = (items, name) => items.reduce((all, one) => all + one[name], 0);

function unit(element, number, words) {
  if (!element.firstElementChild) element.replaceChildren("", make("small"));
  element.firstChild.nodeValue = number;
  put(element.lastChild, words);
}

function showMinutes(buckets, now) {
  const newest = Math.floor(now / 60);
  const found = buckets
    .map((sums, place) => ({ sums, minute: newest - (buckets.length - 1 - place) }))
    .filter((one) => one.sums)
    .reverse();
  rows(byId("minutes"), found, (one) => String(one.minute),
    () => make("tr", "", make("td"), make("td", "n"), make("td", "n"), make("td", "n")),
    (row, { sums, minute }) => {
      const texts = [clock(minute * 60, { second: undefined }), share(sums.hits, sums.hits + sums.misses), count(sums.hits), count(sums.misses)];
      texts.forEach((text, place) => put(row.children[place], text));
    });
}

function showMisses(misses, long) {
  const reasons = Object.entries(misses)
    .map(([reason, number]) => ({ reason, number, lately: long.reasons.get(reason) ?? 0 }))
    .sort((one, other) => other.lately - one.lately || other.number - one.number);
  const most = Math.max(1, ...reasons.map((one) => one.lately));
  byId("no-misses").hidden = reasons.length > 0;
  byId("misses").parentElement.hidden = reasons.length === 0;
  put(byId("miss-note"), reasons.length ? `${count(sum(reasons, "number"))} in all` : "");
  rows(byId("misses"), reasons, (one) => one.reason,
    (one) => make("tr", "",
      make("td", "", make("code", "", one.reason), make("span", "note", REASONS[one.reason] ?? ""), make("span", "meter striped", make("i"))),
      make("td", "n"), make("td", "n")),
    (row, one) => {
      row.querySelector("i").style.width = `${(100 * one.lately) / most}%`;
      put(row.children[1], count(one.lately));
      put(row.children[2], count(one.number));
    });
}

const STATES = { alive: "alive", dead: "dead", gone: "gone", stopped: "stopped" };

function showNodes(nodes) {
  const sorted = [...nodes].sort((one, other) => rank(one) - rank(other) || one.node.localeCompare(other.node));
  byId("no-nodes").hidden = nodes.length > 0;
  byId("nodes").closest("table").hidden = nodes.length === 0;
  const mixed = new Set(nodes.map((one) => one.version).filter(Boolean)).size > 1;
  rows(byId("nodes"), sorted, (one) => one.node, buildNode, (row, one) => {
    const [state, name, arena, items, claims, hits, misses] = row.children;
    row.dataset.state = one.state;
    const silent = one.silent_seconds == null ? "" : one.state === "dead" ? `, silent for ${age(one.silent_seconds)}` : ` ${age(one.silent_seconds)} ago`;
    put(state.querySelector(".text"), STATES[one.state] + silent);
    put(name.querySelector(".note"), [one.host, one.endpoint?.replace("tcp://", ""), mixed && one.version && `version ${one.version}`].filter(Boolean).join(" · "));
    const known = one.capacity_bytes != null;
    put(arena.firstChild, known ? `${share(one.used_bytes, one.capacity_bytes)} of ${size(one.capacity_bytes)}` : "–");
    arena.querySelector("i").style.width = known ? `${100 * fill(one)}%` : "0";
    put(items, one.items == null ? "–" : count(one.items));
    put(claims, one.claims == null ? "–" : count(one.claims));
    put(hits, one.hits_per_second == null ? "–" : rate(one.hits_per_second));
    put(misses, one.misses_per_second == null ? "–" : rate(one.misses_per_second));
  });
}

const rank = (one) => ["dead", "gone", "alive", "stopped"].indexOf(one.state);

function buildNode(one) {
  const labelled = (label) => {
    const cell = make("td", "n");
    cell.dataset.label = label;
    return cell;
  };
  const mark = make("span", "mark");
  mark.setAttribute("aria-hidden", "true");
  return make("tr", "",
    make("td", "", make("span", "state", mark, make("span", "text"))),
    make("td", "", make("bdi", "mono", one.node), make("span", "note")),
    make("td", "arena", make("span"), make("span", "meter", make("i"))),
    labelled("Items"), labelled("Claims"), labelled("Hits/s"), labelled("Misses/s"));
}

function showTransfers(transfers, buckets) {
  const used = transfers.filter((one) => one.bytes);
  byId("no-transfers").hidden = used.length > 0;
  byId("transfers").parentElement.hidden = used.length === 0;
  const wayOf = (one) => `${one.direction} ${one.pipe}`;
  rows(byId("transfers"), used, wayOf,
    (one) => make("tr", "",
      make("td", "", make("code", "", one.pipe), ` ${one.direction}`, make("span", "note", WAYS[wayOf(one)] ?? ""), sparkSvg()),
      make("td", "n"), make("td", "n")),
    (row, one) => {
      const speeds = buckets.map((sums) => (sums ? (sums.bytes.get(wayOf(one)) ?? 0) / sums.seconds : 0));
      const most = `${size(Math.max(...speeds))}/s`;
      sparkline(row.querySelector("svg"), speeds, `at most ${most} lately`);
      put(row.children[1], `${size(one.bytes_per_second)}/s`);
      put(row.children[2], size(one.bytes));
    });
}

function showHottest(hottest, ask) {
  byId("no-hits").hidden = hottest.length > 0;
  byId("hottest").closest("table").hidden = hottest.length === 0;
  put(byId("hot-note"), hottest.length ? "by hits of the last minute; press a key to see where it is" : "");
  rows(byId("hottest"), hottest, (one) => `${one.namespace} ${one.key}`,
    (one) => {
      const button = make("button", "plain", make("bdi", "mono", one.key));
      button.type = "button";
      button.addEventListener("click", () => ask(one.key));
      const cells = ["Namespace", "Hits/s", "Hits in all"].map((label, place) => {
        const cell = make("td", place ? "n" : "");
        cell.dataset.label = label;
        return cell;
      });
      cells[0].append(make("bdi", "mono", one.namespace.slice(0, 8)));
      return make("tr", "", make("td", "", button), ...cells);
    },
    (row, one) => {
      put(row.children[2], rate(one.hits_per_second));
      put(row.children[3], count(one.hits));
    });
}
