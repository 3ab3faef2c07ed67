"""What the scheduler side remembers of one request, from its first sight until it finished.

Owned by the scheduler's thread. Pure data; knows neither the buffer nor vLLM's classes beyond the
attributes that it reads.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.identifiers import Adapters, Carried, NotShareable, carried_by, shared_key
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from connectors.ec.engine_cache import EngineCache
    from connectors.ec.meanings import Meaning


@dataclass(frozen=True, slots=True)
class WatchedItem:
    """One multimodal item of a request that may be shared."""

    identifier: str
    key: TensorKey
    """Under which other instances know it."""
    end: int
    """First token behind the item (of its last occurrence); computed tokens beyond need it not."""
    num_embeds: int
    carried: Carried
    modality: str
    index: int
    """Among the request's features (of its last occurrence)."""


class Phase(enum.Enum):
    """Where a request stands with the items that it still needs."""

    UNASKED = enum.auto()
    """Nothing was asked for, or what was asked for is out of date."""
    WAITING = enum.auto()
    """Asked for; some answers are missing."""
    CLAIMING = enum.auto()
    """What nobody has is to be encoded; it is being decided by whom."""
    ANSWERED = enum.auto()
    """Each needed item is held or known to be unavailable."""


class RequestWatch:
    """One request. Fields are written by the gate, and by its supply and claims."""

    __slots__ = (
        "absent", "allocated", "awaits_room", "computed_tokens", "evictions", "feature_count",
        "held_at", "held_seconds", "hopeless_end", "is_checked", "is_running", "items", "items_end",
        "meant", "metadata_only", "over_budget", "phase", "preemptions", "request_id", "room_since",
        "room_waited_seconds", "unclaimed", "wanted",
    )  # fmt: skip

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.phase = Phase.UNASKED
        self.items: list[WatchedItem] = []
        self.meant: dict[str, set[Meaning]] = {}
        """Of all its items, shared or not, by their identifiers."""
        self.feature_count = -1
        self.items_end = 0
        """End of the last item, shared or not: from here on the request needs nothing."""
        self.metadata_only = False
        """Whether an item cannot be encoded here, so that the request depends on its pin."""
        self.hopeless_end = 0
        """End of the last item that can neither be encoded here nor come from elsewhere."""
        self.is_checked = False
        """Whether it was looked whether what vLLM's cache holds of its items is still stored."""
        self.computed_tokens = 0
        self.preemptions = 0
        self.is_running = False
        """Whether vLLM has scheduled it: it holds blocks or items that others may need."""
        self.held_at: float | None = None
        """When it was last held back for bytes on their way; None once it passed, or waited for
        something else."""
        self.held_seconds = 0.0
        """How long it was held back for bytes, in all; never reset."""
        self.room_since: float | None = None
        """Since when the pins of other requests leave no room for its own; None while they do."""
        self.room_waited_seconds = 0.0
        """How long it lacked room before that; never reset."""
        self.awaits_room = False
        """Whether it is held back until there is room."""
        self.over_budget = False
        """Whether it was counted as one that goes on without, for lack of room."""
        self.wanted: dict[str, WatchedItem] = {}
        self.absent: set[str] = set()
        """Items that were asked for in vain."""
        self.unclaimed: set[str] = set()
        """Those that nobody has and that may be encoded here, until they are claimed."""
        self.allocated: dict[str, int] = {}
        """Items for which vLLM made room in its own encoder cache, and the first token behind the
        place in the prompt that it did so for. An item may stand in several."""
        self.evictions = 0
        """How often vLLM's cache had evicted when the items were last looked at."""

    def look_at(
        self,
        request: Any,
        metadata_fields: Callable[[str], set[str]],
        adapters: Adapters,
        skipped: Callable[[str], None],
    ) -> None:
        """Read the request's items; `skipped` is told why an item is not shared."""
        features = request.mm_features
        by_identifier: dict[str, WatchedItem] = {}
        self.meant = {}
        self.items_end = self.hopeless_end = 0
        for index, feature in enumerate(features):
            position = feature.mm_position
            end = position.offset + position.length
            self.items_end = max(self.items_end, end)
            carried, rows = carried_by(feature, metadata_fields), embeds_of(feature)
            meant = self.meant.setdefault(feature.identifier, set())
            try:
                mm_hash = getattr(feature, "mm_hash", None)
                key = shared_key(feature.identifier, request, adapters, mm_hash)
                if carried is Carried.EMBEDDINGS:
                    raise NotShareable("client_embeddings")
            except NotShareable as reason:
                meant.add((None, rows))
                skipped(str(reason))
                if carried is Carried.METADATA:
                    self.hopeless_end = end
                continue
            meant.add((key, rows))
            by_identifier[feature.identifier] = WatchedItem(
                feature.identifier, key, end, rows, carried, feature.modality, index
            )
        self.items = list(by_identifier.values())
        self.metadata_only = any(item.carried is Carried.METADATA for item in self.items)
        self.feature_count = len(features)
        self.is_checked = False
        self.phase = Phase.UNASKED

    def follow(self, request: Any, computed: int) -> None:
        """See whether vLLM has begun with the request, or preempted it, since the last poll."""
        preemptions = getattr(request, "num_preemptions", 0)
        if computed < self.computed_tokens or preemptions != self.preemptions:
            self.preemptions = preemptions
            self.rewind()
        # Not by what it was called with: a cached prefix gives waiting requests computed tokens.
        self.is_running = bool(self.allocated) or getattr(request, "num_computed_tokens", 0) > 0

    @property
    def is_dependent(self) -> bool:
        """Whether the request cannot run on what it carries itself."""
        return self.metadata_only or self.hopeless_end > 0

    def refers_to(self, identifier: str) -> bool:
        """Whether vLLM's cache surely keeps the item for this request."""
        return self.allocated.get(identifier, 0) > self.computed_tokens

    def lacks(self, item: WatchedItem) -> None:
        """Nobody has the item. If it can be encoded here, it is to be claimed first."""
        if item.carried is Carried.MEDIA:
            self.unclaimed.add(item.identifier)

    def lack_room(self, now: float, wait_seconds: float) -> None:
        """The pins of others leave no room for its own. It waits for that so long in all, but not
        while it runs: then it holds what those others may need."""
        if self.room_since is None:
            self.room_since, self.held_at = now, None
        waited_seconds = self.room_waited_seconds + now - self.room_since
        self.awaits_room = waited_seconds < wait_seconds and not self.is_running

    def find_room(self, now: float) -> None:
        if self.room_since is not None:
            self.room_waited_seconds += now - self.room_since
        self.room_since, self.awaits_room = None, False

    def hold(self, now: float, wait_seconds: float) -> bool:
        """Whether to hold the request back for bytes once more, for `wait_seconds` in all.

        vLLM may be busy with others and not look at it for long. No more than half of the budget
        goes into one such while: who was not looked at has not been asked for again.
        """
        if self.held_at is not None:
            self.held_seconds += min(now - self.held_at, wait_seconds / 2)
        self.held_at = now
        return self.held_seconds < wait_seconds

    def needed(self, engine_cache: "EngineCache", *, anew: bool = False) -> list[WatchedItem]:
        """Items that still need bytes; `anew`: those that were asked for in vain as well."""
        return [
            item
            for item in self.items
            if item.end > self.computed_tokens
            and (anew or item.identifier not in self.absent)
            and not self.refers_to(item.identifier)
            # vLLM's cache may evict before it is used: good enough where media are at hand.
            and (item.identifier not in engine_cache or item.carried is Carried.METADATA)
        ]

    def rewind(self) -> None:
        """The request was preempted: it will need its items again."""
        self.phase = Phase.UNASKED
        self.absent.clear()
        self.unclaimed.clear()
        self.allocated.clear()


def embeds_of(feature: Any) -> int:
    """Rows of the item's encoder output."""
    position = feature.mm_position
    # Hosts before 0.13 keep a row for each placeholder, also where no embedding goes.
    if not hasattr(position, "get_embeds_indices_in_range"):
        return int(position.length)
    count = position.get_num_embeds
    return int(count() if callable(count) else count)  # a property in some releases
