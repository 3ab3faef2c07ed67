"""SentinelTopology: one master, named by Sentinel, which may name another at any time."""

import threading
from collections.abc import Sequence

from store.budget import Budget
from store.connection import ErrorReply, Part
from store.dialled import Access, Endpoint
from store.errors import StoreUnavailable
from store.server import Server
from store.topology import Route, Topology


class SentinelTopology(Topology):
    """Queries the sentinels in turn. One that failed, or named a failed master, moves to the end.

    If no sentinel replies, the last known master is used: without sentinels nothing replaces it.

    A former master that Sentinel still names replies READONLY. Like any failure, this makes the
    next call query the sentinels again. So nothing is ever written to a replica. A call to a
    deposed master costs an error, and never a wrong result for long.
    """

    def __init__(
        self,
        sentinels: Sequence[Endpoint],
        service: str,
        access: Access,
        sentinel_access: Access,
    ) -> None:
        self._sentinels = tuple(Server(endpoint, sentinel_access) for endpoint in sentinels)
        self._service = service
        self._access = access
        self._lock = threading.Lock()
        self._known: dict[Endpoint, Server] = {}
        self._master: Server | None = None
        self._certain = False
        self._changes = 0
        self._closed = False

    def new_budget(self) -> Budget:
        return Budget(self._access)

    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        return self.servers(budget) * len(names)

    def known_server_for(self, name: Part) -> Server:
        master = self._master
        if master is None or not self._certain:
            raise StoreUnavailable(f"the master of {self._service!r} is being looked up")
        return master

    def servers(self, budget: Budget) -> tuple[Server]:
        master = self._master
        if master is not None and self._certain:
            return (master,)
        return (self._find(budget),)

    def failovers(self) -> int:
        with self._lock:
            return self._changes + sum(server.losses for server in self._known.values())

    def suspect(self, server: Server) -> None:
        if server is self._master and self._certain:
            self._certain = False
            self._move_to_end(self._sentinels[0])  # it may have stale information

    def recheck(self) -> None:
        self._find(self.new_budget())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            servers = [*self._sentinels, *self._known.values()]
        for server in servers:
            server.close()

    def _find(self, budget: Budget) -> Server:
        try:
            endpoint = self._query(budget)
        except StoreUnavailable:
            with self._lock:
                if self._master is None or self._closed:
                    raise
                self._certain = True  # until the next failure
                return self._master
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            master = self._known.get(endpoint)
            if master is None:
                master = self._known[endpoint] = Server(endpoint, self._access)
            if self._master is not None and self._master is not master:
                self._changes += 1
            self._master = master
            self._certain = True
            return master

    def _query(self, budget: Budget) -> Endpoint:
        cause: Exception | None = None
        for sentinel in self._sentinels:
            try:
                with budget.half():
                    (reply,) = sentinel.exchange(
                        [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)], budget
                    )
            except StoreUnavailable as error:
                cause = error
            else:
                if not isinstance(reply, ErrorReply) and reply:
                    host, port = reply
                    return Endpoint(host.decode(), int(port))
                cause = StoreUnavailable(
                    f"sentinel {sentinel.endpoint} knows no service {self._service!r}: {reply}"
                )
            self._move_to_end(sentinel)
            if not budget.left:
                break
        raise StoreUnavailable(f"no sentinel names a master of {self._service!r}") from cause

    def _move_to_end(self, sentinel: Server) -> None:
        with self._lock:
            others = [other for other in self._sentinels if other is not sentinel]
            self._sentinels = (*others, sentinel)
