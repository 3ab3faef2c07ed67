"""What a prefetch is told: one `Prefetched` a key, and the `LoadOrder` of what is here.

A handle settles on the client's listening thread while others read it; reading a field is one
attribute access and never waits.
"""

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.errors import MaybeMissed
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.header import TensorHeader


class PrefetchState(enum.Enum):
    RESIDENT = "resident"
    """Here and pinned: `order` says where."""
    PENDING = "pending"
    """Being located, on its way, or waited for."""
    MISSING = "missing"
    """Nobody alive holds it; `reason` says why."""
    FAILED = "failed"
    """It could not be brought here; `reason` says why."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Where pinned bytes lie. Plain data: the scheduler sends it to the workers.

    It stands for a pin; whoever holds it releases it, or every rank says done.
    """

    boot: str
    ticket: int
    offset: int
    nbytes: int
    generation: int
    header: TensorHeader
    lane: str = ""
    """By which the bytes came, where they lie in the readers' own pools under the ticket, on their
    devices; "" where they lie in the arena."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "LoadOrder":
        """The order in a `resident` answer of the node."""
        header = TensorHeader.from_fields(entry["header"])
        return cls(
            boot=entry["boot"],
            ticket=entry["ticket"],
            offset=entry["offset"],
            nbytes=header.nbytes,
            generation=entry["generation"],
            header=header,
            lane=entry.get("lane", ""),
        )


@dataclass(slots=True, eq=False)
class Prefetched:
    """How one key stands. Not to be changed by its readers."""

    key: TensorKey
    settled: threading.Condition = field(repr=False)
    """Notified when any handle of the client settles."""
    state: PrefetchState = PrefetchState.PENDING
    reason: MaybeMissed = ""
    source: str = ""
    """'local', or the node it was fetched from."""
    order: LoadOrder | None = None
    released: bool = False
    """Given up by its owner: a pin that comes later goes straight back."""

    def wait(self, timeout: float) -> PrefetchState:
        """The state once it is settled, or PENDING after `timeout` seconds."""
        with self.settled:
            self.settled.wait_for(lambda: self.state is not PrefetchState.PENDING, timeout)
        return self.state
