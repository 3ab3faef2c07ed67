"""Link: sends commands to the servers that hold their keys, and translates errors.

Commands go out to all servers at once; then the replies of all are read. Redirections (MOVED, ASK)
are followed within the same deadline. Runs on the caller's thread and has none of its own.
Independent of what the keys hold.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from store.budget import Budget
from store.connection import Command, ErrorReply, Part, hgetall
from store.dialled import Endpoint
from store.errors import StoreCorrupt, StoreError, StoreFull, StoreRefused, StoreUnavailable
from store.server import Exchange, Server
from store.topology import Route, Topology

_HOPS_MAX = 4
"""Redirections followed for one command. One is usual; more only while a slot moves again."""
_NOT_SERVED = frozenset(
    (
        *("ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOAUTH"),
        *("NOPERM", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNKILLABLE"),
    )
)
"""Error codes of servers that are reachable but do not serve the command now."""
_SUSPECT_CODES = frozenset(["CLUSTERDOWN", "MASTERDOWN", "READONLY"])
"""Error codes after which another server may be the right one."""
_PAGE = 1000

Fields = dict[bytes, bytes]
"""The content of a HASH."""
Call = tuple[Sequence[str], Sequence[Part]]
"""Keys and arguments of one run of a script."""


class Script:
    """A Lua script, run by its digest, or by its text if the server does not have it yet."""

    def __init__(self, name: str) -> None:
        text = files("store").joinpath("scripts", f"{name}.lua").read_bytes()
        self._text = text
        self._digest = hashlib.sha1(text).hexdigest()

    def by_digest(self, call: Call) -> Command:
        keys, arguments = call
        return ("EVALSHA", self._digest, len(keys), *keys, *arguments)

    def by_text(self, call: Call) -> Command:
        keys, arguments = call
        return ("EVAL", self._text, len(keys), *keys, *arguments)


class Link:
    """Every method may be called from any thread. Errors are those of MetadataStore."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._closed = threading.Event()

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Part]) -> Any:
        """Run one script and return its result."""
        return _checked(self.run_many(script, [(keys, arguments)])[0])

    def run_many(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script for each call, in one round trip.

        Returns the results in order. A failed call has a StoreError as its result, also if its
        server was not reached. If no server was reached, StoreUnavailable is raised.
        """
        budget = self.topology.new_budget()
        routed = [(keys[0], script.by_digest((keys, a))) for keys, a in calls]
        replies = self._exchange(routed, budget)
        unknown = [i for i, reply in enumerate(replies) if _code(reply) == "NOSCRIPT"]
        if unknown:
            # Happens once after each start of a server; EVAL also loads the script there.
            again = [(calls[i][0][0], script.by_text(calls[i])) for i in unknown]
            for i, reply in zip(unknown, self._exchange(again, budget), strict=True):
                replies[i] = reply
        return _raise_if_none_reached([translated(reply) for reply in replies])

    def find_hashes(self, names: Sequence[str | bytes]) -> list[Fields | StoreUnavailable]:
        """The fields of each HASH; empty if it is missing or of another type.

        If its server was not reached, the result is StoreUnavailable. If no server was reached, it
        is raised.
        """
        replies = self._exchange([(name, hgetall(name)) for name in names])
        if not _any_failed(replies):
            return [fields_of(reply) for reply in replies]
        answers = _raise_if_none_reached([translated(reply) for reply in replies])
        return [a if isinstance(a, StoreUnavailable) else fields_of(a) for a in answers]

    def read_hashes(self, names: Sequence[str | bytes]) -> list[Fields]:
        """Like `find_hashes`, but empty as well if the server was not reached."""
        found = self.find_hashes(names)
        return [{} if isinstance(fields, StoreUnavailable) else fields for fields in found]

    def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, each to the server of its first argument; return the replies.

        Raises the first error among them.
        """
        return [_checked(reply) for reply in self.try_batch(commands)]

    def try_batch(self, commands: Sequence[Command]) -> list[Any]:
        """Like `batch`, but an error is returned as the reply's StoreError."""
        replies = self._exchange([(command[1], command) for command in commands])
        return [translated(reply) for reply in replies]

    def each_server(self, command: Command) -> list[Any]:
        """The reply of every server to the same command, in one round trip."""
        self._check_open()
        budget = self.topology.new_budget()
        servers = self.topology.servers(budget)
        replies = self._scatter(servers, [command] * len(servers), budget)
        return [_checked(translated(reply)) for reply in self._suspect_failed(servers, replies)]

    def walk(self, pattern: str) -> Iterator[list[bytes]]:
        """Iterate over pages of key names, by SCAN: one command covers a bounded number of keys."""
        self._check_open()
        for server in self.topology.servers(self.topology.new_budget()):
            cursor: Part = 0
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
                cursor, names = _checked(translated(self._call_server(server, command)))
                if names:
                    yield names
                if cursor in (0, b"0"):
                    break

    def walk_hashes(self, pattern: str) -> Iterator[tuple[bytes, Fields]]:
        """Iterate over the HASHes whose names match: name and fields."""
        for names in self.walk(pattern):
            yield from zip(names, self.read_hashes(names), strict=True)

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        self.topology.close()

    def _call_server(self, server: Server, command: Command) -> Any:
        self._check_open()
        try:
            return server.exchange([command])[0]
        except StoreUnavailable as error:
            self.topology.suspect(server)
            return error

    def _exchange(
        self, routed: Sequence[tuple[Part, Command]], budget: Budget | None = None
    ) -> list[Any]:
        """One reply for each (key name, command): the value, an ErrorReply, or a
        StoreUnavailable.
        """
        self._check_open()
        if not routed:
            return []
        budget = budget or self.topology.new_budget()
        routes = list(self.topology.servers_for([name for name, _ in routed], budget))
        replies = self._scatter(routes, [command for _, command in routed], budget)
        if not _any_failed(replies):
            return replies
        for _ in range(_HOPS_MAX):
            redirected = [i for i, reply in enumerate(replies) if _code(reply) in ("MOVED", "ASK")]
            if not redirected or not budget.left:
                break
            self._follow([(i, *routed[i]) for i in redirected], routes, replies, budget)
        return self._suspect_failed(routes, replies)

    def _suspect_failed(self, routes: Sequence[Route], replies: list[Any]) -> list[Any]:
        """Return the replies. The servers of failed ones become suspect: the topology is checked
        next time.
        """
        for route, reply in zip(routes, replies, strict=True):
            failed = isinstance(reply, StoreUnavailable) or _code(reply) in _SUSPECT_CODES
            if failed and isinstance(route, Server):
                self.topology.suspect(route)
        return replies

    def _scatter(
        self, routes: Sequence[Route], commands: Sequence[Command], budget: Budget
    ) -> list[Any]:
        """Send to all servers, then read from all. Commands to one server keep their order."""
        groups: dict[Server, list[int]] = {}
        replies: list[Any] = [None] * len(commands)
        for i, route in enumerate(routes):
            if isinstance(route, Server):
                groups.setdefault(route, []).append(i)
            else:
                replies[i] = route
        under_way: list[tuple[Exchange, list[int]]] = []
        # Servers without a connection come last and share the time for connecting.
        ordered = sorted(groups.items(), key=lambda group: not group[0].connected)
        for done, (server, indexes) in enumerate(ordered):
            sent = [commands[i] for i in indexes]
            try:
                exchange = server.begin(sent, budget, share=len(ordered) - done)
                under_way.append((exchange, indexes))
            except StoreUnavailable as error:
                for i in indexes:
                    replies[i] = error
        for exchange, indexes in under_way:
            try:
                found = exchange.finish()
            except StoreUnavailable as error:
                found = [error] * len(indexes)
            for i, reply in zip(indexes, found, strict=True):
                replies[i] = reply
        return replies

    def _follow(
        self,
        redirected: Sequence[tuple[int, Part, Command]],
        routes: list[Route],
        replies: list[Any],
        budget: Budget,
    ) -> None:
        """Send the commands to the servers that the error replies (MOVED or ASK) name."""
        requests: list[tuple[int, Server, Command]] = []
        for i, name, command in redirected:
            route = routes[i]
            assert isinstance(route, Server)  # only a server redirects
            try:
                kind, _, address = str(replies[i]).split(" ")[:3]
                host, _, port = address.rpartition(":")
                endpoint = Endpoint(host or route.endpoint.host, int(port))
                if kind == "MOVED":
                    routes[i] = moved_to = self.topology.moved(name, endpoint)
                    requests.append((i, moved_to, command))
                else:
                    target = self.topology.ask_server(endpoint)
                    requests += [(i, target, ("ASKING",)), (i, target, command)]
            except StoreUnavailable as error:
                replies[i] = error
            except ValueError:
                replies[i] = StoreUnavailable(f"store: invalid redirection: {replies[i]}")
        found = self._scatter(
            [at for _, at, _ in requests], [sent for *_, sent in requests], budget
        )
        for (i, *_), reply in zip(requests, found, strict=True):
            replies[i] = reply  # the reply to ASKING is replaced by that of its command

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")


def fields_of(reply: Any) -> Fields:
    """The HASH in the reply to HGETALL; empty if the key is of another type. Raises StoreError."""
    if isinstance(reply, dict):  # RESP3
        return reply
    if isinstance(reply, list):
        pairs = iter(reply)
        return dict(zip(pairs, pairs, strict=True))
    error = translated(reply)
    if isinstance(error, StoreCorrupt) and error.wrong_type:
        return {}
    raise error


def _any_failed(replies: Sequence[Any]) -> bool:
    return any(isinstance(reply, Exception) for reply in replies)


def _code(reply: Any) -> str:
    return reply.code if isinstance(reply, ErrorReply) else ""


def translated(reply: Any) -> Any:
    """The reply; an ErrorReply becomes the matching StoreError."""
    if not isinstance(reply, ErrorReply):
        return reply
    kind: type[StoreError] = StoreCorrupt
    if reply.code == "OOM" or "-OOM" in str(reply):
        kind = StoreFull
    elif reply.code in _NOT_SERVED:
        kind = StoreRefused
    error = kind(f"store: {reply}")
    if isinstance(error, StoreRefused):
        error.forbidden = reply.code == "NOPERM"
    if isinstance(error, StoreCorrupt):
        error.wrong_type = reply.code == "WRONGTYPE"
    error.__cause__ = reply
    return error


def _raise_if_none_reached(answers: list[Any]) -> list[Any]:
    if answers and all(isinstance(answer, StoreUnavailable) for answer in answers):
        raise answers[0]
    return answers


def _checked(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer
