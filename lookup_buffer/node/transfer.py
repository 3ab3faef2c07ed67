"""Transfers: copies a tensor from another node into the arena.

There are four threads (`lb-fetch`), each with one transfer at a time. Connections are kept per
endpoint and closed at their first error. The header is compared with the request, and the checksum
is computed on arrival; the item becomes visible only if both match. If one holder fails, the next
is tried. Failures are counted, and those that a record does not explain are noted: `registrar`
writes them to the store with its next beat, for `lookup-buffer why`. Called by `read` and `takes`
on the loop's thread.
"""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from xxhash import xxh3_64

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import (
    BufferFull,
    CorruptTensor,
    MaybeMissed,
    MissReason,
    NodeRefused,
    PipeError,
    ProtocolError,
    TensorTooLarge,
)
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.locate import Located
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.protocol.auth import connect
from lookup_buffer.protocol.header import PayloadHeader
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.times import PEER_ANSWER_SECONDS, PEER_CONNECT_SECONDS
from store import Location

THREADS = 4
IDLE_LINKS_MAX = 4

BATCH_BYTES = 4 << 20
"""Items of up to so many bytes are requested together: a round trip for each of them would cost
more than their bytes. Larger ones are spread over the threads."""
BATCH_MAX = 64
TOLD_TOGETHER = 8
"""So many small items that have come are told to the loop together."""
TOLD_TOGETHER_BYTES = 1 << 20
NOTED_MAX = 64
"""Bound on the failures that are noted between two beats; others are dropped."""
_TOLD = (MissReason.CHECKSUM, MissReason.PEER_FAILED)
"""Failures that are written to the store; the record explains the others."""
FETCH_OWNER = -1
"""Owner of the pin on a fetched item, until its readers have pinned it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch: `held`, which the caller releases, or the reason of the failure."""

    held: Held | None
    reason: MaybeMissed = ""


@dataclass(slots=True, eq=False)
class Wanted:
    """One key to be fetched. `done` is called on the loop with what came, which is released by
    whoever gets it. `loan`: the copy is visible only to its pins."""

    address: QualifiedKey
    located: Located
    done: Callable[[Fetched], None]
    loan: bool = False
    tried: int = 0
    """Holders that did not deliver it."""
    fetched: Fetched = Fetched(None)

    @property
    def source(self) -> tuple[Location, str]:
        return self.located.sources[self.tried]

    @property
    def nbytes(self) -> int:
        return self.located.record.nbytes if self.located.record else 0


@dataclass(slots=True)
class FailedFetches:
    """Recent failed fetches: which keys, from which node and why. Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _noted: dict[QualifiedKey, tuple[str, str]] = field(default_factory=dict)

    def note(self, address: QualifiedKey, reason: str, holder: str) -> None:
        """The fetch of `address` from `holder` failed because of `reason`."""
        with self._lock:
            if len(self._noted) < NOTED_MAX or address in self._noted:
                self._noted[address] = (reason, holder)

    def take(self) -> dict[QualifiedKey, tuple[str, str]]:
        """Failures since the last call: reason and holder by address."""
        with self._lock:
            noted, self._noted = self._noted, {}
            return noted


@dataclass(slots=True)
class Fetcher:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    counters: Counters
    token: str | None
    failed: FailedFetches = field(default_factory=FailedFetches)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _idle_links: dict[str, list[FramedSocket]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="lb-fetch")
    )

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetch each from the first holder that delivers; those of one holder are requested
        together."""
        by_endpoint: dict[str, list[Wanted]] = defaultdict(list)
        for one in wanted:
            by_endpoint[one.source[1]].append(one)
        for endpoint, group in by_endpoint.items():
            for batch in _batches(group):
                self._pool.submit(self._fetch, endpoint, batch)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for links in self._idle_links.values():
                for link in links:
                    link.abort()
            self._idle_links.clear()

    # -- on `lb-fetch`

    def _fetch(self, endpoint: str, batch: Sequence[Wanted]) -> None:
        """Fetch a batch from one holder. What it does not deliver is fetched from the next ones."""
        started, left, is_kept = time.monotonic(), deque(batch), False
        arrived: list[Wanted] = []
        try:
            with self._link(endpoint) as (link, is_kept):
                _request(link, batch)
                while left:
                    one = left[0]
                    one.fetched = self._receive(link, one)
                    if one.fetched.held is not None:
                        self.counters.fetch_seconds.observe(time.monotonic() - started)
                    arrived.append(left.popleft())
                    if len(arrived) == TOLD_TOGETHER or one.nbytes > TOLD_TOGETHER_BYTES:
                        self._tell(arrived)
        except (BufferFull, TensorTooLarge):
            left[0].fetched = Fetched(None, MissReason.NO_ROOM)
        except CorruptTensor:
            left[0].fetched = Fetched(None, MissReason.CHECKSUM)
        except ProtocolError:
            left[0].fetched = Fetched(None, MissReason.PEER_FAILED)
        except (PipeError, NodeRefused, ValueError):  # the endpoint is no address
            if len(left) < len(batch):
                left[0].fetched = Fetched(None, MissReason.PEER_FAILED)
            elif not is_kept:  # it delivers nothing; a kept connection may just have ended
                for one in left:
                    one.fetched = Fetched(None, MissReason.PEER_FAILED)
        except BaseException:
            for one in left:
                one.fetched = Fetched(None, MissReason.PEER_FAILED)
            raise
        finally:
            self._tell(arrived)
            self._go_on(endpoint, left)

    def _go_on(self, endpoint: str, left: Iterable[Wanted]) -> None:
        """Fetch what a holder did not deliver: from the next one if it failed, else again."""
        again = [one for one in left if one.fetched.reason == ""]
        failed = [one for one in left if one.fetched.reason != ""]
        if again:
            self._submit(endpoint, again)
        self._tell(failed)

    def _submit(self, endpoint: str, batch: list[Wanted]) -> None:
        try:
            self._pool.submit(self._fetch, endpoint, batch)
        except RuntimeError:
            pass  # the node shuts down, and no request waits

    def _tell(self, arrived: list[Wanted]) -> None:
        """Settle the futures of these, except what the next holder may deliver."""
        settled = []
        for one in arrived:
            reason = one.fetched.reason
            if one.fetched.held is None:
                self.counters.add(f"fetches_failed_{reason}")
            if reason in _TOLD:
                self.failed.note(one.address, reason, one.source[0].node)
            one.tried += 1
            may_come = one.tried < len(one.located.sources)
            if one.fetched.held is None and reason != MissReason.NO_ROOM and may_come:
                one.fetched = Fetched(None)
                self._submit(one.source[1], [one])
            else:
                settled.append(one)
        arrived.clear()
        if settled:
            call_from_thread(self.loop, _settle, settled)

    def _receive(self, link: FramedSocket, one: Wanted) -> Fetched:
        """The next answer on the link: the bytes, verified and in the arena, or `stale`."""
        location = one.source[0]
        answer, nbytes = link.recv_header(timeout=PEER_ANSWER_SECONDS)
        if isinstance(answer, dict) and answer.get("status") == "stale":
            return Fetched(None, MissReason.STALE)
        header = self._checked(answer, nbytes, one.address, location)
        item = self._reserve(one.address, header, location.node, one.loan)
        item.device = one.located.record.device if one.located.record else ""
        try:
            hasher = xxh3_64()
            link.recv_into(self.shelf.bytes_of(item), timeout=PEER_ANSWER_SECONDS, hasher=hasher)
            _check(hasher.intdigest(), header, location)
        except BaseException:
            self.shelf.abandon(item)
            raise
        ticket = self.shelf.commit(item, header.checksum, FETCH_OWNER)
        self.counters.add("bytes_fetched", item.nbytes)
        return Fetched(Held(ticket, item))

    def _checked(
        self, answer: object, nbytes: int, address: QualifiedKey, location: Location
    ) -> PayloadHeader:
        """The peer's header, if it matches the request.

        Redis is only a hint; the holder's header and the bytes' checksum decide.
        """
        fields = answer.get("payload") if isinstance(answer, dict) else None
        header = PayloadHeader.from_fields(fields, max_nbytes=self.shelf.arena.nbytes)
        if nbytes != header.tensor.nbytes:
            raise ProtocolError("the length of the payload differs from its header")
        if (header.namespace, header.key) != address or header.generation != location.generation:
            raise CorruptTensor(f"{location.node} sent another tensor than requested")
        return header

    def _reserve(self, address: QualifiedKey, header: PayloadHeader, node: str, loan: bool) -> Item:
        if loan:
            return self.shelf.reserve_loan(address, header.tensor, origin=node)
        ttl_seconds = None if header.ttl_ms is None else header.ttl_ms / 1000
        item = self.shelf.reserve(address, header.tensor, origin=node, ttl_seconds=ttl_seconds)
        if item is None:
            raise BufferFull("a client of this node is writing this key")
        return item

    @contextmanager
    def _link(self, endpoint: str) -> Iterator[tuple[FramedSocket, bool]]:
        """A connection to `endpoint`, and whether it was used before. It is kept for the next
        transfer unless an error occurs."""
        link = self._idle_link(endpoint)
        is_kept = link is not None
        if link is None:
            host, port = parse_tcp(endpoint)
            link = connect(host, port, token=self.token, timeout=PEER_CONNECT_SECONDS)
        try:
            yield link, is_kept
        except BaseException:
            link.abort()
            raise
        self._keep(endpoint, link)

    def _idle_link(self, endpoint: str) -> FramedSocket | None:
        """A kept connection that is still usable. Unrequested input means that the peer closed
        it, or that another boot listens there."""
        while True:
            with self._lock:
                links = self._idle_links.get(endpoint)
                if not links:
                    return None
                link = links.pop()
            if not link.closed and not link.wait_readable(0.0):
                return link
            link.abort()

    def _keep(self, endpoint: str, link: FramedSocket) -> None:
        with self._lock:
            links = self._idle_links.setdefault(endpoint, [])
            if len(links) < IDLE_LINKS_MAX:
                links.append(link)
                return
        link.close()


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """What is requested together of one holder."""
    batch: list[Wanted] = []
    nbytes = 0
    for one in wanted:
        if batch and (nbytes + one.nbytes > BATCH_BYTES or len(batch) == BATCH_MAX):
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += one.nbytes
    if batch:
        yield batch


def _request(link: FramedSocket, batch: Sequence[Wanted]) -> None:
    items = [[*one.address, one.source[0].boot, one.source[0].generation] for one in batch]
    link.send({"op": "get", "items": items}, timeout=PEER_ANSWER_SECONDS)


def _settle(settled: Sequence[Wanted]) -> None:
    for one in settled:
        one.done(one.fetched)


def _check(checksum: int, header: PayloadHeader, location: Location) -> None:
    if checksum != header.checksum:
        raise CorruptTensor(f"{location.node} sent bytes that do not match their checksum")
