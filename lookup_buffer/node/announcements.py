"""Confirms that a hand-off belongs to this node, between its copy and the reply to its insert.

The insert is answered after the store has the record, so that from then on every node finds the
hand-off, or the reason that its owner died. If the record names another node, this node queries
whether that one still has the key. If yes, the local item is dropped and the client gets `exists`.
If no, or if that node is dead, its location is withdrawn and ours is published. A node that is
unreachable, or does not answer in time, is queried again until it is judged dead, or until the
insert's deadline. Until then no taker gets the item.

If the store is down, the insert is answered without it. The record is published later, and a key
that is on two nodes by then becomes one. Called by `insert` and, with the store's results, by
`registrar`. Runs on the loop's thread.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.items import Item
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.registrar import Registrar, Report
from lookup_buffer.node.takes import GONE, UNREACHED, Owners
from lookup_buffer.protocol.messages import InsertOutcome, OwnerReply
from lookup_buffer.times import INSERT_LEAST_SECONDS
from store import GoneReason, Location, Publication

LOOK_SECONDS: Final = 0.1
"""How often a waiting insert checks whether the store has failed."""
AGAIN_SECONDS: Final = 0.1
"""The pause before the next attempt, if the store still names the other node or one does not
answer."""

_log = logging.getLogger(__name__)


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
    _inserts: dict[QualifiedKey, dict[int, "asyncio.Future[InsertOutcome]"]] = field(
        default_factory=dict
    )
    """The inserts that wait for the confirmation, by generation."""
    _contests: dict[QualifiedKey, "asyncio.Task[None]"] = field(default_factory=dict)
    """Keys whose record names another node instead of this one."""

    async def confirm(self, item: Item, until: float) -> InsertOutcome:
        """Confirm the ownership of `item`, which was just committed.

        Returns STORED, or EXISTS after the item was dropped because another node has it.

        Raises:
            NodeUnavailable: that node does not answer until `until`, by the loop's clock.
        """
        until = max(until, self.loop.time() + INSERT_LEAST_SECONDS)
        address = item.address
        outcome: asyncio.Future[InsertOutcome] = self.loop.create_future()
        inserts = self._inserts.setdefault(address, {})
        inserts[item.generation] = outcome
        self.handoffs.hold_back(address)
        try:
            while True:
                await asyncio.wait([outcome], timeout=LOOK_SECONDS)
                if outcome.done():
                    return outcome.result()
                if self._is_unanswered(item, until):
                    return InsertOutcome.STORED
        finally:
            del inserts[item.generation]
            if not inserts:
                del self._inserts[address]
                self.handoffs.arrived(address)

    def _is_unanswered(self, item: Item, until: float) -> bool:
        """Whether the insert ends without the store: that has failed, or it is too late."""
        is_late = self.loop.time() >= until
        if item.address not in self._contests:
            return is_late or bool(self.registrar.breaker.failures) or item.gone
        if not is_late:
            return False
        self.arena.remove(item, GoneReason.ELSEWHERE)
        raise NodeUnavailable(
            f"{item.address[1]} was not stored: the store names another node as its owner, "
            "which does not answer; insert it again"
        )

    def handle_reports(self, reports: Sequence[Report]) -> None:
        """Take the store's results for the hand-offs of one batch."""
        for address, generation, result in reports:
            if result is not Publication.OWNED:
                if contest := self._contests.pop(address, None):
                    contest.cancel()
                self._settle(address, InsertOutcome.STORED, generation)
            elif address not in self._contests:  # another node published first
                self._contests[address] = self.loop.create_task(self._contend(address))

    def _settle(
        self, address: QualifiedKey, outcome: InsertOutcome, generation: float = math.inf
    ) -> None:
        """Answer the inserts up to this generation."""
        for inserted, waiting in self._inserts.get(address, {}).items():
            if inserted <= generation and not waiting.done():
                waiting.set_result(outcome)

    # -- another node's location is present

    async def _contend(self, address: QualifiedKey) -> None:
        """Drop the item if another node has it; or else publish it in place of the others, until
        the store names this node (then the task is cancelled)."""
        try:
            while self.arena.peek(address) is not None:
                others = await self._others(address)
                fates = await asyncio.gather(*(self._ask(address, at) for at in others))
                for at, fate in zip(others, fates, strict=True):
                    if fate.state == "present":
                        self._lose(address, at.node)
                        return
                if UNREACHED not in fates:
                    self.registrar.changed(address, "", void=tuple(others))
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
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
        self._settle(address, InsertOutcome.EXISTS)
