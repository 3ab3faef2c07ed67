"""Confirms that a hand-off belongs to this node, between its copy and the reply to its insert.

The insert is answered after the store has the record, so that from then on every node finds the
hand-off, or the reason that its owner died. If the record names another node, this node queries
whether that one still has the key. If yes, the local item is dropped and the client gets `exists`.
If no, or if that node is dead, its location is withdrawn and ours is published. An unreachable node
is queried again until it is judged dead, or until the insert's deadline. Until then no taker gets
the item.

If the store is down, the insert is answered without it. The record is published later, and a key
that is on two nodes by then becomes one. Called by `intake` and, through `node.py`, by the
publisher's reports. Runs on the loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.owners import GONE, UNREACHED, Answer, Owners
from lookup_buffer.node.publisher import Report
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.protocol.messages import Holds, InsertOutcome
from lookup_buffer.times import INSERT_LEAST_SECONDS
from store import GoneReason, Location, Publication

LOOK_SECONDS: Final = 0.1
"""How often a waiting insert checks whether the store has failed."""
AGAIN_SECONDS: Final = 0.05
"""The pause before the next attempt, if the store and the other node disagree or do not answer."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Announcement:
    item: Item
    until: float
    done: Callable[[InsertOutcome | LookupBufferError], None]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Contest:
    """The record of a key names another node instead of this one."""

    address: QualifiedKey
    published: bool = False
    """Our location was sent to the store again, and the store has not answered yet."""
    unanswered: int = 0
    locating: asyncio.Task[None] | None = None
    void: list[Location] = field(default_factory=list)
    """Locations of nodes that no longer have the key."""
    unsure: bool = False
    lost_to: str = ""


@dataclass(slots=True)
class Announcements:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    handoffs: Handoffs
    locator: Locator
    directory: Directory
    owners: Owners
    identity: Identity
    registrar: Registrar
    counters: Counters
    _waiting: dict[QualifiedKey, list[_Announcement]] = field(default_factory=dict)
    _contests: dict[QualifiedKey, _Contest] = field(default_factory=dict)

    def announce(
        self, item: Item, until: float, done: Callable[[InsertOutcome | LookupBufferError], None]
    ) -> None:
        """Confirm the ownership of `item`, which was just committed. Calls `done` with the
        outcome: STORED, or EXISTS after the item was dropped because another node has it. If
        that node does not answer until `until`, the outcome is an error."""
        one = _Announcement(item, max(until, self.loop.time() + INSERT_LEAST_SECONDS), done)
        self._waiting.setdefault(item.address, []).append(one)
        self.handoffs.hold_back(item.address)
        self._wait(one)

    def handle_reports(self, reports: Sequence[Report]) -> None:
        """Take the store's results for the hand-offs of one batch."""
        for address, generation, outcome in reports:
            if outcome is Publication.OWNED:
                self._contend(address)
                continue
            self._contests.pop(address, None)
            for one in list(self._waiting.get(address, ())):
                if one.item.generation <= generation:
                    self._settle(one, InsertOutcome.STORED)

    def _wait(self, one: _Announcement) -> None:
        address = one.item.address
        contested, late = address in self._contests, self.loop.time() >= one.until
        if contested and late:
            self.shelf.remove(one.item, "elsewhere")
            self._settle(
                one,
                NodeUnavailable(
                    f"{address[1]} was not stored: the store names another node as its "
                    "owner, which does not answer; insert it again"
                ),
            )
            if address not in self._waiting:  # else a newer insert of the key continues
                self._contests.pop(address, None)
        elif not contested and (late or self.registrar.failing or one.item.gone):
            self._settle(one, InsertOutcome.STORED)
        else:
            one.timer = self.loop.call_later(LOOK_SECONDS, self._wait, one)

    def _settle(self, one: _Announcement, outcome: InsertOutcome | LookupBufferError) -> None:
        address = one.item.address
        waiting = self._waiting[address]
        waiting.remove(one)
        if one.timer is not None:
            one.timer.cancel()
        if not waiting:
            del self._waiting[address]
            self.handoffs.arrived(address)
        one.done(outcome)

    # -- another node's location is present

    def _contend(self, address: QualifiedKey) -> None:
        contest = self._contests.get(address)
        if contest is None:
            self._look(self._contests.setdefault(address, _Contest(address)))
        elif contest.published:  # another node published first
            self._look(contest)

    def _look(self, contest: _Contest) -> None:
        if self._is_over(contest):
            return
        if self.shelf.peek(contest.address) is None:
            self._contests.pop(contest.address, None)  # our item is gone
            return
        contest.published = False
        contest.unsure, contest.void = False, []
        self.locator.forget(contest.address)
        contest.locating = self.loop.create_task(self._locate(contest))

    async def _locate(self, contest: _Contest) -> None:
        record = (await self.locator.locate([contest.address]))[0].record
        locations = () if record is None else record.locations
        others = [at for at in locations if at.node != self.identity.node and not at.is_offer]
        contest.unanswered = len(others)
        if not others:  # withdrawn meanwhile, or the store does not answer
            self.loop.call_later(AGAIN_SECONDS, self._publish, contest)
        for location in others:
            self._ask(contest, location)

    def _ask(self, contest: _Contest, location: Location) -> None:
        answered = partial(self._answered, contest, location)
        endpoint = self.directory.endpoint(location)
        if endpoint is not None:
            owner = self.owners.at(location, endpoint)
            owner.ask(Holds(self.owners.next_number(), *contest.address), answered)
        else:
            answered(GONE if self.directory.is_dead(location) else UNREACHED)

    def _answered(self, contest: _Contest, location: Location, answer: Answer) -> None:
        if self._is_over(contest):
            return
        contest.unanswered -= 1
        if answer.state == "present":
            contest.lost_to = location.node
        elif answer is UNREACHED:
            contest.unsure = True
        else:
            contest.void.append(location)
        if contest.unanswered:
            return
        if contest.lost_to:
            self._lose(contest)
        elif contest.unsure:
            self.loop.call_later(AGAIN_SECONDS, self._look, contest)
        else:
            self._publish(contest)

    def _is_over(self, contest: _Contest) -> bool:
        """Whether its insert waits no longer, or the store now names this node."""
        return self._contests.get(contest.address) is not contest

    def _publish(self, contest: _Contest) -> None:
        contest.published = True
        self.registrar.changed(contest.address, "", void=tuple(contest.void))

    def _lose(self, contest: _Contest) -> None:
        address = contest.address
        self._contests.pop(address, None)
        item = self.shelf.peek(address)
        if item is not None:
            self.counters.add("handoffs_elsewhere")
            _log.warning(
                "hand-off dropped: %s, generation %d, namespace %s: node %s already has this key; "
                "its producer gets 'exists'",
                address[1], item.generation, address[0], contest.lost_to,
            )  # fmt: skip
            self.shelf.remove(item, GoneReason.ELSEWHERE)
        for one in list(self._waiting.get(address, ())):
            self._settle(one, InsertOutcome.EXISTS)
