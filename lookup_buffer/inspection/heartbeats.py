"""Liveness of nodes within one command, by their heartbeats.

A node sends a heartbeat once a second. `HeartbeatMonitor` reads the heartbeats until they have
changed. Only such a change distinguishes a live node from one that was killed a moment ago. No
clock of another machine is used.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from lookup_buffer.times import SILENT_SECONDS, Clock
from store import Beat, BrowsableStore, MetadataStore

POLL_SECONDS = 0.1


class HeartbeatMonitor:
    """Decides which nodes are alive. `begin` reads all heartbeats, and `wait` again.

    Other work may be done between the two.
    """

    def __init__(
        self,
        store: MetadataStore,
        first: dict[str, Beat],
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._until = clock() + SILENT_SECONDS
        self._first = first
        self.last: dict[str, Beat] = dict(first)
        self._fresh: dict[str, str] = {}
        """Boot by node, for nodes whose description `note_fresh` found fresh."""

    @classmethod
    async def begin(cls, store: MetadataStore) -> "HeartbeatMonitor":
        return cls(store, await store.beats())

    async def wait(self, nodes: Iterable[str] | None = None) -> None:
        """Read heartbeats until each of `nodes` is known to be alive, or the time is up.

        None means all nodes with a heartbeat. The time ends SILENT_SECONDS after this object was
        made.
        """
        if nodes is None:
            nodes = self._first
        awaited = [node for node in nodes if node in self._first]
        if all(map(self.alive, awaited)):
            return
        with progress_shown("waiting for the nodes' heartbeats …"):
            while not all(map(self.alive, awaited)):
                if self._clock() >= self._until:
                    return
                await self._sleep(POLL_SECONDS)
                self.last = await self._store.beats()

    async def note_fresh(self, nodes: Iterable[str]) -> None:
        """Count those of `nodes` as alive whose description is younger than SILENT_SECONDS.

        An older description tells nothing: a full server may refuse descriptions, and keeps
        heartbeats only. A store that tells no ages has no fresh ones.
        """
        if isinstance(self._store, BrowsableStore):
            nodes = [node for node in nodes if node in self._first and node not in self._fresh]
            ages = await self._store.node_ages(nodes)
            fresh = [node for node, seconds in ages.items() if seconds < SILENT_SECONDS]
            for node, info in (await self._store.node_infos(fresh)).items():
                self._fresh[node] = info.boot

    async def wait_unless_fresh(self, nodes: Iterable[str]) -> None:
        """As `note_fresh`; then as `wait` if no description was fresh so far.

        So a list of records is not delayed by each node that is dead.
        """
        nodes = list(nodes)
        await self.note_fresh(nodes)
        if nodes and not self._fresh:
            await self.wait(nodes)

    def alive(self, node: str, boot: str | None = None) -> bool:
        """Whether the heartbeat of `node` has changed, or its description was fresh.

        With `boot`: and the node still runs as that boot.
        """
        beat = self.last.get(node)
        if beat is None or not (self._has_changed(node) or self._fresh.get(node) == beat.boot):
            return False
        return boot is None or beat.boot == boot

    def _has_changed(self, node: str) -> bool:
        return node in self.last and self.last[node] != self._first.get(node)


def progress_shown(text: str) -> AbstractContextManager[object]:
    """Show `text` while the block runs and remove it afterwards; only if stderr is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
