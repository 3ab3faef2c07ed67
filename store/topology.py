"""Topologies: which server holds which key. One server, a master named by Sentinel, or a cluster.

All methods run on one loop. Errors are those of MetadataStore.
"""

import asyncio
import binascii
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from redis.credentials import CredentialProvider

from store.connections import Access, Endpoint
from store.errors import StoreUnavailable
from store.replies import REFUSALS, Part, translated
from store.server import Budget, Server
from store.url import StoreUrl

SLOTS = 16384
RELOAD_SECONDS_MIN = 0.1
"""The slot map is loaded at most this often, though after a failure thousands of calls a second may
need it. A failover takes a second or more.
"""
LEFT_MAX = 32
"""So many servers of a cluster are remembered that hold no keys: some return, as replicas do."""
Route = Server | StoreUnavailable
"""The server for a command, or the error why there is none."""

_IS_A_CLUSTER = "store: the server is part of a cluster; use a URL with redis-cluster://"


class Topology(ABC):
    has_shards: ClassVar[bool] = False
    """Whether keys are on several servers, so that no caller should wait for one that hangs: it may
    have to call the others next.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self.closed = False
        self._known: dict[Endpoint, Server] = {}
        self._changes = 0
        self.version = 0
        """Counts changes of which server holds which key."""

    def new_budget(self) -> Budget:
        """The deadline of one operation that starts now."""
        if self.closed:
            raise StoreUnavailable("the store is closed")
        return Budget.of(self.access)

    @abstractmethod
    async def route(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        """The server of each key, or an error if no server has it."""

    @abstractmethod
    async def servers(self, budget: Budget) -> Sequence[Server]:
        """All servers that hold keys."""

    @abstractmethod
    def known_server_for(self, name: Part) -> Server:
        """The server of one key, without I/O. Raises StoreUnavailable if it is unknown."""

    @abstractmethod
    def holder_of(self, name: Part) -> Server | None:
        """As `known_server_for`, also if calls of that server fail now; None if it is unknown."""

    @abstractmethod
    async def suspect(self, server: Server, *, demoted: bool = False) -> None:
        """A call to `server` failed, or `demoted`: it takes no writes. The next call checks."""

    def serves(self, server: Server) -> bool:
        """Whether `server` holds keys, as far as it is known."""
        return True

    def place_of(self, name: Part) -> str:
        """The name of the key's server as far as it is known, without I/O."""
        return ""  # all keys are on one server at a time

    async def moved(self, budget: Budget) -> None:
        """Keys were elsewhere (MOVED): read anew where they are."""
        raise StoreUnavailable(_IS_A_CLUSTER)

    def server_at(self, endpoint: Endpoint) -> Server:
        """The server at `endpoint`, to which a command was redirected."""
        raise StoreUnavailable(_IS_A_CLUSTER)

    async def recheck(self) -> None:
        """Check for changes now, in one round trip; for callers that cache what they read."""
        return  # nothing ever changes

    def failovers(self) -> int:
        """How many replacements and restarts of servers were noticed."""
        return self._changes + sum(server.losses for server in list(self._known.values()))

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self.closed = True
        await asyncio.gather(*(server.close() for server in list(self._known.values())))
        await self.access.close()

    def _server(self, endpoint: Endpoint) -> Server:
        if self.closed:
            raise StoreUnavailable("the store is closed")
        server = self._known.get(endpoint)
        if server is None:
            server = self._known[endpoint] = Server(endpoint, self.access)
        return server


class Standalone(Topology):
    """One server. If it takes no more writes, its name may stand for another one by now."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        super().__init__(access)
        self._the_server = self._server(endpoint)
        self._servers = (self._the_server,)

    async def route(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        return [self._the_server] * len(names)

    async def servers(self, budget: Budget) -> Sequence[Server]:
        return self._servers

    def holder_of(self, name: Part) -> Server:
        return self._the_server

    def known_server_for(self, name: Part) -> Server:
        return self._the_server

    async def suspect(self, server: Server, *, demoted: bool = False) -> None:
        if demoted:
            await server.reset()


class SentinelTopology(Topology):
    """One master, named by Sentinel, which may name another at any time.

    Queries the sentinels in turn. One that failed, or named a failed master, moves to the end. If
    no sentinel replies, the last known master is used: without sentinels nothing replaces it.

    A former master that Sentinel still names replies READONLY. Like any failure, this makes the
    next call query the sentinels again. So nothing is ever written to a replica.
    """

    def __init__(
        self,
        sentinels: Sequence[Endpoint],
        service: str,
        access: Access,
        sentinel_access: Access,
    ) -> None:
        super().__init__(access)
        self._sentinels = [Server(endpoint, sentinel_access, "sentinel") for endpoint in sentinels]
        self._service = service
        self._master: Server | None = None
        self._certain = False

    async def route(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        return list(await self.servers(budget)) * len(names)

    async def servers(self, budget: Budget) -> Sequence[Server]:
        if self._master is not None and self._certain:
            return (self._master,)
        return (await self._find(budget),)

    def holder_of(self, name: Part) -> Server | None:
        return self._master

    def known_server_for(self, name: Part) -> Server:
        if self._master is None or not self._certain:
            raise StoreUnavailable(f"the master of {self._service!r} is being looked up")
        return self._master

    async def suspect(self, server: Server, *, demoted: bool = False) -> None:
        if server is self._master and self._certain:
            self._certain = False
            self._sentinels.append(self._sentinels.pop(0))  # it may have stale information

    def serves(self, server: Server) -> bool:
        return server is self._master

    async def recheck(self) -> None:
        await self._find(self.new_budget())

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(sentinel.close() for sentinel in self._sentinels))

    async def _find(self, budget: Budget) -> Server:
        try:
            endpoint = await self._ask_sentinels(budget)
        except StoreUnavailable:
            if self._master is None or self.closed:
                raise
            self._certain = True  # until the next failure
            return self._master
        master = self._server(endpoint)
        if self._master is not master:
            self._changes += self._master is not None
            self.version += 1
        self._master, self._certain = master, True
        return master

    async def _ask_sentinels(self, budget: Budget) -> Endpoint:
        cause: Exception | None = None
        query = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        for sentinel in list(self._sentinels):
            try:
                (reply,) = await sentinel.exchange([query], budget, share=0.5)
            except StoreUnavailable as error:
                cause = error
            else:
                if isinstance(reply, list):
                    host, port = reply
                    return Endpoint(host.decode(), int(port))
                cause = StoreUnavailable(
                    f"sentinel {sentinel.endpoint} knows no service {self._service!r}: {reply}"
                )
            if sentinel in self._sentinels:
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
            if not budget.left:
                break
        raise StoreUnavailable(f"no sentinel names a master of {self._service!r}") from cause


class ClusterTopology(Topology):
    """16,384 slots over several masters: the slot map, as a server of the cluster last reported it.

    It is loaded at the first call, after failures, and once for a batch in which keys had moved.
    Any known server, or a seed, can report it.
    """

    has_shards = True

    def __init__(self, seeds: Sequence[Endpoint], access: Access) -> None:
        super().__init__(access)
        self._seeds = frozenset(self._server(seed) for seed in seeds)
        self._slots: list[Server | None] = [None] * SLOTS
        self._masters: tuple[Server, ...] = ()
        self._certain = False
        self._loaded_at = float("-inf")
        self._loading: asyncio.Task[None] | None = None
        self._suspects: set[Server] = set()
        self._map_source: Server | None = None
        self._cause = "no answer in time"
        """Why the map could not be loaded."""

    async def route(self, names: Sequence[Part], budget: Budget) -> list[Route]:
        if not self._certain:
            await self._load(budget, at_most_each=RELOAD_SECONDS_MIN)
        unserved = StoreUnavailable("no server of the cluster serves this key's slot")
        slots = self._slots
        routes: list[Route] = [slots[slot_of(name)] or unserved for name in names]
        if unserved in routes:
            self._certain = False
        return routes

    async def servers(self, budget: Budget) -> Sequence[Server]:
        if not self._certain:
            await self._load(budget, at_most_each=RELOAD_SECONDS_MIN)
        return self._masters

    def holder_of(self, name: Part) -> Server | None:
        return self._slots[slot_of(name)]

    def known_server_for(self, name: Part) -> Server:
        server = self.holder_of(name)
        # A suspect server does not make the map's other entries wrong.
        if server is None or server in self._suspects:
            raise StoreUnavailable("the cluster's slot map is being loaded")
        return server

    def place_of(self, name: Part) -> str:
        server = self.holder_of(name)
        return "" if server is None else str(server.endpoint)

    async def suspect(self, server: Server, *, demoted: bool = False) -> None:
        self._suspects.add(server)
        self._certain = False

    async def moved(self, budget: Budget) -> None:
        await self._load(budget, at_most_each=0.0)

    def serves(self, server: Server) -> bool:
        return server in self._masters

    def server_at(self, endpoint: Endpoint) -> Server:
        return self._server(endpoint)

    async def recheck(self) -> None:
        await self._load(self.new_budget(), at_most_each=0.0)

    async def close(self) -> None:
        await super().close()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    async def _load(self, budget: Budget, *, at_most_each: float) -> None:
        """Load the slot map. Raises StoreUnavailable if that fails and there is no older one."""
        now = asyncio.get_running_loop().time()
        is_due = self._loaded_at <= now - at_most_each
        is_ours = is_due and (self._loading is None or self._loading.done())
        if is_ours:
            self._loading = asyncio.create_task(self._load_now(budget))
        if self._loading is not None and not self._loading.done():
            # Of another caller, perhaps, whose end must not end it.
            left = budget.left
            await asyncio.wait([self._loading], timeout=budget.left_with_dials)
            if not is_ours:
                budget.note_wait(asyncio.get_running_loop().time() - now - left)
        if not self._masters:
            raise StoreUnavailable(f"no server of the cluster reports its slots: {self._cause}")

    async def _load_now(self, budget: Budget) -> None:
        try:
            self._apply_map(*await self._fetch_map(budget))
            await self._forget_left()
        except StoreUnavailable as error:
            self._cause = str(error)  # whoever waits raises it, or uses the older map
        finally:
            self._loaded_at = asyncio.get_running_loop().time()

    async def _forget_left(self) -> None:
        """Close servers that left: those of replaced pods have addresses that never return."""
        stay = {*self._masters, *self._seeds}
        left = [endpoint for endpoint, server in self._known.items() if server not in stay]
        closing = [self._known.pop(endpoint) for endpoint in left[: max(0, len(left) - LEFT_MAX)]]
        self._changes += sum(server.losses for server in closing)
        await asyncio.gather(*(server.close() for server in closing))

    async def _fetch_map(self, budget: Budget) -> tuple[Server, list[Any]]:
        """One server's slot map. The last reporter comes first, suspect servers last."""
        cause: Exception | None = None
        candidates = list(dict.fromkeys([*self._masters, *self._known.values()]))
        candidates.sort(
            key=lambda server: (server in self._suspects, server is not self._map_source)
        )
        for server in candidates:
            try:
                (reply,) = await server.exchange([("CLUSTER", "SLOTS")], budget, share=0.5)
            except StoreUnavailable as error:
                cause = error
                self._suspects.add(server)
                self._certain = False
            else:
                if isinstance(reply, list) and reply:
                    self._map_source = server
                    return server, reply
                why = translated(reply) if isinstance(reply, REFUSALS) else "no slots assigned"
                cause = StoreUnavailable(f"store {server.endpoint}: {why}")
            if not budget.left:
                break
        raise StoreUnavailable(str(cause)) from cause

    def _apply_map(self, source: Server, view: Iterable[Any]) -> None:
        slots: list[Server | None] = [None] * SLOTS
        for first, last, master, *_ in view:
            server = self._server(_endpoint(master[0], master[1], source))
            for slot in range(max(first, 0), min(last + 1, SLOTS)):
                slots[slot] = server
        if slots != self._slots:
            masters = tuple({at: None for at in slots if at is not None})
            # A slot that moved loses no keys; a server that appears may replace one.
            self._changes += bool(self._masters) and bool(set(masters) - set(self._masters))
            self.version += 1
            self._slots, self._masters = slots, masters
        self._certain = True
        self._suspects.clear()


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


def open_topology(
    address: StoreUrl,
    *,
    call_timeout_seconds: float,
    connect_timeout_seconds: float,
    credentials: CredentialProvider | None = None,
    sentinel_credentials: CredentialProvider | None = None,
    name: str = "",
) -> Topology:
    """The topology that `address` names. Does not connect yet.

    `credentials` come before those of the URL, `sentinel_credentials` before those for sentinels.
    `name` is part of the names of connections.
    """

    def access(
        provider: CredentialProvider | None, user: str | None, password: str | None, database: int
    ) -> Access:
        login: dict[str, Any] = {"credential_provider": provider}
        if provider is None:
            login = {"username": user, "password": password}
        return Access(
            call_timeout_seconds,
            connect_timeout_seconds,
            address.tls_options if address.tls else None,
            {**address.options, "db": database, **login},
            name,
            address.client_name,
            address.connections_max,
        )

    servers = access(credentials, address.username, address.password, address.database)
    if address.path:
        return Standalone(Endpoint(path=address.path), servers)
    endpoints = [Endpoint(host, port) for host, port in address.hosts]
    if address.topology == "cluster":
        return ClusterTopology(endpoints, servers)
    if address.topology == "sentinel":
        user, password = address.sentinel_username, address.sentinel_password
        sentinels = access(sentinel_credentials, user, password, 0)
        return SentinelTopology(endpoints, address.service, servers, sentinels)
    return Standalone(endpoints[0], servers)
