"""Invalidations: namespaces that somebody gave up, and what this node has of them still.

The store says when a namespace was given up. What lies here when this node hears of it goes; what
is inserted later stays. For some seconds what comes from other nodes goes as well, which may hear
of it later than this one. Runs on the registrar's thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.node.shelf import Shelf
from store import GoneReason, MetadataStore

LATE_SECONDS = 10.0
"""Every node that is not cut off from the store hears within two."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Invalidations:
    shelf: Shelf
    clock: Callable[[], float]
    wall_clock: Callable[[], float] = time.time
    _heard: dict[str, float] | None = None
    """None until the store was read for the first time."""
    _recent: dict[str, float] = field(default_factory=dict)
    """By namespace until when copies of other nodes are dropped."""
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at = self.wall_clock()

    def heed(self, store: MetadataStore) -> None:
        """Drop what is to be dropped.

        Raises:
            StoreError: the store did not answer.
        """
        found, now = store.invalidations(), self.clock()
        for namespace, at in found.items():
            if self._is_news(namespace, at):
                _log.info("all of namespace %s is dropped: it was invalidated", namespace)
                self.shelf.remove_namespace(namespace, GoneReason.INVALIDATED)
                self._recent[namespace] = now + LATE_SECONDS
        self._heard = found
        for namespace, until in list(self._recent.items()):
            self.shelf.remove_namespace(namespace, GoneReason.INVALIDATED, fetched_only=True)
            if now >= until:
                del self._recent[namespace]

    def _is_news(self, namespace: str, at: float) -> bool:
        if self._heard is None:  # what was given up before this node had anything is no news
            return at >= self._started_at
        return self._heard.get(namespace) != at
