"""Transfers: copies a tensor from another node into the arena.

A batch of what one node has is requested together, on a connection that the loop has dialled and
keeps. The loop reads headers and reserves memory; a thread (`lb-fetch`) receives bytes that are
many or not here yet. The number of transfers is bounded, also for each node, so one that is not
reached or slow delays only what it is asked for. What waits for its turn has a deadline, and leaves
once nobody waits for it. A connection is closed at its first error. The header is compared with the
request, and the checksum is computed on arrival; the item becomes visible only if both match. Of
several holders a fast one is asked, by what its answers took. If it fails, the next is tried.
Failures are counted, and those that a record does not explain are noted: `registrar` writes them to
the store with its next beat, for `lookup-buffer why`. Called by `read` and `takes`.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

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
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.holders import (
    BATCH_BYTES,
    DOUBT_SECONDS_MAX,
    LINKS_MAX,
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    TIMEOUTS_MAX,
    Holder,
    HolderLink,
    soonest,
)
from lookup_buffer.node.items import Item, Pin
from lookup_buffer.node.links import TENSORS, Credentials, dial
from lookup_buffer.node.locate import Located
from lookup_buffer.node.receive import Busy, Missed, Receiver
from lookup_buffer.node.storage import Breaker
from lookup_buffer.node.turns import granted
from lookup_buffer.protocol.header import PayloadHeader
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.times import PEER_IDLE_SECONDS
from store import Location

TURN_SECONDS = 60.0
"""A batch waits at most so long for one of the holder's places, and so does a request that has no
time of its own. Then the next holder is asked, or it is a miss: `busy`."""
LINK_IDLE_SECONDS = 60.0
"""A connection that was not used for so long is closed."""
assert LINK_IDLE_SECONDS < PEER_IDLE_SECONDS, "the requesting side closes first"

BATCH_MAX = 64
PARTS_AHEAD = 2
"""So many are requested ahead on a connection: when one has come, the next is on its way."""
PARTS_PER_STREAM = 4
"""Of a large item: few, since each costs a request; several, since connections differ in speed."""
TOLD_TOGETHER = 8
"""So many small items that have come are settled together."""
TOLD_TOGETHER_BYTES = 1 << 20
_TOLD = (MissReason.CHECKSUM, MissReason.PEER_FAILED)
"""Failures that are written to the store; the record explains the others."""
FETCH_OWNER = -1
"""Owner of the pin on a fetched item, until its readers have pinned it."""
_log = logging.getLogger(__name__)

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
    batch: "FetchBatch | None" = None
    """The one that it is in, until it has come or failed."""

    @property
    def source(self) -> Source:
        return self.tried[-1]

    @property
    def untried(self) -> list[Source]:
        return [source for source in self.located.sources if source not in self.tried]

    @property
    def nbytes(self) -> int:
        return self.located.record.nbytes if self.located.record else 0

    @property
    def request(self) -> list[object]:
        """What its holder is asked for."""
        location = self.source[0]
        return [*self.address, location.boot, location.generation]


@dataclass(slots=True, eq=False)
class FetchBatch:
    """What is requested together of one holder."""

    holder: Holder
    place: "asyncio.Future[None]"
    """Cancelled if nobody waits for any of it before the place is given."""
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
        one.batch = self

    def withdraw(self, one: Wanted) -> None:
        self.left.remove(one)
        one.batch = None
        if not self.left:
            self.place.cancel()

    def tell_waits(self, waits: bool) -> None:
        for one in tuple(self.left):  # it may be withdrawn
            one.waits(waits)

    def arrive(self, fetched: Fetched) -> Wanted:
        """The result for the first one that is left."""
        one = self.left.popleft()
        one.fetched, one.batch, self.has_begun = fetched, None, True
        self.arrived.append(one)
        return one

    def fail(self, reason: MissReason, count: int = 1) -> None:
        for _ in range(count):
            self.arrive(Fetched(None, reason))

    def take_arrived(self) -> list[Wanted]:
        arrived, self.arrived = self.arrived, []
        return arrived


@dataclass(slots=True, eq=False)
class Parts:
    """A large item that comes in parts, over several connections of one holder."""

    wanted: Wanted
    left: deque[range]
    """The bytes that were not requested yet, or whose connection failed."""
    item: Item | None = None
    """Reserved when the first answer comes."""
    checksum: int = 0
    coming: int = 0
    """Parts that are requested and have not come."""
    began: float = 0.0
    """When the first answer came."""

    def take(self) -> range:
        self.coming += 1
        return self.left.popleft()

    def put_back(self, asked: deque[range]) -> None:
        self.coming -= len(asked)
        self.left.extendleft(reversed(asked))


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
    _receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self._receiver = Receiver(self.loop)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetch each from the first holder that delivers; those of one holder are requested
        together. What is assigned to a holder counts in the choice for the next ones."""
        batches: dict[Holder, FetchBatch] = {}
        for one in wanted:
            holder = self._choose(one)
            batch = batches.get(holder)
            if batch is None or not batch.has_room(one):
                batch = batches[holder] = self._start(holder)
            batch.add(one)

    def withdraw(self, one: Wanted) -> bool:
        """Nobody waits for it any more. False: it comes nevertheless, since its turn has begun;
        else its `done` is not called."""
        batch = one.batch
        if batch is None or batch.place.done():
            return False
        batch.withdraw(one)
        return True

    def tick(self) -> None:
        """Close connections and end threads that are not used, and connections whose certificates
        do not count any more. To be called now and then."""
        self._receiver.tick()
        now = self.loop.time()
        since = now - LINK_IDLE_SECONDS
        for name, holder in list(self._holders.items()):
            holder.end_uses(now)
            holder.close_links(since)
            if not holder.users and holder.used_at < since:
                del self._holders[name]

    def close(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()
        for holder in self._holders.values():
            holder.close_links(math.inf)
        self._receiver.close()

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
        chosen = 0 if len(holders) == 1 else soonest(holders, one.nbytes, self.loop.time())
        one.tried.append(untried[chosen])
        return holders[chosen]

    def _start(self, holder: Holder, *wanted: Wanted) -> FetchBatch:
        """A batch, which is requested when the loop's next turn begins. Until then its holder may
        be given more of it; its load counts, and it waits for a place, from now on."""
        batch = FetchBatch(holder, holder.places.ask())
        for one in wanted:
            batch.add(one)
        holder.users += 1
        task = self.loop.create_task(self._fetch(batch))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)
        return batch

    async def _fetch(self, batch: FetchBatch) -> None:
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
        except Missed as missed:
            batch.fail(missed.reason)
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
        finally:  # if cancelled, no request waits for it, or the node ends
            if is_asked and any(one.fetched.reason in _TOLD for one in batch.arrived):
                holder.doubts.failed()
            holder.users -= 1
            holder.used_at = self.loop.time()
        self._settle(batch.take_arrived())
        if batch.left:
            self._start(holder, *batch.left)

    @asynccontextmanager
    async def _turn(self, batch: FetchBatch) -> AsyncIterator[None]:
        """Wait until fewer than LINKS_MAX batches of its holder are transferred.

        Raises:
            Busy: this took too long.
            CancelledError: all of it was withdrawn.
        """
        places = batch.holder.places
        if not batch.place.done():
            batch.tell_waits(True)
        until = max((one.until for one in batch.left), default=math.inf)
        until = min(until, self.loop.time() + TURN_SECONDS)
        try:
            await granted(batch.place, until, lambda _: places.release())
        except TimeoutError as error:
            raise Busy("other transfers from this holder took too long") from error
        try:
            batch.tell_waits(False)
            yield
        finally:
            places.release()

    async def _fetch_from(self, holder: Holder, batch: FetchBatch) -> None:
        first = batch.left[0]
        streams = holder.streams_for(first.nbytes, self.loop.time()) if len(batch.left) == 1 else 1
        if streams > 1:
            with suppress(_OtherSize):
                batch.arrive(await self._fetch_in_parts(holder, first, streams))
                return
        receive = partial(self._receive_over, holder=holder, batch=batch)
        await self._over_a_link(holder, first.source, receive, lambda: batch.has_begun)

    async def _over_a_link(
        self,
        holder: Holder,
        source: Source,
        receive: Callable[[FramedSocket], Awaitable[None]],
        has_begun: Callable[[], bool],
    ) -> None:
        """Await `receive` with a connection; if a kept one fails before anything has come, once
        more with a new one."""
        if (link := holder.idle_link()) is not None:
            try:
                async with holder.using(link) as framed:
                    await receive(framed)
                return
            except PipeError:  # a kept connection may have ended, also silently, and others with it
                if has_begun():
                    raise
                holder.close_links(math.inf)
        dialled = await dial(self.loop, *source, TENSORS, self.credentials)
        holder.version = dialled.version
        async with holder.using(HolderLink(dialled.framed(), dialled.trust)) as framed:
            await receive(framed)

    async def _receive_over(self, link: FramedSocket, holder: Holder, batch: FetchBatch) -> None:
        """Request the batch and receive it. What comes early is settled before the rest comes.

        Raises:
            LookupBufferError: the first one that is left did not come; the connection is unusable.
        """
        started, began, nbytes = self.loop.time(), 0.0, 0
        try:
            await self._receiver.request(link, [one.request for one in batch.left])
            while batch.left:
                header = await self._receiver.header(link, has_begun=batch.has_begun)
                if not began:
                    began = self.loop.time()
                    holder.pace.answered(began - started, began)
                one = batch.arrive(await self._receive(link, batch.left[0], started, *header))
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

    async def _receive(
        self, link: FramedSocket, one: Wanted, started: float, answer: object, nbytes: int
    ) -> Fetched:
        """What comes behind this header: the bytes, verified and in the arena, or `stale`."""
        if _is_stale(answer):
            return Fetched(None, MissReason.STALE)
        header = self._checked(answer, one)
        if nbytes != header.tensor.nbytes:
            raise ProtocolError("the length of the payload differs from its header")
        item = self._reserve(one, header)
        try:
            checksum = await self._receiver.payload(link, self.arena.bytes_of(item))
            return self._commit(item, checksum, header.checksum, started)
        except BaseException:
            self.arena.abandon(item)
            raise

    async def _fetch_in_parts(self, holder: Holder, one: Wanted, streams: int) -> Fetched:
        """Fetch an item over several connections: one is as fast as its window allows, and slow for
        long after it has lost packets.

        Raises:
            LookupBufferError: it did not come.
        """
        started = self.loop.time()
        parts = Parts(one, _ranges(one.nbytes, streams * PARTS_PER_STREAM))
        try:
            await self._receive_parts(holder, parts, streams)
            assert parts.item is not None
            checksum = await self._receiver.checksum(self.arena.bytes_of(parts.item))
            fetched = self._commit(parts.item, checksum, parts.checksum, started)
        except BaseException:
            if parts.item is not None:
                self.arena.abandon(parts.item)
            raise
        ended = self.loop.time()
        holder.pace.received(one.nbytes, ended - parts.began, ended)
        holder.doubts.succeeded()
        self.counters.fetch_seconds.observe(ended - started)
        return fetched

    async def _receive_parts(self, holder: Holder, parts: Parts, streams: int) -> None:
        """On the connection of the caller, and beside it on others, whose parts it receives if they
        fail."""
        beside = [self.loop.create_task(self._beside(holder, parts)) for _ in range(streams - 1)]
        try:
            while parts.left or parts.coming:
                await self._stream(holder, parts)
                while parts.coming and not parts.left:
                    running = [stream for stream in beside if not stream.done()]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:  # one that is not connected yet has nothing to receive any more
            for stream in beside:
                stream.cancel()
            if beside:
                await asyncio.wait(beside)

    async def _beside(self, holder: Holder, parts: Parts) -> None:
        """On a place that is free, until a batch waits for one."""
        if holder.places.locked():
            return
        holder.users += 1
        holder.places.ask()  # it has one at once
        try:
            await self._stream(holder, parts, gives_way=True)
        except Exception:  # noqa: BLE001 -- the first connection receives these parts, or fails
            _log.debug("parts come on other connections", exc_info=True)
        finally:
            holder.places.release()
            holder.users -= 1

    async def _stream(self, holder: Holder, parts: Parts, *, gives_way: bool = False) -> None:
        """Request and receive parts on one connection until none is left."""
        came: list[range] = []

        async def receive(link: FramedSocket) -> None:
            await self._receive_in_turn(link, holder, parts, came, gives_way)

        await self._over_a_link(holder, parts.wanted.source, receive, lambda: bool(came))

    async def _receive_in_turn(
        self, link: FramedSocket, holder: Holder, parts: Parts, came: list[range], gives_way: bool
    ) -> None:
        asked: deque[range] = deque()
        started = self.loop.time()

        def goes_on() -> bool:
            return bool(parts.left) and not (gives_way and holder.users > LINKS_MAX)

        try:
            while asked or goes_on():
                while len(asked) < PARTS_AHEAD and goes_on():
                    asked.append(parts.take())
                    bounds = asked[-1].start, len(asked[-1])
                    await self._receiver.request(link, [[*parts.wanted.request, *bounds]])
                answer, nbytes = await self._receiver.header(link, has_begun=bool(came))
                if not came:
                    now = self.loop.time()
                    holder.pace.answered(now - started, now)
                    parts.began = parts.began or now
                await self._receiver.part(link, self._memory_of(parts, asked[0], answer, nbytes))
                holder.breaker.succeeded()
                came.append(asked.popleft())
                parts.coming -= 1
        except BaseException:
            link.abort()
            parts.put_back(asked)
            raise

    def _memory_of(self, parts: Parts, part: range, answer: object, nbytes: int) -> memoryview:
        """Of the part that this answer announces; the first one reserves that of the whole."""
        if _is_stale(answer):
            raise Missed(MissReason.STALE)
        header = self._checked(answer, parts.wanted)
        if header.tensor.nbytes != parts.wanted.nbytes:
            raise _OtherSize
        if nbytes != len(part):
            raise ProtocolError("the length of the payload differs from what was requested")
        if parts.item is None:
            parts.item, parts.checksum = self._reserve(parts.wanted, header), header.checksum
        return self.arena.bytes_of(parts.item)[part.start : part.stop]

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

    def _checked(self, answer: object, one: Wanted) -> PayloadHeader:
        """The peer's header, if it matches the request.

        Redis is only a hint; the holder's header and the bytes' checksum decide.
        """
        location = one.source[0]
        fields = answer.get("payload") if isinstance(answer, dict) else None
        header = PayloadHeader.from_fields(fields, max_nbytes=self.arena.memory.nbytes)
        found = (header.namespace, header.key), header.generation
        if found != (one.address, location.generation):
            raise CorruptTensor(f"{location.node} sent another tensor than requested")
        return header

    def _reserve(self, one: Wanted, header: PayloadHeader) -> Item:
        item = self.arena.reserve(
            one.address,
            header.tensor,
            origin=one.source[0].node,
            ttl_seconds=None if header.ttl_ms is None else header.ttl_ms / 1000,
            loan=one.loan,
        )
        if item is None:
            raise Missed(MissReason.BUSY)  # a client of this node is writing it
        item.device = one.located.record.device if one.located.record else ""
        return item

    def _commit(self, item: Item, checksum: int, expected: int, started: float) -> Fetched:
        """`started`: when it was requested, by the loop's clock, which is the arena's."""
        if checksum != expected:
            raise CorruptTensor(f"{item.origin} sent bytes that do not match their checksum")
        if self.arena.is_invalid(item, started):  # its holder may have sent it before it knew
            self.arena.abandon(item)
            return Fetched(None, MissReason.STALE)
        held = self.arena.commit(item, checksum, FETCH_OWNER)
        self.counters.add("bytes_fetched", item.nbytes)
        return Fetched(held)


class _OtherSize(LookupBufferError):
    """The record has another size than its item: that comes whole, as the holder has it."""


def _is_stale(answer: object) -> bool:
    return isinstance(answer, dict) and answer.get("status") == "stale"


def _ranges(nbytes: int, count: int) -> deque[range]:
    """`nbytes` in at most `count` parts."""
    step = -(-nbytes // count)
    return deque(range(start, min(start + step, nbytes)) for start in range(0, nbytes, step))
