"""Link: commands to a deployment, replies back, errors translated.

Sends each command to the server that holds its key, to all servers at once and then reads from
all. What a server pointed elsewhere (MOVED, ASK) is sent there, within the same deadline. Runs in
whatever thread calls; has none of its own. Knows nothing of records.
"""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from store.connection import Command, Endpoint, Part, Refusal
from store.errors import StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from store.server import Exchange, Server
from store.topology import Topology

_HOPS_MAX = 4
"""Redirections followed for one command. One is usual; more only while a slot moves again."""
_NOT_SERVED = frozenset(
    (
        *("ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOAUTH"),
        *("NOPERM", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNKILLABLE"),
    )
)
"""Codes of servers that are there but will not serve us now."""
_DOUBTFUL = frozenset(["CLUSTERDOWN", "MASTERDOWN", "READONLY"])
"""Codes after which another server may be the one to ask."""
_PAGE = 1000

Call = tuple[Sequence[str], Sequence[Part]]
"""The keys and the arguments of one run of a script."""


class Script:
    """A Lua script, sent by its digest; by its text where the server does not know it yet."""

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
    """Every method from any thread. Errors are those of MetadataStore."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._closed = threading.Event()

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Part]) -> Any:
        """Run one script and return its answer."""
        return _checked(self.run_many(script, [(keys, arguments)])[0])

    def run_many(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script for each call, all in one round trip.

        The answers, in order; a call that was refused has a StoreError in its place, and so has
        one whose server was not reached, unless that is true of all: then it is raised.
        """
        replies = self._exchange([(keys[0], script.by_digest((keys, a))) for keys, a in calls])
        unknown = [i for i, reply in enumerate(replies) if _code(reply) == "NOSCRIPT"]
        if unknown:
            # Once after each start of a server; this also makes the script known there.
            again = [(calls[i][0][0], script.by_text(calls[i])) for i in unknown]
            for i, reply in zip(unknown, self._exchange(again), strict=True):
                replies[i] = reply
        answers = [_translated(reply) for reply in replies]
        if answers and all(isinstance(answer, StoreUnavailable) for answer in answers):
            raise answers[0]
        return answers

    def read_hashes(self, names: Sequence[Part]) -> list[dict[bytes, bytes]]:
        """The fields of each HASH; empty where it is missing, or is no HASH at all."""
        return [fields_of(r) for r in self._exchange([(name, ("HGETALL", name)) for name in names])]

    def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, each to where its first argument lies; the replies.

        Raises the first error among them.
        """
        replies = self._exchange([(command[1], command) for command in commands])
        return [_checked(_translated(reply)) for reply in replies]

    def each_server(self, command: Command) -> list[Any]:
        """The reply of every server to the same command."""
        servers = self._guarded(self.topology.servers)
        replies = [self._at(server, command) for server in servers]
        return [_checked(_translated(reply)) for reply in replies]

    def walk(self, pattern: str) -> Iterator[list[bytes]]:
        """Names of keys, in pages. A server looks at a bounded number of keys for each."""
        for server in self._guarded(self.topology.servers):
            cursor: Part = 0
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
                cursor, names = _checked(_translated(self._at(server, command)))
                if names:
                    yield names
                if cursor in (0, b"0"):
                    break

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        self.topology.close()

    def _at(self, server: Server, command: Command) -> Any:
        self._check_open()
        try:
            return server.exchange([command])[0]
        except StoreUnavailable as error:
            self.topology.doubt(server)
            return error

    def _exchange(self, routed: Sequence[tuple[Part, Command]]) -> list[Any]:
        """One reply for each (name of a key, command): what it says, a Refusal, or what failed."""
        self._check_open()
        if not routed:
            return []
        places = self._guarded(lambda: [self.topology.server_for(name) for name, _ in routed])
        deadline = time.monotonic() + places[0].access.call_timeout_seconds
        replies = self._scatter(places, [command for _, command in routed])
        for _ in range(_HOPS_MAX):
            redirected = [i for i, reply in enumerate(replies) if _code(reply) in ("MOVED", "ASK")]
            if not redirected or time.monotonic() >= deadline:
                break
            for i in redirected:
                replies[i] = self._follow(routed[i], replies[i], deadline)
        for place, reply in zip(places, replies, strict=True):
            if isinstance(reply, StoreUnavailable) or _code(reply) in _DOUBTFUL:
                self.topology.doubt(place)
        return replies

    def _scatter(self, places: Sequence[Server], commands: Sequence[Command]) -> list[Any]:
        """Send to all servers, then read from all."""
        groups: dict[Server, list[int]] = {}
        for i, place in enumerate(places):
            groups.setdefault(place, []).append(i)
        replies: list[Any] = [None] * len(commands)
        under_way: list[tuple[Exchange, list[int]]] = []
        for place, indexes in groups.items():
            try:
                exchange = place.begin([commands[i] for i in indexes])
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

    def _follow(self, routed: tuple[Part, Command], refusal: Refusal, deadline: float) -> Any:
        """What the server says that a refusal (MOVED or ASK) points to."""
        name, command = routed
        kind, _, address = str(refusal).split(" ")[:3]
        host, _, port = address.rpartition(":")
        try:
            here = self.topology.server_for(name)
            endpoint = Endpoint(host or here.endpoint.host, int(port))
            if kind == "MOVED":
                server = self.topology.moved(name, endpoint)
                return server.exchange([command], deadline)[0]
            server = self.topology.aside(endpoint)
            return server.exchange([("ASKING",), command], deadline)[1]
        except StoreUnavailable as error:
            return error

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")

    def _guarded(self, ask: Any) -> Any:
        self._check_open()
        return ask()


def fields_of(reply: Any) -> dict[bytes, bytes]:
    """The HASH in the reply to HGETALL; empty where there is something else under that name."""
    found = _translated(reply)
    if isinstance(found, StoreCorrupt):
        return {}
    pairs = _checked(found)
    if isinstance(pairs, dict):  # RESP3
        return pairs
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _code(reply: Any) -> str:
    return reply.code if isinstance(reply, Refusal) else ""


def _translated(reply: Any) -> Any:
    """The reply; a Refusal as the StoreError that says what it means to callers."""
    if not isinstance(reply, Refusal):
        return reply
    kind: type[StoreError] = StoreCorrupt
    if reply.code == "OOM" or "-OOM" in str(reply):
        kind = StoreFull
    elif reply.code in _NOT_SERVED:
        kind = StoreUnavailable
    error = kind(f"store: {reply}")
    if isinstance(error, StoreCorrupt):
        error.wrong_type = reply.code == "WRONGTYPE"
    error.__cause__ = reply
    return error


def _checked(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer
