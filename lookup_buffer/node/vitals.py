"""The node's counters, gauges and health, as `/metrics` and `/healthz` show them.

`control` sends them to the dashboard's process. Runs on the loop's thread.
"""

from dataclasses import asdict, dataclass
from typing import Any

from lookup_buffer.node.control import Control
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.held_claims import HeldClaims
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.shelf import Shelf


@dataclass(slots=True)
class Vitals:
    counters: Counters
    shelf: Shelf
    registrar: Registrar
    directory: Directory
    held_claims: HeldClaims
    control: Control

    def answer(self) -> dict[str, Any]:
        """The fields of the answer to `Metrics`."""
        counters = self.counters
        return {
            "values": counters.totals() | self.gauges(),
            "histograms": {
                "fetch_seconds": counters.fetch_seconds.read(),
                "encode_seconds": counters.encode_seconds.read(),
                "loop_blocked_seconds": counters.loop_blocked_seconds.read(),
            },
            "unhealthy": self.unhealthy_reason(),
        }

    def gauges(self) -> dict[str, int]:
        """The current values."""
        return {
            **asdict(self.shelf.gauges()),
            "unpublished": self.registrar.pending(),
            "store_up": int(self.registrar.store_up),
            "store_breaker_open": int(self.registrar.breaker_open),
            "nodes_alive": self.directory.count_alive(),
            "claims": len(self.held_claims),
            "sessions": self.control.count_sessions(),
        }

    def unhealthy_reason(self) -> str:
        """Why the node is unhealthy; "" if it is healthy."""
        if not self.registrar.store_up:
            return "the store is not reached: only what this host holds is found"
        if not self.registrar.established:
            return "the node has not joined its fleet yet: another node may be running with its id"
        return ""
