"""Transfers: copies a tensor from another node into the arena.

A batch of what one node has is requested together, on a connection that the loop has dialled and
keeps. The loop reads headers and reserves memory; a thread (`lb-fetch`) receives bytes that are
many or not here yet. The number of transfers is bounded, also for each node, so one that is not
reached or slow delays only what it is asked for. What waits for its turn has a deadline. A
connection is closed at its first error. The header is compared with the request, and the checksum
is computed on arrival; the item becomes visible only if both match. Of several holders a fast one
is asked, by what its answers took. If it fails, the next is tried. Failures are counted, and those
that a record does not explain are noted:
`registrar` writes them to the store with its next beat, for `lookup-buffer why`. Called by `read`
and `takes`.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from xxhash import xxh3_64

from lookup_buffer.errors import (
    BufferFull,
    CorruptTensor,
    LookupBufferError,
    MaybeMissed,
    MissReason,
    NodeRefused,
    PipeError,
    PipeTimeout,
    ProtocolError,
    TensorTooLarge,
)
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena, Item, Pin
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.links import TENSORS, Credentials, ThreadPool, dial
from lookup_buffer.node.locate import Located
from lookup_buffer.node.storage import Breaker
from lookup_buffer.protocol.framing import Frame
from lookup_buffer.protocol.header import PayloadHeader
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.times import PEER_ANSWER_SECONDS, PEER_IDLE_SECONDS, PEER_PROGRESS_SECONDS
from store import Location

THREADS = 128
"""Each receives from one holder at a time, so slow ones delay only what they are asked for."""
LINKS_MAX = 4
"""Connections to one node: so many of its batches are transferred at a time."""
TURN_SECONDS = 60.0
"""A batch waits at most so long for one of them, and so does a request that has no time of its own.
Then the next holder is asked, or it is a miss: `busy`."""
LINK_IDLE_SECONDS = 60.0
"""A connection that was not used for so long is closed."""
assert LINK_IDLE_SECONDS < PEER_IDLE_SECONDS, "the requesting side closes first"

BATCH_BYTES = 4 << 20
"""Items of up to so many bytes are requested together: a round trip for each of them would cost
more than their bytes. Larger ones are spread over the threads."""
BATCH_MAX = 64
TOLD_TOGETHER = 8
"""So many small items that have come are settled together."""
TOLD_TOGETHER_BYTES = 1 << 20
AT_ONCE_BYTES = 256 << 10
"""Up to so many bytes that have arrived are received on the loop: 50 µs, as long as a thread needs
to begin."""
_TOLD = (MissReason.CHECKSUM, MissReason.PEER_FAILED)
"""Failures that are written to the store; the record explains the others."""
FETCH_OWNER = -1
"""Owner of the pin on a fetched item, until its readers have pinned it."""
TIMEOUTS_MAX = LINKS_MAX
"""After so many in a row, as many as a node is asked for at a time, it is asked for nothing for a
while. One that refuses, or ends connections, costs no time."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.5, 2.0
"""Bounds on that time."""
DOUBT_SECONDS_MAX = 60.0
"""Bound on how long a holder comes after all others, each time longer, once a transfer failed."""
PACE_SECONDS = 60.0
"""An average that is older counts as unknown."""
NEWEST_SHARE = 0.25
"""Of the last answer in the average of what a holder's answers took."""
SAME_FACTOR, SAME_SECONDS = 2.0, 0.005
"""Holders from which an item is expected within this factor of the fastest, or so much later, count
as equally fast: other work on a host makes such a difference, too."""
_log = logging.getLogger(__name__)


class Busy(LookupBufferError):
    """The transfer did not get its turn in time: the other side has not failed."""


Source = tuple[Location, str]
"""A copy, and the endpoint of its node."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch: `held`, which the caller releases, or the reason of the failure."""

    held: Pin | None
    reason: MaybeMissed = ""


@dataclass(slots=True, eq=False)
class Wanted:
    """One key to be fetched. `done` is called on the loop with what came, which is released by
    whoever gets it. `loan`: the copy is visible only to its pins."""

    address: QualifiedKey
    located: Located
    done: Callable[[Fetched], None]
    loan: bool = False
    waits: Callable[[bool], None] = lambda _: None
    """Called on the loop with whether it waits for its turn at a holder."""
    until: float = math.inf
    """It does not wait for its turn after that, by the loop's clock."""
    tried: list[Source] = field(default_factory=list)
    """Holders that did not deliver it, and then the one that is asked."""
    fetched: Fetched = Fetched(None)

    @property
    def source(self) -> Source:
        return self.tried[-1]

    @property
    def untried(self) -> list[Source]:
        return [source for source in self.located.sources if source not in self.tried]

    @property
    def nbytes(self) -> int:
        return self.located.record.nbytes if self.located.record else 0


@dataclass(slots=True)
class Average:
    """A moving average; 0.0 while it is unknown."""

    value: float = 0.0
    measured_at: float = -math.inf

    def at(self, now: float) -> float:
        return self.value if now - self.measured_at < PACE_SECONDS else 0.0

    def add(self, newest: float, now: float) -> None:
        before = self.at(now)
        self.value = before + NEWEST_SHARE * (newest - before) if before else newest
        self.measured_at = now


@dataclass(slots=True)
class Pace:
    """What a holder's answers took. What is unknown is expected to take no time."""

    answer_seconds: Average = field(default_factory=Average)
    """From a request until its first answer begins."""
    byte_seconds: Average = field(default_factory=Average)
    """For each byte of a batch, from its first answer on."""

    def is_known(self, nbytes: int, now: float) -> bool:
        averages = [self.answer_seconds, self.byte_seconds]
        return all(one.at(now) for one in (averages if nbytes > AT_ONCE_BYTES else averages[:1]))

    def expected_seconds(self, nbytes: int, now: float) -> float:
        return self.answer_seconds.at(now) + self.byte_seconds.at(now) * nbytes

    def answered(self, seconds: float, now: float) -> None:
        self.answer_seconds.add(seconds, now)

    def received(self, nbytes: int, seconds: float, now: float) -> None:
        if nbytes > AT_ONCE_BYTES:
            self.byte_seconds.add(seconds / nbytes, now)


@dataclass(slots=True, eq=False)
class Holder:
    """Another node, and the connections to it that are not in use."""

    breaker: Breaker
    """Of its timeouts."""
    doubts: Breaker
    """Of all its failures when it was asked: until a pause is over it is asked only where no other
    is left."""
    used_at: float
    """When it was last asked; at first, when it was met."""
    pace: Pace = field(default_factory=Pace)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LINKS_MAX))
    links: list[tuple[FramedSocket, float]] = field(default_factory=list)
    """With the time of their last use."""
    users: int = 0
    """Batches that it is asked for, or will be."""

    def expected_seconds(self, nbytes: int, now: float) -> float:
        """Until so many bytes are here, if it is asked for nothing else. Endless while it is asked
        for something and was not measured: what it is asked for will show how fast it is."""
        if self.users and not self.pace.is_known(nbytes, now):
            return math.inf
        return self.pace.expected_seconds(nbytes, now)

    def idle_link(self) -> FramedSocket | None:
        """A kept connection that is still usable. Unrequested input means that the peer closed
        it, or that another boot listens there."""
        while self.links:
            link, _ = self.links.pop()
            if not link.closed and not link.wait_readable(0.0):
                return link
            link.abort()
        return None

    def close_links(self, unused_since: float) -> None:
        for link, used_at in self.links:
            if used_at < unused_since:
                link.close()
        self.links = [one for one in self.links if one[1] >= unused_since]


@dataclass(slots=True, eq=False)
class Batch:
    """What is requested together of one holder."""

    holder: Holder
    left: deque[Wanted] = field(default_factory=deque)
    nbytes: int = 0
    arrived: list[Wanted] = field(default_factory=list)
    """What has come, or will not come from there, and was not settled yet."""
    has_begun: bool = False

    def has_room(self, one: Wanted) -> bool:
        return self.nbytes + one.nbytes <= BATCH_BYTES and len(self.left) < BATCH_MAX

    def add(self, one: Wanted) -> None:
        self.left.append(one)
        self.nbytes += one.nbytes

    def tell_waits(self, waits: bool) -> None:
        for one in self.left:
            one.waits(waits)

    def arrive(self, fetched: Fetched) -> Wanted:
        """The result for the first one that is left."""
        one = self.left.popleft()
        one.fetched, self.has_begun = fetched, True
        self.arrived.append(one)
        return one

    def fail(self, reason: MissReason, count: int = 1) -> None:
        for _ in range(count):
            self.arrive(Fetched(None, reason))

    def take_arrived(self) -> list[Wanted]:
        arrived, self.arrived = self.arrived, []
        return arrived


@dataclass(slots=True)
class Fetcher:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    counters: Counters
    credentials: Credentials
    _holders: dict[tuple[str, str, bool], Holder] = field(default_factory=dict)
    """By node, endpoint and whether hand-offs are fetched: these wait for no shared tensors, since
    their leases end."""
    _fetches: "set[asyncio.Task[None]]" = field(default_factory=set)
    _threads: ThreadPool = field(default_factory=lambda: ThreadPool(THREADS, "lb-fetch"))

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetch each from the first holder that delivers; those of one holder are requested
        together. What is assigned to a holder counts in the choice for the next ones."""
        batches: dict[Holder, Batch] = {}
        for one in wanted:
            holder = self._choose(one)
            batch = batches.get(holder)
            if batch is None or not batch.has_room(one):
                batch = batches[holder] = self._start(holder)
            batch.add(one)

    def tick(self) -> None:
        """Close connections and end threads that are not used. To be called now and then."""
        self._threads.tick()
        since = self.loop.time() - LINK_IDLE_SECONDS
        for name, holder in list(self._holders.items()):
            holder.close_links(since)
            if not holder.users and holder.used_at < since:
                del self._holders[name]

    def close(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()
        for holder in self._holders.values():
            holder.close_links(math.inf)
        self._threads.close()

    def _holder_of(self, one: Wanted, source: Source) -> Holder:
        location, endpoint = source
        name = (location.node, endpoint, one.loan)
        holder = self._holders.get(name)
        if holder is None:
            breaker = Breaker(
                self.loop.time, TIMEOUTS_MAX, PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX, jitter=0.5
            )
            doubts = Breaker(self.loop.time, 1, PAUSE_SECONDS_MIN, DOUBT_SECONDS_MAX, jitter=0.5)
            holder = self._holders[name] = Holder(breaker, doubts, self.loop.time())
        return holder

    def _choose(self, one: Wanted) -> Holder:
        """Of the holders that were not tried, one from which it is expected soon; last, those that
        failed. Among equally fast ones that which is asked for least, or by chance: readers do not
        all ask the same. One that was not measured for a while is asked first, for one item."""
        untried = one.untried
        holders = [self._holder_of(one, source) for source in untried]
        chosen = 0 if len(holders) == 1 else _soonest(holders, one.nbytes, self.loop.time())
        one.tried.append(untried[chosen])
        return holders[chosen]

    def _start(self, holder: Holder, *wanted: Wanted) -> Batch:
        """A batch, which is requested when the loop's next turn begins. Until then its holder may
        be given more of it; its load counts from now on."""
        batch = Batch(holder)
        for one in wanted:
            batch.add(one)
        holder.users += 1
        task = self.loop.create_task(self._fetch(batch))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)
        return batch

    async def _fetch(self, batch: Batch) -> None:
        """Fetch a batch from one holder. What it does not deliver is fetched from the next ones."""
        holder, is_asked = batch.holder, False
        try:
            async with self._turn(batch):
                if is_asked := holder.breaker.allows():
                    await self._fetch_from(holder, batch)
                else:
                    batch.fail(MissReason.PEER_FAILED, len(batch.left))
        except Busy:
            batch.fail(MissReason.BUSY, 1 if batch.has_begun else len(batch.left))
        except (BufferFull, TensorTooLarge):
            batch.fail(MissReason.NO_ROOM)
        except CorruptTensor:
            batch.fail(MissReason.CHECKSUM)
        except ProtocolError:
            batch.fail(MissReason.PEER_FAILED)
        except (PipeError, NodeRefused, ValueError) as error:  # ValueError: it is no address
            if isinstance(error, PipeTimeout):
                holder.breaker.failed()
            # One that has delivered something is asked for the others again.
            batch.fail(MissReason.PEER_FAILED, 1 if batch.has_begun else len(batch.left))
        except Exception:  # noqa: BLE001 -- else its readers would wait for their deadlines
            _log.exception("a transfer failed; this is a bug, please report it")
            batch.fail(MissReason.PEER_FAILED, len(batch.left))
        finally:  # if cancelled, the node ends and no request waits
            if is_asked and any(one.fetched.reason in _TOLD for one in batch.arrived):
                holder.doubts.failed()
            holder.users -= 1
            holder.used_at = self.loop.time()
        self._settle(batch.take_arrived())
        if batch.left:
            self._start(holder, *batch.left)

    @asynccontextmanager
    async def _turn(self, batch: Batch) -> AsyncIterator[None]:
        """Wait until fewer than LINKS_MAX batches of its holder are transferred.

        Raises:
            Busy: this took too long.
        """
        places = batch.holder.places
        if places.locked():
            batch.tell_waits(True)
        until = max(one.until for one in batch.left)
        try:
            async with asyncio.timeout_at(min(until, self.loop.time() + TURN_SECONDS)):
                await places.acquire()
        except TimeoutError as error:
            raise Busy("other transfers from this holder took too long") from error
        try:
            batch.tell_waits(False)
            yield
        finally:
            places.release()

    async def _fetch_from(self, holder: Holder, batch: Batch) -> None:
        if (link := holder.idle_link()) is not None:
            try:
                await self._receive_over(link, holder, batch)
                return
            except PipeError:  # a kept connection may have ended, also silently, and others with it
                if batch.has_begun:
                    raise
                holder.close_links(math.inf)
        location, endpoint = batch.left[0].source
        dialled = await dial(self.loop, location, endpoint, TENSORS, self.credentials)
        await self._receive_over(dialled.framed(), holder, batch)

    async def _receive_over(self, link: FramedSocket, holder: Holder, batch: Batch) -> None:
        """Request the batch and receive it. What comes early is settled before the rest comes.

        Raises:
            LookupBufferError: the first one that is left did not come; the connection is unusable.
        """
        started, began, nbytes = self.loop.time(), 0.0, 0
        try:
            await self._request(link, batch.left)
            while batch.left:
                header = await self._header(link)
                if not began:
                    began = self.loop.time()
                    holder.pace.answered(began - started, began)
                one = batch.arrive(await self._receive(link, batch.left[0], *header))
                nbytes += header[1]
                holder.breaker.succeeded()
                if one.fetched.held is not None:
                    self.counters.fetch_seconds.observe(self.loop.time() - started)
                early = len(batch.arrived) == TOLD_TOGETHER or one.nbytes > TOLD_TOGETHER_BYTES
                if batch.left and early:
                    self._settle(batch.take_arrived())
                    await asyncio.sleep(0)
        except BaseException:
            link.abort()
            raise
        ended = self.loop.time()
        holder.pace.received(nbytes, ended - began, ended)
        holder.doubts.succeeded()
        holder.links.append((link, ended))

    async def _request(self, link: FramedSocket, wanted: Iterable[Wanted]) -> None:
        items = [[*one.address, one.source[0].boot, one.source[0].generation] for one in wanted]
        request = {"op": "get", "items": items}
        sent = link.send_nowait(request)
        if sent is not None:
            await self._on_thread(
                link, partial(link.send, request, timeout=PEER_ANSWER_SECONDS, already_sent=sent)
            )

    async def _receive(
        self, link: FramedSocket, one: Wanted, answer: object, nbytes: int
    ) -> Fetched:
        """What comes behind this header: the bytes, verified and in the arena, or `stale`."""
        location = one.source[0]
        if isinstance(answer, dict) and answer.get("status") == "stale":
            return Fetched(None, MissReason.STALE)
        header = self._checked(answer, nbytes, one.address, location)
        item = self._reserve(one.address, header, location.node, one.loan)
        item.device = one.located.record.device if one.located.record else ""
        try:
            checksum = await self._payload(link, self.arena.bytes_of(item))
            if checksum != header.checksum:
                raise CorruptTensor(f"{location.node} sent bytes that do not match their checksum")
        except BaseException:
            self.arena.abandon(item)
            raise
        held = self.arena.commit(item, header.checksum, FETCH_OWNER)
        self.counters.add("bytes_fetched", item.nbytes)
        return Fetched(held)

    async def _header(self, link: FramedSocket) -> Frame:
        deadline = self.loop.time() + PEER_ANSWER_SECONDS
        while link.peek() is None:
            await self._readable(link, deadline)
            if link.peek() is None:
                link.check_peeked()
        return link.recv_header(timeout=0.0)

    async def _readable(self, link: FramedSocket, deadline: float) -> None:
        readable: asyncio.Future[None] = self.loop.create_future()
        descriptor = link.descriptor
        self.loop.add_reader(descriptor, _set, readable)
        try:
            async with asyncio.timeout_at(deadline):
                await readable
        except TimeoutError as error:
            raise PipeTimeout("the holder did not answer in time") from error
        finally:
            self.loop.remove_reader(descriptor)

    async def _payload(self, link: FramedSocket, memory: memoryview) -> int:
        """Receive into `memory`: what has arrived, which lets the holder send on until a thread
        that receives the rest is awake. Returns the checksum."""
        hasher = xxh3_64()
        rest = memory[link.recv_available(memory[:AT_ONCE_BYTES], hasher) :]
        if rest:
            receive = partial(link.recv_into, rest, timeout=PEER_PROGRESS_SECONDS, hasher=hasher)
            await self._on_thread(link, receive)
        return hasher.intdigest()

    async def _on_thread(self, link: FramedSocket, move: Callable[[], None]) -> None:
        """Run `move`, which sends or receives on `link`. Also if cancelled, it has ended then.

        Raises:
            PipeError: as `move`.
            Busy: no thread was free in time.
        """
        job = self._threads.submit(move)
        moved = asyncio.wrap_future(job, loop=self.loop)
        bound = self.loop.call_later(PEER_PROGRESS_SECONDS, job.cancel)  # unless it has begun
        try:
            await asyncio.shield(moved)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if moved.cancelled() and task is not None and not task.cancelling():
                raise Busy("no thread was free in time") from None
            link.abort()
            await asyncio.wait([moved])
            raise
        finally:
            bound.cancel()

    def _settle(self, arrived: Sequence[Wanted]) -> None:
        """Give these to those who wait, except what the next holder may deliver."""
        for one in arrived:
            held, reason = one.fetched.held, one.fetched.reason
            if held is None:
                self.counters.add(f"fetches_failed_{reason}")
            if reason in _TOLD:
                self.counters.fetch_failed(one.address, reason, one.source[0].node)
            if held is None and reason != MissReason.NO_ROOM and one.untried:
                self._start(self._choose(one), one)
            else:
                one.done(one.fetched)

    def _checked(
        self, answer: object, nbytes: int, address: QualifiedKey, location: Location
    ) -> PayloadHeader:
        """The peer's header, if it matches the request.

        Redis is only a hint; the holder's header and the bytes' checksum decide.
        """
        fields = answer.get("payload") if isinstance(answer, dict) else None
        header = PayloadHeader.from_fields(fields, max_nbytes=self.arena.memory.nbytes)
        if nbytes != header.tensor.nbytes:
            raise ProtocolError("the length of the payload differs from its header")
        if (header.namespace, header.key) != address or header.generation != location.generation:
            raise CorruptTensor(f"{location.node} sent another tensor than requested")
        return header

    def _reserve(self, address: QualifiedKey, header: PayloadHeader, node: str, loan: bool) -> Item:
        ttl_seconds = None if header.ttl_ms is None else header.ttl_ms / 1000
        item = self.arena.reserve(
            address, header.tensor, origin=node, ttl_seconds=ttl_seconds, loan=loan
        )
        if item is None:
            raise BufferFull("a client of this node is writing this key")
        return item


def _soonest(holders: Sequence[Holder], nbytes: int, now: float) -> int:
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


def _set(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
