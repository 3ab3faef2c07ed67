"""The metadata writer: the contents of the arena reach the store in batches, despite any fault."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from awaited import at_once, awaited
from clusters import ValkeyCluster, slot_of
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Pools
from lookup_buffer.node.dirty_set import BATCH, TOGETHER_SECONDS, Change
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.registrar import Registrar, Report
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.times import LONG_DEAD_SECONDS
from memory_store import MemoryStore
from servers import command, flush
from store import (
    LOCATIONS_MAX,
    BlockingStore,
    EmbeddedServer,
    Location,
    Publication,
    Publishing,
    Record,
    Releasing,
    StoreUnavailable,
    Withdrawing,
    layout,
    open_store,
)
from store.testing.claims import ask
from store.testing.samples import a_record

CALL_SECONDS = 5.0
HEADER = TensorHeader("uint8", (4,), 4)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """The metadata writer of node `us` with its arena and directory, on a store."""

    def __init__(self, store: BlockingStore, namespace: str) -> None:
        self.store, self.namespace = store, namespace
        self.clock = Clock()
        self.counters = Counters()
        self.reports: list[Report] = []
        self.arena = Arena(1 << 20, lambda address, reason: None)
        self.directory = Directory("us", self.clock)
        identity = Identity("us", "usboot", "tcp://us:1")
        loop: Any = SimpleNamespace(time=self.clock)
        storage: Any = None
        self.registrar = Registrar(
            loop, storage, self.arena, self.directory, identity, self.counters, 60.0, (),
            Pools(self.arena), self.reports.extend,
        )  # fmt: skip
        self.dirty = self.registrar.dirty
        self.sequence = 0

    def insert(self, key: str, header: TensorHeader = HEADER, token: str | None = None) -> None:
        item = self.arena.reserve((self.namespace, key), header, origin="local", ttl_seconds=None)
        assert item is not None
        self.arena.release([self.arena.commit(item, 7, 1).ticket], 1)
        self.dirty.add(Change((self.namespace, key), "", token))

    def write(self) -> set[str]:
        """All batches that are full, and then what waits for more of its kind."""
        servers: set[str] = set()
        for _ in range(2):
            while self.dirty.wait_seconds() == 0.0:
                servers |= at_once(self.registrar.write(awaited(self.store)))
            self.clock.now += TOGETHER_SECONDS
        return servers

    def pass_seconds(self, seconds: int, *beating: str) -> None:
        for _ in range(seconds):
            self.clock.now += 1.0
            self.sequence += 1
            for node in ("us", *beating):
                self.store.beat(node, f"{node}boot", self.sequence)
            at_once(self.directory.refresh(awaited(self.store)))

    def held_by(self, key: str) -> set[str]:
        (record,) = self.store.locate(self.namespace, [key])
        return {at.node for at in record.locations} if record else set()

    def publish_of(self, node: str, key: str) -> None:
        (record,) = self.store.locate(self.namespace, [key])
        assert record is not None
        self.store.publish(record, Location(node, f"{node}boot", 1, 7))


@pytest.fixture
def bench(valkey_server: EmbeddedServer, namespace: str) -> Iterator[Bench]:
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
        bench = Bench(store, namespace)
        yield bench
        bench.arena.close()


def test_a_thousand_changes_take_a_few_round_trips(
    bench: Bench, valkey_server: EmbeddedServer
) -> None:
    for n in range(1000):
        bench.insert(f"k{n}")
        if n % 10 == 0:
            bench.dirty.add(Change((bench.namespace, f"gone{n}"), "evicted"))
    bench.store.ping()
    command(valkey_server.url, "CONFIG", "RESETSTAT")
    bench.write()
    stats = command(valkey_server.url, "INFO", "stats").decode()
    reads = int(stats.partition("total_reads_processed:")[2].split()[0])
    assert reads < 200, "a batch of 64 is some four reads of the server"
    found = bench.store.locate(bench.namespace, [f"k{n}" for n in range(1000)])
    assert None not in found


def test_a_rewrite_of_what_is_gone_meanwhile_keeps_the_reason(bench: Bench) -> None:
    address = (bench.namespace, "k")
    bench.insert("k")
    bench.write()
    item = bench.arena.published(address)
    assert item is not None
    bench.arena.remove(item, "evicted")
    bench.dirty.add(Change(address, "evicted"))
    bench.write()
    assert bench.store.gone(*address) == "evicted"
    bench.clock.now += 120.0
    bench.dirty.walk([address], 1000.0)  # as listed before it went
    bench.write()
    assert bench.store.gone(*address) == "evicted"
    assert len(bench.dirty) == 0


def test_claims_of_unpublished_keys_are_released_together(
    bench: Bench, valkey_server: EmbeddedServer
) -> None:
    names = [f"k{n}" for n in range(BATCH)]
    other = Location("other", "otherboot", 1, 7)
    for name in names[::2]:  # in conflict; what is not there was evicted meanwhile
        bench.store.publish(a_record(bench.namespace, name), other)
    for name in names:
        ask(bench.store, bench.namespace, "a", key=name)
        if name in names[::2]:
            bench.insert(name, token="token-of-a")
        else:
            bench.dirty.add(Change((bench.namespace, name), "evicted", "token-of-a"))
    command(valkey_server.url, "CONFIG", "RESETSTAT")
    bench.write()
    stats = command(valkey_server.url, "INFO", "stats").decode()
    assert int(stats.partition("total_reads_processed:")[2].split()[0]) < BATCH / 2
    for name in names:
        assert ask(bench.store, bench.namespace, "b", key=name).granted


def test_while_a_slot_moves_its_publications_wait_and_the_others_do_not(
    valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    def on_its_way() -> None:
        started = time.monotonic()
        assert len(bench.write()) == 1
        assert time.monotonic() - started < 2 * CALL_SECONDS, "it waited twice"
        assert [bool(bench.held_by(name)) for name in names] == [n != 3 for n in range(8)]
        assert len(bench.dirty) == 1

    names = [f"k{n}" for n in range(8)]
    slot = slot_of(layout.record(namespace, names[3]))
    source = valkey_cluster.owner(slot)
    target = next(master for master in valkey_cluster.masters() if master is not source)
    with open_store(valkey_cluster.url, call_timeout_seconds=CALL_SECONDS) as store:
        bench = Bench(store, namespace)
        for name in names:
            bench.insert(name)
        valkey_cluster.move_slot(slot, target, between=on_its_way)
        assert bench.dirty.take() == [], "it is not due"
        bench.dirty.retry()
        bench.write()
        assert len(bench.dirty) == 0
        assert bench.held_by(names[3]) == {"us"}
        bench.arena.close()
    valkey_cluster.wait_until_whole()
    valkey_cluster.move_slot(slot, source)
    valkey_cluster.wait_until_whole()


def test_locations_of_dead_nodes_are_replaced(bench: Bench) -> None:
    others = [f"n{n}" for n in range(LOCATIONS_MAX)]
    bench.pass_seconds(3, *others)
    bench.insert("k")
    bench.write()
    for node in others:
        bench.publish_of(node, "k") if node != others[-1] else None
    bench.store.withdraw(bench.namespace, "k", "us", reason="test")
    bench.publish_of(others[-1], "k")
    bench.dirty.add(Change((bench.namespace, "k"), ""))
    bench.write()
    assert bench.held_by("k") == set(others), "all live: four are enough"
    bench.pass_seconds(7, *others[1:])
    bench.dirty.add(Change((bench.namespace, "k"), ""))
    bench.write()
    assert bench.held_by("k") == {*others[1:], "us"}


def test_locations_of_live_nodes_are_kept(bench: Bench) -> None:
    """Nodes that came up after the last refresh are no dead ones."""
    bench.pass_seconds(70)
    others = [f"n{n}" for n in range(LOCATIONS_MAX)]
    bench.insert("k")
    bench.write()
    for node in others[:-1]:
        bench.store.beat(node, f"{node}boot", 1)
        bench.publish_of(node, "k")
    bench.store.withdraw(bench.namespace, "k", "us", reason="test")
    bench.store.beat(others[-1], f"{others[-1]}boot", 1)
    bench.publish_of(others[-1], "k")
    bench.dirty.add(Change((bench.namespace, "k"), ""))
    bench.write()
    assert bench.held_by("k") == set(others)


def test_locations_of_long_dead_nodes_are_withdrawn_when_read(bench: Bench) -> None:
    bench.pass_seconds(3, "a", "b")
    bench.insert("k")
    bench.write()
    for node in ("a", "b"):
        bench.publish_of(node, "k")
    bench.pass_seconds(int(LONG_DEAD_SECONDS) + 1, "b")
    (record,) = bench.store.locate(bench.namespace, ["k"])
    assert record is not None
    bench.directory.sources(record)
    at_once(bench.registrar.withdraw_void(awaited(bench.store)))
    assert bench.held_by("k") == {"us", "b"}


@pytest.mark.parametrize("why", ["added", "present", "conflict", "evicted"])
def test_an_insert_ends_its_claim_even_if_its_publication_fails(bench: Bench, why: str) -> None:
    if why in ("present", "conflict"):
        bench.insert("k")
        bench.write()
    if why == "conflict":
        bench.arena.remove(bench.arena.peek((bench.namespace, "k")), "test")  # type: ignore[arg-type]
        bench.insert("k", TensorHeader("int8", (4,), 4))
    ask(bench.store, bench.namespace, "a")
    if why == "added":
        bench.insert("k", token="token-of-a")
    else:
        bench.dirty.add(Change((bench.namespace, "k"), "", "token-of-a"))
    bench.write()
    assert ask(bench.store, bench.namespace, "b").granted


def test_a_refused_publication_is_counted_and_releases_its_claim(namespace: str) -> None:
    bench = Bench(MemoryStore(records_max=1), namespace)
    bench.insert("first")
    bench.write()
    ask(bench.store, namespace, "a", key="second")
    bench.insert("second", token="token-of-a")
    bench.write()
    assert bench.counters.totals()["publish_refused"] == 1
    assert bench.held_by("second") == set()
    assert ask(bench.store, namespace, "b", key="second").granted
    assert (len(bench.dirty), bench.dirty.take()) == (1, []), "it is held until the next beat"
    bench.dirty.retry()
    bench.write()
    assert bench.counters.totals()["publish_refused"] == 2
    assert not ask(bench.store, namespace, "c", key="second").granted, "the claim of b stays"
    bench.arena.close()


def test_a_foreign_key_does_not_block_the_others(
    bench: Bench, valkey_server: EmbeddedServer
) -> None:
    command(valkey_server.url, "SET", layout.record(bench.namespace, "k5"), "a string")
    for n in range(10):
        bench.insert(f"k{n}")
    bench.write()
    assert [bool(bench.held_by(f"k{n}")) for n in range(10)] == [n != 5 for n in range(10)]
    assert bench.counters.totals()["publish_conflict"] == 1
    assert len(bench.dirty) == 0


def test_writes_that_a_garbled_reply_ends_are_repeated(bench: Bench) -> None:
    """The reply is what nobody expects, so the error is none of the store's."""

    class Garbled(MemoryStore):
        def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
            raise ValueError("no outcome")

    for n in range(10):
        bench.insert(f"k{n}")
    with pytest.raises(ValueError, match="no outcome"):
        at_once(bench.registrar.write(awaited(Garbled())))
    assert len(bench.dirty) == 10
    bench.write()
    assert all(bench.held_by(f"k{n}") for n in range(10))


def test_failed_writes_are_repeated_when_the_store_is_back(bench: Bench) -> None:
    gone = MemoryStore()
    gone.close()
    for n in range(100):
        bench.insert(f"k{n}")
    with pytest.raises(StoreUnavailable):
        at_once(bench.registrar.write(awaited(gone)))
    assert len(bench.dirty) == 100
    evicted = bench.arena.peek((bench.namespace, "k3"))
    assert evicted is not None
    bench.arena.remove(evicted, "evicted")
    bench.write()
    held = [bool(bench.held_by(f"k{n}")) for n in range(100)]
    assert held == [n != 3 for n in range(100)]


def test_the_record_has_the_last_state_of_the_arena(bench: Bench) -> None:
    dice = random.Random(3)
    held = set()
    for _ in range(500):
        key = f"k{dice.randrange(20)}"
        item = bench.arena.peek((bench.namespace, key))
        if item is None:
            bench.insert(key)
            held.add(key)
        else:
            bench.arena.remove(item, "evicted")
            bench.dirty.add(Change((bench.namespace, key), "evicted"))
            held.discard(key)
        if dice.random() < 0.2:
            bench.write()
    bench.write()
    assert {f"k{n}" for n in range(20) if bench.held_by(f"k{n}")} == held


def test_a_hand_off_that_another_node_has_is_reported_until_that_is_void(bench: Bench) -> None:
    address = (bench.namespace, "k@request-8")
    header = TensorHeader("uint8", (10,), 10)
    theirs = Location("them", "theirboot", 3, 9)
    record = Record(*address, "uint8", (4,), 4, "tensor", 1.0)
    bench.store.publish(record, theirs)
    item = bench.arena.reserve_handoff(address, header, ttl_seconds=300.0, wanted=False)
    bench.arena.release([bench.arena.commit(item, 7, 1).ticket], 1)
    bench.dirty.add(Change(address, ""))
    bench.write()
    assert bench.reports == [(address, item.generation, Publication.OWNED)]
    assert bench.held_by(address[1]) == {"them"}
    void = (theirs._replace(generation=2), theirs._replace(boot="otherboot"))
    bench.dirty.add(Change(address, "", void=void))
    bench.write()
    assert bench.held_by(address[1]) == {"them"}, "it is another one that is void"
    bench.dirty.add(Change(address, "", void=(theirs,)))
    bench.write()
    assert bench.held_by(address[1]) == {"us"}
    assert bench.reports[2:] == [(address, item.generation, Publication.ADDED)]
    assert bench.counters.totals().get("publish_conflict", 0) == 0


def test_hand_offs_may_change_their_shape_and_are_withdrawn_soon(
    bench: Bench, valkey_server: EmbeddedServer
) -> None:
    """There may be thousands in a second, and each ends by being taken."""
    key = "k@request-7"
    address, name = (bench.namespace, key), f"lb:gone:{bench.namespace}:{{{key}}}"
    for nbytes in (10, 20):  # another tensor than the generation before it
        header = TensorHeader("uint8", (nbytes,), nbytes)
        item = bench.arena.reserve_handoff(address, header, ttl_seconds=300.0, wanted=False)
        bench.arena.release([bench.arena.commit(item, 7, 1).ticket], 1)
        bench.dirty.add(Change(address, ""))
        bench.write()
        (record,) = bench.store.locate(bench.namespace, [key])
        assert record is not None
        assert record.nbytes == nbytes
        assert [at.generation for at in record.locations] == [item.generation]
        assert command(valkey_server.url, "EXISTS", name) == b":0"
    bench.arena.remove(item, "taken")
    bench.dirty.add(Change(address, "taken"))
    bench.write()
    assert bench.held_by(key) == set()
    assert command(valkey_server.url, "GET", name) == b"taken:us"
    assert 50 < int(command(valkey_server.url, "TTL", name)[1:]) <= 60
    assert bench.counters.totals().get("publish_conflict", 0) == 0


class Sharded(MemoryStore):
    """The first letter of a key is its server. Calls none of whose servers is up raise."""

    def __init__(self) -> None:
        super().__init__()
        self.down: set[str] = set()

    def place_of(self, namespace: str, key: str) -> str:
        return key[0]

    def _each(
        self, keys: list[str], outcomes: Callable[[], list[bool | None]]
    ) -> list[bool | None]:
        up = [key[0] not in self.down for key in keys]
        if keys and not any(up):
            raise StoreUnavailable("no server was reached")
        return [found if is_up else None for found, is_up in zip(outcomes(), up, strict=True)]

    def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        keys = [one.key for one in withdrawings]
        return self._each(keys, lambda: super(Sharded, self).withdraw_many(withdrawings))

    def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        keys = [one.key for one in releasings]
        return self._each(keys, lambda: super(Sharded, self).release_many(releasings))

    def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        up = [one for one in publishings if one.record.key[0] not in self.down]
        if not up:
            raise StoreUnavailable("no server was reached")
        found = iter(super().publish_many(up))
        return [next(found) if one in up else Publication.UNREACHED for one in publishings]


@pytest.mark.parametrize("what", ["void", "release", "gone"])
def test_a_change_on_a_server_that_is_down_holds_no_other_up(namespace: str, what: str) -> None:
    """What is withdrawn or released beside the publications may all lie on that server."""
    store = Sharded()
    bench = Bench(store, namespace)
    if what == "release":  # of one that cannot be published
        store.publish(a_record(namespace, "d"), Location("other", "otherboot", 1, 7))
    if what != "gone":
        bench.insert("d")
    change = Change(
        (namespace, "d"),
        "evicted" if what == "gone" else "",
        "token-of-a",
        (Location("dead", "deadboot", 1, 7),) if what == "void" else (),
    )
    bench.dirty.add(change)
    store.down = {"d"}
    for n in range(5):
        bench.insert(f"h{n}")
        assert bench.write() == {"d"}
        assert bench.held_by(f"h{n}") == {"us"}, "its server is up"
        bench.dirty.retry()
    store.down = set()
    assert bench.write() == set()
    assert len(bench.dirty) == 0


def test_what_cannot_be_listed_in_a_full_record_now_is_tried_again(namespace: str) -> None:
    store = Sharded()
    bench = Bench(store, namespace)
    others = [f"n{n}" for n in range(LOCATIONS_MAX)]
    bench.pass_seconds(3, *others)
    bench.insert("k")
    bench.write()
    for node in others[:-1]:
        bench.publish_of(node, "k")
    store.withdraw(namespace, "k", "us", reason="test")
    bench.publish_of(others[-1], "k")
    bench.pass_seconds(7, *others[1:])
    bench.dirty.add(Change((namespace, "k"), ""))
    publish_many = store.publish_many

    def then_down(publishings: Sequence[Publishing]) -> list[Publication]:
        found = publish_many(publishings)
        store.down = {"k"}
        return found

    store.publish_many = then_down  # type: ignore[method-assign]
    assert bench.write() == {"k"}
    store.publish_many = publish_many  # type: ignore[method-assign]
    store.down = set()
    bench.dirty.retry()
    bench.write()
    assert bench.held_by("k") == {*others[1:], "us"}
