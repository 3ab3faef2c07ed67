"""Work of many parts, which is done in many turns of the node's loop.

Used by `handoffs`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.times import TURN_SECONDS


@dataclass(slots=True)
class Turns:
    """Calls in the order in which they were added: for about TURN_SECONDS in each turn of the loop,
    or one of them. What others wait for comes in between."""

    loop: asyncio.AbstractEventLoop
    _parts: deque[Callable[[], None]] = field(default_factory=deque)
    _is_due: bool = False

    def add(self, part: Callable[[], None]) -> None:
        """Call it soon; it may add others."""
        self._parts.append(part)
        if not self._is_due:
            self._is_due = True
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        until = self.loop.time() + TURN_SECONDS
        try:
            while self._parts:
                self._parts.popleft()()
                if self.loop.time() >= until:
                    break
        finally:
            self._is_due = bool(self._parts)
            if self._is_due:
                self.loop.call_soon(self._go_on)
