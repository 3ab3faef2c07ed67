"""An item of the arena, and the gauges of all of them. Plain data; `shelf` writes it."""

from dataclasses import dataclass

from lookup_buffer.key import QualifiedKey
from lookup_buffer.protocol.header import TensorHeader


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
    gone: bool = False
    handoff_bytes: int = 0
    """Bytes of a hand-off of this node that are charged to the share of hand-offs."""
    wanted_bytes: int = 0
    """Its bytes if they are charged like a pin instead, because its taker waits: see
    `Shelf.reserve_handoff`."""
    device: str = ""
    """The device on which the inserting client computed it; empty if unknown."""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def is_handoff(self) -> bool:
        """Whether it is a hand-off of this node; False for a loan of another node's."""
        return self.handoff_bytes > 0 or self.wanted_bytes > 0


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
