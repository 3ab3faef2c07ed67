"""The claims of one request, kept until the request finishes.

Pure bookkeeping. `EcClaims` and `MetadataWaits` use it on vLLM's scheduler thread.
"""

import math
from dataclasses import dataclass, field

from lookup_buffer.client.handles import ClaimHandle
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome


@dataclass(slots=True, eq=False)
class RequestClaims:
    """Claims that one request asked for as one set."""

    deadline: float
    """End of the request's single budget for waiting on others. Set at the first claim, never
    extended."""
    keys: dict[str, TensorKey] = field(default_factory=dict)
    """Keys of the claimed items, by identifier."""
    handle: ClaimHandle | None = None
    """The set of claims at the node; None once its outcome was processed."""
    not_granted_at: float = 0.0
    """Time of the last check that found no grant. A grant seen later is not older than this."""
    late_grants: int = 0
    """Successive grants that were seen only after the intent may have passed to another engine."""
    answer_deadline: float = 0.0
    """A node that has not reported a holder by then is not waited for."""
    encodes_seen: int = 0
    """Number of encodes that the engine had begun at the last check."""
    waited: bool = False
    """Whether the wait for another engine was counted."""
    expires_at: float = math.inf
    """When the granted intents expire."""
    held_elsewhere: set[str] = field(default_factory=set)
    """Items that another engine was still encoding when the wait ended."""
    refetches: dict[str, int] = field(default_factory=dict)
    """By the text of a key: how often the item was reported as stored."""

    def still_waits(self, now: float, encodes_begun: int) -> bool:
        """Whether another engine still holds a claim, as already seen, and nothing has changed
        since."""
        handle = self.handle
        if handle is None or handle.state is not ClaimOutcome.PENDING or not handle.holder:
            return False
        if now >= self.deadline or not self.waited or self.encodes_seen != encodes_begun:
            return False
        self.not_granted_at = now
        return True
