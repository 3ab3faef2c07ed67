"""The directory on a store that loses data: which nodes are alive, shut down, or long dead."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from awaited import at_once, awaited
from lookup_buffer.node.membership import DESCRIPTIONS_PAGE, VOID_MAX, Directory, Liveness
from lookup_buffer.times import LONG_DEAD_SECONDS
from memory_store import MemoryStore
from store import NODES_MAX, Beat, Location, NodeInfo
from store.testing.samples import a_record


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A directory of node `us`, and other nodes that beat each second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.directory = Directory("us", self.clock)
        self.sequence = 0

    def pass_seconds(self, seconds: int, *beating: str) -> None:
        for _ in range(seconds):
            self.clock.now += 1.0
            self.sequence += 1
            for node in beating:
                self.store.beat(node, f"{node}boot", self.sequence)
                self.store.describe_node(info(node))
            at_once(self.directory.refresh(awaited(self.store)))

    def lose_all(self) -> None:
        for node, beat in self.store.beats().items():
            self.store.leave(node, beat.boot)


def info(node: str) -> NodeInfo:
    return NodeInfo(node, f"{node}boot", f"tcp://{node}:1", node, "0", 1, 0, 0)


def at(node: str, boot: str | None = None) -> Location:
    return Location(node, boot or f"{node}boot", 1, 7)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_an_unreachable_node_counts_as_dead_until_its_next_beat(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    away = MemoryStore()
    away.close()
    record = a_record("ns", "k")._replace(locations=(at("new"),))
    fleet.clock.now += 0.5
    at_once(fleet.directory.meet(awaited(away), [record]))
    assert fleet.directory.sources(record) == ()
    fleet.pass_seconds(1, "us", "a", "new")
    assert fleet.directory.sources(record) == ((at("new"), "tcp://new:1"),)


def test_the_loss_of_all_data_is_no_departure(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a", "b")
    fleet.lose_all()
    at_once(fleet.directory.refresh(awaited(fleet.store)))
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"
    fleet.pass_seconds(1, "us", "a")
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"
    assert fleet.directory.endpoint(at("b")) == "tcp://b:1", "it may only be late"
    fleet.pass_seconds(6, "us", "a")
    assert fleet.directory.endpoint(at("b")) is None
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"


def test_a_loss_that_our_own_beat_noticed_first(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    fleet.lose_all()
    fleet.directory.store_lost_data()
    fleet.pass_seconds(1, "us")
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"


class Slow:
    """Its first reading of the beats arrives late."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = awaited(store)
        self.on_its_way = asyncio.Event()
        self.readings = 0

    async def beats(self) -> dict[str, Beat]:
        self.readings += 1
        found = await self.store.beats()
        if self.readings == 1:
            await self.on_its_way.wait()
        return found

    async def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        return await self.store.node_infos(nodes)


def test_an_older_reading_that_arrives_late_is_no_sign_of_life(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")

    async def read_twice() -> None:
        store: Any = Slow(fleet.store)
        slow = asyncio.ensure_future(fleet.directory.refresh(store))
        await asyncio.sleep(0)
        fleet.store.beat("a", "aboot", 99)  # its last
        other = asyncio.ensure_future(fleet.directory.refresh(store))
        await asyncio.sleep(0.01)
        fleet.clock.now += 2.0
        store.on_its_way.set()
        await asyncio.gather(slow, other)

    asyncio.run(read_twice())
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"
    fleet.pass_seconds(5, "us")
    assert fleet.directory.endpoint(at("a")) is None, "noticed within six seconds"


def test_a_node_that_was_stopped_counts_no_other_as_dead_when_it_resumes(fleet: Fleet) -> None:
    """The whole host may have stood still; the next read shows which nodes are alive."""
    fleet.pass_seconds(3, "us", "a", "b")
    fleet.clock.now += 30.0
    fleet.directory.tick()
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"
    at_once(fleet.directory.refresh(awaited(fleet.store)))
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1", "it has not come to beat again"
    fleet.pass_seconds(5, "us", "a")
    assert fleet.directory.endpoint(at("a")) == "tcp://a:1"
    assert fleet.directory.endpoint(at("b")) is None, "noticed within six seconds"


def test_a_store_that_is_away_is_no_stall(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    for _ in range(5):
        fleet.clock.now += 1.0
        fleet.directory.tick()
    assert fleet.directory.endpoint(at("a")) is None


def test_a_node_that_shuts_down_counts_as_dead_at_once(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    fleet.store.leave("a", "aboot")
    fleet.pass_seconds(1, "us")
    assert fleet.directory.endpoint(at("a")) is None


def test_long_dead_are_others_that_stood_still_for_a_minute(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a", "b")
    fleet.pass_seconds(int(LONG_DEAD_SECONDS) - 1, "us", "b")
    assert fleet.directory.expired() == []
    fleet.pass_seconds(2, "us", "b")
    assert fleet.directory.expired() == [("a", "aboot")]
    assert fleet.directory.count_alive() == 2


def test_locations_of_the_long_dead_are_remembered_when_they_are_found(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a", "b")
    fleet.pass_seconds(int(LONG_DEAD_SECONDS) + 1, "us", "b")
    record = a_record("ns", "k")
    held = (at("a"), at("b"), at("us"), at("b", "older"), at("us", "older"))
    found = fleet.directory.sources(record._replace(locations=held))
    assert found == ((at("b"), "tcp://b:1"),)
    assert fleet.directory.take_void(10) == [(("ns", "k"), at("a"))], "others may be too young"
    fleet.pass_seconds(1, "us", "b")
    fleet.directory.sources(record._replace(locations=held))
    void = fleet.directory.take_void(10)
    assert void == [
        (("ns", "k"), at("a")), (("ns", "k"), at("b", "older")), (("ns", "k"), at("us", "older"))
    ]  # fmt: skip
    assert fleet.directory.take_void(10) == []


def test_a_boot_that_is_too_young_to_be_known_is_not_dead(fleet: Fleet) -> None:
    """It beats before it publishes, so only a later read of the beats shows whether it is dead."""
    fleet.pass_seconds(10, "us", "a")
    assert not fleet.directory.is_dead(at("new")), "it may have begun to beat just now"
    assert not fleet.directory.is_dead(at("a", "next"))
    away = MemoryStore()
    away.close()
    fleet.clock.now += 0.5
    at_once(
        fleet.directory.meet(awaited(away), [a_record("ns", "k")._replace(locations=(at("new"),))])
    )
    assert not fleet.directory.is_dead(at("new")), "the store did not answer"
    fleet.pass_seconds(1, "us", "a", "new")
    assert not fleet.directory.is_dead(at("new"))
    assert fleet.directory.is_dead(at("a", "next")), "there is no such boot"


def test_a_boot_that_began_right_after_the_last_refresh_is_found(fleet: Fleet) -> None:
    """Its record may be read milliseconds later, which is no reason for a miss."""
    fleet.pass_seconds(3, "us", "a")
    fleet.store.beat("new", "newboot", 1)
    fleet.store.describe_node(info("new"))
    record = a_record("ns", "k")._replace(locations=(at("new"),))
    fleet.clock.now += 0.001
    assert not fleet.directory.knows(at("new"))
    at_once(fleet.directory.meet(awaited(fleet.store), [record]))
    assert fleet.directory.sources(record) == ((at("new"), "tcp://new:1"),)


def test_after_a_pause_of_the_store_a_node_is_not_dead_before_its_beats_are_read(
    fleet: Fleet,
) -> None:
    """The store was down for longer than a node may be silent, and this node finds a record there
    before it reads the beats."""
    fleet.pass_seconds(3, "us", "a")
    record = a_record("ns", "k")._replace(locations=(at("a"),))
    refreshed_at = fleet.clock.now
    for _ in range(6):
        fleet.clock.now += 1.0
        fleet.directory.tick()
    assert fleet.directory.sources(record) == ()
    assert fleet.directory.knows(at("a"), read_at=refreshed_at - 1.0), "the store may still be down"
    assert not fleet.directory.knows(at("a"), read_at=refreshed_at + 5.0)
    fleet.store.beat("a", "aboot", fleet.sequence + 1)
    at_once(fleet.directory.meet(awaited(fleet.store), [record]))
    assert fleet.directory.sources(record) == ((at("a"), "tcp://a:1"),)


def test_a_boot_that_is_not_found_causes_few_refreshes(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    record = a_record("ns", "k")._replace(locations=(at("gone"),))
    began = set()
    for _ in range(1000):
        fleet.clock.now += 0.001
        at_once(fleet.directory.meet(awaited(fleet.store), [record]))
        began.add(fleet.directory.refreshed_at)
    assert 15 <= len(began) <= 22


def test_a_boot_that_was_replaced_is_dead_at_once(fleet: Fleet) -> None:
    fleet.pass_seconds(10, "us", "a", "b")
    fleet.clock.now += 1.0
    (old,) = [beat for node, beat in fleet.store.beats().items() if node == "a"]
    fleet.store.beat("a", "next", 1, replacing=old)
    assert not fleet.directory.is_dead(at("a"))
    at_once(fleet.directory.refresh(awaited(fleet.store)))
    assert fleet.directory.is_dead(at("a"))
    assert fleet.directory.is_replaced(at("a"))
    assert not fleet.directory.is_dead(at("a", "next"))


def test_a_boot_that_is_silent_is_dead_but_not_replaced(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    fleet.pass_seconds(4, "us")
    assert not fleet.directory.is_dead(at("a"))
    fleet.pass_seconds(3, "us")
    assert fleet.directory.is_dead(at("a"))
    assert not fleet.directory.is_replaced(at("a")), "it may thaw"


def test_its_memory_is_bounded_and_checked_again(fleet: Fleet) -> None:
    fleet.pass_seconds(3, "us", "a")
    fleet.pass_seconds(int(LONG_DEAD_SECONDS) + 1, "us")
    for n in range(VOID_MAX + 10):
        record = a_record("ns", f"k{n}")
        fleet.directory.sources(record._replace(locations=(at("a"),)))
    assert len(fleet.directory.take_void(10)) == 10
    fleet.pass_seconds(1, "us", "a")
    assert fleet.directory.take_void(VOID_MAX) == [], "it was only frozen"


class Asked(MemoryStore):
    """Counts the descriptions that are read."""

    count = 0

    def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        self.count += len(nodes)
        return super().node_infos(nodes)


def test_nodes_without_a_description_are_asked_for_a_page_at_a_time(fleet: Fleet) -> None:
    fleet.store = store = Asked()
    for number in range(3 * DESCRIPTIONS_PAGE):
        store.beat(f"ghost-{number:04}", "ghostboot", 1)
    fleet.pass_seconds(1, "us")
    assert store.count == 3 * DESCRIPTIONS_PAGE + 1, "each once"
    store.count = 0
    store.describe_node(replace(info("ghost-0000"), boot="ghostboot"))
    for seconds in (1, 1, 1):
        fleet.pass_seconds(seconds, "us")
    assert store.count == 3 * DESCRIPTIONS_PAGE, "all again, in turns"
    assert fleet.directory.endpoint(at("ghost-0000", "ghostboot")) == "tcp://ghost-0000:1"
    fleet.pass_seconds(1, "us", "new")
    assert fleet.directory.endpoint(at("new")) == "tcp://new:1", (
        "a new one does not wait for its turn"
    )


def test_beats_of_nodes_that_come_and_go_do_not_fill_the_memory() -> None:
    """Absent nodes are kept for a while where this node's own beat is absent as well."""
    liveness = Liveness()
    for turn in range(3):
        beats = {f"{turn}-{number}": ("boot", 1) for number in range(NODES_MAX)}
        liveness.observe(beats, float(turn), complete=False)
        assert len(liveness.boots()) == NODES_MAX
