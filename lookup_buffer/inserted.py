"""What an insert and a claim came to."""

from enum import Enum, StrEnum


class InsertOutcome(Enum):
    STORED = "stored"
    EXISTS = "exists"
    """The key was there already; shared content never changes, so nothing was done. Of a hand-off:
    another node has one under that key, which nobody has taken; this one was dropped."""


class ClaimOutcome(StrEnum):
    """How a claim, or a set of claims, was decided. The values are those of messages.

    The store decides between two of them (`store.ClaimAnswer.granted`): it does not know which
    nodes are alive, and so not whether a key is STORED.
    """

    GRANTED = "granted"
    """The right to produce the key is ours, until the lease ends. Of a set: all are ours, as
    intents of a second at most."""
    HELD = "held"
    """Another engine has it: `holder`. Of a set: none is ours, for `holder` had `key` until the
    end of the wait."""
    STORED = "stored"
    """Nobody needs to produce it: a live node holds a complete copy. Of a set: none is ours, for a
    live node holds `key`; look for the keys again."""
    PENDING = "waiting"
    """Only of a set: not answered yet, or waiting for what others hold."""
    FAILED = "refused"
    """Only of a set: the node refused it, or did not answer."""
