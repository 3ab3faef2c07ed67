"""The observer: a process that a node starts to sample the fleet for the dashboard's page.

Standard input: first the node's name and settings, then questions, one JSON value a line.
Standard output, one line each: `point` (what was counted since the last one), `now` (all that the
page shows), `trouble` (why there is neither) or `answer N`, followed by a JSON value.

The main thread samples once a second. A second thread reads the questions, and a pool answers
them. The process reads the store only, with the code of the commands. It ends when its input ends.
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
from lookup_buffer.dashboard.fleet import FleetSampler, explain, store_error_text
from lookup_buffer.inspection.access import CALL_SECONDS_MIN
from store import BlockingStore, StoreError

INTERVAL_SECONDS = 1.0
"""Time between two samples. Nodes write their heartbeats and counters once a second."""
NICENESS = 10
"""Lower priority than engines and the node: sampling must not slow them down."""
QUESTIONS_AT_ONCE = 2


def main() -> None:
    start = json.loads(sys.stdin.readline())
    os.nice(NICENESS)
    access = BufferConfig.of(start["settings"]).store_access()
    output = LineWriter()
    name = f"{start['node']}:dashboard"
    store = access.open(access.actual_url(), CALL_SECONDS_MIN, name=name)
    threading.Thread(target=answer_questions, args=(sys.stdin, store, output), daemon=True).start()
    try:
        observe(store, start["node"], output)
    except BrokenPipeError:
        os._exit(0)


class LineWriter:
    """Writes the lines for the node to stdout. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, kind: str, value: Any) -> None:
        line = f"{kind} {json.dumps(value, separators=(',', ':'))}\n"
        with self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()


def observe(store: BlockingStore, node: str, output: LineWriter) -> None:
    """Take a sample each second; never returns. BrokenPipeError: the node has ended."""
    with ThreadPoolExecutor(1, "namespaces") as scanner:
        sampler = FleetSampler(store, scanner)
        due = time.monotonic()
        while True:
            try:
                update = sampler.sample()
            except StoreError as error:  # try again: the store may come back
                output.write("trouble", store_error_text(error))
            else:
                if update.point is not None:
                    output.write("point", update.point)
                output.write("now", {"node": node, "point": update.point, **update.now})
            now = time.monotonic()
            due = max(due + INTERVAL_SECONDS, now)
            time.sleep(due - now)


def answer_questions(questions: Iterable[str], store: BlockingStore, output: LineWriter) -> None:
    """Answer questions until the input ends, as the node has ended; then end this process."""
    pool = ThreadPoolExecutor(QUESTIONS_AT_ONCE, "question")

    def answer(question: dict[str, Any]) -> None:
        found = explain(store, question["key"], question["namespace"])
        output.write(f"answer {question['number']}", found)

    for line in questions:
        pool.submit(answer, json.loads(line))
    os._exit(0)
