"""One HTTP exchange: a request is read, judged and answered, and the connection closed.

h11 does the protocol. Here is who may have what: only GET, only paths that there are, and the
token where one is set, but for what tells nothing: `/healthz`, for a probe has none and hears no
more than one line, and the files of the dashboard, in which nothing stands before its script was
given the token. Runs on the HTTP listener's thread.
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
"""What a client still sends after it was answered is read up to here, for a connection that is
closed with unread bytes takes the answer away with it."""
EXCHANGE_SECONDS = 5.0
"""For a request to arrive, and again for its answer to be taken, however slowly it comes; and for
each part of a stream."""
MAKE_SECONDS = 30.0
"""For a page that somebody else makes."""
OPEN_PATHS = frozenset({"/healthz"})
HEADERS = (
    # No page may load or run what is not a file of this listener.
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
        """Whether we owe it something: it has asked, and was not told all yet."""
        self._is_head = False
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)

    async def hold(self) -> None:
        """Answer the one request, in bounded time.

        Raises:
            OSError: the client has left.
            TimeoutError: it is too slow.
        """
        answer: Answer | None
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                asked = await self._hear()
            self.answering = True
            answer = None if asked is None else await self._judge(asked)
        except h11.RemoteProtocolError as error:
            answer = Page.line(error.error_status_hint, "that is no HTTP request as it should be")
        if isinstance(answer, Stream):
            await self._stream(answer)
        elif answer is not None:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                await self._say(answer)
                self.answering = False
                await self._drain()

    async def _hear(self) -> h11.Request | None:
        """The request without its body; None where the client leaves without a word."""
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
            return Page.line(404, "there is nothing; there are /, /metrics and /healthz")
        if asked.method != b"GET":
            return Page.line(405, "only GET is answered")
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
            return Page.line(504, "that takes too long")
        except Exception:  # noqa: BLE001 -- a bug in one page must not end the listener
            _log.exception("the page %s failed", request.path)
            return Page.line(500, "this page failed; the node's log says why")

    def _refusal(self, request: Request, maker: Maker) -> Page | None:
        """Without a token only who names us as loopback is answered: a page of the web that has
        its own name resolved to 127.0.0.1 would make its visitor's browser read us otherwise. And
        what is no file is answered to no other site's page, which could not read it, but have us
        work for it."""
        if isinstance(maker, File):
            if self._token is not None:
                return None
        elif request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return Page.line(403, "pages of other sites are not answered")
        if self._token is None:
            host = request.headers.get("host", "localhost").lower()
            if is_loopback(_name(host)):
                return None
            return Page.line(421, "set http_token to be asked under another name than localhost")
        said = request.headers.get("authorization", "")
        if hmac.compare_digest(said.encode("latin-1"), f"Bearer {self._token}".encode()):
            return None
        return Page.line(401, "this needs the header 'Authorization: Bearer' with http_token")

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
            del events[0]  # the answer to it has no body
        for event in events:
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()

    async def _stream(self, stream: Stream) -> None:
        """Each part has to be taken in time. Only bytes that cannot be sent tell of a client that
        has left, so parts have to come now and then."""
        self._writer.write(self._head(200, ("Content-Type", stream.content_type)))
        async with contextlib.aclosing(stream.parts) as parts:
            async for part in parts:
                self._writer.write(self._protocol.send(h11.Data(data=part)) or b"")
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    await self._writer.drain()

    async def _drain(self) -> None:
        """Say that this was all, and wait for the client to leave."""
        self._writer.write_eof()
        left = LEFT_BYTES_MAX
        while left > 0 and (data := await self._reader.read(READ_BYTES)):
            left -= len(data)


def _name(host: str) -> str:
    """The name or address in the header `Host`, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
