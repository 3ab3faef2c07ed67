"""Types of the HTTP listener: requests, pages, streams and files.

Plain data, used by the `http_*` modules and `exposition` on `lb-http`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: Mapping[str, str]
    """By name in lower case; of repeated names the last."""
    query: str = ""

    def said(self, name: str) -> str:
        """The first value of a query parameter; "" if absent."""
        return parse_qs(self.query).get(name, [""])[0]


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    body: bytes
    content_type: str = TEXT

    @classmethod
    def line(cls, status: int, text: str) -> "Page":
        """A page of one line."""
        return cls(status, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Stream:
    """A response without an end: parts are sent as they come, until the client disconnects."""

    parts: AsyncGenerator[bytes, None]
    content_type: str = EVENTS


@dataclass(frozen=True, slots=True)
class File:
    """The same for all readers and without data of a node: it needs no token."""

    body: bytes
    content_type: str

    def __call__(self, _: Request) -> Page:
        return Page(200, self.body, self.content_type)


Answer = Page | Stream
Maker = Callable[[Request], Answer | Awaitable[Answer]]
"""Called on `lb-http`; must not block except by `await`."""
