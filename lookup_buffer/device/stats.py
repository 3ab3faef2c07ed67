"""Notes: what a lane did and did not, counted by reason, and said once for each. Any thread."""

import logging
import threading
from collections import Counter

logger = logging.getLogger(__name__)


class Notes:
    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> int:
        """The answer is how often, with this time."""
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def warn(self, reason: str, why: object) -> None:
        if self.count(f"warned:{reason}") == 1:
            logger.warning(
                "lookup buffer: the %s lane was not used, and the bytes came over the hosts: %s "
                "(%s; said once, counted by the node as lane_fallbacks_%s)",
                self._lane, why, reason, reason,
            )  # fmt: skip

    def warn_of_serving(self, why: object) -> None:
        """Of what another process asked for, and did not get."""
        if self.count("warned:serving") == 1:
            logger.warning(
                "lookup buffer: a reader's %s lane was ended, and it has its bytes over the hosts: "
                "%s (said once, counted by the reader's node as lane_fallbacks_peer_failed)",
                self._lane, why,
            )  # fmt: skip
