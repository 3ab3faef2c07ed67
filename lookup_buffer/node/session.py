"""A client's session: what it owns, and when it is really over.

It begins with `hello` on its first connection (the anchor) and ends with `goodbye` or with the
end of the client's process. An anchor that breaks while the process lives on ends the session
too, but what it had pinned stays untouched until the process is gone or a bound has passed: the
client may be in the middle of a copy. Runs on the loop's thread only.
"""

from dataclasses import dataclass, field

from lookup_buffer.node.connection import Connection
from lookup_buffer.shm.memory import Mapping

Owner = str | int
"""An engine's id, or the number of a session that is no engine's."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which place in which engine a client has; `rank` None is the scheduler's side."""

    engine_id: str
    rank: int | None
    world_size: int
    encodes: bool
    """Whether what it gets spares it an encode."""
    device: str
    """On what it computes; empty where it did not say."""


@dataclass(slots=True, eq=False)
class Session:
    id: int
    anchor: Connection
    seat: Seat | None
    connections: set[Connection] = field(default_factory=set)
    stagings: dict[Connection, Mapping] = field(default_factory=dict)
    process: int | None = None
    """Tells when the client's process has ended, where its number says nothing here: engines in
    containers have pid namespaces of their own. Taken at the start, while it surely lives."""
    over: bool = False

    @property
    def owner(self) -> Owner:
        """Whose its claims are: all clients of an engine share them."""
        return self.id if self.seat is None else self.seat.engine_id

    @property
    def encodes(self) -> bool:
        return self.seat is not None and self.seat.encodes

    @property
    def device(self) -> str:
        return "" if self.seat is None else self.seat.device

    def ranks(self) -> range | None:
        """The ranks that must report before a ticket of this session ends; None: it releases."""
        return None if self.seat is None else range(self.seat.world_size)
