"""The shares of the arena: how many bytes of it readers, writers and hand-offs may hold.

What they leave can be evicted, so that there is always room to be made. Pure bookkeeping, as
`inventory`, whose items these bytes are.
"""

from dataclasses import dataclass
from typing import Final

from lookup_buffer.errors import BufferFull, TensorTooLarge

HELD_FRACTION: Final = 1 / 3
"""Share of the arena that pins and reservations may take together. One item alone may exceed it."""
HANDOFF_FRACTION: Final = 1 / 2
"""Share of the arena that hand-offs may take together: they are never evicted."""


@dataclass(slots=True)
class Shares:
    capacity_bytes: int
    pinned_bytes: int = 0
    reserved_bytes: int = 0
    handoff_bytes: int = 0
    wanted_bytes: int = 0
    """Of hand-offs for whose share there was no room and whose takers wait: held like pins."""

    def check_held(self, nbytes: int) -> None:
        """Raise BufferFull where pins and reservations would exceed their share."""
        held_bytes = self.pinned_bytes + self.reserved_bytes + self.wanted_bytes
        # What has no bytes always passes, else its writer could be refused the pin at commit.
        if nbytes and held_bytes and held_bytes + nbytes > self.capacity_bytes * HELD_FRACTION:
            raise BufferFull(
                f"{held_bytes} bytes are pinned or being written; {nbytes} more exceed "
                f"a third of the arena of {self.capacity_bytes} bytes"
            )

    def check_handoff_size(self, nbytes: int) -> None:
        """Raise TensorTooLarge for a hand-off that exceeds the share of all of them."""
        if nbytes > self.capacity_bytes * HANDOFF_FRACTION:
            raise TensorTooLarge(
                f"a hand-off of {nbytes} bytes exceeds half of the arena of "
                f"{self.capacity_bytes} bytes; raise capacity_bytes"
            )

    def takes_handoff(self, nbytes: int, *, without: int = 0) -> bool:
        """Whether the share has room for so much, were `without` bytes of it given back."""
        used_bytes = self.handoff_bytes - without
        return used_bytes + nbytes <= self.capacity_bytes * HANDOFF_FRACTION

    def check_handoff(self, nbytes: int) -> None:
        """Raise BufferFull where hand-offs would exceed their share."""
        if not self.takes_handoff(nbytes):
            raise BufferFull(
                f"hand-offs take {self.handoff_bytes} bytes; {nbytes} more exceed half of "
                f"the arena of {self.capacity_bytes} bytes"
            )

    def charge_handoff(self, nbytes: int, *, wanted: bool) -> None:
        if wanted:
            self.wanted_bytes += nbytes
        else:
            self.handoff_bytes += nbytes
