"""What a client is told that asked for a claim."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from store import ClaimState


class ClaimOutcome(Enum):
    GRANTED = "granted"
    """The right to produce the key is ours, until the lease ends."""
    HELD = "held"
    """Another engine has it: `holder`, for `remaining_seconds` at most unless it is renewed."""
    STORED = "stored"
    """Nobody needs to produce it: a live node holds a complete copy."""


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
