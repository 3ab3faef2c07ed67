"""The observer: a process that a node starts to sample the fleet for the dashboard's page.

Standard input: first the node's name and settings, then questions, one JSON value a line.
Standard output, one line each: `point` (what was counted since the last one), `now` (all that the
page shows), `trouble` (why there is neither) or `answer N`, followed by a JSON value.

The main thread samples once a second; a second thread reads the questions, which a pool answers.
The process reads the store alone, with the code of the commands. It ends when its input ends.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lookup_buffer.config import BufferConfig
from lookup_buffer.dashboard.fleet import FleetWatch, answer, trouble_text
from lookup_buffer.inspection.records import PATIENCE_SECONDS
from store import MetadataStore, StoreError

INTERVAL_SECONDS = 1.0
"""Between two samples. Nodes write their beats and counters once a second."""
NICENESS = 10
"""Lower priority than engines and the node: watching must not slow them down."""
QUESTIONS_AT_ONCE = 2


class Lines:
    """Writes the lines for the node to stdout. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, kind: str, value: Any) -> None:
        line = f"{kind} {json.dumps(value, separators=(',', ':'))}\n"
        with self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()


def observe(store: MetadataStore, node: str, lines: Lines) -> None:
    """Take a sample each second; never returns. BrokenPipeError: the node has ended."""
    with ThreadPoolExecutor(1, "namespaces") as walker:
        watch = FleetWatch(store, walker)
        due = time.monotonic()
        while True:
            try:
                seen = watch.look()
            except StoreError as error:  # try again: the store may come back
                lines.say("trouble", trouble_text(error))
            else:
                if seen.point is not None:
                    lines.say("point", seen.point)
                lines.say("now", {"node": node, "point": seen.point, **seen.now})
            now = time.monotonic()
            due = max(due + INTERVAL_SECONDS, now)
            time.sleep(due - now)


def heed(questions: Iterable[str], store: MetadataStore, lines: Lines) -> None:
    """Answer questions until the input ends, as the node has ended; then end this process."""
    pool = ThreadPoolExecutor(QUESTIONS_AT_ONCE, "question")

    def find_out(asked: dict[str, Any]) -> None:
        found = answer(store, asked["key"], asked["namespace"])
        lines.say(f"answer {asked['number']}", found)

    for question in questions:
        pool.submit(find_out, json.loads(question))
    os._exit(0)


def main() -> None:
    told = json.loads(sys.stdin.readline())
    os.nice(NICENESS)
    access = BufferConfig.of(told["settings"]).store_access()
    lines = Lines()
    store = access.open(access.actual_url(), PATIENCE_SECONDS)
    threading.Thread(target=heed, args=(sys.stdin, store, lines), daemon=True).start()
    try:
        observe(store, told["node"], lines)
    except BrokenPipeError:
        os._exit(0)
