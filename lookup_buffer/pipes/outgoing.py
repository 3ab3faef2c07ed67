"""A message on its way out: what the outbox keeps of it, and the speaker sends."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that was offered and not received."""

    key: bytes | None
    memory: memoryview
    """The caller's, until there is room for a copy."""
    cost: int
    at: int | None = None
    """Where the copy lies, if the other end sees it there."""
    charged: bool = False
    number: int = 0
    inline: bool = False
    copying: bool = False
    """Its bytes are not all in `memory` yet."""
    pulled: bool = False
    over: bool = False
    """Received, or as good as: its bytes are the kernel's."""
