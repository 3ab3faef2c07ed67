"""A rate-limited log for failures that repeat.

Used by `registrar` and `errands` on the loop's thread.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

AGAIN_SECONDS = 60.0
"""A lasting failure is logged again after this time."""
KINDS_MAX = 16
"""At most this many different failures are logged within that time."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Troubles:
    clock: Callable[[], float] = time.monotonic
    _said_at: dict[str, float] = field(default_factory=dict)

    def log(self, what: str, error: Exception) -> None:
        """Log that `what` failed and why, unless it was logged recently."""
        text = f"{what}: {error}"
        if self._is_due(text):
            _log.warning("%s", text)

    def log_bug(self, what: str, error: Exception) -> None:
        """As `log`, for an unexpected error; with its traceback."""
        text = f"{what}: {error!r}; this is a bug, please report it"
        if self._is_due(text):
            _log.error("%s", text, exc_info=error)

    @contextmanager
    def logged(self, what: str, *kinds: type[Exception]) -> Iterator[None]:
        """Continue after errors of these kinds, after logging them."""
        try:
            yield
        except kinds as error:
            self.log(what, error)

    def _is_due(self, text: str) -> bool:
        now = self.clock()
        said = {said: at for said, at in self._said_at.items() if now - at < AGAIN_SECONDS}
        self._said_at = said
        if text in said or len(said) >= KINDS_MAX:
            return False
        said[text] = now
        return True
