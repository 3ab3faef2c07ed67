"""Confirms that a hand-off belongs to this node, between its copy and the reply to its insert.

The insert is answered after the store has the record, so that from then on every node finds the
hand-off, or the reason that its owner died. If the record names another node, this node queries
whether that one still has the key. If yes, the local item is dropped and the client gets `exists`.
If no, or if that node is dead, its location is withdrawn and ours is published. An unreachable node
is queried again until it is judged dead, or until the insert's deadline. Until then no taker gets
the item.

If the store is down, the insert is answered without it. The record is published later, and a key
that is on two nodes by then becomes one. Called by `insert` and, through `main.py`, by the
publisher's reports. Runs on the loop's thread.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena, Item
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.publisher import Report
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.takes import GONE, UNREACHED, Owners
from lookup_buffer.protocol.messages import InsertOutcome, OwnerReply
from lookup_buffer.times import INSERT_LEAST_SECONDS
from store import GoneReason, Location, Publication

LOOK_SECONDS: Final = 0.1
"""How often a waiting insert checks whether the store has failed."""
AGAIN_SECONDS: Final = 0.05
"""The pause before the next attempt, if the store and the other node disagree or do not answer."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Insert:
    """One insert that waits for the confirmation."""

    item: Item
    outcome: InsertOutcome | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, outcome: InsertOutcome) -> None:
        self.outcome = outcome
        self.settled.set()


@dataclass(slots=True)
class Announcements:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    handoffs: Handoffs
    locator: Locator
    directory: Directory
    owners: Owners
    identity: Identity
    registrar: Registrar
    counters: Counters
    _inserts: dict[QualifiedKey, list[_Insert]] = field(default_factory=dict)
    _contests: dict[QualifiedKey, "asyncio.Task[None]"] = field(default_factory=dict)
    """Keys whose record names another node instead of this one."""
    _owned: dict[QualifiedKey, "asyncio.Future[None]"] = field(default_factory=dict)
    """Contests that sent their location to the store again: set if its record still names
    another node."""

    async def confirm(self, item: Item, until: float) -> InsertOutcome:
        """Confirm the ownership of `item`, which was just committed.

        Returns STORED, or EXISTS after the item was dropped because another node has it.

        Raises:
            NodeUnavailable: that node does not answer until `until`, by the loop's clock.
        """
        until = max(until, self.loop.time() + INSERT_LEAST_SECONDS)
        one, address = _Insert(item), item.address
        inserts = self._inserts.setdefault(address, [])
        inserts.append(one)
        self.handoffs.hold_back(address)
        try:
            while one.outcome is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await one.settled.wait()
                if one.outcome is None:
                    self._look(one, until)
            return one.outcome
        finally:
            inserts.remove(one)
            if not inserts:
                del self._inserts[address]
                self.handoffs.arrived(address)

    def _look(self, one: _Insert, until: float) -> None:
        """Settle the insert if the store has failed, or if it is too late."""
        is_late, address = self.loop.time() >= until, one.item.address
        if address not in self._contests:
            if is_late or self.registrar.breaker.failures or one.item.gone:
                one.settle(InsertOutcome.STORED)
        elif is_late:
            self.arena.remove(one.item, GoneReason.ELSEWHERE)
            raise NodeUnavailable(
                f"{address[1]} was not stored: the store names another node as its owner, "
                "which does not answer; insert it again"
            )

    def handle_reports(self, reports: Sequence[Report]) -> None:
        """Take the store's results for the hand-offs of one batch."""
        for address, generation, outcome in reports:
            contest = self._contests.get(address)
            if outcome is Publication.OWNED:  # another node published first
                owned = self._owned.pop(address, None)
                if owned is not None and not owned.done():  # done: the contest is being cancelled
                    owned.set_result(None)
                if contest is None:
                    self._contests[address] = self.loop.create_task(self._contend(address))
                continue
            if contest is not None:
                self._contests.pop(address).cancel()
            for one in self._inserts.get(address, ()):
                if one.item.generation <= generation and one.outcome is None:
                    one.settle(InsertOutcome.STORED)

    # -- another node's location is present

    async def _contend(self, address: QualifiedKey) -> None:
        """Drop the item if another node has it; or else publish it in place of the others, until
        the store names this node (then the task is cancelled)."""
        try:
            while self.arena.peek(address) is not None:
                others = await self._others(address)
                fates = await asyncio.gather(*(self._ask(address, at) for at in others))
                holders = [
                    at.node
                    for at, fate in zip(others, fates, strict=True)
                    if fate.state == "present"
                ]
                if holders:
                    self._lose(address, holders[-1])
                    return
                if UNREACHED in fates or not others:  # not others: the store may not answer
                    await asyncio.sleep(AGAIN_SECONDS)
                if UNREACHED not in fates:
                    owned = self._owned[address] = self.loop.create_future()
                    self.registrar.changed(address, "", void=tuple(others))
                    while not owned.done() and self.arena.peek(address) is not None:
                        await asyncio.wait([owned], timeout=LOOK_SECONDS)
        finally:
            self._owned.pop(address, None)
            if self._contests.get(address) is asyncio.current_task():
                del self._contests[address]

    async def _others(self, address: QualifiedKey) -> list[Location]:
        """The other nodes that the record names now."""
        self.locator.forget(address)
        (located,) = await self.locator.locate([address])
        locations = () if located.record is None else located.record.locations
        return [at for at in locations if at.node != self.identity.node and not at.is_offer]

    async def _ask(self, address: QualifiedKey, location: Location) -> OwnerReply:
        """Whether that node has the key: present or absent; else its fate."""
        endpoint = self.directory.endpoint(location)
        if endpoint is None:
            return GONE if self.directory.is_dead(location) else UNREACHED
        return await self.owners.at(location, endpoint).holds(address)

    def _lose(self, address: QualifiedKey, holder: str) -> None:
        item = self.arena.peek(address)
        if item is not None:
            self.counters.add("handoffs_elsewhere")
            _log.warning(
                "hand-off dropped: %s, generation %d, namespace %s: node %s already has this key; "
                "its producer gets 'exists'",
                address[1], item.generation, address[0], holder,
            )  # fmt: skip
            self.arena.remove(item, GoneReason.ELSEWHERE)
        for one in self._inserts.get(address, ()):
            if one.outcome is None:
                one.settle(InsertOutcome.EXISTS)
