"""Periodic tasks of a beat, each with its own circuit breaker.

A store may consist of several servers, and each task has its own keys. If a task's server does not
answer, the task costs one timeout, is logged, and pauses; the other tasks and the publication on
other servers continue. A beat is delayed by at most one task: the tasks that did not run come first
after the next beat. Called by `registrar` on the loop's
thread.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import ConfigError
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.troubles import Troubles
from store import StoreCorrupt, StoreError, StoreFull

REST_SECONDS_MIN: Final = 2.0
REST_SECONDS_MAX: Final = 5.0
"""After its server returned, a task is late by at most this."""

Errand = tuple[str, Callable[[], Awaitable[object]]]
"""The text to log if it fails, and the task."""


@dataclass(slots=True)
class Errands:
    troubles: Troubles
    clock: Callable[[], float] = time.monotonic
    _breakers: dict[str, Breaker] = field(default_factory=dict)
    _turn: int = 0

    async def run_until(self, due: float, errands: Sequence[Errand]) -> None:
        """Run the tasks one after another until `due`; the next call continues after the last
        one."""
        for _ in errands:
            await self.run(*errands[self._turn % len(errands)])
            self._turn += 1
            if self.clock() >= due:
                return

    async def run(self, trouble: str, errand: Callable[[], Awaitable[object]]) -> None:
        """Run one task, unless it pauses. `trouble`: the text to log if it fails."""
        breaker = self._breakers.get(trouble)
        if breaker is None:
            breaker = self._breakers[trouble] = Breaker(
                self.clock,
                failures_to_open=1,
                open_seconds_min=REST_SECONDS_MIN,
                open_seconds_max=REST_SECONDS_MAX,
            )
        if not breaker.allows():
            return
        try:
            await errand()
        except (StoreFull, StoreCorrupt) as error:  # its server answers: no pause
            self.troubles.log(trouble, error)
        except StoreError as error:
            self.troubles.log(trouble, error)
            breaker.failed()
            return
        except ConfigError:
            raise  # the node must end
        except Exception as error:  # noqa: BLE001 -- the publication must not depend on it
            self.troubles.log_bug(trouble, error)
            breaker.failed()
            return
        breaker.succeeded()

    def wake(self) -> None:
        """End all pauses: the store is new, or has lost its data."""
        self._breakers.clear()
