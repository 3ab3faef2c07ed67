"""The locator's interface: which nodes hold a key, and when does that change.

`AskingLocator` (asking.py) looks up every key in the store. `MirrorLocator` (mirroring.py) caches
the records, which the store invalidates. Both give the same answers. Called on the loop's thread by
`resolver`, `loans`, `takings`, `presence`, `lanes` and `waiting`.
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
    """Where a key can be fetched; without sources the reason is set."""

    record: Record | None
    sources: tuple[tuple[Location, str], ...] = ()
    """(location, endpoint) of live nodes other than this one."""
    reason: MaybeMissed = ""
    offers: tuple[tuple[Location, str], ...] = ()
    """Live nodes with the hand-off but no space for it in their arena yet."""


NOT_REACHED = Located(None, reason=MissReason.STORE_DOWN)

Answer = Callable[[list[Located]], None]


def located(record: Record | None, directory: Directory) -> Located:
    """The meaning of a record, given the nodes that are alive now."""
    if record is None:
        return Located(None, reason=MissReason.ABSENT)
    alive = directory.sources(record)
    offers = tuple(source for source in alive if source[0].is_offer)
    sources = tuple(source for source in alive if not source[0].is_offer) if offers else alive
    reason = MissReason.ABSENT if offers else MissReason.OWNER_DEAD
    return Located(record, sources, "" if sources else reason, offers)


class Locator(ABC):
    """All methods and callbacks run on the loop's thread. A failed store is a value, not an
    error."""

    @abstractmethod
    def start(self) -> None:
        """Begin to connect, in the background."""

    @abstractmethod
    def ask(self, addresses: Sequence[QualifiedKey], answer: Answer) -> None:
        """Answer with a `Located` for each of `addresses`, in order; perhaps before this
        returns."""

    @abstractmethod
    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        """Whether a live node holds each key; None if that takes a call of the store."""

    @abstractmethod
    def forget(self, address: QualifiedKey) -> None:
        """This node has newer information on the key: the next `ask` reads the store."""

    @abstractmethod
    def tick(self) -> None:
        """To be called a few times a second, after `Directory.tick`."""

    @abstractmethod
    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` when the key's record may exist, or its claim may be free; until cancelled.

        Requests during or after that call see the change. There may be more calls than changes.
        Returns the cancellation, which is idempotent.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop. Idempotent."""
