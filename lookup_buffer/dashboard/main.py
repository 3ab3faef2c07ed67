"""The observer's process: told by its node whom it is for, it says a line each second.

Standard input: first the node's name and settings, then questions, one a line. Standard output:
`point` (what happened since the last), `now` (all that the page shows), `trouble` (why there is
neither) and `answer N`, each with a JSON value behind it. It asks the store alone, as the command
line does, with whose code it finds things out; it ends when its input does.
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
"""Nodes beat, and write what they counted, once a second."""
NICENESS = 10
"""Who looks on waits for who works."""
QUESTIONS_AT_ONCE = 2


class Lines:
    """What is said to the node. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, kind: str, value: Any) -> None:
        line = f"{kind} {json.dumps(value, separators=(',', ':'))}\n"
        with self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()


def observe(store: MetadataStore, node: str, lines: Lines) -> None:
    """Look each second, for ever."""
    with ThreadPoolExecutor(1, "namespaces") as walker:
        watch = FleetWatch(store, walker)
        due = time.monotonic()
        while True:
            try:
                seen = watch.look()
            except StoreError as error:  # it may come back
                lines.say("trouble", trouble_text(error))
            else:
                if seen.point is not None:
                    lines.say("point", seen.point)
                lines.say("now", {"node": node, "point": seen.point, **seen.now})
            now = time.monotonic()
            due = max(due + INTERVAL_SECONDS, now)
            time.sleep(due - now)


def heed(questions: Iterable[str], store: MetadataStore, lines: Lines) -> None:
    """Answer, until the node has gone: then so does this process."""
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
