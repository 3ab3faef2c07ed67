// The page: reads the stream, shows its events, sends questions, and prompts for the token.

import { byId, clock, put } from "./format.js";
import { History } from "./history.js";
import { show } from "./panels.js";
import { Refused, listen } from "./stream.js";
import { ask } from "./why.js";

const history = new History();
let last = null;
let trouble = null;
let connection = "wait";
let frame = 0;

function state(name, text) {
  connection = name;
  byId("status").dataset.state = trouble && name === "live" ? "lost" : name;
  const live = trouble ? "no data" : last ? `live, ${clock(last.at)}` : "live";
  put(byId("status").querySelector(".text"), text ?? live);
  warn();
}

function warn() {
  const lost = connection === "lost";
  const seen = last ? ` The data below is of ${clock(last.at)}.` : "";
  const text = lost ? `The connection to the node is lost.${seen}` : trouble ? `${trouble}.${seen}` : "";
  byId("banner").hidden = !text;
  put(byId("banner"), text);
  byId("board").classList.toggle("stale", Boolean(text));
}

/** Draws at most once per frame, however fast events come, and not while the page is hidden. */
function draw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    show(last, history, ask);
  });
}

function on(name, value) {
  if (name === "history") history.replace(value);
  else if (name === "trouble") {
    trouble = value;
    state("live");
  } else if (name === "now") {
    trouble = null;
    last = value;
    if (value.point) history.add(value.point);
    state("live");
    draw();
  }
}

async function begin() {
  byId("login").hidden = true;
  byId("board").hidden = false;
  try {
    await listen(on, state);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    sessionStorage.removeItem("http_token");
    put(byId("refused"), "The node refused that token.");
    login();
  }
}

function login() {
  state("wait", "waiting for the token");
  byId("board").hidden = true;
  byId("login").hidden = false;
  byId("token").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("http_token", byId("token").value.trim());
  byId("token").value = "";
  put(byId("refused"), "");
  begin();
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(byId("key").value.trim());
});
if (document.body.dataset.access === "token" && !sessionStorage.getItem("http_token")) login();
else begin();
