"""An asyncio loop in virtual time: nothing runs by itself, and `run` lets time pass at once."""

import asyncio
from typing import Any

from lookup_buffer.node.turns import Turns, Worker

EPSILON = 1e-9


class VirtualLoop(asyncio.BaseEventLoop):
    """Without files or sockets. It is its own selector, which moves the clock instead of waiting.

    `now` may also be set: then timers are late.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self._until = 0.0
        self._errors: list[dict[str, Any]] = []
        self._selector = self
        self.set_exception_handler(lambda _, context: self._errors.append(context))

    def time(self) -> float:
        return self.now

    def run(self, seconds: float) -> None:
        """Run what is due within `seconds`, and what that causes at once.

        Raises:
            The first error of a callback.
        """
        self._until = self.now + seconds
        self.run_forever()
        self.now = self._until
        if self._errors:
            context = self._errors.pop(0)
            raise context.get("exception") or AssertionError(context["message"])

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or self.now + timeout > self._until + EPSILON:
            self.stop()  # nothing more is due
        else:
            self.now += max(0.0, timeout)
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def __del__(self, *_: object) -> None:
        """There is nothing to close."""


class PacedTurns(Turns):
    """Does a number of steps in each turn of the loop: then its time is over."""

    def __init__(self, loop: VirtualLoop, steps_per_turn: int) -> None:
        super().__init__(loop)
        self._most, self._done = steps_per_turn, 0

    def _step(self, worker: Worker) -> bool:
        self._done += 1
        has_more = super()._step(worker)
        if self._done % self._most == 0:
            self._left = 0.0
        return has_more
