"""What the scheduler side remembers of one request, from its first sight until it finished.

Owned by the scheduler's thread. Pure data; knows neither the buffer nor vLLM's classes beyond the
attributes that it reads.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from connectors.identifiers import why_not_shareable
from connectors.media import Carried, carried_by


@dataclass(frozen=True, slots=True)
class WatchedItem:
    """One multimodal item of a request that may be shared."""

    identifier: str
    end: int
    """First token behind the item (of its last occurrence); computed tokens beyond need it not."""
    num_embeds: int
    carried: Carried


class Phase(enum.Enum):
    """Where a request stands with the items that it still needs."""

    UNASKED = enum.auto()
    """Nothing was asked for, or what was asked for is out of date."""
    WAITING = enum.auto()
    """Asked for; some answers are missing."""
    ANSWERED = enum.auto()
    """Each needed item is held or known to be unavailable."""


class RequestWatch:
    """One request. Fields are written by `EcScheduler` alone."""

    __slots__ = (
        "absent", "allocated", "ask_again_at", "computed_tokens", "deadline", "evictions",
        "feature_count", "hopeless_end", "items", "items_end", "metadata_only", "over_budget",
        "phase", "preemptions", "request_id", "wanted",
    )  # fmt: skip

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.phase = Phase.UNASKED
        self.items: list[WatchedItem] = []
        self.feature_count = -1
        self.items_end = 0
        """End of the last item, shared or not: from here on the request needs nothing."""
        self.metadata_only = False
        """Whether an item cannot be encoded here, so that the request depends on its pin."""
        self.hopeless_end = 0
        """End of the last item that can neither be encoded here nor come from elsewhere."""
        self.computed_tokens = 0
        self.preemptions = 0
        self.deadline: float | None = None
        """When the one wait budget of the request ends; set at its first wait, never again."""
        self.ask_again_at = 0.0
        self.over_budget = False
        """Whether it was counted as too large for what is left of the pin budget."""
        self.wanted: dict[str, WatchedItem] = {}
        self.absent: set[str] = set()
        """Items that were asked for in vain."""
        self.allocated: set[str] = set()
        """Items for which this request holds room in vLLM's own encoder cache."""
        self.evictions = 0
        """How often vLLM's cache had evicted when the items were last looked at."""

    def look_at(
        self,
        request: Any,
        metadata_fields: Callable[[str], set[str]],
        skipped: Callable[[str], None],
    ) -> None:
        """Read the request's items; `skipped` is told why an item is not shared."""
        features = request.mm_features
        lora = getattr(request, "lora_request", None)
        lora_name = None if lora is None else lora.lora_name
        by_identifier: dict[str, WatchedItem] = {}
        self.items_end = self.hopeless_end = 0
        for feature in features:
            position = feature.mm_position
            end = position.offset + position.length
            self.items_end = max(self.items_end, end)
            reason = why_not_shareable(feature.identifier, self.request_id, lora_name)
            carried = carried_by(feature, metadata_fields)
            if reason is None and carried is Carried.EMBEDDINGS:
                reason = "client_embeddings"
            if reason is not None:
                skipped(reason)
                if carried is Carried.METADATA:
                    self.hopeless_end = end
                continue
            by_identifier[feature.identifier] = WatchedItem(
                feature.identifier, end, embeds_of(feature), carried
            )
        self.items = list(by_identifier.values())
        self.metadata_only = any(item.carried is Carried.METADATA for item in self.items)
        self.feature_count = len(features)
        self.phase = Phase.UNASKED

    @property
    def is_dependent(self) -> bool:
        """Whether the request cannot run on what it carries itself."""
        return self.metadata_only or self.hopeless_end > 0

    def rewind(self) -> None:
        """The request was preempted: it will need its items again."""
        self.phase = Phase.UNASKED
        self.absent.clear()
        self.allocated.clear()


def embeds_of(feature: Any) -> int:
    """Rows of the item's encoder output."""
    position = feature.mm_position
    # Hosts before 0.13 know only the placeholder's length, which then is the same.
    count = getattr(position, "get_num_embeds", None)
    return int(position.length if count is None else count())
