"""Topology: which server of a deployment holds a key, and who has taken over from whom.

`Standalone` here; `SentinelTopology` and `ClusterTopology` in modules of their own. A topology
keeps its servers; it finds out what changed when a call is answered with a hint (MOVED, READONLY)
or fails, never on a timer of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from store.budget import Budget
from store.connection import Part
from store.dialled import Endpoint
from store.errors import StoreUnavailable
from store.server import Server

PoolMemory = Server | StoreUnavailable
"""Where a command goes, or why it can go nowhere."""

_IS_A_CLUSTER = "store: this server is one of a cluster; its URL begins with redis-cluster://"


class Topology(ABC):
    """Thread-safe. Methods that may have to ask a server raise StoreUnavailable."""

    @abstractmethod
    def new_budget(self) -> Budget:
        """For one operation, from now on."""

    @abstractmethod
    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[PoolMemory]:
        """The server that holds each key; an error in its place where nobody serves that key."""

    @abstractmethod
    def known_server_for(self, name: Part) -> Server:
        """The same, but asks nobody: raises StoreUnavailable where it is not known, or in doubt."""

    def place_of(self, name: Part) -> str:
        """Names the key's server as far as it is known, in doubt or not; asks nobody."""
        return ""  # all keys are on one server at a time, and none is better off than another

    @abstractmethod
    def servers(self, budget: Budget) -> Sequence[Server]:
        """All servers that hold keys."""

    @abstractmethod
    def failovers(self) -> int:
        """How often a server was lost or replaced, as far as it was noticed."""

    def moved(self, name: Part, endpoint: Endpoint) -> Server:
        """A server said that the key now lives at `endpoint`; the server there."""
        raise StoreUnavailable(_IS_A_CLUSTER)

    def aside(self, endpoint: Endpoint) -> Server:
        """The server at `endpoint`, for one question that the key's server passed on (ASK)."""
        raise StoreUnavailable(_IS_A_CLUSTER)

    @abstractmethod
    def doubt(self, server: Server) -> None:
        """A call to `server` failed or was refused: find out anew before the next."""

    @abstractmethod
    def recheck(self) -> None:
        """Find out now whether anything changed. One round trip; for whoever keeps what it read."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Idempotent."""


class Standalone(Topology):
    """One server, always the same."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._servers = (server,)

    def new_budget(self) -> Budget:
        return Budget(self._server.access)

    def servers_for(self, names: Sequence[Part], budget: Budget) -> Sequence[PoolMemory]:
        return self._servers * len(names)

    def known_server_for(self, name: Part) -> Server:
        return self._server

    def servers(self, budget: Budget) -> Sequence[Server]:
        return self._servers

    def failovers(self) -> int:
        return self._server.losses

    def doubt(self, server: Server) -> None:
        pass

    def recheck(self) -> None:
        pass

    def close(self) -> None:
        self._server.close()
