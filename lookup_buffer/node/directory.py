"""The directory: which other nodes live and where they listen, as read from the store.

Refreshed once a second by the registrar, and by the locator when a record names a node that is
not known yet. Any thread may ask.
"""

import threading
import time
from collections.abc import Callable, Iterable

from lookup_buffer.liveness import Liveness
from store import Location, MetadataStore, NodeInfo, Record

REFRESH_SECONDS_MIN = 0.05
"""An unknown node in a record refreshes the directory at most this often."""


class Directory:
    """Thread-safe."""

    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._liveness = Liveness()
        self._infos: dict[tuple[str, str], NodeInfo] = {}
        self._refreshed_at = -REFRESH_SECONDS_MIN
        self._endpoints: dict[tuple[str, str], str] = {}
        self.epoch = 0
        """Grows when a node came, went, or moved: what was judged before then is out of date."""

    def refresh(self, store: MetadataStore) -> None:
        """Read all beats, and the description of every boot that is new.

        Raises:
            StoreError: the store did not answer.
        """
        beats = store.beats()
        with self._lock:
            self._refreshed_at = self._clock()
            observed = {node: (beat.boot, beat.sequence) for node, beat in beats.items()}
            self._liveness.observe(observed, self._refreshed_at)
            boots = set(self._liveness.boots())
            self._infos = {boot: info for boot, info in self._infos.items() if boot in boots}
            unknown = [node for node, boot in boots if (node, boot) not in self._infos]
        if unknown:
            infos = store.node_infos(unknown)
            with self._lock:
                for info in infos.values():
                    self._infos[info.node, info.boot] = info
        self.tick()

    def tick(self) -> None:
        """See who has died since. To be called each second, also while the store is away."""
        with self._lock:
            now = self._clock()
            endpoints = {
                (node, boot): info.endpoint
                for (node, boot), info in self._infos.items()
                if node != self._node and self._liveness.alive(node, boot, now)
            }
            if endpoints != self._endpoints:
                self._endpoints = endpoints
                self.epoch += 1

    def endpoint(self, location: Location) -> str | None:
        """Where to fetch from `location`; None when that boot of the node is not alive, or us."""
        return self._endpoints.get((location.node, location.boot))

    def meet(self, store: MetadataStore, records: Iterable[Record | None]) -> None:
        """Read the directory if one of the records names a node that was never seen.

        Raises:
            StoreError: the store did not answer.
        """
        if not all(self.knows(at) for record in records if record for at in record.locations):
            self.refresh(store)

    def knows(self, location: Location) -> bool:
        """Whether this boot of the node has been seen, or a refresh is not due yet."""
        with self._lock:
            known = location.node == self._node or (location.node, location.boot) in self._infos
            return known or self._clock() - self._refreshed_at < REFRESH_SECONDS_MIN
