"""Nodes in virtual time: the node's claims as they are, over a store that lives in memory.

What goes to the store takes a while, by chance, and arrives in the order in which it was sent.
Nothing runs by itself: `VirtualLoop.run` lets time pass.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.claims import Arbiter, Claims
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.held_claims import HeldClaims
from lookup_buffer.node.locate import Waiting
from lookup_buffer.node.membership import Identity
from lookup_buffer.protocol.messages import ClaimAll, Encoding, Unclaim
from store import ClaimAnswer, Claiming, ClaimState, Releasing
from virtual_loop import VirtualLoop

NAMESPACE = "0" * 64
RECORD: Any = object()
"""Of each key that is stored; its holders live."""


class Way:
    """Messages in one direction: each takes its time, none overtakes another."""

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self._loop = loop
        self._chance = chance
        self.seconds: Sequence[float] = (0.0002, 0.001, 0.005, 0.03)
        self._arrives_at = 0.0
        self._messages: deque[Callable[[], object]] = deque()

    def send(self, function: Callable[..., object], *arguments: Any) -> None:
        takes = self._chance.choice(self.seconds)
        self._arrives_at = max(self._arrives_at, self._loop.now + takes)
        self._messages.append(partial(function, *arguments))
        self._loop.call_at(self._arrives_at, self._arrive)

    def _arrive(self) -> None:
        self._messages.popleft()()

    @property
    def under_way(self) -> int:
        return len(self._messages)


@dataclass(slots=True)
class Store:
    """What Redis has: which keys are stored, and whose claims there are, with state and end."""

    loop: VirtualLoop
    stored: set[str] = field(default_factory=set)
    claims: dict[str, tuple["VirtualNode", ClaimState, float]] = field(default_factory=dict)
    watches: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    def holder(self, key: str) -> "VirtualNode | None":
        node, _, ends_at = self.claims.get(key, (None, ClaimState.INTENT, 0.0))
        return node if ends_at > self.loop.now else None

    def claim(self, node: "VirtualNode", request: Claiming) -> ClaimAnswer:
        key, holder = request.key, self.holder(request.key)
        if key in self.stored:
            return ClaimAnswer(False, "", request.state, 0.0, RECORD)
        if holder not in (None, node):
            assert holder is not None
            left = self.claims[key][2] - self.loop.now
            return ClaimAnswer(False, holder.name, request.state, left)
        if holder is None or request.state is ClaimState.ENCODING:
            ends_at = self.loop.now + request.lease_seconds
            self.claims[key] = (node, request.state, ends_at)
        left = self.claims[key][2] - self.loop.now
        return ClaimAnswer(True, "", request.state, left)

    def release(self, node: "VirtualNode", key: str) -> bool:
        if self.holder(key) is not node:
            return False
        del self.claims[key]
        self.changed(key)
        return True

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
    """As `Session`, of which only the requests that wait are of interest."""

    loop: VirtualLoop
    owner: str = "engine"
    is_open: bool = True
    has_ended: bool = False
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set)

    def start(
        self, request: Coroutine[Any, Any, None], *, keys: Sequence[str]
    ) -> "asyncio.Task[None] | None":
        if not self.is_open:
            request.close()
            return None
        task = self.loop.create_task(request)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def end(self, closing: Callable[[], None]) -> None:
        """Cancel the requests a turn later, as a task group does; `closing` comes after them."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        closing()


class VirtualNode:
    """One engine's node: `Claims` and `Arbiter` as they are; this is its locator with the mirror's
    claims, and its arena."""

    def __init__(self, name: str, store: Store, chance: random.Random) -> None:
        self.name = name
        self.loop = store.loop
        self.store = store
        self.session: Any = _Session(self.loop)
        self.to_store, self.from_store = Way(self.loop, chance), Way(self.loop, chance)
        parts: Any = self
        directory = SimpleNamespace(sources=lambda record: [record])
        locator: Any = SimpleNamespace(claims=self, knows=lambda _: True, directory=directory)
        self.claims = Claims(
            self.loop, HeldClaims(self.loop), Arbiter(self.loop, locator, parts),
            Identity(name, "boot", ""), parts, Waiting(self.loop, parts), parts, parts, Counters(),
        )  # fmt: skip

    # What `Arbiter` asks of `MirrorClaims`.

    def claim(self, claiming: Claiming, answer: Callable[[ClaimAnswer], None]) -> None:
        def decide() -> None:
            self.from_store.send(answer, self.store.claim(self, claiming))

        self.to_store.send(decide)

    def release(self, releasing: Releasing, answer: Callable[[bool], None]) -> None:
        def release() -> None:
            self.from_store.send(answer, self.store.release(self, releasing.key))

        self.to_store.send(release)

    # What they ask of `Arena`, `Reads` and `Locator`.

    def holds(self, address: QualifiedKey) -> bool:
        return False

    def published(self, address: QualifiedKey) -> None: ...

    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        return [None] * len(keys)

    def place_of(self, address: QualifiedKey) -> str:
        return ""

    def watch(self, address: QualifiedKey, wake: Callable[[], None]) -> Callable[[], None]:
        watch = (address[1], wake)
        self.store.watches.append(watch)
        handle = self.loop.call_later(0.001, wake)

        def cancel() -> None:
            if watch in self.store.watches:
                self.store.watches.remove(watch)
            handle.cancel()

        return cancel

    # The rest.

    def handle(self, request: Any, answer: Callable[[dict[str, Any]], None]) -> None:
        if not self.session.is_open:
            return
        session = self.session
        match request:
            case ClaimAll():
                self.claims.claim_all(session, request, answer)
            case Encoding():
                self.claims.encoding(session, request)
            case Unclaim():
                self.claims.unclaim(session, request)

    def publish(self, key: str) -> None:
        self.claims.held.drop(self.session, (NAMESPACE, key))
        self.to_store.send(self.store.publish, self, key)

    def end(self) -> None:
        """The engine's process died."""
        self.session.is_open, self.session.has_ended = False, True
        self.loop.create_task(self.session.end(partial(self.claims.end, self.session)))

    @property
    def is_at_rest(self) -> bool:
        turns = any(each.active for each in self.claims._sessions.values())
        return not (turns or self.to_store.under_way or self.from_store.under_way)
