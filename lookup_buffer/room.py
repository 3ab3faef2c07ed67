"""Room: where in the arena items lie, and which of them give way when there is no room.

Pure bookkeeping, like the inventory, which decides what may be evicted and what it means.
"""

from collections import OrderedDict
from collections.abc import Iterator

from lookup_buffer.item import Item
from lookup_buffer.shm.allocator import Allocator


class Room:
    """Not thread-safe. All sizes reported here are rounded as `Allocator` has it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._allocator = Allocator(capacity_bytes)
        self._at: dict[int, Item] = {}
        self._by_use: OrderedDict[int, Item] = OrderedDict()
        """By offset: the items that may be evicted unless they are pinned, the least recently used
        first."""

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._allocator.used_bytes

    def rounded_bytes(self, nbytes: int) -> int:
        """What an item of so many bytes takes."""
        return self._allocator.rounded_bytes(nbytes)

    def find(self, nbytes: int) -> int | None:
        """The offset of so many bytes that are the caller's now; None where there are none."""
        return self._allocator.allocate(nbytes)

    def in_the_way(self, nbytes: int) -> list[Item] | None:
        """What has to go so that `find` has an answer; None where that would not do.

        Neighbours, of which the youngest was not used for longest: see
        `Allocator.eviction_window`.
        """
        window = self._allocator.eviction_window(nbytes, self._oldest_first())
        return None if window is None else [self._at[offset] for offset in window]

    def settle(self, item: Item) -> None:
        """The item lies at its offset, which was found for it."""
        self._at[item.offset] = item

    def used(self, item: Item) -> None:
        """The item was used later than all others. It may be evicted from the first time on."""
        self._by_use[item.offset] = item
        self._by_use.move_to_end(item.offset)

    def free(self, item: Item) -> None:
        """Its bytes are anybody's."""
        del self._at[item.offset]
        self._by_use.pop(item.offset, None)
        self._allocator.free(item.offset)

    def _oldest_first(self) -> Iterator[tuple[float, int]]:
        for offset, item in self._by_use.items():
            if not item.pins:
                yield item.last_used, offset
