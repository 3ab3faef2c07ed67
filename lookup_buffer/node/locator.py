"""The locator's contract: who holds a key, and when does that change.

`AskingLocator` (asking.py) puts every question to the store; `MirrorLocator` (mirroring.py) keeps
the answers, for the store tells when they change. Both answer the same; one is faster.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.directory import Directory
from store import Location, Record


@dataclass(frozen=True, slots=True)
class Located:
    """Where a key can be fetched; no sources and a reason where it cannot."""

    record: Record | None
    sources: tuple[tuple[Location, str], ...] = ()
    """(location, endpoint) of nodes that live, this node left out."""
    reason: MaybeMissed = ""
    offers: tuple[tuple[Location, str], ...] = ()
    """Of a hand-off: nodes that live and have it, but no room for it as yet."""


NOT_REACHED = Located(None, reason=MissReason.STORE_DOWN)

Answer = Callable[[list[Located]], None]


def located(record: Record | None, directory: Directory) -> Located:
    """What a record comes to, with the nodes that live now."""
    if record is None:
        return Located(None, reason=MissReason.ABSENT)
    alive = directory.sources(record)
    offers = tuple(source for source in alive if source[0].is_offer)
    sources = tuple(source for source in alive if not source[0].is_offer) if offers else alive
    reason = MissReason.ABSENT if offers else MissReason.OWNER_DEAD
    return Located(record, sources, "" if sources else reason, offers)


class Locator(ABC):
    """All methods, and all callbacks, on the loop's thread. A store that fails is a value."""

    @abstractmethod
    def start(self) -> None:
        """Begin to connect, in the background."""

    @abstractmethod
    def ask(self, addresses: Sequence[QualifiedKey], answer: Answer) -> None:
        """Tell where `addresses` can be fetched, in their order; maybe before this returns."""

    @abstractmethod
    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        """Whether a live node holds each key; None where that is not known without asking."""

    @abstractmethod
    def forget(self, address: QualifiedKey) -> None:
        """The store has told something newer of this key, on another way: ask it when asked."""

    @abstractmethod
    def tick(self) -> None:
        """To be called a few times a second, after it was looked for who has died."""

    @abstractmethod
    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` when a key's record, or its claim, may be there to be had; until cancelled.

        What is asked in that call, or later, is not older than the change. Called more often than
        needed. Returns the cancellation, which may be called any number of times.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop. Idempotent."""
