"""The state of one request on the scheduler side, from its first poll until it finishes.

`EcGate`, the item source and `EcClaims` use it on vLLM's scheduler thread. Pure data; it reads
attributes of vLLM's requests and uses neither vLLM nor the buffer.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from connectors.identifiers import Adapters, ItemPayload, NotShareable, payload_of, shared_key
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from connectors.ec.items import EngineCache, Variant


@dataclass(frozen=True, slots=True)
class RequestItem:
    """One multimodal item of a request that may be shared."""

    identifier: str
    key: TensorKey
    """The key under which it is shared with other engines."""
    end: int
    """First token behind the item's last occurrence. Later tokens do not need the item."""
    num_embeds: int
    payload: ItemPayload
    modality: str
    index: int
    """Index of the last occurrence among the request's features."""


class Phase(enum.Enum):
    """Progress of a request with the items that it still needs."""

    UNKNOWN = enum.auto()
    """Nothing was looked up, or the results are out of date."""
    FETCHING = enum.auto()
    """Looked up; some results are in flight."""
    CLAIMING = enum.auto()
    """Missing items are claimed; the engine that encodes them is not decided yet."""
    RESOLVED = enum.auto()
    """Each needed item is held, or known to be unavailable."""


class RequestState:
    """The state of one request. The gate, its item source and its claims write the fields."""

    __slots__ = (
        "absent", "allocated", "awaits_space", "computed_tokens", "evictions", "feature_count",
        "held_at", "held_seconds", "is_republish_checked", "is_running", "items", "items_end",
        "metadata_only", "over_budget", "phase", "preemptions", "request_id", "space_wait_since",
        "space_waited_seconds", "unavailable_end", "unclaimed", "variants", "wanted",
    )  # fmt: skip

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.phase = Phase.UNKNOWN
        self.items: list[RequestItem] = []
        self.variants: dict[str, set[Variant]] = {}
        """Of all its items, shared or not, by identifier."""
        self.feature_count = -1
        self.items_end = 0
        """End of the last item, shared or not. Later tokens need no item."""
        self.metadata_only = False
        """Whether an item cannot be encoded here, so that the request depends on its pin."""
        self.unavailable_end = 0
        """End of the last item that can neither be encoded here nor be loaded."""
        self.is_republish_checked = False
        """Whether `EcRepublishing` has checked the request's items."""
        self.computed_tokens = 0
        self.preemptions = 0
        self.is_running = False
        """Whether vLLM has scheduled it, so that it holds blocks or items that others may need."""
        self.held_at: float | None = None
        """When it was last held back for bytes in flight. None once it passed, or waited for
        something else."""
        self.held_seconds = 0.0
        """Total time that it was held back for bytes; never reset."""
        self.space_wait_since: float | None = None
        """Start of the current wait for space in the pin budget; None while there is space."""
        self.space_waited_seconds = 0.0
        """Total of earlier waits for space; never reset."""
        self.awaits_space = False
        """Whether it is held back until there is space."""
        self.over_budget = False
        """Whether it was counted as one that continues without its items, for lack of space."""
        self.wanted: dict[str, RequestItem] = {}
        self.absent: set[str] = set()
        """Items that were looked up and are not available."""
        self.unclaimed: set[str] = set()
        """Absent items that no node has and that may be encoded here, until they are claimed."""
        self.allocated: dict[str, int] = {}
        """Items that vLLM allocated in its own cache for this request, and the first token behind
        the occurrence. An item may occur several times."""
        self.evictions = 0
        """Number of evictions in vLLM's cache at the last lookup."""

    def read_items(
        self,
        request: Any,
        metadata_fields: Callable[[str], set[str]],
        adapters: Adapters,
        skipped: Callable[[str], None],
    ) -> None:
        """Read the request's items. `skipped` is called with the reason for each item that is not
        shared."""
        features = request.mm_features
        by_identifier: dict[str, RequestItem] = {}
        self.variants = {}
        self.items_end = self.unavailable_end = 0
        for index, feature in enumerate(features):
            position = feature.mm_position
            end = position.offset + position.length
            self.items_end = max(self.items_end, end)
            payload, rows = payload_of(feature, metadata_fields), embeds_of(feature)
            variants = self.variants.setdefault(feature.identifier, set())
            try:
                mm_hash = getattr(feature, "mm_hash", None)
                key = shared_key(feature.identifier, request, adapters, mm_hash)
                if payload is ItemPayload.EMBEDDINGS:
                    raise NotShareable("client_embeddings")
            except NotShareable as reason:
                variants.add((None, rows))
                skipped(str(reason))
                if payload is ItemPayload.METADATA:
                    self.unavailable_end = end
                continue
            variants.add((key, rows))
            item = RequestItem(feature.identifier, key, end, rows, payload, feature.modality, index)
            earlier = by_identifier.get(feature.identifier, item)
            by_identifier[feature.identifier] = _of_both(earlier, item)
        self.items = list(by_identifier.values())
        self.metadata_only = any(item.payload is ItemPayload.METADATA for item in self.items)
        self.feature_count = len(features)
        self.is_republish_checked = False
        self.phase = Phase.UNKNOWN

    def update_progress(self, request: Any, computed: int) -> None:
        """Detect whether vLLM has scheduled or preempted the request since the last poll."""
        preemptions = getattr(request, "num_preemptions", 0)
        if computed < self.computed_tokens or preemptions != self.preemptions:
            self.preemptions = preemptions
            self.reset()
        # The request's own count, because a cached prefix gives waiting requests computed tokens,
        # too.
        self.is_running = bool(self.allocated) or getattr(request, "num_computed_tokens", 0) > 0

    @property
    def needs_loads(self) -> bool:
        """Whether the request cannot run on what it carries itself."""
        return self.metadata_only or self.unavailable_end > 0

    def is_allocated(self, identifier: str) -> bool:
        """Whether vLLM's cache certainly keeps the item for this request."""
        return self.allocated.get(identifier, 0) > self.computed_tokens

    def mark_missing(self, item: RequestItem) -> None:
        """No node has the item. If it can be encoded here, it has to be claimed first."""
        if item.payload is ItemPayload.MEDIA:
            self.unclaimed.add(item.identifier)

    def wait_for_space(self, now: float, wait_seconds: float) -> None:
        """The pins of others leave no space in the budget. The request waits for it, `wait_seconds`
        in all, unless it runs: then it holds what those others may need."""
        if self.space_wait_since is None:
            self.space_wait_since, self.held_at = now, None
        waited_seconds = self.space_waited_seconds + now - self.space_wait_since
        self.awaits_space = waited_seconds < wait_seconds and not self.is_running

    def end_space_wait(self, now: float) -> None:
        if self.space_wait_since is not None:
            self.space_waited_seconds += now - self.space_wait_since
        self.space_wait_since, self.awaits_space = None, False

    def hold_back(self, now: float, wait_seconds: float) -> bool:
        """Whether to hold the request back for bytes once more; `wait_seconds` in all.

        vLLM may poll others for a long time. At most half of the limit is spent on one such gap,
        because the request could not repeat its lookup meanwhile.
        """
        if self.held_at is not None:
            self.held_seconds += min(now - self.held_at, wait_seconds / 2)
        self.held_at = now
        return self.held_seconds < wait_seconds

    def needed(
        self, engine_cache: "EngineCache", *, include_absent: bool = False
    ) -> list[RequestItem]:
        """Items that still need bytes; `include_absent`: also those that were not available."""
        return [
            item
            for item in self.items
            if item.end > self.computed_tokens
            and (include_absent or item.identifier not in self.absent)
            and not self.is_allocated(item.identifier)
            # vLLM's cache may evict it before it is used. A request with media then encodes it.
            and (item.identifier not in engine_cache or item.payload is ItemPayload.METADATA)
        ]

    def reset(self) -> None:
        """The request was preempted and will need its items again."""
        self.phase = Phase.UNKNOWN
        self.absent.clear()
        self.unclaimed.clear()
        self.allocated.clear()


def _of_both(earlier: RequestItem, item: RequestItem) -> RequestItem:
    """`item`, which the request has more than once. If one of them carries no media, it needs
    another engine's output: vLLM may come to that one first."""
    if item.payload is ItemPayload.MEDIA and earlier.payload is ItemPayload.METADATA:
        return replace(item, payload=ItemPayload.METADATA)
    if item.payload is ItemPayload.METADATA:
        return replace(item, index=earlier.index)
    return item


def embeds_of(feature: Any) -> int:
    """Rows of the item's encoder output."""
    position = feature.mm_position
    # vLLM before 0.13 keeps a row for each placeholder, also where no embedding goes.
    if not hasattr(position, "get_embeds_indices_in_range"):
        return int(position.length)
    count = position.get_num_embeds
    return int(count() if callable(count) else count)  # a property in some releases
