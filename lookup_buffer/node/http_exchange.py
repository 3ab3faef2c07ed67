"""One HTTP exchange: a request is read, judged and answered, and the connection closed.

h11 does the protocol. Here is who may have what: only GET, only paths that there are, and the
token where one is set, but for `/healthz`: a probe has none, and hears no more than one line. Runs
on the HTTP listener's thread.
"""

import asyncio
import hmac
import http
import logging
from collections.abc import Callable, Mapping

import h11

from lookup_buffer.config import LOOPBACK
from lookup_buffer.node.http_page import Page, Request

REQUEST_BYTES_MAX = 8 << 10
"""Request line and headers together."""
READ_BYTES = 4 << 10
LEFT_BYTES_MAX = 64 << 10
"""What a client still sends after it was answered is read up to here, for a connection that is
closed with unread bytes takes the answer away with it."""
OPEN_PATHS = frozenset({"/healthz"})

_log = logging.getLogger(__name__)


class Exchange:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pages: Mapping[str, Callable[[Request], Page]],
        token: str | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._pages = pages
        self._token = token
        self._is_head = False
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)

    async def hold(self) -> None:
        """Answer the one request. Who calls bounds the time, and closes.

        Raises:
            OSError: the client has left.
        """
        try:
            asked = await self._hear()
            page = None if asked is None else self._judge(asked)
        except h11.RemoteProtocolError as error:
            page = Page.line(error.error_status_hint, "that is no HTTP request as it should be")
        if page is not None:
            await self._say(page)
            await self._drain()

    async def _hear(self) -> h11.Request | None:
        """The request without its body; None where the client leaves without a word."""
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(READ_BYTES))
        return event if isinstance(event, h11.Request) else None

    def _judge(self, asked: h11.Request) -> Page:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in asked.headers}
        self._is_head = asked.method == b"HEAD"
        request = Request(asked.target.decode("latin-1").partition("?")[0], headers)
        page = self._pages.get(request.path)
        if page is None:
            return Page.line(404, f"there is {' and '.join(self._pages)}")
        if asked.method != b"GET":
            return Page.line(405, "only GET is answered")
        refusal = None if request.path in OPEN_PATHS else self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            return page(request)
        except Exception:  # noqa: BLE001 -- a bug in one page must not end the listener
            _log.exception("the page %s failed", request.path)
            return Page.line(500, "this page failed; the node's log says why")

    def _refusal(self, request: Request) -> Page | None:
        """Without a token only who names us as loopback is answered: a page of the web that has
        its own name resolved to 127.0.0.1 would make its visitor's browser read us otherwise."""
        if self._token is None:
            host = request.headers.get("host", "localhost").lower()
            if _name(host) in LOOPBACK:
                return None
            return Page.line(421, "set http_token to be asked under another name than localhost")
        said = request.headers.get("authorization", "")
        if hmac.compare_digest(said.encode("latin-1"), f"Bearer {self._token}".encode()):
            return None
        return Page.line(401, "this needs the header 'Authorization: Bearer' with http_token")

    async def _say(self, page: Page) -> None:
        headers = [
            ("Content-Type", page.content_type),
            ("Content-Length", str(len(page.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Connection", "close"),
        ]
        if page.status == http.HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET"))
        if page.status == http.HTTPStatus.UNAUTHORIZED:
            headers.append(("WWW-Authenticate", 'Bearer realm="lookup-buffer"'))
        reason = http.HTTPStatus(page.status).phrase
        events: list[h11.Event] = [
            h11.Response(status_code=page.status, headers=headers, reason=reason),
            h11.Data(data=page.body),
            h11.EndOfMessage(),
        ]
        if self._is_head:
            del events[1]  # the answer to it has no body
        for event in events:
            self._writer.write(self._protocol.send(event) or b"")
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
