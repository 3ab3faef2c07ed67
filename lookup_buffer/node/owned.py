"""Things by number, and by the owner of each: pins, leases, tickets.

The end of one owner costs only as much as what it has. Pure bookkeeping, on the loop's thread. Used
by `arena`, `devices`, `handoffs` and `takes`.
"""

from collections.abc import Hashable
from typing import TypeVar

T = TypeVar("T")


class Owned(dict[int, T]):
    """A dict whose things are put and dropped together with their owner, by these methods only."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[Hashable, dict[int, T]] = {}

    def put(self, owner: Hashable, number: int, thing: T) -> None:
        """The number is new."""
        self[number] = thing
        of_owner = self._of.get(owner)
        if of_owner is None:
            self._of[owner] = {number: thing}
        else:
            of_owner[number] = thing

    def drop(self, owner: Hashable, number: int) -> None:
        """Nothing happens if the owner does not have it."""
        of_owner = self._of.get(owner)
        if of_owner is None or of_owner.pop(number, None) is None:
            return
        del self[number]
        if not of_owner:
            del self._of[owner]

    def of(self, owner: Hashable) -> list[T]:
        """What the owner has, in the order in which it was put."""
        return list(self._of.get(owner, {}).values())

    def has(self, owner: Hashable) -> bool:
        return owner in self._of
