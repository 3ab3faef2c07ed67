"""Discovery of other nodes' device pools, from their descriptions in the store.

With it a reader's pool connects to another pool when that is first seen, and not only when it needs
a tensor of it (see `device.pairs`). Only a node with a receiving pool reads, a few nodes with each
beat. Called by `registrar` on the loop's thread.
"""

import random
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.config import parse_tcp
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.pools import Pools
from lookup_buffer.protocol.messages import SeenPool
from store import MetadataStore, NodeInfo

NODES_A_BEAT: Final = 16
"""Descriptions read with one beat: bounds the load of a large fleet on the store."""
SEEN_MAX: Final = 256
"""Bound on the known pools; readers get the others from the records that name them."""

Boot = tuple[str, str]
"""A node's id and its boot id."""


@dataclass(slots=True)
class Sightings:
    directory: Directory
    pools: Pools
    _turn: list[Boot] = field(default_factory=list)
    """Nodes whose descriptions are still to be read in this round, the next one last."""
    _found: dict[Boot, tuple[SeenPool, ...]] = field(default_factory=dict)
    _seen: dict[str, SeenPool] = field(default_factory=dict)

    async def look(self, store: MetadataStore) -> None:
        """Read some descriptions, and send the changes to the readers' processes.

        Raises:
            StoreError: the store did not answer.
        """
        if not self.pools.has_readers:
            self._turn, self._found, self._seen = [], {}, {}
            return
        others = self.directory.others()
        await self._read(store, others)
        self._found = {boot: pools for boot, pools in self._found.items() if boot in others}
        found = {pool.pool: pool for pools in self._found.values() for pool in pools}
        seen = {name: found.pop(name) for name in self._seen if name in found}
        self._seen = dict([*seen.items(), *found.items()][:SEEN_MAX])
        self.pools.tell_readers(self._seen)

    async def _read(self, store: MetadataStore, others: set[Boot]) -> None:
        if not self._turn:  # a random order, so that not all nodes begin with the same ones
            self._turn = random.sample(sorted(others), len(others))
        due, self._turn = self._turn[-NODES_A_BEAT:], self._turn[:-NODES_A_BEAT]
        infos = await store.node_infos([node for node, _ in due])
        for node, boot in due:
            info = infos.get(node)
            # A missing description, or another boot's, is ignored: after the store lost its data
            # it returns within a second.
            if info is not None and info.boot == boot:
                self._found[node, boot] = _pools_of(info)


def _pools_of(info: NodeInfo) -> tuple[SeenPool, ...]:
    """The pools, with the node's host as theirs."""
    try:
        host, _ = parse_tcp(info.endpoint)
    except ValueError:
        return ()
    return tuple(SeenPool(host, *pool) for pool in info.pools)
