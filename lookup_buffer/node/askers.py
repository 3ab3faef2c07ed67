"""The owner's side of hand-offs for other nodes: answers their takers' requests.

Each other node has one connection, which identifies it. When the connection ends, the leases that
its clients did not acknowledge are given back. `peers` passes the connections in through `node.py`;
everything runs on the loop's thread.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs, Lease
from lookup_buffer.protocol.messages import Acknowledge, GiveBack, Holds, Leave, Take, parse
from lookup_buffer.protocol.sockets import enable_keepalive

BIDS_MAX: Final = 4096
"""Bound on the queued takers of one other node."""


@dataclass(slots=True)
class Askers:
    loop: asyncio.AbstractEventLoop
    handoffs: Handoffs
    counters: Counters
    _takes: dict[Connection, dict[int, "asyncio.Task[None]"]] = field(default_factory=dict)
    """The queued takers of each node, by the id of their `Take`."""

    def admit(self, stream: socket.socket, on_end: Callable[[], None]) -> None:
        """Serve requests on `stream` until it ends; then call `on_end`."""

        def ended(connection: Connection, error: LookupBufferError | None) -> None:
            if isinstance(error, ProtocolError):
                self.counters.add("protocol_errors")
            self._takes.pop(connection, None)
            self.handoffs.end(connection)
            on_end()

        enable_keepalive(stream)
        connection = Connection(self.loop, stream, self._on_message, ended)
        self._takes[connection] = {}

    def close(self) -> None:
        for connection in list(self._takes):
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
                take = self._takes[connection].pop(request.take, None)
                if take is not None:
                    take.cancel()
                    connection.send({"id": request.take, "state": "absent"})
            case request:
                raise ProtocolError(f"{request.op} is not a request between nodes")

    def _take(self, connection: Connection, request: Take) -> None:
        takes, address = self._takes[connection], (request.namespace, request.key)
        if len(takes) >= BIDS_MAX:
            raise ProtocolError(f"more than {BIDS_MAX} takers of one node are queued")
        lease = self.handoffs.take_now(address, connection)
        if lease is not None or not request.wait_seconds:
            _tell(connection, request, lease)
            return
        take = connection.start(self._queue(connection, request))
        if take is not None:
            takes[request.id] = take

    async def _queue(self, connection: Connection, request: Take) -> None:
        address = (request.namespace, request.key)
        lease = await self.handoffs.take_queued(address, connection)
        self._takes[connection].pop(request.id, None)
        _tell(connection, request, lease)


def _tell(connection: Connection, request: Take, lease: Lease | None) -> None:
    if lease is None:
        connection.send({"id": request.id, "state": "absent"})
        return
    item = lease.held.item
    connection.send(
        {
            "id": request.id,
            "state": "leased",
            "token": lease.token,
            "lease_seconds": lease.seconds,
            "generation": item.generation,
            "checksum": item.checksum,
            "nbytes": item.nbytes,
        }
    )
