"""Item: one tensor that lies in the arena, and the address that it is found by."""

from dataclasses import dataclass

from lookup_buffer.protocol.header import TensorHeader

Address = tuple[str, str]
"""(namespace fingerprint, key text): what an item is found by."""


@dataclass(slots=True, eq=False)
class Item:
    """One tensor in the arena. `ready` once its bytes are complete and verified.

    An item that is `gone` from the start is on loan: a copy for those who have it pinned.
    """

    address: Address
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
    """What it takes of the share of hand-offs; 0 where it is none of ours."""
    device: str = ""
    """On what the client that inserted it had computed it; empty where nobody said."""
    wanted: bool = False
    """A hand-off that is charged like a pin, because its taker waits: see `reserve_handoff`."""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def is_handoff(self) -> bool:
        """Whether it is a hand-off of this node, and not what another has lent."""
        return self.handoff_bytes > 0
