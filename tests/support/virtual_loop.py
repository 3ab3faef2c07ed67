"""An asyncio loop in virtual time: nothing runs by itself, and `run` lets time pass at once."""

import asyncio
from typing import Any

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
