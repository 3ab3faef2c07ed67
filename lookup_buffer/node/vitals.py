"""The node's gauges, and its health for `/healthz`.

`node.py` ticks it on the loop; `exposition` and `http_pages` read it on `lb-http`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lookup_buffer.node.control import Control
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.holdings import Holdings
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.times import STALL_SECONDS


@dataclass(slots=True)
class Vitals:
    identity: Identity
    counters: Counters
    shelf: Shelf
    registrar: Registrar
    directory: Directory
    holdings: Holdings
    control: Control
    clock: Callable[[], float] = time.monotonic
    _ticked_at: float = 0.0

    def tick(self) -> None:
        """The node's loop runs."""
        self._ticked_at = self.clock()

    def gauges(self) -> dict[str, int]:
        """The current values."""
        return {
            **asdict(self.shelf.gauges()),
            "unpublished": self.registrar.pending(),
            "store_up": int(self.registrar.store_up),
            "store_breaker_open": int(self.registrar.breaker_open),
            "nodes_alive": self.directory.count_alive(),
            "claims": len(self.holdings),
            "sessions": self.control.count_sessions(),
        }

    def unhealthy_reason(self) -> str:
        """Why the node is unhealthy; "" if it is healthy."""
        if self.clock() - self._ticked_at > STALL_SECONDS:
            return "the node does not answer its clients"
        if not self.registrar.store_up:
            return "the store is not reached: only what this host holds is found"
        if not self.registrar.established:
            return "the node has not joined its fleet yet: another node may be running with its id"
        return ""
