"""ClusterTopology: 16,384 slots over several masters."""

import binascii
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from store.budget import Budget
from store.connection import ErrorReply, Part
from store.dialled import Access, Endpoint
from store.errors import StoreUnavailable
from store.server import Server
from store.topology import Route, Topology

SLOTS = 16384
_RELOAD_SECONDS_MIN = 0.1
"""The slot map is loaded at most this often, though after a failure thousands of calls a second may
need it. A failover takes a second or more.
"""


class ClusterTopology(Topology):
    """The slot map, as a server of the cluster last reported it.

    It is loaded at the first call and after failures; MOVED corrects single slots. Any known
    server, or a seed, can report it.
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
        self._suspects: frozenset[Server] = frozenset()
        self._map_source: Server | None = None

    def new_budget(self) -> Budget:
        return Budget(self._access)

    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        if not self._certain:
            self._load(budget, at_most_each=_RELOAD_SECONDS_MIN)
        unserved = StoreUnavailable("no server of the cluster serves this key's slot")
        slots = self._slots
        routes = [slots[slot_of(name)] or unserved for name in names]
        if unserved in routes:
            self._certain = False
        return routes

    def known_server_for(self, name: Part) -> Server:
        server = self._slots[slot_of(name)]
        # A suspect server does not make the map's other entries wrong.
        if server is None or server in self._suspects:
            raise StoreUnavailable("the cluster's slot map is being loaded")
        return server

    def place_of(self, name: Part) -> str:
        server = self._slots[slot_of(name)]
        return "" if server is None else str(server.endpoint)

    def servers(self, budget: Budget) -> Sequence[Server]:
        if not self._certain:
            self._load(budget, at_most_each=_RELOAD_SECONDS_MIN)
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

    def ask_server(self, endpoint: Endpoint) -> Server:
        with self._lock:
            return self._server(endpoint)

    def suspect(self, server: Server) -> None:
        with self._lock:
            self._suspects |= {server}
            self._certain = False

    def recheck(self) -> None:
        self._load(self.new_budget(), at_most_each=0.0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            servers = list(self._known.values())
        for server in servers:
            server.close()

    def _load(self, budget: Budget, *, at_most_each: float) -> None:
        """Load the slot map. Raises StoreUnavailable if that fails and there is no older one."""
        came_at = time.monotonic()
        if self._loading.acquire(timeout=budget.left):
            try:
                # Skipped if another caller loaded it, or tried to, just now.
                if self._loaded_at <= came_at - at_most_each:
                    self._load_now(budget)
            finally:
                self._loading.release()
        if not self._masters:
            raise StoreUnavailable("no server of the cluster was reached a moment ago")

    def _load_now(self, budget: Budget) -> None:
        try:
            self._apply_map(*self._fetch_map(budget))
        except StoreUnavailable:
            if not self._masters:
                raise
        finally:
            self._loaded_at = time.monotonic()

    def _fetch_map(self, budget: Budget) -> tuple[Server, list[Any]]:
        """One server's slot map. The last reporter comes first, suspect servers last."""
        cause: Exception | None = None
        with self._lock:
            candidates = list(dict.fromkeys([*self._masters, *self._known.values()]))
        candidates.sort(
            key=lambda server: (server in self._suspects, server is not self._map_source)
        )
        for server in candidates:
            try:
                with budget.half():
                    (reply,) = server.exchange([("CLUSTER", "SLOTS")], budget)
            except StoreUnavailable as error:
                cause = error
                self.suspect(server)
            else:
                if not isinstance(reply, ErrorReply) and reply:
                    self._map_source = server
                    return server, reply
                cause = StoreUnavailable(f"store {server.endpoint}: {reply or 'no slots assigned'}")
            if not budget.left:
                break
        raise StoreUnavailable(f"no server of the cluster reports its slots: {cause}") from cause

    def _apply_map(self, source: Server, view: Iterable[Any]) -> None:
        slots: list[Server | None] = [None] * SLOTS
        with self._lock:
            for first, last, master, *_ in view:
                endpoint = _endpoint(master[0], master[1], source)
                slots[first : last + 1] = [self._server(endpoint)] * (last + 1 - first)
            if slots != self._slots:
                self._changes += self._masters != ()
                self._slots = slots
                self._masters = tuple({at: None for at in slots if at is not None})
            self._certain = True
            self._suspects = frozenset()

    def _server(self, endpoint: Endpoint) -> Server:
        """The lock must be held."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        server = self._known.get(endpoint)
        if server is None:
            server = self._known[endpoint] = Server(endpoint, self._access)
        return server


def slot_of(name: Part) -> int:
    """The slot of a key: CRC16 of the text in its first braces, or of the whole name."""
    raw = name if isinstance(name, bytes) else str(name).encode("utf-8", "surrogatepass")
    _, _, rest = raw.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if tag and closed else raw, 0) % SLOTS


def _endpoint(host: Any, port: int, source: Server) -> Endpoint:
    # A server that does not know its own address reports none: use the address of this connection.
    known = host.decode() if host else ""
    return Endpoint(known if known not in ("", "?") else source.endpoint.host, int(port))
