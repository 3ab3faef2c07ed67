"""Drops this node's items of namespaces that were invalidated.

The store lists invalidated namespaces. Items that are here when this node reads the list are
removed; later inserts stay. For LATE_SECONDS copies from other nodes are removed, too, since those
nodes may read the list later. Called by `registrar` with each beat.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.node.shelf import Shelf
from store import GoneReason, MetadataStore

LATE_SECONDS = 10.0
"""Every node with access to the store reads the list within two seconds."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Invalidations:
    shelf: Shelf
    clock: Callable[[], float]
    wall_clock: Callable[[], float] = time.time
    _heard: dict[str, float] | None = None
    """None until the list was read for the first time."""
    _recent: dict[str, float] = field(default_factory=dict)
    """By namespace: until when copies from other nodes are removed."""
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at = self.wall_clock()

    async def apply(self, store: MetadataStore) -> None:
        """Read the list and remove what it names.

        Raises:
            StoreError: the store did not answer.
        """
        found, now = await store.invalidations(), self.clock()
        for namespace, at in found.items():
            if self._is_news(namespace, at):
                _log.info(
                    "namespace %s was invalidated: its items on this node are removed", namespace
                )
                self.shelf.remove_namespace(namespace, GoneReason.INVALIDATED)
                self._recent[namespace] = now + LATE_SECONDS
        self._heard = found
        for namespace, until in list(self._recent.items()):
            self.shelf.remove_namespace(namespace, GoneReason.INVALIDATED, fetched_only=True)
            if now >= until:
                del self._recent[namespace]

    def _is_news(self, namespace: str, at: float) -> bool:
        if self._heard is None:  # older invalidations are of no concern: this node had no items
            return at >= self._started_at
        return self._heard.get(namespace) != at
