"""What is asked of the HTTP listener and what it answers. Plain data."""

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
    """By name in small letters; of several under one name, the last."""
    query: str = ""

    def said(self, name: str) -> str:
        """The first value of a parameter; "" where there is none."""
        return parse_qs(self.query).get(name, [""])[0]


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    body: bytes
    content_type: str = TEXT

    @classmethod
    def line(cls, status: int, text: str) -> "Page":
        """One line of text."""
        return cls(status, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Stream:
    """A page without an end: its parts are sent as they come, until the client leaves."""

    parts: AsyncGenerator[bytes, None]
    content_type: str = EVENTS


@dataclass(frozen=True, slots=True)
class File:
    """What is the same for everybody and tells nothing of any node: it needs no token."""

    body: bytes
    content_type: str

    def __call__(self, _: Request) -> Page:
        return Page(200, self.body, self.content_type)


Answer = Page | Stream
Maker = Callable[[Request], Answer | Awaitable[Answer]]
"""Called on the listener's thread; must not wait but by `await`."""
