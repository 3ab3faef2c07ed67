"""Which nodes a command counts as alive, and how long it waits to know."""

import asyncio
from collections.abc import Mapping

import pytest

from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.times import BEAT_SECONDS, SILENT_SECONDS
from memory_store import InMemoryStore
from store import NodeInfo

BOOT = "boot"


class Fleet:
    """Nodes that beat once a second, by a clock that moves only while a command waits."""

    def __init__(self, *beating: str) -> None:
        self.now = 100.0
        self.waited_seconds = 0.0
        self.store = InMemoryStore(clock=lambda: self.now)
        self.beating = beating

    async def describe(self, node: str) -> None:
        await self.store.describe_node(NodeInfo(node, BOOT, "tcp://h:1", "h", "0.1", 1, 1, 1))

    async def beat(self, *nodes: str) -> None:
        for node in nodes:
            await self.store.beat(node, BOOT, int(self.now / BEAT_SECONDS))

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.waited_seconds += seconds
        await self.beat(*self.beating)

    async def monitor(self) -> HeartbeatMonitor:
        beats = await self.store.beats()
        return HeartbeatMonitor(self.store, beats, clock=lambda: self.now, sleep=self.pass_time)

    async def alive(self) -> Mapping[str, bool]:
        """As `nodes` finds out."""
        monitor = await self.monitor()
        await monitor.note_fresh(monitor.last)
        await monitor.wait()
        return {node: monitor.alive(node, BOOT) for node in monitor.last}


def test_nodes_with_fresh_descriptions_are_not_waited_for() -> None:
    async def go() -> None:
        fleet = Fleet("a", "b")
        await fleet.beat("a", "b")
        await fleet.describe("a")
        await fleet.describe("b")
        assert await fleet.alive() == {"a": True, "b": True}
        assert fleet.waited_seconds == 0.0

    asyncio.run(go())


def test_a_node_that_only_beats_is_watched_beside_one_that_describes_itself() -> None:
    """A shard of a cluster that is full refuses the descriptions of some nodes, and takes beats."""

    async def go() -> None:
        fleet = Fleet("beats")
        await fleet.beat("beats", "describes")
        await fleet.describe("describes")
        assert await fleet.alive() == {"beats": True, "describes": True}
        assert 0.0 < fleet.waited_seconds <= BEAT_SECONDS + 0.1

    asyncio.run(go())


@pytest.mark.parametrize("described", [True, False])
def test_a_node_that_is_silent_for_two_seconds_is_not_alive(described: bool) -> None:
    async def go() -> None:
        fleet = Fleet("living")
        await fleet.beat("living", "silent")
        if described:
            await fleet.describe("silent")
        await fleet.pass_time(SILENT_SECONDS)
        await fleet.describe("living")
        fleet.waited_seconds = 0.0
        assert await fleet.alive() == {"living": True, "silent": False}
        assert fleet.waited_seconds == pytest.approx(SILENT_SECONDS, abs=0.11)

    asyncio.run(go())


def test_a_description_of_an_earlier_boot_is_no_sign_of_life() -> None:
    async def go() -> None:
        fleet = Fleet()
        await fleet.store.beat("node", "another", 1)
        await fleet.describe("node")
        monitor = await fleet.monitor()
        await monitor.note_fresh(monitor.last)
        await monitor.wait()
        assert not monitor.alive("node")

    asyncio.run(go())
