"""How the turns of the node's loop are shared, so that nothing holds it for long.

`CallQueue` is for work of many parts; `handoffs` uses it. `Turns` is for connections, and for the
inserts of all clients. A connection handles its messages in steps, an insert its parts. Together
the steps take about TURN_SECONDS of each turn of the loop, or one step takes longer. The rest
waits, and then each worker makes one step in its turn: who sends much delays others by a step.
While there is time and nobody waits, a step is made at once: a message is handled as soon as it is
read. Used on the loop's thread only.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lookup_buffer.times import TURN_SECONDS


@dataclass(slots=True)
class CallQueue:
    """Calls in the order in which they were added: for about TURN_SECONDS in each turn of the loop,
    or one of them. What others wait for comes in between. For work of many parts."""

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


class Worker(Protocol):
    def step(self) -> bool:
        """Do a part of the work. Returns whether more of it can be done now. It does not raise."""
        ...


class Steps(NamedTuple):
    """A worker whose steps are calls of a function."""

    step: Callable[[], bool]


class Turns:
    """Of workers of one kind: other kinds have their own, and their own time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Worker] = deque()
        self._left = TURN_SECONDS
        """Of this turn of the loop, or of several if those took little: to begin anew in each would
        make the loop turn once more for each message."""
        self._is_scheduled = False

    def work(self, worker: Worker) -> bool:
        """Let `worker`, which does not wait, do its steps. Returns whether it waits to go on."""
        if not self._waiting:
            while self._left > 0:
                if not self._step(worker):
                    return False
        self._waiting.append(worker)
        self._schedule()
        return True

    def _step(self, worker: Worker) -> bool:
        began = self._loop.time()
        has_more = worker.step()
        self._left -= self._loop.time() - began
        if self._left <= 0:
            self._schedule()
        return has_more

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled, self._left = False, TURN_SECONDS
        while self._waiting and self._left > 0:
            worker = self._waiting.popleft()
            if self._step(worker):
                self._waiting.append(worker)
        if self._waiting:
            self._schedule()
