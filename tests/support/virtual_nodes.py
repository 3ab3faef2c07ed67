"""Nodes in virtual time: the node's parts for sets of claims and for what is held as they are, over
a store and single claims that live in memory.

What goes to the store takes a while, by chance, and arrives in the order in which it was sent.
Nothing runs by itself: `VirtualLoop.run` lets time pass.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.claim_sets import ClaimSets
from lookup_buffer.node.holdings import Holdings
from lookup_buffer.protocol.messages import Claim, ClaimAll, Encoding, ReleaseClaim, Unclaim
from store import ClaimState

NAMESPACE = "0" * 64


class VirtualLoop:
    """The part of asyncio's loop that the node's parts use."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._cancelled: set[int] = set()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Any:
        number = next(self._order)
        heapq.heappush(self._due, (self.now + seconds, number, function, arguments))
        return _Handle(partial(self._cancelled.add, number))

    def call_at(self, when: float, function: Callable[..., object], *arguments: Any) -> Any:
        return self.call_later(max(0.0, when - self.now), function, *arguments)

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> Any:
        return self.call_later(0.0, function, *arguments)

    call_soon_threadsafe = call_soon

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            at, number, function, arguments = heapq.heappop(self._due)
            self.now = max(self.now, at)
            if number not in self._cancelled:
                function(*arguments)
            self._cancelled.discard(number)
        self.now = until


@dataclass(frozen=True, slots=True)
class _Handle:
    cancel: Callable[[], None]


class Way:
    """Messages in one direction: each takes its time, none overtakes another."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self._loop = loop
        self._chance = chance
        self._arrives_at = 0.0
        self.under_way = 0

    def send(self, function: Callable[..., object], *arguments: Any) -> None:
        takes = self._chance.choice((0.0002, 0.001, 0.005, 0.03))
        self._arrives_at = max(self._arrives_at, self._loop.now + takes)
        self.under_way += 1
        self._loop.call_later(self._arrives_at - self._loop.now, self._arrive, function, arguments)

    def _arrive(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.under_way -= 1
        function(*arguments)


@dataclass(slots=True)
class Store:
    """What Redis has: which keys are stored, and whose claims there are, with state and end."""

    loop: VirtualLoop
    stored: set[str] = field(default_factory=set)
    claims: dict[str, tuple["VirtualNode", str, float]] = field(default_factory=dict)
    watches: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    def holder(self, key: str) -> "VirtualNode | None":
        node, _, ends_at = self.claims.get(key, (None, "", 0.0))
        return node if ends_at > self.loop.now else None

    def claim(self, node: "VirtualNode", request: Claim) -> dict[str, Any]:
        key, holder = request.key, self.holder(request.key)
        if key in self.stored:
            return {"outcome": "stored", "holder": "", "remaining_seconds": 0.0}
        if holder not in (None, node):
            assert holder is not None
            left = self.claims[key][2] - self.loop.now
            return {"outcome": "held", "holder": holder.name, "remaining_seconds": left}
        if holder is None or request.state == "encoding":
            ends_at = self.loop.now + request.lease_seconds
            self.claims[key] = (node, request.state, ends_at)
        left = self.claims[key][2] - self.loop.now
        return {"outcome": "granted", "holder": "", "remaining_seconds": left}

    def release(self, node: "VirtualNode", key: str) -> None:
        if self.holder(key) is node:
            del self.claims[key]
            self.changed(key)

    def publish(self, node: "VirtualNode", key: str) -> None:
        self.stored.add(key)
        if self.holder(key) is node:
            del self.claims[key]
        self.changed(key)

    def changed(self, key: str) -> None:
        for watched, wake in list(self.watches):
            if watched == key:
                self.loop.call_later(0.001, wake)


@dataclass(slots=True, eq=False)
class _Session:
    owner: str = "engine"
    over: bool = False


@dataclass(slots=True, eq=False)
class _Vigil:
    address: QualifiedKey
    cancel: Callable[[], None]


class VirtualNode:
    """One engine's node: `ClaimSets` and `Holdings` as they are, with claims as `Claims` answers
    them."""

    def __init__(self, name: str, store: Store, chance: random.Random) -> None:
        self.name = name
        self.loop = store.loop
        self.store = store
        self.session = _Session()
        self.to_store, self.from_store = Way(self.loop, chance), Way(self.loop, chance)
        parts: Any = self
        self.holdings = Holdings(parts.loop)
        self.sets = ClaimSets(parts.loop, parts, self.holdings, parts)

    # What `ClaimSets` asks of `Claims`.

    @property
    def holder(self) -> str:
        return self.name

    def claim(self, session: Any, request: Claim, wanted: Callable[[], bool], answer: Any) -> None:
        def decide() -> None:
            fields = self.store.claim(self, request)
            self.from_store.send(answered, fields)

        def answered(fields: dict[str, Any]) -> None:
            if fields["outcome"] == "granted":
                if not wanted():
                    self.to_store.send(self.store.release, self, request.key)
                    return
                self.holdings.keep(
                    session, (request.namespace, request.key), ClaimState(request.state),
                    lease_seconds=request.lease_seconds,
                    granted_seconds=fields["remaining_seconds"],
                )  # fmt: skip
            if wanted():
                answer(fields)

        self.to_store.send(decide)

    def release(self, session: Any, request: ReleaseClaim, answer: Any) -> None:
        self.holdings.drop(session, (request.namespace, request.key))
        self.to_store.send(self.store.release, self, request.key)

    # What it asks of `Waiting`.

    def watch(self, address: QualifiedKey, until: float, wake: Callable[[], None]) -> _Vigil:
        watch = (address[1], wake)
        self.store.watches.append(watch)
        handles = [self.loop.call_later(0.001, wake)]
        handles.append(self.loop.call_later(max(0.0, until - self.loop.now), wake))

        def cancel() -> None:
            if watch in self.store.watches:
                self.store.watches.remove(watch)
            for handle in handles:
                handle.cancel()

        return _Vigil(address, cancel)

    # The rest.

    def handle(self, request: Any, answer: Callable[[dict[str, Any]], None]) -> None:
        if self.session.over:
            return
        session: Any = self.session
        match request:
            case ClaimAll():
                self.sets.ask(session, request, answer)
            case Encoding():
                self.sets.encoding(session, request)
            case Unclaim():
                self.sets.unclaim(session, request)

    def publish(self, key: str) -> None:
        session: Any = self.session
        self.holdings.drop(session, (NAMESPACE, key))
        self.to_store.send(self.store.publish, self, key)

    def end(self) -> None:
        """The engine's process died."""
        self.session.over = True
        session: Any = self.session
        self.sets.end(session)
        for _, key in self.holdings.drop_all(session):
            self.to_store.send(self.store.release, self, key)

    @property
    def is_at_rest(self) -> bool:
        turns = any(line.busy for line in self.sets._lines.values())
        return not (turns or self.to_store.under_way or self.from_store.under_way)
