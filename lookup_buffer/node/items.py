"""What the arena holds: items, their pins, and what both count.

Plain data. `arena` makes and changes it; other parts of the node read it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from lookup_buffer.key import QualifiedKey
from lookup_buffer.protocol.header import TensorHeader

ENTRY_BYTES: Final = 1 << 10
"""What an item's bookkeeping occupies beside the text of its address: 0.5 to 1.0 KB measured."""
RANKS_A_PIN: Final = 8


@dataclass(slots=True, eq=False)
class Item:
    """One tensor in the arena. `ready` once its bytes are complete and verified.

    An item that is `gone` from the start is a loan: a copy that exists only for its pins.
    """

    address: QualifiedKey
    header: TensorHeader
    offset: int
    generation: int
    origin: str
    """'local' when a client of this node inserted it, else the node it was fetched from."""
    last_used: float
    expires_at: float | None
    ready: bool = False
    checksum: int = 0
    pins: int = 0
    peer_pins: int = 0
    """Of those, how many are PEER_OWNER's."""
    gone: bool = False
    is_leased: bool = False
    """Whether a taker has this hand-off: see `handoffs`."""
    handoff_bytes: int = 0
    """Bytes of a hand-off of this node that are charged to the share of hand-offs."""
    wanted_bytes: int = 0
    """Its bytes if they are charged like a pin instead, because its taker waits: see
    `Arena.reserve_handoff`."""
    device: str = ""
    """The device on which the inserting client computed it; empty if unknown."""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def entry_bytes(self) -> int:
        return entry_bytes_of(self.address)

    @property
    def is_handoff(self) -> bool:
        """Whether it is a hand-off of this node; False for a loan of another node's."""
        return self.handoff_bytes > 0 or self.wanted_bytes > 0


@dataclass(slots=True, eq=False)
class Pin:
    """It keeps `item` in the arena until its ticket is released."""

    ticket: int
    item: Item
    owner: int
    ranks: set[int] | None
    """Ranks that have not reported done yet; None if the owner releases the pin itself."""
    size: int
    """What it counts in the owner's share."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the arena at one moment, in numbers."""

    items: int
    used_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    handoff_bytes: int
    pins: int
    capacity_bytes: int


def pin_size(ranks: Collection[int] | None) -> int:
    """What a pin for these ranks counts."""
    return 1 + (0 if ranks is None else len(ranks) // RANKS_A_PIN)


def entry_bytes_of(address: QualifiedKey) -> int:
    """About what an item at this address occupies of the node's own memory."""
    return ENTRY_BYTES + sum(map(len, address))
