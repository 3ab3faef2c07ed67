"""Time budgets of one scheduling pass, for its waits for the node.

vLLM schedules nothing else while a pass waits. So each kind of wait has a budget, which all
requests of the pass share. Used in vLLM's scheduler thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

FIRST_SIGHT_SECONDS: Final = 1e-3
"""How long a pass waits, in all, for the node's answers about new requests."""
IDLE_SECONDS: Final = 2 * FIRST_SIGHT_SECONDS
"""How long a pass or step that follows an idle one waits, in all; on the scheduler side and in the
workers."""

Result = TypeVar("Result")


class PassTime:
    """A budget of seconds for each pass.

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

    def spend_on(self, call: Callable[[float], Result]) -> Result:
        """Call `call` with the seconds that are left (0 where the budget is used up) and return its
        result."""
        started = self._clock()
        result = call(max(self._left, 0.0))
        self._left -= self._clock() - started
        return result


class IdleTime:
    """A budget of seconds for each pass that follows an idle one, in which nothing ran.

    Where no request may be scheduled, vLLM polls: it sleeps for a millisecond and calls again. That
    keeps a core busy that node and store could use. So such a pass waits for the node's answer
    instead.

    Args:
        seconds: of one idle pass, for all its requests together.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._left = 0.0

    def begin_pass(self, *, is_idle: bool) -> None:
        """`is_idle`: the previous pass found nothing to run."""
        self._left = self._seconds if is_idle else 0.0

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def spend_on(self, wait: Callable[[float], bool]) -> bool:
        """Call `wait` with the seconds that are left and return its result: whether it was
        satisfied. An unsuccessful wait uses up the budget."""
        if self.is_over:
            return wait(0.0)
        started = self._clock()
        satisfied = wait(self._left)
        # An unsuccessful wait uses up the budget, even by a clock that does not advance.
        self._left = self._left - (self._clock() - started) if satisfied else 0.0
        return satisfied


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Both budgets of one pass."""

    first_sights: PassTime
    """For the node's answer to the first call for a request, or to a repeated one."""
    idle: IdleTime

    def begin_pass(self, *, is_idle: bool) -> None:
        """`is_idle`: the previous pass found nothing to run."""
        self.first_sights.begin_pass()
        self.idle.begin_pass(is_idle=is_idle)
