"""What a client is told that asked for a claim, or for a set of claims."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.inserted import ClaimOutcome
from lookup_buffer.key import TensorKey
from store import ClaimState


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
