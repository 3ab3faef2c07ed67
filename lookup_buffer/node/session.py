"""A client's session: its connections, staging areas and engine rank.

A session begins with `Hello` on its main connection, the first one. It ends with `Goodbye`, or
when the client's process ends. If the main connection breaks while the process lives, the session
ends too, but its pins stay until the process has ended or a bound has passed: the client may be
copying. Created by `control`; used on the loop's thread only.
"""

from dataclasses import dataclass, field

from lookup_buffer.node.connection import Connection
from lookup_buffer.shm.memory import Mapping

Owner = str | int
"""An engine's id, or the session's number if the client belongs to no engine."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of which engine a client is. `rank` None: the scheduler."""

    engine_id: str
    rank: int | None
    world_size: int
    encodes: bool
    """Whether a hit saves this client an encode."""
    device: str
    """The device on which it computes; empty if unknown."""


@dataclass(slots=True, eq=False)
class Session:
    id: int
    anchor: Connection
    seat: Seat | None
    connections: set[Connection] = field(default_factory=set)
    stagings: dict[Connection, Mapping] = field(default_factory=dict)
    process: int | None = None
    """A pidfd, readable when the client's process has ended. Set if the client's pid is not
    valid here: engines in containers have their own pid namespaces. Taken at the start of the
    session, while the process certainly lives."""
    over: bool = False

    @property
    def owner(self) -> Owner:
        """The owner of its claims: all clients of an engine share them."""
        return self.id if self.seat is None else self.seat.engine_id

    @property
    def encodes(self) -> bool:
        return self.seat is not None and self.seat.encodes

    @property
    def device(self) -> str:
        return "" if self.seat is None else self.seat.device

    def ranks(self) -> range | None:
        """The ranks that must report done before a ticket of this session ends. None: the
        session releases its tickets itself."""
        return None if self.seat is None else range(self.seat.world_size)
