"""A storm of joins and leaves among processes with pools on three hosts: right bytes or an honest
miss, nobody hangs, and nothing is left of it, in those that live on and in their nodes."""

import random

import pytest

from device_ends import StartEnd, start_end
from device_storm import DeviceStorm
from nodes import MIB, NodeProcess, StartNode, at_rest, wait_until, with_store

__all__ = ["start_end"]
NODES, EACH = 3, 2
ALLOWED = {"right", "STORED", "EXISTS", "MissingTensor", "BufferFull", "NodeUnavailable"}
POOL_BYTES = 14 * MIB
"""Little, so that pools evict what is read, and what is offered."""
SECONDS = 40.0


def test_nothing_is_left_of_a_storm(
    start_node: StartNode, start_end: StartEnd, pytestconfig: pytest.Config
) -> None:
    chance = random.Random(pytestconfig.getoption("--soak-seed"))
    nodes = [start_node(capacity_bytes=48 * MIB) for _ in range(NODES)]
    with_store(*nodes)
    storm = DeviceStorm(nodes, EACH, lambda node: start_end(node, pool_bytes=POOL_BYTES), chance)
    storm.run(pytestconfig.getoption("--lane-seconds"))
    print(dict(storm.done), dict(storm.outcomes))
    print({name: count for name, count in _counted(nodes).items() if "lane" in name})
    assert storm.outcomes.keys() <= ALLOWED, storm.outcomes
    assert _counted(nodes)["lane_received_gloo"], "all came over the hosts"
    assert not _counted(nodes).get("lane_fallbacks_checksum")
    for member in storm.members:
        if not member.joined:
            member.end.do("join()")
    for node in nodes:
        at_rest(node, seconds=SECONDS)
    for member in storm.members:
        wait_until(lambda: member.end.do("lane.gauges().pinned_bytes") == 0, SECONDS)  # noqa: B023
        assert member.end.do("__import__('device_storm').used_bytes_amiss(buffer)") == 0
    # Whoever stays sees that the others are gone; then it is as it was before all of it.
    first, *others = storm.members
    for member in others:
        member.end.do("leave()")
    wait_until(lambda: first.end.do("lane.pairs()") == 0, SECONDS, "pairs with those who left")
    first.end.do("leave()")
    for member, before in storm.lasting.items():
        assert member.files_alone() <= before + 1


def _counted(nodes: list[NodeProcess]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in nodes:
        for name, count in node.stats().items():
            found[name] = found.get(name, 0) + count
    return found
