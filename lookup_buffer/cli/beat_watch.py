"""Which nodes live, found out within a command: their beats are read until they have moved.

A node beats once a second. No clock of another machine takes part, so nothing less than seeing a
beat change tells a node that lives from one that was killed a moment ago.
"""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from lookup_buffer.times import SILENT_SECONDS
from store import Beat, MetadataStore

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
        self._until = clock() + SILENT_SECONDS
        self._first = store.beats()
        self.last: dict[str, Beat] = dict(self._first)
        self._fresh: dict[str, str] = {}
        """Boots that described themselves a moment before somebody glanced at them."""

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

    def glance(self, nodes: Iterable[str]) -> None:
        """Take those for alive that described themselves a moment ago, without waiting for a beat.

        Where nobody did, though nodes are listed, they may have been refused (a full server keeps
        beats only): then it is waited as `settle` does.
        """
        nodes = [node for node in nodes if node in self._first and node not in self._fresh]
        ages = self._store.node_ages(nodes)
        fresh = [node for node, seconds in ages.items() if seconds < SILENT_SECONDS]
        for node, info in self._store.node_infos(fresh).items():
            self._fresh[node] = info.boot
        if nodes and not self._fresh:
            self.settle(nodes)

    def alive(self, node: str, boot: str | None = None) -> bool:
        """Whether `node` moved, and is still the start of it that `boot` names."""
        beat = self.last.get(node)
        if beat is None or not (self._moved(node) or self._fresh.get(node) == beat.boot):
            return False
        return boot is None or beat.boot == boot

    def _moved(self, node: str) -> bool:
        return node in self.last and self.last[node] != self._first.get(node)


def _note(text: str) -> AbstractContextManager[object]:
    """A note of what takes so long, gone afterwards; only for a person at a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
