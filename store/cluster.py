"""ClusterTopology: 16,384 slots over several masters, and what servers say of changes to that."""

import binascii
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from store.budget import Budget
from store.connection import Part, Refusal
from store.dialled import Access, Endpoint
from store.errors import StoreUnavailable
from store.server import Server
from store.topology import PoolMemory, Topology

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
        self._doubted: frozenset[Server] = frozenset()
        self._teller: Server | None = None

    def new_budget(self) -> Budget:
        return Budget(self._access)

    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[PoolMemory]:
        if not self._certain:
            self._load(budget, at_most_each=_RELOAD_SECONDS_MIN)
        unserved = StoreUnavailable("the cluster has no server for this part of its slots")
        slots = self._slots
        places = [slots[slot_of(name)] or unserved for name in names]
        if unserved in places:
            self._certain = False
        return places

    def known_server_for(self, name: Part) -> Server:
        server = self._slots[slot_of(name)]
        # A doubt about one server says nothing against what the map says of the others.
        if server is None or server in self._doubted:
            raise StoreUnavailable("the map of the cluster's slots is being looked for")
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

    def aside(self, endpoint: Endpoint) -> Server:
        with self._lock:
            return self._server(endpoint)

    def doubt(self, server: Server) -> None:
        with self._lock:
            self._doubted |= {server}
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
        """Raises StoreUnavailable where nobody tells and there is no older map to go on with."""
        came_at = time.monotonic()
        if self._loading.acquire(timeout=budget.left):
            try:
                # Unless another caller did, or tried, just now.
                if self._loaded_at <= came_at - at_most_each:
                    self._load_now(budget)
            finally:
                self._loading.release()
        if not self._masters:
            raise StoreUnavailable("no server of the cluster was reached a moment ago")

    def _load_now(self, budget: Budget) -> None:
        try:
            self._take_over(*self._ask(budget))
        except StoreUnavailable:
            if not self._masters:
                raise
        finally:
            self._loaded_at = time.monotonic()

    def _ask(self, budget: Budget) -> tuple[Server, list[Any]]:
        """Somebody's view of the cluster; who told it last is asked first, who is in doubt last."""
        cause: Exception | None = None
        with self._lock:
            candidates = list(dict.fromkeys([*self._masters, *self._known.values()]))
        candidates.sort(key=lambda server: (server in self._doubted, server is not self._teller))
        for server in candidates:
            try:
                with budget.half():
                    (reply,) = server.exchange([("CLUSTER", "SLOTS")], budget)
            except StoreUnavailable as error:
                cause = error
                self.doubt(server)
            else:
                if not isinstance(reply, Refusal) and reply:
                    self._teller = server
                    return server, reply
                cause = StoreUnavailable(f"store {server.endpoint}: {reply or 'no slots assigned'}")
            if not budget.left:
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
            self._doubted = frozenset()

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
    _, _, rest = raw.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if tag and closed else raw, 0) % SLOTS


def _endpoint(host: Any, port: int, teller: Server) -> Endpoint:
    # A server that does not know its own address tells none: it is where we asked it.
    known = host.decode() if host else ""
    return Endpoint(known if known not in ("", "?") else teller.endpoint.host, int(port))
