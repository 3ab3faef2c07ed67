"""Errands: what a beat does besides, each at its own risk.

A store may be several servers, and each errand has its own keys. One whose server does not answer
costs a time-out, is said, and then rests for a while; the others, and what is to be published on
other servers, go on. The next beat is never kept waiting by more than one of them: what does not
come to its turn comes to it with that beat. On the registrar's thread.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import ConfigError
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.troubles import Troubles
from store import StoreCorrupt, StoreError, StoreFull

REST_SECONDS_MIN: Final = 2.0
REST_SECONDS_MAX: Final = 5.0
"""What people see of a node is late by so much when its server is back."""

Errand = tuple[str, Callable[[], object]]
"""What it means where it fails, as it is told then, and what is to be done."""


@dataclass(slots=True)
class Errands:
    troubles: Troubles
    clock: Callable[[], float] = time.monotonic
    _breakers: dict[str, Breaker] = field(default_factory=dict)
    _turn: int = 0

    def run_until(self, due: float, errands: Sequence[Errand]) -> None:
        """One after another until it is `due`; the next time it goes on where it was then."""
        for _ in errands:
            self.run(*errands[self._turn % len(errands)])
            self._turn += 1
            if self.clock() >= due:
                return

    def run(self, trouble: str, errand: Callable[[], object]) -> None:
        """Do it, unless it rests."""
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
            errand()
        except (StoreFull, StoreCorrupt) as error:  # its server answers
            self.troubles.tell(trouble, error)
        except StoreError as error:
            self.troubles.tell(trouble, error)
            breaker.failed()
            return
        except ConfigError:
            raise  # the node has to end
        except Exception as error:  # noqa: BLE001 -- what is to be published does not depend on it
            self.troubles.tell_bug(trouble, error)
            breaker.failed()
            return
        breaker.succeeded()

    def wake(self) -> None:
        """None rests any more: the store is another one, or has lost its data."""
        self._breakers.clear()
