"""Client: sends commands to the servers that hold their keys, and translates errors.

Commands go out to all servers at once. Redirections (MOVED, ASK) are followed within the same
deadline. Independent of what the keys hold.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any

from redis.exceptions import AskError, MovedError, NoScriptError

from store.connections import Endpoint
from store.errors import StoreCorrupt, StoreError, StoreUnavailable
from store.replies import REFUSALS, Command, Part, Reply, code_of, translated
from store.server import Budget, Server
from store.topology import Route, Topology

_HOPS_MAX = 4
"""Redirections followed for one command. One is usual; more only while a slot moves again."""
_DEMOTED = "READONLY"
_SUSPECT_CODES = frozenset(["CLUSTERDOWN", "MASTERDOWN", _DEMOTED])
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


class Client:
    """All methods run on one loop. Errors are those of MetadataStore."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Part]) -> Any:
        """Run one script and return its result."""
        (result,) = await self.run_many(script, [(keys, arguments)])
        return _checked(result)

    async def run_many(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run a script for each call, in one round trip.

        Returns the results in order. A failed call has a StoreError as its result, also if its
        server was not reached. If no server was reached, StoreUnavailable is raised.
        """
        budget = self.topology.new_budget()
        routed = [(keys[0], script.by_digest((keys, a))) for keys, a in calls]
        replies = await self._exchange(routed, budget)
        for with_each in (False, True):  # the second time if keys moved meanwhile
            unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            again = self._loading(script, [calls[i] for i in unknown], with_each=with_each)
            for i, reply in zip(unknown, await self._exchange(again, budget), strict=True):
                replies[i] = reply
        return _raise_if_none_reached([translated(reply) for reply in replies])

    async def find_hashes(
        self, names: Sequence[str | bytes], budget: Budget | None = None
    ) -> list[Fields | StoreUnavailable]:
        """The fields of each HASH; empty if it is missing or of another type.

        If its server was not reached, the result is StoreUnavailable. If no server was reached, it
        is raised.
        """
        replies = await self._exchange([(name, ("HGETALL", name)) for name in names], budget)
        answers = _raise_if_none_reached([translated(reply) for reply in replies])
        return [a if isinstance(a, StoreUnavailable) else fields_of(a) for a in answers]

    async def read_hashes(self, names: Sequence[str | bytes]) -> list[Fields]:
        """Like `find_hashes`, but empty as well if the server was not reached."""
        found = await self.find_hashes(names)
        return [{} if isinstance(fields, StoreUnavailable) else fields for fields in found]

    async def read_some(self, name: str, fields_max: int) -> Fields:
        """Up to `fields_max` fields of a HASH, in one round trip if it has no more; empty if it is
        missing or of another type."""
        budget, found = self.topology.new_budget(), Fields()
        cursor: Part = 0
        while len(found) < fields_max:
            command = ("HSCAN", name, cursor, "COUNT", fields_max)
            (reply,) = await self._exchange([(name, command)], budget)
            cursor, page = reply if isinstance(reply, list) else (b"0", reply)
            found |= fields_of(page)
            if cursor == b"0":
                break
        return dict(islice(found.items(), fields_max))

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, each to the server of its first argument; return the replies.

        Raises the first error among them.
        """
        return [_checked(reply) for reply in await self.try_batch(commands)]

    async def try_batch(self, commands: Sequence[Command]) -> list[Any]:
        """Like `batch`, but an error is returned as the reply's StoreError."""
        replies = await self._exchange([(command[1], command) for command in commands])
        return [translated(reply) for reply in replies]

    async def each_server(self, command: Command) -> list[Any]:
        """The reply of every server to the same command, in one round trip."""
        budget = self.topology.new_budget()
        servers = await self.topology.servers(budget)
        replies = await self._scatter(servers, [command] * len(servers), budget)
        return [_checked(translated(reply)) for reply in replies]

    async def walk(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Iterate over pages of key names, by SCAN: one command covers a bounded number of keys."""
        budget: Budget | None = (first := self.topology.new_budget())
        for server in await self.topology.servers(first):
            cursor: Part = 0
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
                page = budget or self.topology.new_budget()
                (reply,) = await self._scatter([server], [command], page)
                budget = None  # each further page has its own, from when it is asked for
                cursor, names = _checked(translated(reply))
                if names:
                    yield names
                if cursor in (0, b"0"):
                    break

    async def walk_hashes(self, pattern: str) -> AsyncIterator[tuple[bytes, Fields]]:
        """Iterate over the HASHes whose names match: name and fields."""
        async for names in self.walk(pattern):
            for name, fields in zip(names, await self.read_hashes(names), strict=True):
                yield name, fields

    def _loading(
        self, script: Script, calls: Sequence[Call], *, with_each: bool
    ) -> list[tuple[str, Command]]:
        """The calls of a script that servers lack, as after each start: (key name, command).

        EVAL also loads it, for the calls that follow on the connection. Its text `with_each` of
        hundreds would be several round trips to a server far away.
        """
        routed: list[tuple[str, Command]] = []
        has_text: set[Server] = set()
        for call in calls:
            name = call[0][0]
            server = self.topology.holder_of(name)
            follows = server in has_text and not with_each
            routed.append((name, script.by_digest(call) if follows else script.by_text(call)))
            if server is not None:
                has_text.add(server)
        return routed

    async def _exchange(
        self, routed: Sequence[tuple[Part, Command]], budget: Budget | None = None
    ) -> list[Reply]:
        """One reply for each (key name, command): the value, a refusal, or a StoreUnavailable."""
        budget = budget or self.topology.new_budget()
        if not routed:
            return []
        names = [name for name, _ in routed]
        commands = [command for _, command in routed]
        routes = await self.topology.route(names, budget)
        replies = await self._scatter(routes, commands, budget)
        for _ in range(_HOPS_MAX):
            redirected = [i for i, reply in enumerate(replies) if isinstance(reply, AskError)]
            if not redirected or not budget.left:
                break
            await self._follow(redirected, routed, replies, budget)
        return replies

    async def _scatter(
        self, routes: Sequence[Route], commands: Sequence[Command], budget: Budget
    ) -> list[Reply]:
        """Send to all servers at once, and read all replies. A server that hangs delays no other.

        Commands to one server keep their order.
        """
        groups: dict[Server, list[int]] = {}
        replies: list[Reply] = [None] * len(commands)
        for i, route in enumerate(routes):
            if isinstance(route, Server):
                groups.setdefault(route, []).append(i)
            else:
                replies[i] = route
        calls = [
            self._call(server, [commands[i] for i in indexes], budget)
            for server, indexes in groups.items()
        ]
        found = (
            await asyncio.gather(*calls) if len(calls) > 1 else [await calls[0]] if calls else []
        )
        for indexes, answers in zip(groups.values(), found, strict=True):
            for i, reply in zip(indexes, answers, strict=True):
                replies[i] = reply
        return replies

    async def _call(
        self, server: Server, commands: Sequence[Command], budget: Budget
    ) -> list[Reply]:
        """The replies of one server, or the same StoreUnavailable for each command."""
        try:
            if self.topology.has_shards and server.hangs:
                raise StoreUnavailable(
                    f"store {server.endpoint}: did not answer in time, and is being probed"
                )
            replies = await server.exchange(commands, budget)
        except StoreUnavailable as error:
            await self.topology.suspect(server)
            return [error] * len(commands)
        codes = {code_of(reply) for reply in replies} & _SUSPECT_CODES
        if codes:
            await self.topology.suspect(server, demoted=_DEMOTED in codes)
        return replies

    async def _follow(
        self,
        redirected: Sequence[int],
        routed: Sequence[tuple[Part, Command]],
        replies: list[Reply],
        budget: Budget,
    ) -> None:
        """Send redirected commands again: after MOVED by a slot map read anew, once for all."""
        errors = {i: replies[i] for i in redirected}
        routes: dict[int, Route] = {}
        try:
            if any(isinstance(error, MovedError) for error in errors.values()):
                await self.topology.moved(budget)
            names = [routed[i][0] for i in redirected]
            routes = dict(zip(redirected, await self.topology.route(names, budget), strict=True))
            # The server that redirects knows better than a map that another one reports.
            routes |= {i: self._target(errors[i], routes[i]) for i in redirected}
        except StoreUnavailable as error:
            for i in redirected:
                replies[i] = error
            return
        requests: list[tuple[int, Route, Command]] = []
        for i in redirected:
            if not isinstance(errors[i], MovedError):
                requests.append((i, routes[i], ("ASKING",)))
            requests.append((i, routes[i], routed[i][1]))
        found = await self._scatter(
            [route for _, route, _ in requests], [command for *_, command in requests], budget
        )
        for (i, *_), reply in zip(requests, found, strict=True):
            replies[i] = reply  # the reply to ASKING is replaced by that of its command

    def _target(self, error: AskError, route: Route) -> Route:
        known = error.host if error.host != "?" else ""  # it does not know its own address
        host = known or (route.endpoint.host if isinstance(route, Server) else "")
        return self.topology.server_at(Endpoint(host, error.port))


def fields_of(reply: Any) -> Fields:
    """The HASH in the reply to HGETALL; empty if the key is of another type. Raises StoreError."""
    if isinstance(reply, dict):  # RESP3
        return reply
    if isinstance(reply, list):
        pairs = iter(reply)
        return dict(zip(pairs, pairs, strict=True))
    error = translated(reply) if isinstance(reply, REFUSALS) else reply
    if isinstance(error, StoreCorrupt) and error.wrong_type:
        return {}
    raise error


def _raise_if_none_reached(answers: list[Any]) -> list[Any]:
    if answers and all(isinstance(answer, StoreUnavailable) for answer in answers):
        raise answers[0]
    return answers


def _checked(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer
