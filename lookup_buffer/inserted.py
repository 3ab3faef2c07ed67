"""What an insert came to."""

from enum import Enum


class InsertOutcome(Enum):
    STORED = "stored"
    EXISTS = "exists"
    """The key was there already; shared content never changes, so nothing was done. Of a hand-off:
    another node has one under that key, which nobody has taken; this one was dropped."""
