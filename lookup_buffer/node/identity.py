"""A node's identity: its id, its boot id, and its description for other nodes.

Created by `node.py`; plain data for all threads.
"""

import secrets
import socket
from dataclasses import dataclass

from lookup_buffer.environment import distribution_version
from lookup_buffer.node.inventory import Gauges
from store import NodeInfo, PoolEndpoint


@dataclass(frozen=True, slots=True)
class Identity:
    """`boot` is new at every start: locations of an earlier boot are void."""

    node: str
    boot: str
    endpoint: str

    @classmethod
    def create(cls, node_id: str | None, endpoint: str) -> "Identity":
        boot = secrets.token_hex(8)
        return cls(node_id or f"{socket.gethostname()[:40]}-{boot[:4]}", boot, endpoint)

    def info(self, gauges: Gauges, claims: int, pools: tuple[PoolEndpoint, ...] = ()) -> NodeInfo:
        return NodeInfo(
            node=self.node,
            boot=self.boot,
            endpoint=self.endpoint,
            host=socket.gethostname(),
            version=distribution_version(),
            capacity_bytes=gauges.capacity_bytes,
            used_bytes=gauges.used_bytes,
            items=gauges.items,
            claims=claims,
            pools=pools,
        )
