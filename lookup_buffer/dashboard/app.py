"""The HTTP application: the page with its events and `why`, `/metrics` and `/healthz`.

Only GET, only known paths, and only requests with the token if one is set. Two need no token, since
they reveal nothing: `/healthz`, one line for probes, and the page's files, which contain no data.
Runs on the loop of the dashboard's process (`main`).
"""

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from functools import partial
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lookup_buffer.config import is_loopback
from lookup_buffer.dashboard.exposition import Exposition
from lookup_buffer.dashboard.feed import Feed, TooMany
from lookup_buffer.dashboard.node import NodeSilent, NodeView
from lookup_buffer.dashboard.users import Users

MAKE_SECONDS = 30.0
"""Deadline for the answer to `why`."""
HEALTH_SECONDS = 0.25
"""Probes, which need no token, ask the node at most this often."""
REQUEST_BYTES_MAX: Final = 8 << 10
"""Request line and headers together."""
HEALTH_PATH: Final = "/healthz"
INDEX: Final = "index.html"
CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    # A page may load and run only files of this listener.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Connection": "close",
}
"""Of every answer."""
_HOST: Final = re.compile(r"(?:\[([0-9a-f:]+)\]|([^][:]*))(?::[0-9]*)?")
"""The header `Host`: an IPv6 address in brackets or a name, and perhaps a port."""
_log = logging.getLogger(__name__)

Page = Callable[[Request], Awaitable[Response]]


def make_app(node: NodeView, exposition: Exposition, feed: Feed, token: str | None) -> ASGIApp:
    files_by_path = _files(needs_token=token is not None)
    pages = {**_data_pages(node, exposition, feed), **files_by_path}
    routes = [Route(path, page, methods=["GET"]) for path, page in pages.items()]
    app = Starlette(routes=routes, exception_handlers={Exception: _failed})
    return Guard(app, pages.keys(), files_by_path.keys(), token)


def _data_pages(node: NodeView, exposition: Exposition, feed: Feed) -> dict[str, Page]:
    users = Users()

    async def metrics(request: Request) -> Response:
        try:
            state = await node.state()
        except NodeSilent as silent:
            return line(503, str(silent))
        body, content_type = exposition.text(state, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def health(_: Request) -> Response:
        try:
            unhealthy = (await node.state(HEALTH_SECONDS)).unhealthy
        except NodeSilent as silent:
            unhealthy = str(silent)
        return line(503, unhealthy) if unhealthy else line(200, "ok")

    async def stream(request: Request) -> Response:
        try:
            watcher = feed.watch(await users.user_of(request.scope))
            return EventStream(feed.events(watcher), partial(feed.leave, watcher))
        except TooMany as error:
            return line(503, str(error))

    async def why(request: Request) -> Response:
        asked = request.query_params
        try:
            async with asyncio.timeout(MAKE_SECONDS):
                found = await feed.explain(asked.get("key", ""), asked.get("namespace", ""))
            return JSONResponse(found)
        except TooMany as error:
            return line(503, str(error))
        except TimeoutError:
            return line(504, "the answer takes too long; try again later")

    return {
        "/metrics": metrics,
        HEALTH_PATH: health,
        "/dashboard/stream": stream,
        "/dashboard/why": why,
    }


def _files(*, needs_token: bool) -> dict[str, Page]:
    """The page's files by path. `needs_token`: the page asks its reader for the token before its
    first request for data."""
    pages: dict[str, Page] = {}
    for file in files("lookup_buffer.dashboard").joinpath("page").iterdir():
        body, content_type = file.read_bytes(), CONTENT_TYPES["." + file.name.rpartition(".")[2]]
        if file.name == INDEX and needs_token:
            body = body.replace(b'data-access="open"', b'data-access="token"')
        path = "/" if file.name == INDEX else f"/dashboard/{file.name}"
        pages[path] = _file(body, content_type)
    return pages


def _file(body: bytes, content_type: str) -> Page:
    async def page(_: Request) -> Response:
        return Response(body, headers={"Content-Type": content_type})

    return page


class EventStream(StreamingResponse):
    """Server-sent events. `left` is called at its end, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


async def _failed(request: Request, _: Exception) -> Response:
    _log.error("HTTP %s failed (500 sent): this is a bug, please report it", request.url.path)
    return line(500, "this page failed; the reason is in the node's log")


def line(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of one line."""
    return PlainTextResponse(f"{text}\n", status, headers)


class Guard:
    """Outermost: refuses requests, and adds HEADERS to all answers."""

    def __init__(
        self, app: ASGIApp, paths: Collection[str], file_paths: Collection[str], token: str | None
    ) -> None:
        self._app = app
        self._paths = paths
        self._file_paths = file_paths
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer: ASGIApp = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        path, headers = scope["path"], Headers(scope=scope)
        if _request_bytes(scope) > REQUEST_BYTES_MAX:
            return line(431, "the request is too large")
        if path not in self._paths:
            return line(404, "no such page; the pages are /, /metrics and /healthz")
        if scope["method"] != "GET":
            return line(405, "only GET is allowed", {"Allow": "GET"})
        if path == HEALTH_PATH:
            return None
        return self._forbidden(path, headers)

    def _forbidden(self, path: str, headers: Headers) -> Response | None:
        """Without a token only requests for a loopback host name are answered: otherwise a web
        page whose own name resolves to 127.0.0.1 could make its visitor's browser read this
        node. Requests by pages of other sites are refused except for files: they could not read
        the answer, but would cause work. No browser sends `Origin` for a page that reads its
        own site."""
        if path in self._file_paths:
            if self._token is not None:
                return None
        elif headers.get("sec-fetch-site") in ("cross-site", "same-site") or "origin" in headers:
            return line(403, "requests from pages of other sites are refused")
        if self._token is None:
            if is_loopback(_name(headers.get("host", "localhost").lower())):
                return None
            return line(421, "without http_token only the name localhost is allowed")
        said = headers.get("authorization", "")
        if hmac.compare_digest(said.encode("latin-1"), f"Bearer {self._token}".encode()):
            return None
        return line(
            401,
            "the header 'Authorization: Bearer <http_token>' is required",
            {"WWW-Authenticate": 'Bearer realm="lookup-buffer"'},
        )


def _request_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return len(scope["raw_path"]) + len(scope["query_string"]) + headers


def _name(host: str) -> str:
    """The name or address in the header `Host`, without its port; "" if that is not all it says."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1] or found[2]
