"""`Holder`: another node that tensors are fetched from, what its answers took, and its connections.

`soonest` decides which of several holders is asked. Used by `transfer`. All runs on the loop's
thread.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from lookup_buffer.errors import PipeBroken
from lookup_buffer.node.storage import Breaker
from lookup_buffer.node.turns import Places
from lookup_buffer.protocol.auth import VERSION_OF_PARTS
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.protocol.tls import Trust

LINKS_MAX = 4
"""Connections to one node: so many of its batches are transferred at a time."""
PARTS_ANSWER_SECONDS = 0.002
"""Where each answer takes at least so long, one connection is bounded by its window, and an item of
over BATCH_BYTES is requested in parts, on several."""
BATCH_BYTES = 4 << 20
"""Items of up to so many bytes are requested together: a round trip for each of them would cost
more than their bytes."""
TIMEOUTS_MAX = LINKS_MAX
"""After so many in a row, as many as a node is asked for at a time, it is asked for nothing for a
while. One that refuses, or ends connections, costs no time."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.5, 2.0
"""Bounds on that time."""
DOUBT_SECONDS_MAX = 60.0
"""Bound on how long a holder comes after all others, each time longer, once a transfer failed."""
PACE_SECONDS = 60.0
"""An average that is older counts as unknown."""
LEAST_SECONDS = 10.0
"""How long a least value stands before the next one replaces it, whatever that is."""
AVERAGED_BYTES_MIN = 256 << 10
"""The time of fewer bytes says nothing of the time for each."""
NEWEST_SHARE = 0.25
"""Of the last answer in the average of what a holder's answers took."""
SAME_FACTOR, SAME_SECONDS = 2.0, 0.005
"""Holders from which an item is expected within this factor of the fastest, or so much later, count
as equally fast: other work on a host makes such a difference, too."""


@dataclass(slots=True)
class Measured:
    """What was measured lately; 0.0 while it is unknown."""

    value: float = 0.0
    measured_at: float = -math.inf

    def at(self, now: float) -> float:
        return self.value if now - self.measured_at < PACE_SECONDS else 0.0


class Average(Measured):
    """The moving average."""

    __slots__ = ()

    def add(self, newest: float, now: float) -> None:
        before = self.at(now)
        self.value = before + NEWEST_SHARE * (newest - before) if before else newest
        self.measured_at = now


class Least(Measured):
    """The least value."""

    __slots__ = ()

    def add(self, newest: float, now: float) -> None:
        if newest <= self.value or now - self.measured_at >= LEAST_SECONDS:
            self.value, self.measured_at = newest, now


@dataclass(slots=True)
class Pace:
    """What a holder's answers took. What is unknown is expected to take no time."""

    answer_seconds: Average = field(default_factory=Average)
    """From a request until its first answer begins."""
    least_answer_seconds: Least = field(default_factory=Least)
    """Near the round trip, also if the hosts are busy."""
    byte_seconds: Average = field(default_factory=Average)
    """For each byte of a batch, from its first answer on."""

    def is_known(self, nbytes: int, now: float) -> bool:
        averages = [self.answer_seconds, self.byte_seconds]
        has_size = nbytes > AVERAGED_BYTES_MIN
        return all(one.at(now) for one in (averages if has_size else averages[:1]))

    def expected_seconds(self, nbytes: int, now: float) -> float:
        return self.answer_seconds.at(now) + self.byte_seconds.at(now) * nbytes

    def answered(self, seconds: float, now: float) -> None:
        self.answer_seconds.add(seconds, now)
        self.least_answer_seconds.add(seconds, now)

    def received(self, nbytes: int, seconds: float, now: float) -> None:
        if nbytes > AVERAGED_BYTES_MIN:
            self.byte_seconds.add(seconds / nbytes, now)


class HolderLink(NamedTuple):
    """A connection to a holder, and how long the certificate there counts."""

    framed: FramedSocket
    trust: Trust


@dataclass(slots=True, eq=False)
class Holder:
    """Another node, and the connections to it."""

    breaker: Breaker
    """Of its timeouts."""
    doubts: Breaker
    """Of all its failures when it was asked: until a pause is over it is asked only where no other
    is left."""
    used_at: float
    """When it was last asked; at first, when it was met."""
    pace: Pace = field(default_factory=Pace)
    places: Places = field(default_factory=lambda: Places(LINKS_MAX))
    links: list[tuple[HolderLink, float]] = field(default_factory=list)
    """Those that are not in use, with the time of their last use."""
    uses: dict[asyncio.Timeout, Trust] = field(default_factory=dict)
    """Of the others: what ends their use."""
    users: int = 0
    """Batches that it is asked for, or will be, and further connections for parts."""
    version: int = 0
    """Of the protocol, on the last connection that was made."""

    def expected_seconds(self, nbytes: int, now: float) -> float:
        """Until so many bytes are here, if it is asked for nothing else. Endless while it is asked
        for something and was not measured: what it is asked for will show how fast it is."""
        if self.users and not self.pace.is_known(nbytes, now):
            return math.inf
        return self.pace.expected_seconds(nbytes, now)

    def streams_for(self, nbytes: int, now: float) -> int:
        """On how many connections an item is to be fetched, of which the caller has one. Another
        one is left to other batches."""
        is_far = self.pace.least_answer_seconds.at(now) >= PARTS_ANSWER_SECONDS
        if nbytes <= BATCH_BYTES or not is_far or self.version < VERSION_OF_PARTS:
            return 1
        return max(1, LINKS_MAX - self.users)

    def idle_link(self) -> HolderLink | None:
        """A kept connection that is still usable. Unrequested input means that the peer closed
        it, or that another boot listens there."""
        while self.links:
            (framed, trust), _ = link, _ = self.links.pop()
            if trust.counts() and not framed.closed and not framed.wait_readable(0.0):
                return link
            framed.abort()
        return None

    @asynccontextmanager
    async def using(self, link: HolderLink) -> AsyncIterator[FramedSocket]:
        """Use a connection, and then keep it. After an error it is unusable.

        Raises:
            PipeBroken: the certificate there has not counted for a while.
        """
        bound = asyncio.timeout(None)
        self.uses[bound] = link.trust
        try:
            async with bound:
                yield link.framed
        except TimeoutError as error:
            if bound.expired():
                raise PipeBroken("the holder's certificate does not count any more") from error
            raise
        finally:
            del self.uses[bound]
        self.links.append((link, asyncio.get_running_loop().time()))

    def end_uses(self, now: float) -> None:
        """Of connections whose certificates have not counted for a while."""
        for bound in [one for one, trust in self.uses.items() if trust.is_over()]:
            if not bound.expired():
                bound.reschedule(now)

    def close_links(self, unused_since: float) -> None:
        """Of those that are not in use: the ones that were not used since then, and those whose
        certificates do not count."""
        links, self.links = self.links, []
        for link, used_at in links:
            if used_at >= unused_since and link.trust.counts():
                self.links.append((link, used_at))
            else:
                link.framed.close()


def soonest(holders: Sequence[Holder], nbytes: int, now: float) -> int:
    """The position of the one to ask for so many bytes: see `Fetcher._choose`."""
    fails = [not (holder.breaker.allows() and holder.doubts.allows()) for holder in holders]
    seconds = [holder.expected_seconds(nbytes, now) for holder in holders]
    alive = [takes for takes, failing in zip(seconds, fails, strict=True) if not failing]
    fastest = min(alive, default=0.0)
    same = SAME_FACTOR * fastest + SAME_SECONDS

    def order(n: int) -> tuple[bool, float, int, float]:
        users = holders[n].users
        alone = seconds[n] if seconds[n] > same else fastest
        return fails[n], alone * (1 + users / LINKS_MAX), users, random.random()

    return min(range(len(holders)), key=order)
