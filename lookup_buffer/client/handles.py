"""What a prefetch is told: one `Prefetched` a key, and the `LoadOrder` of what is here.

A handle settles on the client's listening thread while others read it; reading a field is one
attribute access and never waits.

What a client is told that asked for a claim, or for a set of claims.
"""

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.errors import MaybeMissed
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import ClaimOutcome
from store import ClaimState


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


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """`holder` and `state` are our own where it is granted, and empty where nobody has it.

    `remaining_seconds` is 0 where it was granted because the store did not answer.
    """

    outcome: ClaimOutcome
    holder: str
    state: ClaimState | None
    remaining_seconds: float

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> "ClaimAnswer":
        """The answer in a node's reply."""
        state = ClaimState(reply["state"]) if reply["state"] else None
        outcome = ClaimOutcome(reply["outcome"])
        return cls(outcome, reply["holder"], state, reply["remaining_seconds"])

    @property
    def granted(self) -> bool:
        return self.outcome is ClaimOutcome.GRANTED


@dataclass(slots=True, eq=False)
class ClaimSet:
    """How a set of claims stands. Settles on the client's listening thread, as `Prefetched`; not
    to be changed by its readers."""

    keys: Sequence[TensorKey]
    settled: threading.Condition = field(repr=False)
    """Notified when any set of the client settles, or begins to wait."""
    state: ClaimOutcome = ClaimOutcome.PENDING
    key: str = ""
    """Text of the key that decided, or that is waited for."""
    holder: str = ""
    """Who has it, as `node:boot`; while PENDING, that another has it is known by this."""
    request_id: int = 0

    def hear(self, timeout: float) -> None:
        """Until it is settled or known to wait for another, for `timeout` seconds at most."""
        if timeout > 0:
            with self.settled:
                self.settled.wait_for(
                    lambda: self.holder or self.state is not ClaimOutcome.PENDING, timeout
                )

    def wait(self, timeout: float) -> ClaimOutcome:
        """The state once it is settled, or PENDING after `timeout` seconds."""
        with self.settled:
            self.settled.wait_for(lambda: self.state is not ClaimOutcome.PENDING, timeout)
        return self.state
