"""Drops this node's items of namespaces that the store lists as invalidated.

Each mark is heeded once, by its id: one that the store lost and that a snapshot of it brings back
removes nothing again. Its time says nothing about which of two marks is newer, since whoever can
write the store, or has a wrong clock, would else make the later ones void.

Items that are here when a mark is read are removed; later inserts stay. For LATE_SECONDS copies
from other nodes are removed, too, since those nodes may read the list later; copies that are on
their way meanwhile are not kept, however late they come. Of more namespaces than are remembered,
which only a writer of the store invalidates at once, copies of all are: marks of his hide none.
`registrar` has the list read with each beat. A task of its own removes the items: 300,000 take
seconds, and a beat that waited for them would make a living node look dead. All on the loop's
thread. It writes nothing to the store.
"""

import asyncio
import logging
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from lookup_buffer.node.arena import Arena
from lookup_buffer.node.items import Item
from lookup_buffer.times import Clock
from store import INVALIDATIONS_MAX, GoneReason, Invalidation, MetadataStore

LATE_SECONDS = 10.0
"""Every node with access to the store reads the list within two seconds."""
CLOCKS_SECONDS: Final = 60.0
"""The clocks of two hosts differ by less. A mark older than the start of this node by more was set
before this node had items."""
SEEN_MAX: Final = 2 * INVALIDATIONS_MAX
"""Marks that are remembered: those of the list, and as many that the store has lost."""
PAGE: Final = 200
"""So many items are removed in one iteration of the loop: at most 6 ms measured."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Invalidations:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    wall_clock: Clock = time.time
    _seen: dict[tuple[str, str], None] | None = None
    """Namespaces and ids of marks that were read, SEEN_MAX at most, those read last at the end;
    None until the list was read for the first time."""
    _recent: dict[str, float] = field(default_factory=dict)
    """By namespace: until when copies from other nodes are removed. INVALIDATIONS_MAX at most."""
    _all_until: float | None = None
    """The same of all namespaces, once there were more."""
    _doomed: dict[Item, None] = field(default_factory=dict)
    """What is to be removed."""
    _removal: "asyncio.Task[None] | None" = None
    _has_warned: bool = False
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at = self.wall_clock()

    async def apply(self, store: MetadataStore) -> None:
        """Read the list, and see to it that what it names is removed.

        Raises:
            StoreError: the store did not answer.
        """
        found, now = await store.invalidations(), self.loop.time()
        if len(found) >= INVALIDATIONS_MAX and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the store lists %d invalidated namespaces or more: others are ignored",
                INVALIDATIONS_MAX,
            )
        news = {name: None for name, mark in found.items() if self._is_news(name, mark)}
        if news:
            self._doom_all(news)
            self._note(news, now + LATE_SECONDS)
        if news or self._seen is None:
            self._remember(found)
        self._doom_copies(now)
        self._start_removal()

    def close(self) -> None:
        if self._removal is not None:
            self._removal.cancel()

    def _doom_all(self, news: Container[str]) -> None:
        """In one walk over the items: the list may name any number of namespaces."""
        items = self.arena.items_of(news)
        self._doomed |= dict.fromkeys(items)
        for namespace in {item.address[0] for item in items}:
            _log.info("namespace %s was invalidated: its items on this node are removed", namespace)

    def _note(self, news: Iterable[str], until: float) -> None:
        self._recent |= dict.fromkeys(news, until)
        if len(self._recent) > INVALIDATIONS_MAX:
            if self._all_until is None:
                _log.warning(
                    "over %d namespaces were invalidated within %d s: what is fetched from other "
                    "nodes is removed meanwhile, of all namespaces",
                    INVALIDATIONS_MAX, LATE_SECONDS,
                )  # fmt: skip
            self._recent, self._all_until = {}, until

    def _doom_copies(self, now: float) -> None:
        """Those of other nodes, which may read the marks later than this one."""
        namespaces = self._recent if self._all_until is None else None
        if namespaces or namespaces is None:
            self.arena.invalidate_copies(namespaces)
            copies = self.arena.items_of(namespaces, fetched_only=True)
            self._doomed |= dict.fromkeys(copies)
        self._recent = {space: until for space, until in self._recent.items() if now < until}
        if self._all_until is not None and now >= self._all_until:
            self._all_until = None

    def _start_removal(self) -> None:
        last = self._removal
        if self._doomed and (last is None or last.done()):
            self._removal = self.loop.create_task(self._remove())
            if last is not None:
                last.result()  # which raises if a bug has ended it

    async def _remove(self) -> None:
        while self._doomed:
            for _ in range(min(PAGE, len(self._doomed))):
                item, _ = self._doomed.popitem()
                self.arena.remove(item, GoneReason.INVALIDATED)
            await asyncio.sleep(0)

    def _is_news(self, namespace: str, mark: Invalidation) -> bool:
        if self._seen is None:
            return mark.at > self._started_at - CLOCKS_SECONDS
        return (namespace, mark.id) not in self._seen

    def _remember(self, found: Mapping[str, Invalidation]) -> None:
        """Also marks that the store has lost: a snapshot of it may bring them back."""
        listed = {(namespace, mark.id): None for namespace, mark in found.items()}
        others = [mark for mark in self._seen or () if mark not in listed]
        forgotten = max(0, len(others) + len(listed) - SEEN_MAX)
        self._seen = dict.fromkeys(islice(others, forgotten, None)) | listed
