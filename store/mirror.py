"""Mirror: the records that were asked for lately, kept true by the servers' own push.

What was read stays known until the server says that it changed; "there is nothing" does so too,
but for a second at most. One lane (`lane.py`) for each server that holds keys; what a lost lane had
read is forgotten, and so is everything when keys moved to other servers. All methods on one asyncio
loop's thread.

Only a reading aid: a mirror that is wrong for a moment costs a miss or a fetch that fails, for
nodes check what they are asked for.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from store import layout, record_fields
from store.base import Found
from store.connection import Command, Refusal, hgetall
from store.entries import Entries, Entry, Forgotten
from store.errors import StoreError, StoreUnavailable
from store.lane import Lane
from store.link import fields_of
from store.topology import Standalone, Topology
from store.watches import Watches

if TYPE_CHECKING:
    import asyncio

    from store.dialled import Endpoint

ENTRIES_MAX = 200_000
"""About 2 KB each. Past it the entries that were read longest ago are forgotten."""
AGE_SECONDS_MAX = 60.0
"""No entry is believed longer: a bound on what a push that never came could do."""
RECHECK_SECONDS = 1.0
"""How often the topology is looked at: a slot that moved is noticed so late at the latest."""
FORGOTTEN_SECONDS = 10.0
"""How long it is remembered what was to be forgotten: longer than a reading is under way."""
_PASSING = frozenset(["ASK", "TRYAGAIN"])
"""Refusals while a slot is on its way: the server is right, and the map too."""

Answer = Callable[[list[Found]], None]
_Group = Sequence[tuple[int, bytes]]
"""What one lane is asked: positions in the question, and names of keys."""


class Mirror:
    """`close` stops it; the topology belongs to the store and stays open."""

    def __init__(
        self,
        loop: "asyncio.AbstractEventLoop",
        topology: Topology,
        dialler: Executor,
        forgotten: Forgotten = lambda _: None,
        *,
        entries_max: int = ENTRIES_MAX,
        age_seconds_max: float = AGE_SECONDS_MAX,
    ) -> None:
        self._loop = loop
        self._topology = topology
        self._dialler = dialler
        self._age_seconds_max = age_seconds_max
        self._entries = Entries(entries_max, forgotten)
        self._lanes: dict[Endpoint, Lane] = {}
        self._forgotten_at: dict[bytes, float] = {}
        """What was asked for before then, and is answered after it, is not kept."""
        self._watches = Watches(loop, self._lane_for, self.take_in, self._tell)
        self._failovers = topology.failovers()
        self._rechecking = False
        self._closed = False
        self.pushes = 0
        """Invalidations received, for people."""
        self._ticker = loop.call_later(RECHECK_SECONDS, self._tick)
        self._recheck()  # so that the first question finds it known who holds what

    def entries(self, namespace: str) -> Mapping[str, Entry]:
        """What is known of a namespace, each until its `until`. Look, and do not keep it."""
        return self._entries.of(namespace)

    @property
    def size(self) -> int:
        return len(self._entries)

    def ask(self, namespace: str, keys: Sequence[str], answer: Answer) -> None:
        """The records of `keys`, in their order; at once where all are known."""
        entries, now = self.entries(namespace), self._loop.time()
        found: list[Found] = []
        missing: list[int] = []
        for index, key in enumerate(keys):
            entry = entries.get(key)
            found.append(None if entry is None else entry.record)
            if entry is None or entry.until < now:
                missing.append(index)
        if missing:
            self._read(_Reading(namespace, keys, found, answer, now), missing)
        else:
            answer(found)

    def forget(self, namespace: str, key: str) -> None:
        """Read the key anew when it is asked for: another connection has told something newer, and
        was quicker than the push."""
        name = layout.record(namespace, key).encode()
        self._entries.drop(name)
        self._forgotten_at[name] = self._loop.time()

    def watch(self, namespace: str, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` once what is known now is known, and after each change; until cancelled.

        A change of the record or of the claim; not as long as there is a claim and no record. It is
        called when the next change can no longer be missed, so what is read or claimed in it, or
        later, is enough. Returns the cancellation.
        """
        return self._watches.add(namespace, key, notify)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._ticker.cancel()
        self._watches.close()
        for lane in self._lanes.values():
            lane.close(StoreUnavailable("the mirror is closed"))

    def now(self) -> float:
        """What `take_in` goes by: when something was asked."""
        return self._loop.time()

    def send(
        self, name: bytes, command: Command, answer: Callable[[Lane | None, Any], None]
    ) -> None:
        """Put a command on the lane of the key `name` of Redis. `answer` is told the lane and the
        reply, which may be a Refusal; or StoreUnavailable, and no lane where none was known."""
        try:
            lane = self._lane_for(name)
        except StoreUnavailable as error:
            answer(None, error)
            return
        replies: list[Any] = []

        def done(error: StoreError | None) -> None:
            unknown = StoreUnavailable(str(error))
            self._tell(answer, lane, replies[0] if replies else unknown)

        lane.ask([command], lambda _, reply: replies.append(reply), done)

    # -- reading

    def _read(self, reading: "_Reading", indexes: Sequence[int]) -> None:
        groups: dict[Lane, list[tuple[int, bytes]]] = {}
        for index in indexes:
            name = layout.record(reading.namespace, reading.keys[index]).encode()
            try:
                lane = self._lane_for(name)
            except StoreUnavailable as error:
                reading.found[index] = error
            else:
                groups.setdefault(lane, []).append((index, name))
        reading.left = len(groups)
        for lane, group in groups.items():
            commands = [hgetall(name) for _, name in group]
            each = partial(self._read_one, lane, reading, group)
            lane.ask(commands, each, partial(self._read_all, reading, group))
        if not groups:
            self._tell(reading.answer, reading.found)

    def _read_one(
        self, lane: Lane, reading: "_Reading", group: _Group, at: int, reply: Any
    ) -> None:
        index, name = group[at]
        key = reading.keys[index]
        address = (reading.namespace, key)
        reading.found[index] = self.take_in(lane, name, address, reply, reading.asked_at)

    def _read_all(self, reading: "_Reading", group: _Group, error: StoreError | None) -> None:
        if error is not None:
            unknown = StoreUnavailable(str(error))
            for index, _ in group:
                reading.found[index] = unknown
        reading.left -= 1
        if not reading.left:
            self._tell(reading.answer, reading.found)

    def take_in(
        self, lane: Lane, name: bytes, address: tuple[str, str], reply: Any, asked_at: float
    ) -> Found:
        """What a reply says of a key; remembered, unless it says that somebody else knows."""
        if isinstance(reply, Refusal) and reply.code != "WRONGTYPE":
            self.refused(lane, reply)
            return StoreUnavailable(f"store {lane.server.endpoint}: {reply}")
        record = record_fields.read_record(*address, fields_of(reply))
        if self._forgotten_at.get(name, -math.inf) < asked_at:
            self._entries.put(name, *address, lane, record, self._loop.time())
        return record

    def refused(self, lane: Lane, refusal: Refusal) -> None:
        """A server refused a command: perhaps another one is to be asked from now on."""
        if refusal.code not in _PASSING:
            self._topology.doubt(lane.server)
            self._recheck()

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call somebody else's code: what is wrong with it must not end the lane's own reading."""
        try:
            callback(*arguments)
        except Exception as error:  # noqa: BLE001
            context = {"message": "told by the mirror, it failed", "exception": error}
            self._loop.call_exception_handler(context)

    # -- what servers say unasked

    def _invalidated(self, lane: Lane, names: Sequence[bytes] | None) -> None:
        self.pushes += 1
        if names is None:
            self._forget_all(lane)
            return
        for name in names:
            self._entries.drop(name)
            self._watches.changed(name)

    def _forget_all(self, lane: Lane) -> None:
        """All that `lane` had read; what is watched there is read again, now or soon."""
        self._entries.drop_all(lane)
        self._watches.lost(lane)

    # -- servers

    def _lane_for(self, name: bytes) -> Lane:
        if self._closed:
            raise StoreUnavailable("the mirror is closed")
        try:
            server = self._topology.known_server_for(name)
        except StoreUnavailable:
            self._recheck()
            raise
        lane = self._lanes.get(server.endpoint)
        if lane is None:
            lane = Lane(
                self._loop,
                self._dialler,
                server,
                invalidated=self._invalidated,
                lost=self._forget_all,
            )
            self._lanes[server.endpoint] = lane
        return lane

    def _tick(self) -> None:
        """Once a second: forget what is too old, and see whether keys or servers have gone."""
        self._ticker = self._loop.call_later(RECHECK_SECONDS, self._tick)
        self._forget_old()
        bound = self._loop.time() - FORGOTTEN_SECONDS
        self._forgotten_at = {name: at for name, at in self._forgotten_at.items() if at > bound}
        for lane in tuple(self._lanes.values()):
            lane.probe()
        self._recheck()

    def _forget_old(self) -> None:
        if self._entries.drop_older(self._loop.time() - self._age_seconds_max):
            self._loop.call_soon(self._forget_old)

    def _recheck(self) -> None:
        """Look at the topology on another thread, unless that is under way."""
        if not (self._rechecking or self._closed or isinstance(self._topology, Standalone)):
            self._rechecking = True
            checked = self._dialler.submit(self._topology.recheck)
            checked.add_done_callback(self._rechecked_elsewhere)

    def _rechecked_elsewhere(self, checked: "Future[None]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so are we
            self._loop.call_soon_threadsafe(self._rechecked)

    def _rechecked(self) -> None:
        """Forget everything where servers took over from each other, or slots moved."""
        self._rechecking = False
        failovers = self._topology.failovers()
        if failovers == self._failovers or self._closed:
            return
        self._failovers = failovers
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close(StoreUnavailable("keys have moved to other servers"))


@dataclass(slots=True, eq=False)
class _Reading:
    """One `ask` under way, over one lane or more."""

    namespace: str
    keys: Sequence[str]
    found: list[Found]
    answer: Answer
    asked_at: float
    left: int = 0
