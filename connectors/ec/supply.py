"""Item sources: where the items come from that waiting requests need.

On an engine that loads, `FetchingSource` prefetches and pins them. On one that only encodes,
`LocatingSource` finds out which items need no encode. `EcGate` decides which requests may run; it
and `EcScheduler` call the source on vLLM's scheduler thread.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from connectors.ec.items import Variant
from connectors.ec.watch import RequestItem, RequestState


class Lookup(enum.Enum):
    """What `look_up` did."""

    STARTED = enum.auto()
    """Every needed item was looked up, or none is needed."""
    DEFERRED = enum.auto()
    """Nothing was looked up, and the request waits until it can be."""
    SKIPPED = enum.auto()
    """Nothing was looked up, and the request does not wait for it."""


class ItemSource(ABC):
    """Used on vLLM's scheduler thread. Never waits longer than the pass has left, and never raises
    for a fault of the node, of Redis or of a peer."""

    @abstractmethod
    def look_up(self, state: RequestState, needed: Sequence[RequestItem]) -> Lookup:
        """Look up all items that the request needs, or none of them.

        With STARTED the request is FETCHING or RESOLVED, and `state.wanted` holds the items that
        are available or may become so.
        """

    def settle(self, state: RequestState) -> bool:
        """Read the results for a request that is FETCHING. With True it is RESOLVED, and
        `state.absent` holds the items that are not available. With False some are in flight, and
        the request has time left."""
        return True

    @abstractmethod
    def holds(self, state: RequestState, identifier: str) -> bool:
        """Whether the request still has this item from this source."""

    @abstractmethod
    def promise(self, identifier: str, variants: Sequence[Variant]) -> bool:
        """Whether vLLM can load the item in this pass (on a pure producer: need not encode it), and
        all `variants` agree with it. A promise holds until the pass ends."""

    def look_up_lost(self, identifier: str, variants: Sequence[Variant]) -> bool:
        """As `promise`, for an item that no request looked up because vLLM's own cache held it,
        until it was evicted or reset in this pass. May wait, for much less than an encode takes."""
        return False

    def end_pass(self) -> None:  # noqa: B027 -- a source without `look_up_lost` has no budget
        """The pass ended; the time budgets of `promise` and `look_up_lost` start again."""

    @abstractmethod
    def drop(self, identifier: str, request_id: str) -> None:
        """The request no longer needs the item."""
