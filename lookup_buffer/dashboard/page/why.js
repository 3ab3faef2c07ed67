// The form that asks why a key is a miss, and the answer in sentences.

import { byId, make } from "./format.js";
import { headers } from "./stream.js";

const VERDICTS = { there: "there", coming: "coming", missing: "missing" };
let asked = 0;

export async function ask(key) {
  const mine = (asked += 1);
  const box = byId("answer");
  byId("key").value = key;
  box.hidden = false;
  box.replaceChildren(head(key), make("p", "soft", "Asking Redis …"));
  let shown;
  try {
    const query = new URLSearchParams({ key });
    const answer = await fetch(`dashboard/why?${query}`, { headers: headers(), cache: "no-store" });
    if (answer.ok) shown = found(await answer.json());
    else shown = [head(key), make("p", "", (await answer.text()).trim())];
  } catch {
    shown = [head(key), make("p", "", "The node does not answer; try again when the page is live.")];
  }
  if (mine === asked) box.replaceChildren(...shown);
}

function head(key) {
  const close = make("button", "plain soft", "close");
  close.type = "button";
  close.addEventListener("click", () => {
    asked += 1;
    byId("answer").hidden = true;
    byId("key").focus();
  });
  return make("div", "head", make("h2", "", "Why ", make("bdi", "mono", key)), close);
}

/** Text nodes, and code elements for the parts between backticks. */
function marked(sentence) {
  return sentence.split("`").map((part, place) => (place % 2 ? make("code", "", part) : part));
}

function found(answer) {
  if (answer.problem) return [head(answer.key), make("p", "", answer.problem)];
  const list = make("ul", "findings");
  for (const [place, one] of answer.findings.entries()) {
    const words = make("div", "", make("p", "", ...marked(one.sentence)));
    const again = answer.findings[place + 1]?.hint === one.hint; // equal hints: shown once, after the last
    if (one.hint && !again) words.append(make("p", "soft", "→ ", ...marked(one.hint)));
    if (one.namespace) words.append(make("p", "note", "namespace ", make("bdi", "mono", one.namespace.slice(0, 12))));
    const item = make("li", one.state, make("span", "verdict", VERDICTS[one.state]), words);
    item.dataset.code = one.code;
    list.append(item);
  }
  return [head(answer.key), list];
}
