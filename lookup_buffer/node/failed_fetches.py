"""Recent failed fetches: which keys, from which node and why, shown to people by `lookup-buffer
why`.

`fetcher` adds them on `lb-fetch`, `registrar` writes them to the store with its next beat. Bounded:
of many failures at once some are dropped.
"""

import threading
from dataclasses import dataclass, field

from lookup_buffer.key import QualifiedKey

NOTED_MAX = 64


@dataclass(slots=True)
class FailedFetches:
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _noted: dict[QualifiedKey, tuple[str, str]] = field(default_factory=dict)

    def note(self, address: QualifiedKey, reason: str, holder: str) -> None:
        """The fetch of `address` from `holder` failed because of `reason`."""
        with self._lock:
            if len(self._noted) < NOTED_MAX or address in self._noted:
                self._noted[address] = (reason, holder)

    def take(self) -> dict[QualifiedKey, tuple[str, str]]:
        """Failures since the last call: reason and holder by address."""
        with self._lock:
            noted, self._noted = self._noted, {}
            return noted
