"""Failed fetches: which keys could not be fetched of late and from whom, for people.

The fetcher notes them, the registrar writes them to the store with its next beat. Bounded: when
many fail at once some are not told. Any thread.
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
        """`holder` was asked for `address`, in vain because of `reason`."""
        with self._lock:
            if len(self._noted) < NOTED_MAX or address in self._noted:
                self._noted[address] = (reason, holder)

    def take(self) -> dict[QualifiedKey, tuple[str, str]]:
        """What was noted since the last call: reason and holder by address."""
        with self._lock:
            noted, self._noted = self._noted, {}
            return noted
