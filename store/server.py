"""Server: a pool of connections to one server."""

import threading
from collections.abc import Sequence
from typing import Any

from store.budget import Budget
from store.connection import Command, Connection, Lost, pack
from store.dialled import Access, Endpoint
from store.errors import StoreUnavailable

_CONNECTIONS_MAX = 64  # more than a node has threads; a call above the limit fails


class Exchange:
    """Commands that were sent; `finish` reads their replies."""

    def __init__(
        self, server: "Server", connection: Connection, count: int, budget: Budget
    ) -> None:
        self._server = server
        self._connection = connection
        self._count = count
        self._budget = budget

    def finish(self) -> list[Any]:
        """The replies, in order; a failed command has an ErrorReply. Raises StoreUnavailable."""
        try:
            replies = self._connection.receive(self._count, self._budget.deadline)
        except BaseException as error:
            # Replies may still arrive, so the connection cannot be used again.
            self._server.discard(self._connection, error)
            raise
        self._server.release(self._connection)
        return replies


class Server:
    """Up to 64 connections to one server. Every method may be called from any thread.

    `losses` counts connections that ended, or were refused, after the server had been reached: it
    may have restarted and lost its data.
    """

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self.access = access
        self.losses = 0
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._in_use = 0
        self._reached = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether a call now would probably find an open connection."""
        return bool(self._idle)

    def begin(
        self, commands: Sequence[Command], budget: Budget | None = None, *, share: int = 1
    ) -> Exchange:
        """Send `commands`. The time for connecting is divided among `share` servers."""
        budget = budget or Budget(self.access)
        packed = pack(commands)
        connection = self._take(budget, share)
        try:
            connection.send(packed, budget.deadline)
        except BaseException as error:
            self.discard(connection, error)
            raise
        return Exchange(self, connection, len(commands), budget)

    def exchange(self, commands: Sequence[Command], budget: Budget | None = None) -> list[Any]:
        """Send commands and read the replies, in one round trip."""
        return self.begin(commands, budget).finish()

    def dial(self) -> Connection:
        """Open a RESP3 connection outside the pool, for the caller alone."""
        return self._dial(Budget(self.access), 1, protocol=3)

    def _take(self, budget: Budget, share: int) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable("the store is closed")
                if not self._idle:
                    if self._in_use >= _CONNECTIONS_MAX:
                        raise StoreUnavailable(
                            f"store {self.endpoint}: at the limit of {_CONNECTIONS_MAX} calls "
                            "in flight; use fewer threads"
                        )
                    self._in_use += 1
                    break
                connection = self._idle.pop()
                self._in_use += 1
            if connection.is_idle:
                return connection
            self.discard(connection, Lost("ended while it was idle"))
        try:
            connection = self._dial(budget, share, protocol=2)
        except BaseException as error:
            self._count_loss(error)
            raise
        self._reached = True
        return connection

    def _dial(self, budget: Budget, share: int, *, protocol: int) -> Connection:
        with budget.connecting(share) as seconds:
            connection = Connection(self.endpoint, self.access, seconds)
        try:
            connection.log_in(budget.deadline, protocol=protocol)
        except BaseException:
            connection.close()
            raise
        return connection

    def release(self, connection: Connection) -> None:
        with self._lock:
            self._in_use -= 1
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def discard(self, connection: Connection, cause: BaseException) -> None:
        connection.close()
        self._count_loss(cause)

    def _count_loss(self, cause: BaseException) -> None:
        with self._lock:
            self._in_use -= 1
            if not isinstance(cause, Lost):
                return
            if self._reached:
                self.losses += 1
                self._reached = False
            # The idle ones ended too, or are opened again: one restart counts as one loss.
            stale, self._idle = self._idle, []
        for connection in stale:
            connection.close()

    def close(self) -> None:
        """Close idle connections now, and those in use when their replies have arrived.
        Idempotent.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
