"""Topology: which server holds a key, and which failovers happened.

`Standalone` is here; `SentinelTopology` and `ClusterTopology` have modules of their own. A topology
owns its servers. It notices changes when a call fails or its reply has a hint (MOVED, READONLY),
never on a timer of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from store.budget import Budget
from store.connection import Part
from store.dialled import Endpoint
from store.errors import StoreUnavailable
from store.server import Server

Route = Server | StoreUnavailable
"""The server for a command, or the error why there is none."""

_IS_A_CLUSTER = "store: the server is part of a cluster; use a URL with redis-cluster://"


class Topology(ABC):
    """Thread-safe. Methods that may do I/O raise StoreUnavailable."""

    @abstractmethod
    def new_budget(self) -> Budget:
        """The deadlines of one operation that starts now."""

    @abstractmethod
    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        """The server of each key, or an error if no server has it."""

    @abstractmethod
    def known_server_for(self, name: Part) -> Server:
        """The server of one key, without I/O. Raises StoreUnavailable if it is unknown or
        suspect.
        """

    def place_of(self, name: Part) -> str:
        """The name of the key's server as far as it is known, suspect or not, without I/O."""
        return ""  # all keys are on one server at a time

    @abstractmethod
    def servers(self, budget: Budget) -> Sequence[Server]:
        """All servers that hold keys."""

    @abstractmethod
    def failovers(self) -> int:
        """How many losses or replacements of a server were noticed."""

    def moved(self, name: Part, endpoint: Endpoint) -> Server:
        """Record that the key is now at `endpoint` (MOVED); return the server there."""
        raise StoreUnavailable(_IS_A_CLUSTER)

    def ask_server(self, endpoint: Endpoint) -> Server:
        """The server at `endpoint`, for one command that was redirected (ASK)."""
        raise StoreUnavailable(_IS_A_CLUSTER)

    @abstractmethod
    def suspect(self, server: Server) -> None:
        """A call to `server` failed or was refused: check the topology before the next one."""

    @abstractmethod
    def recheck(self) -> None:
        """Check for changes now, in one round trip; for callers that cache what they read."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Idempotent."""


class Standalone(Topology):
    """One server that never changes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._servers = (server,)

    def new_budget(self) -> Budget:
        return Budget(self._server.access)

    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[Route]:
        return self._servers * len(names)

    def known_server_for(self, name: Part) -> Server:
        return self._server

    def servers(self, budget: Budget) -> Sequence[Server]:
        return self._servers

    def failovers(self) -> int:
        return self._server.losses

    def suspect(self, server: Server) -> None:
        pass

    def recheck(self) -> None:
        pass

    def close(self) -> None:
        self._server.close()
