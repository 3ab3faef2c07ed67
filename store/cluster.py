"""ClusterTopology: 16,384 slots over several masters, and what servers say of changes to that."""

import threading
import time
from binascii import crc_hqx
from collections.abc import Iterable, Sequence
from typing import Any

from store.connection import Access, Endpoint, Part, Refusal
from store.errors import StoreUnavailable
from store.server import Server
from store.topology import Topology

SLOTS = 16384
_RELOAD_SECONDS_MIN = 0.1
"""After a failure callers may come in thousands a second; the map is asked for this often at most.
A failover takes a second and more."""


class ClusterTopology(Topology):
    """The map of slots, as some node of the cluster last told it.

    Loaded at the first call and after failures; single slots are corrected by MOVED. Any server
    known, and the seeds, may be asked.
    """

    def __init__(self, seeds: Sequence[Endpoint], access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._known = {seed: Server(seed, access) for seed in seeds}
        self._slots: list[Server | None] = [None] * SLOTS
        self._masters: tuple[Server, ...] = ()
        self._certain = False
        self._loaded_at = -_RELOAD_SECONDS_MIN
        self._changes = 0
        self._closed = False
        self._doubted: Server | None = None

    def server_for(self, name: Part) -> Server:
        if not self._certain:
            self._load(at_most_each=_RELOAD_SECONDS_MIN)
        server = self._slots[slot_of(name)]
        if server is None:
            self._certain = False
            raise StoreUnavailable("the cluster has no server for a part of its slots")
        return server

    def known_server_for(self, name: Part) -> Server:
        server = self._slots[slot_of(name)]
        if server is None or not self._certain:
            raise StoreUnavailable("the map of the cluster's slots is being looked for")
        return server

    def servers(self) -> Sequence[Server]:
        if not self._certain:
            self._load(at_most_each=_RELOAD_SECONDS_MIN)
        return self._masters

    def failovers(self) -> int:
        with self._lock:
            return self._changes + sum(server.losses for server in self._known.values())

    def moved(self, name: Part, endpoint: Endpoint) -> Server:
        slot = slot_of(name)
        with self._lock:
            server = self._server(endpoint)
            if self._slots[slot] is not server:
                self._slots[slot] = server
                self._changes += 1
                self._masters = tuple({at: None for at in self._slots if at is not None})
        return server

    def aside(self, endpoint: Endpoint) -> Server:
        with self._lock:
            return self._server(endpoint)

    def doubt(self, server: Server) -> None:
        self._doubted = server
        self._certain = False

    def recheck(self) -> None:
        self._load(at_most_each=0.0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            servers = list(self._known.values())
        for server in servers:
            server.close()

    def _load(self, *, at_most_each: float) -> None:
        with self._loading:
            if time.monotonic() - self._loaded_at < at_most_each:
                return  # another caller did, or tried, just now
            self._loaded_at = time.monotonic()
            self._take_over(*self._ask())

    def _ask(self) -> tuple[Server, list[Any]]:
        """Somebody's view of the cluster; the one in doubt is asked last."""
        cause: Exception | None = None
        with self._lock:
            candidates = list(dict.fromkeys([*self._masters, *self._known.values()]))
        candidates.sort(key=lambda server: server is self._doubted)
        deadline = time.monotonic() + self._access.call_timeout_seconds
        for server in candidates:
            try:
                (reply,) = server.exchange([("CLUSTER", "SLOTS")], deadline)
            except StoreUnavailable as error:
                cause = error
                self._doubted = server
            else:
                if not isinstance(reply, Refusal) and reply:
                    return server, reply
                cause = StoreUnavailable(f"store {server.endpoint}: {reply or 'no slots assigned'}")
            if time.monotonic() >= deadline:
                break
        raise StoreUnavailable(f"no server of the cluster tells its slots: {cause}") from cause

    def _take_over(self, teller: Server, view: Iterable[Any]) -> None:
        slots: list[Server | None] = [None] * SLOTS
        with self._lock:
            for first, last, master, *_ in view:
                endpoint = _endpoint(master[0], master[1], teller)
                slots[first : last + 1] = [self._server(endpoint)] * (last + 1 - first)
            if slots != self._slots:
                self._changes += self._masters != ()
                self._slots = slots
                self._masters = tuple({at: None for at in slots if at is not None})
            self._certain = True

    def _server(self, endpoint: Endpoint) -> Server:
        """Call it with the lock held."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        server = self._known.get(endpoint)
        if server is None:
            server = self._known[endpoint] = Server(endpoint, self._access)
        return server


def slot_of(name: Part) -> int:
    """The slot of a key: of what stands in its first braces, where it has any."""
    raw = name if isinstance(name, bytes) else str(name).encode("utf-8", "surrogatepass")
    start = raw.find(b"{")
    end = raw.find(b"}", start + 1)
    tag = raw[start + 1 : end] if 0 <= start < end - 1 else raw
    return crc_hqx(tag, 0) % SLOTS


def _endpoint(host: Any, port: int, teller: Server) -> Endpoint:
    # A server that does not know its own address tells none: it is where we asked it.
    known = host.decode() if host else ""
    return Endpoint(known if known not in ("", "?") else teller.endpoint.host, int(port))
