"""What is remembered of one request that asked for claims, until it finished."""

import math
from dataclasses import dataclass, field

from lookup_buffer.client.handles import ClaimHandle
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome


@dataclass(slots=True, eq=False)
class Claimant:
    until: float
    """End of its one budget of waiting for others; set when it first asks, never again."""
    keys: dict[str, TensorKey] = field(default_factory=dict)
    """Of the items that it asked for, by their identifiers."""
    asked: ClaimHandle | None = None
    """None once the answer was seen."""
    ungranted_at: float = 0.0
    """When it was last seen that nothing is granted yet: the grant is no older."""
    late: int = 0
    """How often a grant was seen only when it may have been another's again."""
    answer_by: float = 0.0
    """A node that did not even say that another is at it by then is not waited for."""
    encodes_seen: int = 0
    """How many encodes the engine had begun when it was last looked whose they are."""
    waited: bool = False
    lapses_at: float = math.inf
    """When the intents that were granted are free again."""
    despite: set[str] = field(default_factory=set)
    """Items that another is encoding still."""
    asked_again: dict[str, int] = field(default_factory=dict)
    """By the text of a key: how often it was said to be stored."""

    def still_waits(self, now: float, encodes_begun: int) -> bool:
        """Whether another is at it, as was seen before, and nothing has happened since."""
        asked = self.asked
        if asked is None or asked.state is not ClaimOutcome.PENDING or not asked.holder:
            return False
        if now >= self.until or not self.waited or self.encodes_seen != encodes_begun:
            return False
        self.ungranted_at = now
        return True
