"""Troubles: what goes wrong again and again, said in the log at a limited rate."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

AGAIN_SECONDS = 60.0
"""What lasts is said again so often."""
KINDS_MAX = 16
"""At most so many different troubles are said within that time."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Troubles:
    """One thread's."""

    clock: Callable[[], float] = time.monotonic
    _said_at: dict[str, float] = field(default_factory=dict)

    def tell(self, what: str, error: Exception) -> None:
        """Say that `what` failed and why; nothing where it was said a moment ago."""
        text = f"{what}: {error}"
        if self._is_due(text):
            _log.warning("%s", text)

    def tell_bug(self, what: str, error: Exception) -> None:
        """The same of what should not happen, with where it happened."""
        text = f"{what}: {error!r}, which is a bug"
        if self._is_due(text):
            _log.error("%s", text, exc_info=error)

    @contextmanager
    def told(self, what: str, *kinds: type[Exception]) -> Iterator[None]:
        """Go on after errors of these kinds, having told them."""
        try:
            yield
        except kinds as error:
            self.tell(what, error)

    def _is_due(self, text: str) -> bool:
        now = self.clock()
        said = {said: at for said, at in self._said_at.items() if now - at < AGAIN_SECONDS}
        self._said_at = said
        if text in said or len(said) >= KINDS_MAX:
            return False
        said[text] = now
        return True
