"""Transfers: copies a tensor from another node into the arena.

There are four threads (`lb-fetch`), each with one transfer at a time. Connections are kept per
endpoint and closed at their first error. The header is compared with the request, and the checksum
is computed on arrival; the item becomes visible only if both match. If one holder fails, the next
is tried. Failures are counted, and those that a record does not explain are noted: `registrar`
writes them to the store with its next beat, for `lookup-buffer why`. Called by `read` and `takings`
on the loop's thread.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from xxhash import xxh3_64

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import (
    BufferFull,
    CorruptTensor,
    MaybeMissed,
    MissingTensor,
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

    def fetch(
        self, address: QualifiedKey, located: Located, *, loan: bool = False
    ) -> "asyncio.Future[Fetched]":
        """Fetch from the first holder that delivers. `loan`: the copy is visible only to its
        pins. Do not cancel the future: what arrives must be released."""
        done: asyncio.Future[Fetched] = self.loop.create_future()
        self._pool.submit(self._fetch, address, located, done, loan)
        return done

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for links in self._idle_links.values():
                for link in links:
                    link.abort()
            self._idle_links.clear()

    def _fetch(
        self, address: QualifiedKey, located: Located, done: "asyncio.Future[Fetched]", loan: bool
    ) -> None:
        fetched = Fetched(None, located.reason or MissReason.ABSENT)
        device = located.record.device if located.record else ""
        try:
            for location, endpoint in located.sources:
                fetched = self._try(address, location, endpoint, loan, device)
                if fetched.held is None:
                    self.counters.add(f"fetches_failed_{fetched.reason}")
                if fetched.reason in _TOLD:
                    self.failed.note(address, fetched.reason, location.node)
                if fetched.held is not None or fetched.reason == MissReason.NO_ROOM:
                    break
        finally:
            call_from_thread(self.loop, done.set_result, fetched)

    def _try(
        self, address: QualifiedKey, location: Location, endpoint: str, loan: bool, device: str
    ) -> Fetched:
        try:
            return Fetched(self._transfer(address, location, endpoint, loan, device))
        except (BufferFull, TensorTooLarge):
            return Fetched(None, MissReason.NO_ROOM)
        except MissingTensor:
            return Fetched(None, MissReason.STALE)
        except CorruptTensor:
            return Fetched(None, MissReason.CHECKSUM)
        except (PipeError, ProtocolError, NodeRefused, ValueError):  # the endpoint is no address
            return Fetched(None, MissReason.PEER_FAILED)

    def _transfer(
        self, address: QualifiedKey, location: Location, endpoint: str, loan: bool, device: str
    ) -> Held:
        started = time.monotonic()
        with self._link(endpoint) as link:
            namespace, key = address
            request = {
                "op": "get",
                "namespace": namespace,
                "key": key,
                "boot": location.boot,
                "generation": location.generation,
            }
            link.send(request, timeout=PEER_ANSWER_SECONDS)
            answer, nbytes = link.recv_header(timeout=PEER_ANSWER_SECONDS)
            if isinstance(answer, dict) and answer.get("status") == "stale":
                raise MissingTensor(f"{location.node} no longer holds {key}")
            header = self._checked(answer, nbytes, address, location)
            item = self._reserve(address, header, location.node, loan)
            item.device = device
            try:
                hasher = xxh3_64()
                link.recv_into(
                    self.shelf.bytes_of(item), timeout=PEER_ANSWER_SECONDS, hasher=hasher
                )
                _check(hasher.intdigest(), header, location)
            except BaseException:
                self.shelf.abandon(item)
                raise
        ticket = self.shelf.commit(item, header.checksum, FETCH_OWNER)
        self.counters.add("bytes_fetched", item.nbytes)
        self.counters.fetch_seconds.observe(time.monotonic() - started)
        return Held(ticket, item)

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
    def _link(self, endpoint: str) -> Iterator[FramedSocket]:
        """A connection to `endpoint`, kept for the next transfer unless an error occurred."""
        link = self._idle_link(endpoint)
        if link is None:
            host, port = parse_tcp(endpoint)
            link = connect(host, port, token=self.token, timeout=PEER_CONNECT_SECONDS)
        try:
            yield link
        except MissingTensor:
            self._keep(endpoint, link)  # a complete reply: the connection can be reused
            raise
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


def _check(checksum: int, header: PayloadHeader, location: Location) -> None:
    if checksum != header.checksum:
        raise CorruptTensor(f"{location.node} sent bytes that do not match their checksum")
