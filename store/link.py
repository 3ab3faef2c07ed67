"""Link: commands to a deployment, replies back, errors translated.

Sends each command to the server that holds its key, to all servers at once and then reads from
all. What a server pointed elsewhere (MOVED, ASK) is sent there, within the same deadline. Runs in
whatever thread calls; has none of its own. Knows nothing of records.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from store.budget import Budget
from store.connection import Command, Part, Refusal, hgetall
from store.dialled import Endpoint
from store.errors import StoreCorrupt, StoreError, StoreFull, StoreRefused, StoreUnavailable
from store.server import Exchange, Server
from store.topology import PoolMemory, Topology

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

Fields = dict[bytes, bytes]
"""A HASH."""
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
        budget = self.topology.new_budget()
        routed = [(keys[0], script.by_digest((keys, a))) for keys, a in calls]
        replies = self._exchange(routed, budget)
        unknown = [i for i, reply in enumerate(replies) if _code(reply) == "NOSCRIPT"]
        if unknown:
            # Once after each start of a server; this also makes the script known there.
            again = [(calls[i][0][0], script.by_text(calls[i])) for i in unknown]
            for i, reply in zip(unknown, self._exchange(again, budget), strict=True):
                replies[i] = reply
        return _unless_none_was_reached([translated(reply) for reply in replies])

    def find_hashes(self, names: Sequence[str | bytes]) -> list[Fields | StoreUnavailable]:
        """The fields of each HASH; empty where it is missing, or is no HASH at all.

        The error in their place where its server was not reached; where none was, it is raised.
        """
        replies = self._exchange([(name, hgetall(name)) for name in names])
        if not _any_failed(replies):
            return [fields_of(reply) for reply in replies]
        answers = _unless_none_was_reached([translated(reply) for reply in replies])
        return [a if isinstance(a, StoreUnavailable) else fields_of(a) for a in answers]

    def read_hashes(self, names: Sequence[str | bytes]) -> list[Fields]:
        """The same, but empty as well where the server was not reached."""
        found = self.find_hashes(names)
        return [{} if isinstance(fields, StoreUnavailable) else fields for fields in found]

    def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, each to where its first argument lies; the replies.

        Raises the first error among them.
        """
        return [_checked(reply) for reply in self.try_batch(commands)]

    def try_batch(self, commands: Sequence[Command]) -> list[Any]:
        """The same, with a StoreError in the place of each reply that is one."""
        replies = self._exchange([(command[1], command) for command in commands])
        return [translated(reply) for reply in replies]

    def each_server(self, command: Command) -> list[Any]:
        """The reply of every server to the same command, in one round trip."""
        self._check_open()
        budget = self.topology.new_budget()
        servers = self.topology.servers(budget)
        replies = self._scatter(servers, [command] * len(servers), budget)
        return [_checked(translated(reply)) for reply in self._doubting(servers, replies)]

    def walk(self, pattern: str) -> Iterator[list[bytes]]:
        """Names of keys, in pages. A server looks at a bounded number of keys for each."""
        self._check_open()
        for server in self.topology.servers(self.topology.new_budget()):
            cursor: Part = 0
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
                cursor, names = _checked(translated(self._at(server, command)))
                if names:
                    yield names
                if cursor in (0, b"0"):
                    break

    def walk_hashes(self, pattern: str) -> Iterator[tuple[bytes, Fields]]:
        """As `walk`, one by one, each with what its HASH holds."""
        for names in self.walk(pattern):
            yield from zip(names, self.read_hashes(names), strict=True)

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

    def _exchange(
        self, routed: Sequence[tuple[Part, Command]], budget: Budget | None = None
    ) -> list[Any]:
        """One reply for each (name of a key, command): what it says, a Refusal, or what failed."""
        self._check_open()
        if not routed:
            return []
        budget = budget or self.topology.new_budget()
        places = list(self.topology.servers_for([name for name, _ in routed], budget))
        replies = self._scatter(places, [command for _, command in routed], budget)
        if not _any_failed(replies):
            return replies
        for _ in range(_HOPS_MAX):
            redirected = [i for i, reply in enumerate(replies) if _code(reply) in ("MOVED", "ASK")]
            if not redirected or not budget.left:
                break
            self._follow([(i, *routed[i]) for i in redirected], places, replies, budget)
        return self._doubting(places, replies)

    def _doubting(self, places: Sequence[PoolMemory], replies: list[Any]) -> list[Any]:
        """The replies; who failed is asked again only after a look at the topology."""
        for place, reply in zip(places, replies, strict=True):
            failed = isinstance(reply, StoreUnavailable) or _code(reply) in _DOUBTFUL
            if failed and isinstance(place, Server):
                self.topology.doubt(place)
        return replies

    def _scatter(
        self, places: Sequence[PoolMemory], commands: Sequence[Command], budget: Budget
    ) -> list[Any]:
        """Send to all servers, then read from all. Commands to one server keep their order."""
        groups: dict[Server, list[int]] = {}
        replies: list[Any] = [None] * len(commands)
        for i, place in enumerate(places):
            if isinstance(place, Server):
                groups.setdefault(place, []).append(i)
            else:
                replies[i] = place
        under_way: list[tuple[Exchange, list[int]]] = []
        # Who has to be dialled comes last, and shares what time there is for that.
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
        places: list[PoolMemory],
        replies: list[Any],
        budget: Budget,
    ) -> None:
        """Ask the servers that refusals (MOVED or ASK) point to."""
        asked: list[tuple[int, Server, Command]] = []
        for i, name, command in redirected:
            place = places[i]
            assert isinstance(place, Server)  # who else would redirect?
            try:
                kind, _, address = str(replies[i]).split(" ")[:3]
                host, _, port = address.rpartition(":")
                endpoint = Endpoint(host or place.endpoint.host, int(port))
                if kind == "MOVED":
                    places[i] = moved_to = self.topology.moved(name, endpoint)
                    asked.append((i, moved_to, command))
                else:
                    aside = self.topology.aside(endpoint)
                    asked += [(i, aside, ("ASKING",)), (i, aside, command)]
            except StoreUnavailable as error:
                replies[i] = error
            except ValueError:
                replies[i] = StoreUnavailable(f"store: cannot be followed: {replies[i]}")
        found = self._scatter([at for _, at, _ in asked], [sent for *_, sent in asked], budget)
        for (i, *_), reply in zip(asked, found, strict=True):
            replies[i] = reply  # what ASKING answers is replaced by what follows it

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")


def fields_of(reply: Any) -> Fields:
    """The HASH in the reply to HGETALL; empty where there is something else under that name."""
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
    return reply.code if isinstance(reply, Refusal) else ""


def translated(reply: Any) -> Any:
    """The reply; a Refusal as the StoreError that says what it means to callers."""
    if not isinstance(reply, Refusal):
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


def _unless_none_was_reached(answers: list[Any]) -> list[Any]:
    if answers and all(isinstance(answer, StoreUnavailable) for answer in answers):
        raise answers[0]
    return answers


def _checked(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer
