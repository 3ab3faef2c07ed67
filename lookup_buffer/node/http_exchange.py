"""One HTTP exchange: reads a request, checks access, sends the answer, and closes the connection.

h11 implements the protocol. This module allows only GET, only known paths, and only requests with
the token if one is set. Two need no token, since they reveal nothing: `/healthz`, one line for
probes, and the dashboard's files, which contain no data. Called by `http_server` on `lb-http`.
"""

import asyncio
import contextlib
import hmac
import http
import inspect
import logging
from collections.abc import Mapping

import h11

from lookup_buffer.config import is_loopback
from lookup_buffer.node.http_page import Answer, File, Maker, Page, Request, Stream

REQUEST_BYTES_MAX = 8 << 10
"""Request line and headers together."""
READ_BYTES = 4 << 10
LEFT_BYTES_MAX = 64 << 10
"""After the answer, at most this much further input is read: closing a connection with unread
bytes would discard the answer."""
EXCHANGE_SECONDS = 5.0
"""Deadline for a request to arrive, for its answer to be sent, and for each part of a stream."""
MAKE_SECONDS = 30.0
"""Deadline for a page that another process makes."""
OPEN_PATHS = frozenset({"/healthz"})
HEADERS = (
    # A page may load and run only files of this listener.
    ("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; "
     "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
     "frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Connection", "close"),
)  # fmt: skip

_log = logging.getLogger(__name__)


class Exchange:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pages: Mapping[str, Maker],
        token: str | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._pages = pages
        self._token = token
        self.answering = False
        """Whether a request was read and its answer is not complete yet."""
        self._is_head = False
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)

    async def hold(self) -> None:
        """Answer the one request, in bounded time.

        Raises:
            OSError: the client disconnected.
            TimeoutError: the client is too slow.
        """
        answer: Answer | None
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                asked = await self._hear()
            self.answering = True
            answer = None if asked is None else await self._judge(asked)
        except h11.RemoteProtocolError as error:
            answer = Page.line(error.error_status_hint, "this is not a valid HTTP request")
        if isinstance(answer, Stream):
            await self._stream(answer)
        elif answer is not None:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                await self._say(answer)
                self.answering = False
                await self._drain()

    async def _hear(self) -> h11.Request | None:
        """The request without its body; None if the client closes without one."""
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(READ_BYTES))
        return event if isinstance(event, h11.Request) else None

    async def _judge(self, asked: h11.Request) -> Answer:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in asked.headers}
        self._is_head = asked.method == b"HEAD"
        path, _, query = asked.target.decode("latin-1").partition("?")
        request = Request(path, headers, query)
        maker = self._pages.get(request.path)
        if maker is None:
            return Page.line(404, "no such page; the pages are /, /metrics and /healthz")
        if asked.method != b"GET":
            return Page.line(405, "only GET is allowed")
        refusal = None if request.path in OPEN_PATHS else self._refusal(request, maker)
        if refusal is not None:
            return refusal
        try:
            made = maker(request)
            if inspect.isawaitable(made):
                async with asyncio.timeout(MAKE_SECONDS):
                    return await made
            return made
        except TimeoutError:
            return Page.line(504, "the answer takes too long; try again later")
        except Exception:  # noqa: BLE001 -- a bug in one page must not end the listener
            _log.exception(
                "HTTP %s failed (500 sent): this is a bug, please report it", request.path
            )
            return Page.line(500, "this page failed; the reason is in the node's log")

    def _refusal(self, request: Request, maker: Maker) -> Page | None:
        """Without a token only requests for a loopback host name are answered: otherwise a web
        page whose own name resolves to 127.0.0.1 could make its visitor's browser read this
        node. Requests by pages of other sites are refused except for files: they could not read
        the answer, but would cause work."""
        if isinstance(maker, File):
            if self._token is not None:
                return None
        elif request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return Page.line(403, "requests from pages of other sites are refused")
        if self._token is None:
            host = request.headers.get("host", "localhost").lower()
            if is_loopback(_name(host)):
                return None
            return Page.line(421, "without http_token only the name localhost is allowed")
        said = request.headers.get("authorization", "")
        if hmac.compare_digest(said.encode("latin-1"), f"Bearer {self._token}".encode()):
            return None
        return Page.line(401, "the header 'Authorization: Bearer <http_token>' is required")

    def _head(self, status: int, *headers: tuple[str, str]) -> bytes:
        reason = http.HTTPStatus(status).phrase
        event = h11.Response(status_code=status, headers=[*headers, *HEADERS], reason=reason)
        return self._protocol.send(event) or b""

    async def _say(self, page: Page) -> None:
        headers = [("Content-Type", page.content_type), ("Content-Length", str(len(page.body)))]
        if page.status == http.HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET"))
        if page.status == http.HTTPStatus.UNAUTHORIZED:
            headers.append(("WWW-Authenticate", 'Bearer realm="lookup-buffer"'))
        self._writer.write(self._head(page.status, *headers))
        events: list[h11.Event] = [h11.Data(data=page.body), h11.EndOfMessage()]
        if self._is_head:
            del events[0]  # its answer has no body
        for event in events:
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()

    async def _stream(self, stream: Stream) -> None:
        """Send each part within its deadline. A client that disconnected is detected only by a
        failed send, so parts must come now and then."""
        self._writer.write(self._head(200, ("Content-Type", stream.content_type)))
        async with contextlib.aclosing(stream.parts) as parts:
            async for part in parts:
                self._writer.write(self._protocol.send(h11.Data(data=part)) or b"")
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    await self._writer.drain()

    async def _drain(self) -> None:
        """Close the sending side, and wait for the client to close."""
        self._writer.write_eof()
        left = LEFT_BYTES_MAX
        while left > 0 and (data := await self._reader.read(READ_BYTES)):
            left -= len(data)


def _name(host: str) -> str:
    """The name or address in the header `Host`, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
