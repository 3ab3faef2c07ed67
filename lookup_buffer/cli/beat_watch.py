"""Which nodes live, found out within a command: their beats are read until they have moved.

A node beats once a second. No clock of another machine takes part, so nothing less than seeing a
beat change tells a node that lives from one that was killed a moment ago.
"""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from store import Beat, MetadataStore

WATCH_SECONDS = 2.0
"""A beat and a slow machine's delay. A node that is silent for so long is shown as not alive."""
POLL_SECONDS = 0.1


class BeatWatch:
    """Begins to watch when it is made; other work may be done before `settle`."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._until = clock() + WATCH_SECONDS
        self._first = store.beats()
        self.last: dict[str, Beat] = dict(self._first)

    def settle(self, nodes: Iterable[str] | None = None) -> None:
        """Look until each of `nodes` (None: all that beat) has moved, or the time is up."""
        if nodes is None:
            nodes = self._first
        waited_for = [node for node in nodes if node in self._first]
        with _note("waiting for the nodes' beats …"):
            while not all(self._moved(node) for node in waited_for):
                if self._clock() >= self._until:
                    return
                self._sleep(POLL_SECONDS)
                self.last = self._store.beats()

    def alive(self, node: str, boot: str | None = None) -> bool:
        """Whether `node` moved, and is still the start of it that `boot` names."""
        if not self._moved(node):
            return False
        return boot is None or self.last[node].boot == boot

    def _moved(self, node: str) -> bool:
        return node in self.last and self.last[node] != self._first.get(node)


def _note(text: str) -> AbstractContextManager[object]:
    """A note of what takes so long, gone afterwards; only for a person at a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
