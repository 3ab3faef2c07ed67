"""What is asked of the HTTP listener and what it answers. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: Mapping[str, str]
    """By name in small letters; of several under one name, the last."""


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    body: bytes
    content_type: str = TEXT

    @classmethod
    def line(cls, status: int, text: str) -> "Page":
        """One line of text."""
        return cls(status, f"{text}\n".encode())
