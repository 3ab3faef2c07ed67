"""The owner's side of hand-offs for other nodes: answers their takers' requests.

Each other node has one connection, which identifies it. When the connection ends, the leases that
its clients did not acknowledge are given back. `peers` passes the connections in through `node.py`;
everything runs on the loop's thread.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Bid, Handoffs, Lease
from lookup_buffer.protocol.messages import Acknowledge, GiveBack, Holds, Leave, Take, parse
from lookup_buffer.protocol.sockets import enable_keepalive

BIDS_MAX: Final = 4096
"""Bound on the queued takers of one other node."""


@dataclass(slots=True)
class Askers:
    loop: asyncio.AbstractEventLoop
    handoffs: Handoffs
    counters: Counters
    _bids: dict[Connection, dict[int, Bid]] = field(default_factory=dict)

    def admit(self, stream: socket.socket, on_end: Callable[[], None]) -> None:
        """Serve requests on `stream` until it ends; then call `on_end`."""

        def ended(connection: Connection, error: LookupBufferError | None) -> None:
            if isinstance(error, ProtocolError):
                self.counters.add("protocol_errors")
            self._bids.pop(connection, None)
            self.handoffs.end(connection)
            on_end()

        enable_keepalive(stream)
        connection = Connection(self.loop, stream, self._on_message, ended)
        self._bids[connection] = {}

    def close(self) -> None:
        for connection in list(self._bids):
            connection.end(None)

    def _on_message(self, connection: Connection, message: Any) -> None:
        match parse(message):
            case Take() as request:
                self._take(connection, request)
            case Acknowledge() as request:
                won = self.handoffs.acknowledge(request.token)
                connection.send({"id": request.id, "state": "won" if won else "lost"})
            case GiveBack() as request:
                self.handoffs.give_back(request.token)
            case Holds() as request:
                held = self.handoffs.holds((request.namespace, request.key))
                connection.send({"id": request.id, "state": "present" if held else "absent"})
            case Leave() as request:
                bid = self._bids[connection].pop(request.take, None)
                if bid is not None:
                    self.handoffs.cancel(bid)
                    connection.send({"id": request.take, "state": "absent"})
            case request:
                raise ProtocolError(f"{request.op} is not a request between nodes")

    def _take(self, connection: Connection, request: Take) -> None:
        if len(self._bids[connection]) >= BIDS_MAX:
            raise ProtocolError(f"more than {BIDS_MAX} takers of one node are queued")
        bid = self.handoffs.take(
            (request.namespace, request.key),
            connection,
            partial(self._tell, connection, request.id),
            patient=request.wait_seconds > 0,
        )
        if bid is not None:
            self._bids[connection][request.id] = bid

    def _tell(self, connection: Connection, number: int, lease: Lease | None) -> None:
        self._bids.get(connection, {}).pop(number, None)
        if lease is None:
            connection.send({"id": number, "state": "absent"})
            return
        item = lease.held.item
        connection.send(
            {
                "id": number,
                "state": "leased",
                "token": lease.token,
                "lease_seconds": lease.seconds,
                "generation": item.generation,
                "checksum": item.checksum,
                "nbytes": item.nbytes,
            }
        )
