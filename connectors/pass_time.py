"""Pass time: what a scheduling pass of vLLM may spend on waiting for the node.

vLLM schedules nothing else meanwhile, so each kind of wait has a budget that all requests of a pass
share. In vLLM's scheduler thread; serves both connectors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Answer = TypeVar("Answer")


class PassTime:
    """So many seconds of each pass.

    Args:
        seconds: of one pass, for all its requests together.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = self._left = seconds
        self._clock = clock

    def begin_pass(self) -> None:
        self._left = self._seconds

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def spend_on(self, ask: Callable[[float], Answer]) -> Answer:
        """What `ask` says, which is told how long it may take: nothing where the time is over."""
        started = self._clock()
        answer = ask(max(self._left, 0.0))
        self._left -= self._clock() - started
        return answer


class IdleTime:
    """So many seconds of each pass that follows one in which nothing ran.

    vLLM asks again at once whether a request may be scheduled, and where none may it rests for a
    millisecond and asks again, which keeps a core busy that node and store could use. Such a pass
    may as well wait for the answer.

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


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Both, as one pass has them."""

    first_sights: PassTime
    """For answers about what a request asks for the first time, or anew."""
    idle: IdleTime

    def begin_pass(self, *, is_idle: bool) -> None:
        """`is_idle`: the pass before found nothing to run."""
        self.first_sights.begin_pass()
        self.idle.begin_pass(is_idle=is_idle)
