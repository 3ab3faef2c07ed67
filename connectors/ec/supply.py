"""The supply: where the items that waiting requests need come from.

An engine that loads has them fetched and pinned (`EcFetching`); one that only encodes wants to know
what need not be encoded (`EcLocating`). Which requests may run is the gate's to decide.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from connectors.ec.meanings import Meaning
from connectors.ec.watch import RequestWatch, WatchedItem


class Asked(enum.Enum):
    YES = enum.auto()
    LATER = enum.auto()
    """Not asked, and the request waits until it can be."""
    WITHOUT = enum.auto()
    """Not asked, and the request need not wait for that."""


class ItemSupply(ABC):
    """In vLLM's scheduler thread. Never waits for longer than the pass has left, and never raises
    for a fault of the node, of Redis or of a peer."""

    @abstractmethod
    def ask(self, watch: RequestWatch, needed: Sequence[WatchedItem]) -> Asked:
        """Ask for all that the request needs, or for nothing.

        With YES the watch is WAITING or ANSWERED, and what is to be had, or may be, is `wanted`.
        """

    def settle(self, watch: RequestWatch) -> bool:
        """Look at the answers for a request that is WAITING; with True it is ANSWERED, and what is
        not to be had is `absent`. False: some are on their way and the request has time left."""
        return True

    @abstractmethod
    def holds(self, watch: RequestWatch, identifier: str) -> bool:
        """Whether the request still has from here what it was to have."""

    @abstractmethod
    def promise(self, identifier: str, meanings: Sequence[Meaning]) -> bool:
        """Whether vLLM can load the item in this pass, if that is what all mean by it (where the
        engine only encodes: need not encode it). What was promised stays until the pass ends."""

    def look_again(self, identifier: str, meanings: Sequence[Meaning]) -> bool:
        """As `promise`, for an item that nobody asked for because vLLM's own cache had it, until it
        was evicted or reset in this pass. May wait, for much less than an encode takes."""
        return False

    def end_pass(self) -> None:  # noqa: B027 -- a supply that never looks again has none to begin
        """vLLM has made its choice; what `promise` and `look_again` may spend begins anew."""

    @abstractmethod
    def drop(self, identifier: str, request_id: str) -> None:
        """This request does not want the item any more."""
