"""Idle time: what a scheduling pass may spend on waiting, where there is nothing to run.

vLLM asks again at once whether a request may be scheduled, and where none may it rests for a
millisecond and asks again, which keeps a core busy that node and store could use. A pass that
follows one in which nothing ran may as well wait for the answer.
"""

from collections.abc import Callable


class IdleTime:
    """In vLLM's scheduler thread.

    Args:
        seconds: of one idle pass, for all its requests together.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._left = 0.0

    def begin_pass(self, *, is_idle: bool) -> None:
        """`is_idle`: the pass before found nothing to run."""
        self._left = self._seconds if is_idle else 0.0

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def spend_on(self, wait: Callable[[float], bool]) -> bool:
        """What `wait` says, which is told how long it may take."""
        if self.is_over:
            return wait(0.0)
        started = self._clock()
        has_come = wait(self._left)
        # Who waited in vain has used it up, also by a clock that stands still.
        self._left = self._left - (self._clock() - started) if has_come else 0.0
        return has_come
