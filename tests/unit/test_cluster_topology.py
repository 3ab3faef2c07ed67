"""The map of a cluster whose servers come and go."""

import asyncio

from store.topology import LEFT_MAX, SLOTS, ClusterTopology, open_topology
from store.url import parse


def new_topology() -> ClusterTopology:
    topology = open_topology(
        parse("redis-cluster://127.0.0.1:7000"),
        call_timeout_seconds=1.0,
        connect_timeout_seconds=1.0,
    )
    assert isinstance(topology, ClusterTopology)
    return topology


def test_servers_that_left_are_not_kept_for_ever() -> None:
    """Replaced pods have new addresses."""

    async def replace_all(times: int) -> tuple[int, list[int]]:
        topology = new_topology()
        (seed,) = topology._known.values()
        failovers = []
        for number in range(times):
            topology._apply_map(seed, [[0, 16383, [b"10.0.0.%d" % number, 6379, b"id"]]])
            (master,) = topology._masters
            master.losses += 1
            await topology._forget_left()
            failovers.append(topology.failovers())
        assert topology.server_at(master.endpoint) is master
        assert seed in topology._known.values()
        known = len(topology._known)
        await topology.close()
        return known, failovers

    known, failovers = asyncio.run(replace_all(3 * LEFT_MAX))
    assert known == LEFT_MAX + 2
    assert failovers == sorted(failovers), "what a server that left had counted stays counted"
    assert failovers[-1] == 2 * 3 * LEFT_MAX - 1


def test_a_map_with_slots_that_do_not_exist_takes_no_memory_for_them() -> None:
    async def apply() -> None:
        topology = new_topology()
        (seed,) = topology._known.values()
        topology._apply_map(seed, [[-5, 10**15, [b"10.0.0.1", 6379, b"id"]]])
        assert len(topology._slots) == SLOTS
        assert len(topology._masters) == 1
        await topology.close()

    asyncio.run(apply())
