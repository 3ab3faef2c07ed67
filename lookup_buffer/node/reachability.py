"""Whether nodes reach each other at the addresses that they advertise, for `lookup-buffer doctor`.

A node dials another one as for a transfer, and the two exchange a frame of EXCHANGED_BYTES each
way: if a smaller MTU on the way drops large packets silently, the handshake still succeeds, and
these frames do not arrive.

So that no one can use a node to scan ports or to send bytes elsewhere: it dials only the address in
the membership record of a live node, for its clients (at most REACHING_MAX at a time), or upon a
`DialBack` that names that node. Who sends one has proved that it knows the token. No message
contains an address. For other nodes it dials one connection at a time, a few in a second at most,
and each reply is as large as the request. All runs on the loop's thread.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ECONNREFUSED, EHOSTUNREACH, ENETUNREACH
from typing import Any, Final, NamedTuple

from lookup_buffer.errors import (
    LookupBufferError,
    NodeRefused,
    PipeBroken,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.node.connection import Connection, Fields, Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.links import (
    HANDOFFS,
    REACHABILITY,
    Credentials,
    Link,
    dial,
    received,
    send_all,
)
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.turns import Turns
from lookup_buffer.protocol.fields import EXCHANGED_BYTES, is_count
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import (
    AskDialBack,
    DialBack,
    Exchange,
    Reach,
    Reached,
    Request,
    parse,
)
from lookup_buffer.protocol.sockets import reset
from lookup_buffer.times import BEAT_SECONDS, PEER_CONNECT_SECONDS, PEER_PROGRESS_SECONDS
from store import Location

SINCE_VERSION: Final = 5
"""Of the protocol between nodes."""
LINKS_MAX: Final = 32
"""Bound on connections of other nodes for this purpose; they take no places of others. Who has most
of them loses his oldest to others."""
QUEUED_MAX: Final = 16
"""Bound on the nodes that wait until they are dialled back."""
QUEUE_SECONDS: Final = 8.0
REACHING_MAX: Final = 32
"""Bound on what clients of this node have it do at a time. `doctor` asks for 8."""
PAUSE_SECONDS: Final = 0.05
"""Between two connections that are dialled for other nodes."""
KNOWN_SECONDS: Final = 2 * BEAT_SECONDS
"""How long to wait until a node that has just started is known."""
DIAL_SECONDS: Final = 2 * PEER_CONNECT_SECONDS + 2 * PEER_PROGRESS_SECONDS
"""Bound on one attempt: two connections at most, and the frames there and back."""
DIAL_BACK_SECONDS: Final = KNOWN_SECONDS + QUEUE_SECONDS + DIAL_SECONDS + PEER_CONNECT_SECONDS
"""Bound on the answer to a DialBack."""
ASK_SECONDS: Final = KNOWN_SECONDS + 2 * PEER_CONNECT_SECONDS + DIAL_BACK_SECONDS + 1.0
"""Bound on the answer to an AskDialBack."""
LINK_SECONDS: Final = ASK_SECONDS + 1.0
"""Bound on a connection of another node."""
KNOWN_POLL_SECONDS: Final = 0.1
DETAIL_CHARACTERS: Final = 300
_HEADER_BYTES_MAX: Final = EXCHANGED_BYTES + 1024
"""Of a request, and of its answer. One of MAX_HEADER_BYTES can hold the loop for 0.2 s."""


class Result(NamedTuple):
    outcome: Reached
    detail: str = ""

    def fields(self) -> Fields:
        return {"outcome": self.outcome.value, "detail": self.detail[:DETAIL_CHARACTERS]}

    @classmethod
    def parse(cls, message: Any) -> "Result":
        """Raises ProtocolError: it is not a result."""
        outcome, detail = message.get("outcome"), message.get("detail")
        if isinstance(outcome, str) and outcome in list(Reached) and isinstance(detail, str):
            return cls(Reached(outcome), detail[:DETAIL_CHARACTERS])
        raise ProtocolError("not a result")


class Reachability:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        identity: Identity,
        directory: Directory,
        credentials: Credentials,
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._identity = identity
        self._directory = directory
        self._credentials = credentials
        self._counters = counters
        self._turns = Turns(loop)
        self._dialling = asyncio.Lock()
        self._queued = self._reaching = 0
        self._links: dict[Connection, tuple[str, asyncio.TimerHandle]] = {}
        """The oldest first, each with the client that has it and its deadline."""
        self._asked: set[Connection] = set()
        """Those that may request nothing now."""

    def close(self) -> None:
        for connection in list(self._links):
            connection.end(None)

    # -- a client of this node

    async def reach(self, _: Session, request: Reach) -> Fields:
        if self._reaching >= REACHING_MAX:
            return self._busy().fields()
        self._reaching += 1
        try:
            return (await self._reach(request.dialler, request.node)).fields()
        finally:
            self._reaching -= 1

    async def _reach(self, dialler: str, node: str) -> Result:
        if node == self._identity.node:
            return await self._ask_for_dial_back(dialler)
        member = await self._member(node)
        if member is None:
            return Result(Reached.UNKNOWN, f"{node} is not alive, as {self._identity.node} sees it")
        if dialler == self._identity.node:
            return await self._dial(*member)
        return await self._ask(*member, AskDialBack(1, dialler), ASK_SECONDS)

    async def _ask_for_dial_back(self, dialler: str) -> Result:
        here = self._identity
        member = await self._member(dialler)
        if member is None:
            return Result(Reached.UNKNOWN, f"{dialler} is not alive, as {here.node} sees it")
        request = DialBack(1, here.node, here.boot)
        return await self._ask(*member, request, DIAL_BACK_SECONDS, Reached.CUT)

    async def _member(self, node: str) -> tuple[Location, str] | None:
        """The boot and the endpoint of another live node, of one that has just started as well."""
        until = self._loop.time() + KNOWN_SECONDS
        while (member := self._directory.member(node)) is None and self._loop.time() < until:
            await asyncio.sleep(KNOWN_POLL_SECONDS)
        return member

    # -- to another node

    async def _ask(
        self,
        location: Location,
        endpoint: str,
        request: Request,
        seconds: float,
        unreached: Reached = Reached.UNASKED,
    ) -> Result:
        """The answer of a node to `request`. If there is none, UNASKED; `unreached` if no
        connection to that node can be made."""
        outcome = unreached
        try:
            link = await dial(self._loop, location, endpoint, REACHABILITY, self._credentials)
            outcome = Reached.UNASKED
            with _caller(self._loop, link) as caller:
                async with asyncio.timeout(seconds):
                    await caller.send(request)
                    return Result.parse(await caller.reply())
        except NodeRefused as refusal:
            result = await self._refused(location, endpoint, refusal)
            if result.outcome is Reached.OLD:
                return result
            outcome, why = Reached.UNASKED, result.detail
        except (LookupBufferError, OSError, ValueError) as error:
            why = _text_of(error) or "no answer in time"
        return Result(outcome, f"{location.node} at {endpoint} cannot be asked: {why}")

    async def _dial_in_turn(self, location: Location, endpoint: str) -> Result:
        if self._queued >= QUEUED_MAX:
            return self._busy()
        self._queued += 1
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._dialling.acquire()
        except TimeoutError:
            return self._busy()
        finally:
            self._queued -= 1
        try:
            result = await self._dial(location, endpoint)
            await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._dialling.release()
        return result

    def _busy(self) -> Result:
        return Result(Reached.BUSY, f"{self._identity.node} has many such requests")

    async def _dial(self, location: Location, endpoint: str) -> Result:
        try:
            link = await dial(self._loop, location, endpoint, REACHABILITY, self._credentials)
        except NodeRefused as refusal:
            return await self._refused(location, endpoint, refusal)
        except (LookupBufferError, ValueError) as error:
            return _failure(error)
        with _caller(self._loop, link) as caller:
            return await _exchange(caller)

    async def _refused(self, location: Location, endpoint: str, refusal: NodeRefused) -> Result:
        """What the refusal of a connection for this purpose means: an older node knows none, and
        accepts one for hand-offs."""
        try:
            link = await dial(self._loop, location, endpoint, HANDOFFS, self._credentials)
        except NodeRefused as reason:
            return Result(Reached.OTHER, str(reason))
        except (LookupBufferError, ValueError):
            return Result(Reached.OTHER, str(refusal))
        link.stream.close()
        if link.version < SINCE_VERSION:
            return Result(Reached.OLD, f"{location.node} speaks protocol {link.version}")
        return Result(Reached.OTHER, str(refusal))

    # -- from another node

    def admit(self, link: Link, client: str) -> None:
        """Answer the requests on `link` until it ends, one at a time. `client`: the node that its
        certificate names, or its host."""
        if len(self._links) >= LINKS_MAX and not self._make_place(client):
            link.stream.close()
            return
        connection = Connection(
            self._loop, link.stream, self, link.macs,
            turns=self._turns, header_bytes_max=_HEADER_BYTES_MAX,
        )  # fmt: skip
        timer = self._loop.call_later(LINK_SECONDS, connection.end, None)
        self._links[connection] = client, timer

    def _make_place(self, client: str) -> bool:
        counts = Counter(of for of, _ in self._links.values())
        ((crowded, most),) = counts.most_common(1)
        if counts[client] + 1 >= most:
            return False
        next(link for link, (of, _) in self._links.items() if of == crowded).end(None)
        return True

    def connection_lost(self, connection: Connection, error: LookupBufferError | None) -> None:
        if isinstance(error, ProtocolError):
            self._counters.add("protocol_errors")
        self._links.pop(connection)[1].cancel()
        self._asked.discard(connection)

    def message_received(self, connection: Connection, message: Any) -> None:
        if connection in self._asked:
            raise ProtocolError("a request before the answer to the last one")
        match parse(message):
            case Exchange() as request:
                self._asked.add(connection)  # one a connection: it is large
                connection.send({"id": request.id})
                connection.send({"id": request.id, "data": request.data})
            case (DialBack() | AskDialBack()) as request:
                self._asked.add(connection)
                connection.start(self._answer(connection, request))
            case request:
                raise ProtocolError(f"{request.op} is not a request between nodes")

    async def _answer(self, connection: Connection, request: DialBack | AskDialBack) -> None:
        try:
            if isinstance(request, AskDialBack):
                result = await self._ask_for_dial_back(request.dialler)
            else:
                result = await self._dial_back(request)
            connection.send({"id": request.id, **result.fields()})
        finally:
            self._asked.discard(connection)

    async def _dial_back(self, request: DialBack) -> Result:
        member = await self._member(request.node)
        if member is None or member[0].boot != request.boot:
            what = f"this boot of {request.node}"
            return Result(Reached.UNKNOWN, f"{what} is not alive, as {self._identity.node} sees it")
        return await self._dial_in_turn(*member)


class _Caller:
    """The asking side of a connection: one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        self._loop = loop
        self._stream = link.stream
        self._sends = link.macs.sends if link.macs else None
        receives = link.macs.receives if link.macs else None
        self._decoder = FrameDecoder(_HEADER_BYTES_MAX, mac=receives)
        self._received: list[Any] = []

    async def send(self, request: Request) -> None:
        frame = encode_frame(request.to_wire(), mac=self._sends)
        await send_all(self._loop, self._stream, frame)
        if self._sends is not None:
            self._sends.next()

    async def reply(self) -> dict[str, Any]:
        """Raises PipeClosed, ProtocolError or OSError."""
        while not self._received:
            data = await received(self._loop, self._stream)
            if not data:
                raise PipeClosed("the remote end closed the connection")
            self._received += [header for header, _ in self._decoder.feed(data)]
        message = self._received.pop(0)
        if not isinstance(message, dict) or not is_count(message.get("id")):
            raise ProtocolError("the message is not an answer")
        return message


@contextmanager
def _caller(loop: asyncio.AbstractEventLoop, link: Link) -> Iterator[_Caller]:
    try:
        yield _Caller(loop, link)
    finally:
        reset(link.stream)  # else the other end keeps waiting for what does not arrive


async def _exchange(caller: _Caller) -> Result:
    """Whether large frames arrive there, and then here."""
    data = bytes(EXCHANGED_BYTES)
    try:
        async with asyncio.timeout(PEER_PROGRESS_SECONDS):
            await caller.send(Exchange(1, data))
            await caller.reply()
    except TimeoutError:
        return Result(Reached.STUCK_THERE)
    except PipeClosed:
        return Result(Reached.BUSY, "it has too many such connections")
    except (LookupBufferError, OSError) as error:
        return Result(Reached.BROKEN, _text_of(error))
    try:
        async with asyncio.timeout(PEER_PROGRESS_SECONDS):
            reply = await caller.reply()
    except TimeoutError:
        return Result(Reached.STUCK_BACK)
    except (LookupBufferError, OSError) as error:
        return Result(Reached.BROKEN, _text_of(error))
    return (
        Result(Reached.YES) if reply.get("data") == data else Result(Reached.BROKEN, "other data")
    )


def _failure(error: Exception) -> Result:
    """What an error of `dial` means."""
    cause = error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    if isinstance(error, PipeTimeout):
        return Result(Reached.TIMED_OUT)
    if isinstance(error, ValueError) or isinstance(cause, socket.gaierror):
        return Result(Reached.NO_ADDRESS, _text_of(error))
    if isinstance(error, ProtocolError):
        return Result(Reached.STRANGER, _text_of(error))
    if isinstance(error, PipeBroken) and number == ECONNREFUSED:
        return Result(Reached.REFUSED)
    if isinstance(error, PipeBroken) and number in (EHOSTUNREACH, ENETUNREACH):
        return Result(Reached.NO_ROUTE)
    return Result(Reached.BROKEN, _text_of(error))


def _text_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
