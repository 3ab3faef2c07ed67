"""Handles and results of a client's calls: `PrefetchHandle`, `LoadOrder`, `ClaimAnswer`,
`ClaimHandle`.

A prefetch returns one `PrefetchHandle` for each key, with a `LoadOrder` once the bytes are on this
host. A claim returns a `ClaimAnswer`, a set of claims a `ClaimHandle`. Handles settle on the
client's listening thread while other threads read them; reading a field is one attribute access and
never waits. Plain data: the module sends no requests.
"""

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.errors import MaybeMissed
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.fields import clamped_seconds
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import ClaimOutcome
from store import ClaimState


class PrefetchState(enum.Enum):
    RESIDENT = "resident"
    """On this host and pinned: `order` gives its location."""
    PENDING = "pending"
    """Not settled: it is being located or fetched, or waits for its publication."""
    MISSING = "missing"
    """No live node holds it; `reason` gives the cause."""
    FAILED = "failed"
    """It could not be fetched, or the session with the node that pinned it was lost; `reason` gives
    the cause."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The location of pinned bytes. Plain data: the scheduler sends it to the workers.

    It represents a pin. The pin ends when its holder releases it, or when every rank has sent
    `Done`.
    """

    boot: str
    ticket: int
    offset: int
    nbytes: int
    generation: int
    header: TensorHeader
    lane: str = ""
    """The lane that received the bytes, which are then in the readers' device pools, under the
    ticket. Empty if the bytes are in the arena."""

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
class PrefetchHandle:
    """The state of one prefetched key. Readers must not change it."""

    key: TensorKey
    settled: threading.Condition = field(repr=False)
    """Notified when any handle of the client settles."""
    state: PrefetchState = PrefetchState.PENDING
    reason: MaybeMissed = ""
    source: str = ""
    """'local', or the node it was fetched from."""
    order: LoadOrder | None = None
    released: bool = False
    """The caller has released it: a pin that arrives later is released at once."""

    def wait(self, timeout: float) -> PrefetchState:
        """The state once it is settled, or PENDING after `timeout` seconds."""
        seconds = clamped_seconds(timeout)
        with self.settled:
            self.settled.wait_for(lambda: self.state is not PrefetchState.PENDING, seconds)
        return self.state


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer to one claim. `holder` and `state` are this client's own if the claim was granted,
    and empty if no client holds it.

    `remaining_seconds` is the rest of the holder's lease; 0 if the claim was granted because the
    store did not answer.
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
class ClaimHandle:
    """The state of a set of claims. It settles on the client's listening thread, as
    `PrefetchHandle`; readers must not change it."""

    keys: Sequence[TensorKey]
    settled: threading.Condition = field(repr=False)
    """Notified when any set of the client settles, or starts to wait for another claimant."""
    state: ClaimOutcome = ClaimOutcome.PENDING
    key: str = ""
    """Text of the key that determined the outcome, or whose claim the set waits for."""
    holder: str = ""
    """The claimant of `key`, as `node:boot`; set while PENDING if another client holds `key`."""
    request_id: int = 0
    keeps: bool = True
    """False: the client gives the claims back as soon as they are granted."""

    def wait_for_answer(self, timeout: float) -> None:
        """Wait, at most `timeout` seconds, for the node's first answer: the set has settled, or it
        waits for another claimant."""
        seconds = clamped_seconds(timeout)
        if seconds > 0:
            with self.settled:
                self.settled.wait_for(
                    lambda: self.holder or self.state is not ClaimOutcome.PENDING, seconds
                )

    def wait(self, timeout: float) -> ClaimOutcome:
        """The state once it is settled, or PENDING after `timeout` seconds."""
        seconds = clamped_seconds(timeout)
        with self.settled:
            self.settled.wait_for(lambda: self.state is not ClaimOutcome.PENDING, seconds)
        return self.state
