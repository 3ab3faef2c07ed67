"""The peer server: sends tensors to other nodes over TCP, and admits their requests for hand-offs.

Accepting, handshakes and requests are on the loop; threads (`lb-send`) send what a socket does not
take at once, directly from the arena, pinned meanwhile. So a connection without a request costs no
thread. A request for another boot or generation is answered `stale`, and the record in the store is
corrected. `main.py` starts it; the callers are the fetchers and owners of other nodes.

Connections whose handshake is not done have places of their own, of which the oldest is dropped:
strangers take none from other nodes. The other places follow the size of the fleet; if they are
used up, the longest idle connection is closed.
"""

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from lookup_buffer.config import parse_address
from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import PEER_OWNER, Arena
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Askers
from lookup_buffer.node.items import Pin
from lookup_buffer.node.links import (
    HANDOFFS,
    REACHABILITY,
    ROLES,
    TENSORS,
    Credentials,
    Link,
    ThreadPool,
    call_from_thread,
    greet,
    host_of,
)
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.reachability import Reachability
from lookup_buffer.node.shares import KEY_BYTES
from lookup_buffer.node.turns import Places, Turns, granted
from lookup_buffer.protocol.acceptor import RETRY_SECONDS, listening_socket
from lookup_buffer.protocol.auth import Purpose
from lookup_buffer.protocol.fields import is_boot, is_count, is_fingerprint, is_key_text
from lookup_buffer.protocol.header import PayloadHeader
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.protocol.tls import Trust
from lookup_buffer.times import PEER_IDLE_SECONDS, PEER_PROGRESS_SECONDS

HALF_OPEN_MAX: Final = 256
HALF_OPEN_PER_HOST_MAX: Final = 128
"""Bounds on connections whose handshake is not done; beyond them the oldest of the address that has
most is dropped. The addresses of one IPv6 network of 64 bits count as one: a host may have all."""
ACCEPTED_AT_ONCE: Final = 32
LINKS_MIN: Final = 1024
LINKS_PER_NODE: Final = 10
"""Bound on connections after their handshake: LINKS_MIN, or so many for each live node."""
LINKS_PER_CLIENT: Final = 16
"""Bound on those for tensors of a client that a certificate names: twice what a node opens."""
SENDERS_MAX: Final = 128
"""Threads that send; each has one reader at a time, so slow readers delay only themselves."""
ONLY_READ_SENDERS_MAX: Final = SENDERS_MAX // 2
"""So many of them send to nodes that only read, all together: others never wait for those, however
slowly they read."""
ITEMS_MAX: Final = 256
"""Bound on the items of one request, and on those of the requests that one connection has sent
ahead of the one in work, if they are several: a key may have 4 KB. A node sends one batch, or two
parts."""
QUEUED_MAX: Final = 16
"""Bound on the requests that one connection has sent ahead. What those of all connections occupy is
bounded, too: see `connection.PEERS_TOTAL_BYTES`."""
TOGETHER_BYTES: Final = 4 << 20
"""Items of up to so many bytes are pinned and sent by one call of a thread."""
TOGETHER_MAX: Final = 64
"""Bound on their number: what the loop does of them is one step."""


class Asked(NamedTuple):
    """One item of a request."""

    address: QualifiedKey
    boot: str
    generation: int
    start: int = 0
    nbytes: int | None = None
    """Of a part; None: up to the end."""


class Reply(NamedTuple):
    """A header, and the bytes that follow it, of an item that is pinned until they are sent."""

    header: dict[str, Any]
    held: Pin | None = None
    payload: memoryview | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.payload is None else self.payload.nbytes


STALE: Final = Reply({"status": "stale"})


@dataclass(slots=True)
class PeerServer:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    counters: Counters
    credentials: Credentials
    missed: Callable[[QualifiedKey], None]
    """Called with an address whose requested generation this node does not have."""
    askers: Askers
    """They get the connections for hand-offs."""
    directory: Directory | None = None
    reachability: Reachability | None = None
    """It gets the connections by which other nodes find out whether they reach this one."""
    identity: Identity = field(default_factory=lambda: Identity("", "", ""))
    _listener: socket.socket | None = None
    _greetings: "dict[asyncio.Task[None], str]" = field(default_factory=dict)
    """The handshakes in progress, the oldest first, and the hosts that they are with."""
    _readers: "set[Reader]" = field(default_factory=set)
    _senders: ThreadPool = field(default_factory=lambda: ThreadPool(SENDERS_MAX, "lb-send"))
    _only_readers: Places = field(default_factory=lambda: Places(ONLY_READ_SENDERS_MAX))
    """Which of them have a thread."""
    _trusts: dict[Connection, Trust] = field(default_factory=dict)
    """Of the connections for tensors and hand-offs; those for `doctor` end soon in any case."""
    turns: Turns = field(init=False)
    """Of the readers' requests."""
    answering: Turns = field(init=False)
    """Of the answers to them."""

    def __post_init__(self) -> None:
        self.turns, self.answering = Turns(self.loop), Turns(self.loop)

    def listen(self, address: str) -> str:
        """Bind; returns the address with the actual port.

        Raises:
            OSError: the address is in use or not of this host.
        """
        self._listener, shown = listening_socket(*parse_address(address))
        self._listener.setblocking(False)
        return f"{urlsplit(address).scheme}://{shown}"

    def start(self, identity: Identity, directory: Directory, reachability: Reachability) -> None:
        self.identity, self.directory = identity, directory
        self.reachability = reachability
        self._accept_more()

    def tick(self) -> None:
        """Close connections without a request for PEER_IDLE_SECONDS, and those whose certificates
        have not counted for a while; end idle threads. To be called now and then."""
        self._senders.tick()
        self._trusts = {one: trust for one, trust in self._trusts.items() if one.open}
        for connection in [one for one, trust in self._trusts.items() if trust.is_over()]:
            connection.end(None)
        bound = self.loop.time() - PEER_IDLE_SECONDS
        for reader in [one for one in self._readers if not one.is_busy and one.used_at < bound]:
            reader.end()

    def close(self) -> None:
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for greeting in list(self._greetings):
            greeting.cancel()
        for reader in list(self._readers):
            reader.end()
        self._senders.close()

    # -- accepting

    def _accept_more(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                stream, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no free descriptor
                self.loop.remove_reader(listener)
                self.loop.call_later(RETRY_SECONDS, self._accept_more)
                return
            self._greet(stream, host_of(address[0]))

    def _greet(self, stream: socket.socket, host: str) -> None:
        of_host = [task for task, theirs in self._greetings.items() if theirs == host]
        if len(of_host) >= HALF_OPEN_PER_HOST_MAX:
            self._drop(of_host[0])
        elif len(self._greetings) >= HALF_OPEN_MAX:
            ((crowded, _),) = Counter(self._greetings.values()).most_common(1)
            self._drop(next(task for task, of in self._greetings.items() if of == crowded))
        task = self.loop.create_task(self._admit(stream, host))
        self._greetings[task] = host

        def over(_: object) -> None:
            self._greetings.pop(task, None)
            if task.cancelled():
                stream.close()  # it may not have begun

        task.add_done_callback(over)

    def _drop(self, greeting: "asyncio.Task[None]") -> None:
        del self._greetings[greeting]
        greeting.cancel()

    def _refused(self, purpose: Purpose) -> str:
        """See `Accepts`. A proof is for one address, node and role: it cannot be passed on."""
        identity = self.identity
        if purpose.role not in ROLES:
            return "a node listens here"
        if (purpose.node, purpose.endpoint) != (identity.node, identity.endpoint):
            return f"node {identity.node} listens here, at {identity.endpoint}"
        if purpose.role != TENSORS and purpose.boot != identity.boot:
            return "the node was started again"
        return ""

    async def _admit(self, stream: socket.socket, host: str) -> None:
        try:
            link = await greet(self.loop, stream, self.credentials, self._refused)
        except ProtocolError:
            self.counters.add("protocol_errors")
            return
        except LookupBufferError:
            return  # it left, was too slow, or was refused: only its connection ends
        if link.purpose.role == REACHABILITY:
            self._admit_check(link, link.client or host)
        elif not self._make_place(link.client):
            link.stream.close()
        elif link.purpose.role == HANDOFFS:
            self._trusts[self.askers.admit(link)] = link.trust
        else:
            self._read(link)

    def _admit_check(self, link: Link, client: str) -> None:
        assert self.reachability is not None, "nothing is accepted before `start`"
        self.reachability.admit(link, client)

    def _read(self, link: Link) -> None:
        try:
            reader = Reader(self, link)
        except OSError:  # no free descriptor
            link.stream.close()
            return
        self._readers.add(reader)
        self._trusts[reader.connection] = link.trust

    def _make_place(self, client: str) -> bool:
        """Whether there is a place for one more connection, if need be that of an idle one; of the
        same client, if that has as many as it may."""
        nodes = self.directory.count_alive() if self.directory else 1
        crowd = self._certified_of(client)
        if len(crowd) < LINKS_PER_CLIENT:
            if len(self._readers) + len(self.askers) < max(LINKS_MIN, LINKS_PER_NODE * nodes):
                return True
            crowd = self._readers
        idle = [reader for reader in crowd if not reader.is_busy]
        if idle:
            min(idle, key=lambda reader: reader.used_at).end()
        return bool(idle)

    def _certified_of(self, client: str) -> "set[Reader]":
        """Without TLS `client` is empty: nobody is certified."""
        if not client:
            return set()
        return {reader for reader in self._readers if reader.client == client}

    # -- what a reader gets

    def replies(self, asked: Iterable[Asked]) -> Iterator[list[Reply]]:
        """The items as they are now, pinned; those of one list are sent together."""
        together: list[Reply] = []
        nbytes = 0
        for one in asked:
            together.append(self._reply(one))
            held = together[-1].held
            nbytes += 0 if held is None else held.item.nbytes  # it is pinned in full
            if nbytes >= TOGETHER_BYTES or len(together) == TOGETHER_MAX:
                yield together
                together, nbytes = [], 0
        if together:
            yield together

    def release(self, replies: Iterable[Reply]) -> None:
        self.arena.release([one.held.ticket for one in replies if one.held is not None], PEER_OWNER)

    async def send_by_thread(self, sender: FramedSocket, left: "Left", *, only_reads: bool) -> None:
        """Send what `send_nowait` has not, and then release it. `only_reads`: to such a node.

        Raises:
            LookupBufferError: the other end left, or is too slow.
            RuntimeError: this server is closed.
        """
        with ExitStack() as held:
            held.callback(self.release, left.replies)
            if only_reads:
                place = self._only_readers.ask()
                await granted(place, None, lambda _: self._only_readers.release())
                held.callback(self._only_readers.release)
            job = self._senders.submit(self._send, sender, *left)
            over = held.pop_all().close
        # Not by who waits, which may be cancelled: until then the thread reads these bytes.
        job.add_done_callback(lambda _: call_from_thread(self.loop, over))
        await asyncio.wrap_future(job, loop=self.loop)

    def _send(self, sender: FramedSocket, replies: Sequence[Reply], already_sent: int) -> None:
        for one in replies:
            sender.send(
                one.header, one.payload, timeout=PEER_PROGRESS_SECONDS, already_sent=already_sent
            )
            already_sent = 0

    def _reply(self, asked: Asked) -> Reply:
        held = self._hold(asked)
        if held is None:
            return STALE
        payload = self.arena.bytes_of(held.item)[asked.start :]
        if asked.nbytes is not None:
            payload = payload[: asked.nbytes]
        return Reply(self._header(held), held, payload)

    def _header(self, held: Pin) -> dict[str, Any]:
        item = held.item
        remaining = self.arena.remaining_seconds(item)
        namespace, key = item.address
        header = PayloadHeader(
            namespace=namespace,
            key=key,
            generation=item.generation,
            checksum=item.checksum,
            ttl_ms=None if remaining is None else int(remaining * 1000),
            tensor=item.header,
        )
        return {"status": "ok", "payload": header.to_fields()}

    def _hold(self, asked: Asked) -> Pin | None:
        """The requested item, pinned; None if this boot does not have that generation."""
        if asked.boot != self.identity.boot:
            self.missed(asked.address)
            return None
        try:
            held = self.arena.hold(asked.address, PEER_OWNER)
        except BufferFull:
            return None  # the reader tries another holder, or encodes
        if held is not None and held.item.generation == asked.generation:
            return held
        if held is not None:
            self.arena.release([held.ticket], PEER_OWNER)
        self.missed(asked.address)
        return None

    def forget(self, reader: "Reader", error: LookupBufferError | None) -> None:
        if isinstance(error, ProtocolError):
            self.counters.add("protocol_errors")
        self._readers.discard(reader)


class Left(NamedTuple):
    """What a socket did not take yet: these replies, but so many bytes of the first."""

    replies: Sequence[Reply]
    already_sent: int


class Reader:
    """A connection on which another node reads tensors. Its requests are answered in order."""

    def __init__(self, server: PeerServer, link: Link) -> None:
        self._server = server
        self._requests: deque[list[Asked]] = deque()
        self._pending = server.askers.pending
        self._asked_bytes = 0
        """Of the requests that are not answered."""
        self.is_busy = False
        self.used_at = server.loop.time()
        self.client, self._only_reads = link.client, link.only_reads
        stream = link.stream.dup()  # each of the two that use it closes its own descriptor
        self.connection = Connection(
            server.loop, link.stream, self, link.macs, pending=self._pending, turns=server.turns
        )
        self._sender = FramedSocket(stream)
        self._sender.macs = link.macs

    def end(self) -> None:
        self.connection.end(None)

    def connection_lost(self, _: Connection, error: LookupBufferError | None) -> None:
        self._sender.abort()  # a thread that sends stops
        self._hold(-self._asked_bytes)
        self._server.forget(self, error)

    def message_received(self, connection: Connection, message: Any) -> None:
        asked, ahead = _asked_for(message), sum(map(len, self._requests))
        if len(self._requests) >= QUEUED_MAX or (ahead and ahead + len(asked) > ITEMS_MAX):
            most = f"{QUEUED_MAX} requests, or {ITEMS_MAX} items,"
            raise ProtocolError(f"more than {most} were sent ahead")
        if not self._pending.fits(connection, _bytes_of(asked)):
            raise ProtocolError("too much is asked for by all nodes together")
        self._hold(_bytes_of(asked))
        self._requests.append(asked)
        self.used_at = self._server.loop.time()
        if not self.is_busy:
            self.is_busy = True
            connection.start(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while self._requests:
                asked = self._requests.popleft()
                lists = self._server.replies(asked)
                while await self._answer(lists):
                    pass
                self._hold(-_bytes_of(asked))
            self.used_at = self._server.loop.time()
        except (LookupBufferError, RuntimeError):  # the reader left or is too slow; or we close
            self.end()
        finally:
            self.is_busy = False

    def _hold(self, nbytes: int) -> None:
        """Count so many bytes of requests that wait."""
        self._asked_bytes += nbytes
        self._pending.add(self.connection, nbytes)

    async def _answer(self, lists: Iterator[list[Reply]]) -> bool:
        """Send the next list. Returns whether there was one."""
        send_next = partial(self._send_next, lists)
        left = await self._server.answering.run(send_next, self._undo)
        if left is not None and left.replies:
            await self._server.send_by_thread(self._sender, left, only_reads=self._only_reads)
            self._count(left.replies)
        return left is not None

    def _send_next(self, lists: Iterator[list[Reply]]) -> Left | None:
        """Send of the next list what the socket takes. None if there is no other."""
        replies = next(lists, None)
        if replies is None:
            return None
        try:
            first, already_sent = self._send_at_once(replies)
        except BaseException:
            self._server.release(replies)
            raise
        self._server.release(replies[:first])
        self._count(replies[:first])
        return Left(replies[first:], already_sent)

    def _undo(self, left: Left | None) -> None:
        if left is not None:
            self._server.release(left.replies)

    def _count(self, sent: Sequence[Reply]) -> None:
        self._server.counters.add("bytes_served", sum(one.nbytes for one in sent))

    def _send_at_once(self, replies: Sequence[Reply]) -> tuple[int, int]:
        """Send what the socket takes, so that the reader need not wait until a thread is awake.
        Returns how many replies are sent, and how many bytes of the next one."""
        for number, one in enumerate(replies):
            sent = self._sender.send_nowait(one.header, one.payload)
            if sent is not None:
                return number, sent
        return len(replies), 0


def _bytes_of(asked: Sequence[Asked]) -> int:
    """About what a request occupies."""
    return sum(KEY_BYTES + len(one.address[1]) + len(one.boot) for one in asked)


def _asked_for(request: Any) -> list[Asked]:
    """The requested items.

    Raises:
        ProtocolError: it is not a valid request.
    """
    if not isinstance(request, dict) or request.get("op") != "get":
        raise ProtocolError("the only request of a reader is 'get'")
    items = request.get("items")
    if not isinstance(items, list) or not 0 < len(items) <= ITEMS_MAX:
        raise ProtocolError(f"a request is for 1 to {ITEMS_MAX} items")
    return [_asked(item) for item in items]


def _asked(item: Any) -> Asked:
    if not isinstance(item, list) or len(item) not in (4, 6):
        raise ProtocolError("an item is [namespace, key, boot, generation], or that and a part")
    namespace, key, boot, generation, *part = item
    if not is_fingerprint(namespace) or not is_key_text(key):
        raise ProtocolError("an item needs the fingerprint of a namespace, and the text of a key")
    if not is_boot(boot) or not is_count(generation):
        raise ProtocolError("an item needs the id of a boot, and the number of a generation")
    if not all(is_count(one) for one in part):
        raise ProtocolError("a part is the number of its first byte, and how many it has")
    return Asked((namespace, key), boot, generation, *part)
