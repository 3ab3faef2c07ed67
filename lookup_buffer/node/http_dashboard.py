"""The dashboard's paths of the HTTP listener: its files, its event stream, and `why`.

The files in `lookup_buffer/dashboard/page` are served unchanged. All their data comes from
`observer`, as text that is not parsed here. Called by `http_pages`; runs on `lb-http`.
"""

from importlib.resources import files

from lookup_buffer.node.http_page import JSON, Answer, File, Maker, Page, Request, Stream
from lookup_buffer.node.observer import Observer, TooMany

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def dashboard_pages(observer: Observer, *, needs_token: bool) -> dict[str, Maker]:
    """Pages by path. `needs_token`: the page asks its reader for the token before its first
    request."""

    def stream(_: Request) -> Answer:
        try:
            return Stream(observer.watch())
        except TooMany as error:
            return Page.line(503, str(error))

    async def why(request: Request) -> Answer:
        try:
            return Page(
                200, await observer.ask(request.said("key"), request.said("namespace")), JSON
            )
        except TooMany as error:
            return Page.line(503, str(error))

    pages: dict[str, Maker] = {"/dashboard/stream": stream, "/dashboard/why": why}
    for file in files("lookup_buffer.dashboard").joinpath("page").iterdir():
        body, content_type = file.read_bytes(), CONTENT_TYPES["." + file.name.rpartition(".")[2]]
        if file.name == INDEX:
            if needs_token:
                body = body.replace(b'data-access="open"', b'data-access="token"')
            pages["/"] = File(body, content_type)
        else:
            pages[f"/dashboard/{file.name}"] = File(body, content_type)
    return pages
