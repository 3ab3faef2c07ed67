"""Server: the connections to one server, handed to one caller each."""

import threading
from collections.abc import Sequence
from typing import Any

from store.budget import Budget
from store.connection import Command, Connection, Lost, pack
from store.dialled import Access, Endpoint
from store.errors import StoreUnavailable

_CONNECTIONS_MAX = 64  # more callers at once than a node has threads; the next is refused


class Exchange:
    """Commands that were sent; `finish` takes their replies."""

    def __init__(
        self, server: "Server", connection: Connection, count: int, budget: Budget
    ) -> None:
        self._server = server
        self._connection = connection
        self._count = count
        self._budget = budget

    def finish(self) -> list[Any]:
        """The replies, in order; a refused command has its Refusal. Raises StoreUnavailable."""
        try:
            replies = self._connection.receive(self._count, self._budget.deadline)
        except BaseException as error:
            # The replies may still be on their way: never again may it be read from.
            self._server.give_up(self._connection, error)
            raise
        self._server.give_back(self._connection)
        return replies


class Server:
    """Up to 64 connections to one server; every method from any thread.

    `losses` counts connections that ended by themselves, or were refused, after the server had
    once been reached: it may have been restarted since, and may lack what it knew.
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
        """Whether a call now would probably not have to dial."""
        return bool(self._idle)

    def begin(
        self, commands: Sequence[Command], budget: Budget | None = None, *, share: int = 1
    ) -> Exchange:
        """Send `commands`; `share` servers have to share the budget for dialling."""
        budget = budget or Budget(self.access)
        packed = pack(commands)
        connection = self._take(budget, share)
        try:
            connection.send(packed, budget.deadline)
        except BaseException as error:
            self.give_up(connection, error)
            raise
        return Exchange(self, connection, len(commands), budget)

    def exchange(self, commands: Sequence[Command], budget: Budget | None = None) -> list[Any]:
        """One round trip."""
        return self.begin(commands, budget).finish()

    def dial(self) -> Connection:
        """A connection of the caller's own, with pushes."""
        return self._dial(Budget(self.access), 1, protocol=3)

    def _take(self, budget: Budget, share: int) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable("the store is closed")
                if not self._idle:
                    if self._in_use >= _CONNECTIONS_MAX:
                        raise StoreUnavailable(
                            f"store {self.endpoint}: {_CONNECTIONS_MAX} calls are under way"
                        )
                    self._in_use += 1
                    break
                connection = self._idle.pop()
                self._in_use += 1
            if connection.in_step:
                return connection
            self.give_up(connection, Lost("ended while it was idle"))
        try:
            connection = self._dial(budget, share, protocol=2)
        except BaseException as error:
            self._forget(error)
            raise
        self._reached = True
        return connection

    def _dial(self, budget: Budget, share: int, *, protocol: int) -> Connection:
        with budget.dialling(share) as seconds:
            connection = Connection(self.endpoint, self.access, seconds)
        try:
            connection.log_in(budget.deadline, protocol=protocol)
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: Connection) -> None:
        with self._lock:
            self._in_use -= 1
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def give_up(self, connection: Connection, cause: BaseException) -> None:
        connection.close()
        self._forget(cause)

    def _forget(self, cause: BaseException) -> None:
        with self._lock:
            self._in_use -= 1
            if not isinstance(cause, Lost):
                return
            if self._reached:
                self.losses += 1
                self._reached = False
            # The others ended with it, or will be dialled anew: one restart is one loss.
            stale, self._idle = self._idle, []
        for connection in stale:
            connection.close()

    def close(self) -> None:
        """Idempotent. A connection in use is closed by its user, as soon as it has its replies."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
