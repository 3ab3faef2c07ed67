// The live stream: server-sent events, read by fetch, since EventSource cannot send the token's header.

const QUIET_MS = 20_000; // the node sends something every five seconds
const PAUSES_MS = [1000, 2000, 4000, 8000];

export class Refused extends Error {}

export function headers() {
  const token = sessionStorage.getItem("http_token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** Reads events without end and calls `on(name, value)` for each; connects again after a failure.
 *  Calls `state(name, text)` when the state of the connection changes. Throws Refused if the node
 *  refuses the token. */
export async function listen(on, state) {
  for (let failed = 0; ; failed += 1) {
    let why = "the node does not answer";
    try {
      await readEvents(on, () => {
        failed = 0;
        state("live");
      });
    } catch (error) {
      if (error instanceof Refused) throw error;
      if (error.sentence) why = error.sentence;
    }
    const pause = PAUSES_MS[Math.min(failed, PAUSES_MS.length - 1)];
    for (let left = pause; left > 0; left -= 1000) {
      state("lost", `connection lost, trying again in ${left / 1000} s (${why})`);
      await new Promise((done) => setTimeout(done, 1000));
    }
    state("wait", "connecting …");
  }
}

async function readEvents(on, alive) {
  const ending = new AbortController();
  let quiet = setTimeout(() => ending.abort(), QUIET_MS);
  try {
    const options = { headers: headers(), cache: "no-store", signal: ending.signal };
    const answer = await fetch("dashboard/stream", options);
    if (answer.status === 401) throw new Refused();
    if (!answer.ok) throw Object.assign(new Error(), { sentence: (await answer.text()).trim() });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(quiet);
      quiet = setTimeout(() => ending.abort(), QUIET_MS);
      alive();
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) dispatch(event, on);
    }
  } finally {
    clearTimeout(quiet);
  }
}

function dispatch(event, on) {
  const match = /^event: (\w+)\ndata: ([^]*)$/.exec(event);
  if (match) on(match[1], JSON.parse(match[2]));
}
