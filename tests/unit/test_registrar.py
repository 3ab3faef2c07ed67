"""The registrar, in virtual time, on stores that fail over, refuse, evict it, or have bugs."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import pytest

from awaited import awaited
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node import descriptions
from lookup_buffer.node import invalidations as invalidations_module
from lookup_buffer.node import registrar as registrar_module
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Pools
from lookup_buffer.node.dirty_set import BATCH, RECENT_SECONDS
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.registrar import WALK_PAUSE_SECONDS, Registrar
from lookup_buffer.node.storage import Storage
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.times import DEAD_AFTER_SECONDS
from memory_store import MemoryStore
from store import Beat, BlockingStore, Location, Publication, Publishing, StoreUnavailable
from store.testing.samples import a_mark, a_record
from virtual_loop import VirtualLoop

NAMESPACE = "ns"


class FailingOver(MemoryStore):
    """One whose server is replaced by a replica that lagged behind."""

    count = 0

    def failovers(self) -> int:
        return self.count


class Given(Storage):
    def __init__(self, store: BlockingStore) -> None:
        super().__init__(BufferConfig.of({}), "node-1")
        self._store = awaited(store)


@contextmanager
def registrar_on(store: BlockingStore) -> Iterator[tuple[Registrar, Arena]]:
    loop = VirtualLoop()
    arena = Arena(1 << 20, lambda address, reason: registrar.changed(address, reason))
    identity = Identity("us", "usboot", "tcp://us:1")
    registrar = Registrar(
        loop,
        Given(store),
        arena,
        Directory("us", loop.time),
        identity,
        Counters(),
        1800.0,
        {},
        Pools(arena),
        lambda _: None,
    )
    registrar.start()
    yield registrar, arena
    closing = loop.create_task(registrar.close())
    loop.run(10.0)
    closing.result()
    arena.close()


def comes_true(registrar: Registrar, condition: Callable[[], object], seconds: float) -> bool:
    """Let time pass until `condition` holds, for so many seconds at most."""
    loop: Any = registrar.loop
    until = loop.now + seconds
    while not condition() and loop.now < until:
        loop.run(0.02)
    return bool(condition())


def insert(arena: Arena, key: str) -> None:
    header = TensorHeader("uint8", (4,), 4)
    item = arena.reserve((NAMESPACE, key), header, origin="local", ttl_seconds=None)
    assert item is not None
    arena.release([arena.commit(item, 7, 1).ticket], 1)


def held(store: BlockingStore, *keys: str) -> list[bool]:
    return [record is not None for record in store.locate(NAMESPACE, keys)]


def test_after_a_failover_the_last_minute_is_written_again() -> None:
    store = FailingOver()
    with registrar_on(store) as (registrar, arena):
        insert(arena, "kept")
        insert(arena, "withdrawn")
        assert comes_true(registrar, lambda: held(store, "kept", "withdrawn") == [True, True], 3.0)
        item = arena.peek((NAMESPACE, "withdrawn"))
        assert item is not None
        arena.remove(item, "evicted")
        assert comes_true(registrar, lambda: held(store, "kept", "withdrawn") == [True, False], 3.0)
        # The replica knows neither of the last two writes.
        store.withdraw(NAMESPACE, "kept", "us", reason="test")
        store.publish(
            a_record(NAMESPACE, "withdrawn", dtype="uint8", shape=(4,), nbytes=4),
            Location("us", "usboot", 2, 7),
        )
        assert held(store, "kept", "withdrawn") == [False, True]
        store.count += 1
        assert comes_true(registrar, lambda: held(store, "kept", "withdrawn") == [True, False], 3.0)
        assert comes_true(registrar, lambda: registrar.pending() == 0, 3.0)
        store.withdraw(NAMESPACE, "kept", "us", reason="test")
        assert not comes_true(registrar, lambda: held(store, "kept") == [True], 2.5)


def test_after_a_server_was_lost_the_inventory_is_written_again_at_a_bounded_rate() -> None:
    store = FailingOver()
    with registrar_on(store) as (registrar, arena):
        loop: Any = registrar.loop
        insert(arena, "old")
        assert comes_true(registrar, lambda: held(store, "old") == [True], 3.0)
        loop.run(RECENT_SECONDS + WALK_PAUSE_SECONDS)
        for lost in (True, False):
            store.withdraw(NAMESPACE, "old", "us", reason="test")  # its server came back empty
            store.count += 1
            if lost:
                assert comes_true(registrar, lambda: held(store, "old") == [True], 4.0)
        assert not comes_true(registrar, lambda: held(store, "old") == [True], 2.5)
        loop.run(WALK_PAUSE_SECONDS)
        assert comes_true(registrar, lambda: held(store, "old") == [True], 4.0)


class Losing(MemoryStore):
    """Once told to, it loses all its data; what the caller then hears is lost as well."""

    loses = ""

    def beat(self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None) -> bool:
        if self.loses:
            self.clear_all()
        known = super().beat(node, boot, sequence, replacing=replacing)
        if self.loses == "and the answer to the beat":
            self.loses = ""
            raise StoreUnavailable("no answer in time")
        return known

    def beats(self) -> dict[str, Beat]:
        if self.loses == "and the beats are not read":
            self.loses = ""
            raise StoreUnavailable("no answer in time")
        return super().beats()

    def clear_all(self) -> None:
        for record in list(self.scan()):
            for at in record.locations:
                self.withdraw(record.namespace, record.key, at.node, reason="test")
        for node, beat in super().beats().items():
            self.leave(node, beat.boot)


@pytest.mark.parametrize("how", ["and the answer to the beat", "and the beats are not read"])
def test_a_loss_of_all_data_is_noticed_also_if_that_beat_fails(how: str) -> None:
    store = Losing()
    with registrar_on(store) as (registrar, arena):
        keys = [f"k{n}" for n in range(100)]
        for key in keys:
            insert(arena, key)
        assert comes_true(registrar, lambda: all(held(store, *keys)), 3.0)
        assert comes_true(registrar, lambda: registrar.pending() == 0, 3.0)
        store.loses = how
        assert comes_true(registrar, lambda: not store.loses, 3.0)
        assert comes_true(registrar, lambda: all(held(store, *keys)), 4.0)


def test_a_beat_that_fails_is_no_loss_of_data() -> None:
    store = Losing()
    store.clear_all = lambda: None  # type: ignore[method-assign]
    with registrar_on(store) as (registrar, arena):
        insert(arena, "k")
        assert comes_true(registrar, lambda: held(store, "k") == [True], 3.0)
        assert comes_true(registrar, lambda: registrar.pending() == 0, 3.0)
        store.loses = "and the answer to the beat"
        assert comes_true(registrar, lambda: not store.loses, 3.0)
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
        assert not comes_true(registrar, lambda: registrar.pending() > 0, 2.5)


def test_an_evicted_node_publishes_its_whole_inventory() -> None:
    store = MemoryStore()
    with registrar_on(store) as (registrar, arena):
        for n in range(100):
            insert(arena, f"k{n}")
        keys = [f"k{n}" for n in range(100)]
        assert comes_true(registrar, lambda: all(held(store, *keys)), 3.0)
        for key in keys:
            store.withdraw(NAMESPACE, key, "us", reason="owner_dead")
        store.leave("us", "usboot")
        assert comes_true(registrar, lambda: all(held(store, *keys)), 3.0)
        assert "us" in store.beats()
    assert "us" not in store.beats(), "it left when it was closed"


def test_a_loss_of_all_data_during_a_walk_causes_another_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrar_module, "AGAIN_PER_SECOND_MAX", 10.0)
    store, keys = Losing(), [f"k{n}" for n in range(100)]
    with registrar_on(store) as (registrar, arena):
        for key in keys:
            insert(arena, key)
        assert comes_true(registrar, lambda: registrar.pending() == 0, 10.0)
        for _ in range(2):
            store.clear_all()
            assert comes_true(registrar, lambda: any(held(store, *keys)), 3.0)
            assert not all(held(store, *keys)), "the walk has not ended"
        assert comes_true(registrar, lambda: all(held(store, *keys)), 20.0)


class Interrupted(MemoryStore):
    """While it writes a namespace, something else happens."""

    meanwhile: Callable[[], None] | None = None

    def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        super().describe_namespace(fingerprint, parts)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_a_namespace_that_is_described_anew_meanwhile_is_written_anew() -> None:
    store = Interrupted()
    with registrar_on(store) as (registrar, _):
        store.meanwhile = lambda: registrar.describe(NAMESPACE, {"model": "newer"})
        registrar.describe(NAMESPACE, {"model": "older"})
        assert comes_true(
            registrar, lambda: store.namespaces().get(NAMESPACE) == {"model": "newer"}, 3.0
        )


def test_a_replaced_node_ends_and_writes_nothing_more() -> None:
    store = MemoryStore()
    with registrar_on(store) as (registrar, arena):
        assert comes_true(registrar, lambda: "us" in store.beats(), 3.0)
        store.beat("us", "later", 1, replacing=store.beats()["us"])
        assert comes_true(registrar, lambda: not registrar.heartbeat.established, 3.0)
        insert(arena, "k")
        assert not comes_true(registrar, lambda: registrar.fault or any(held(store, "k")), 2.0)
        store.beat("us", "later", 2)
        assert not comes_true(registrar, lambda: registrar.fault, 1.0), "it may be a late one"
        store.beat("us", "later", 3)
        assert comes_true(registrar, lambda: registrar.fault, 3.0)
    assert isinstance(registrar.fault, ConfigError)
    assert "boot later" in str(registrar.fault)
    assert held(store, "k") == [False]
    assert store.beats()["us"].boot == "later"


def test_a_store_restored_from_a_snapshot_older_than_this_boot_is_filled_again() -> None:
    """It names an earlier boot of this node, and an item of that boot."""
    store = MemoryStore()
    with registrar_on(store) as (registrar, arena):
        insert(arena, "k")
        assert comes_true(registrar, lambda: held(store, "k") == [True], 3.0)
        store.withdraw(NAMESPACE, "k", "us", reason="test")
        store.leave("us", "usboot")
        store.beat("us", "earlier", 7)
        assert comes_true(registrar, lambda: not registrar.heartbeat.established, 3.0)
        insert(arena, "meanwhile")
        assert not comes_true(registrar, lambda: any(held(store, "k", "meanwhile")), 2.5)
        assert comes_true(registrar, lambda: all(held(store, "k", "meanwhile")), 3.0)
        assert store.beats()["us"].boot == "usboot"
        assert registrar.fault is None


def test_beats_do_not_wait_for_a_large_namespace_to_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invalidations_module, "PAGE", 10)
    store, count, seconds = Beating(), 500, 0.02
    with registrar_on(store) as (registrar, arena):
        loop: Any = registrar.loop
        store.clock = loop.time
        for n in range(count):
            insert(arena, f"k{n}")
        assert comes_true(registrar, lambda: registrar.pending() == 0, 3.0)
        changed = arena.on_change

        def slowly(address: QualifiedKey, reason: str) -> None:
            loop.now += seconds
            changed(address, reason)

        arena.on_change = slowly
        store.mark_invalid(NAMESPACE, a_mark())
        loop.run(count * seconds + 4.0)
        assert not arena.addresses()
        assert not any(held(store, "k0", "k499"))
    pauses = [after - before for before, after in pairwise(store.beaten_at)]
    assert max(pauses) < DEAD_AFTER_SECONDS / 2


class Full(MemoryStore):
    """One that may have no memory, and counts what it refuses then."""

    is_full = True
    refused = 0

    def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        if not self.is_full:
            return super().publish_many(publishings)
        self.refused += len(publishings)
        return [Publication.REFUSED] * len(publishings)


def test_what_a_full_store_refused_is_published_when_there_is_memory() -> None:
    """Long before the next walk: a hand-off would have ended by then."""
    store, keys = Full(), [f"k{n}" for n in range(500)]
    with registrar_on(store) as (registrar, arena):
        for key in keys:
            insert(arena, key)
        handoff = ("ns", "h@request")
        header = TensorHeader("uint8", (4,), 4)
        item = arena.reserve_handoff(handoff, header, ttl_seconds=300.0, wanted=False)
        arena.commit(item, 7, 1)
        assert comes_true(registrar, lambda: store.refused > len(keys), 3.0)
        refused = store.refused
        assert not comes_true(registrar, lambda: registrar.pending() <= len(keys) or any(
            held(store, *keys, handoff[1])
        ), 10.0)  # fmt: skip
        assert store.refused - refused <= 12 * BATCH, "few are tried with each beat"
        store.is_full = False
        assert comes_true(registrar, lambda: all(held(store, *keys, handoff[1])), 3.0)
        assert comes_true(registrar, lambda: registrar.pending() == 0, 3.0)


class Beating(MemoryStore):
    """It notes when it is given a beat."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: Callable[[], float] = time.monotonic
        self.beaten_at: list[float] = []

    def beat(self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None) -> bool:
        self.beaten_at.append(self.clock())
        return super().beat(node, boot, sequence, replacing=replacing)


class Failing(MemoryStore):
    """One that fails by `error` while there is one."""

    error: Exception | None = None
    failed = 0

    def beats(self) -> dict[str, Beat]:
        if self.error is not None:
            self.failed += 1
            raise self.error
        return super().beats()


def test_a_bug_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = Failing()
    with registrar_on(store) as (registrar, arena):
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
        store.error = ZeroDivisionError("by an odd number")
        assert comes_true(registrar, lambda: store.failed >= 5, 5.0)
        assert not registrar.store_up
        store.error = None
        insert(arena, "k")
        assert comes_true(registrar, lambda: held(store, "k") == [True], 3.0)
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert "by an odd number" in told.getMessage()
    assert told.exc_info, "where it was"


def test_a_bug_at_the_restart_of_the_embedded_server_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = 0

    async def no_thread(_: Storage) -> NoReturn:
        nonlocal failed
        failed += 1
        raise RuntimeError("can't start new thread")

    with registrar_on(MemoryStore()) as (registrar, _):
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
        with monkeypatch.context() as patch:
            patch.setattr(Given, "store", no_thread)
            assert comes_true(registrar, lambda: failed >= 3, 5.0)
            assert not registrar.store_up
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
    assert "can't start new thread" in caplog.text


def test_at_its_end_no_server_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def restart(_: Storage) -> NoReturn:
        raise AssertionError("it takes seconds")

    store = MemoryStore()
    with registrar_on(store) as (registrar, _):
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
        monkeypatch.setattr(Given, "store", restart)
    assert registrar.store_up
    assert "us" not in store.beats(), "it left"


def test_a_failure_of_the_store_is_logged_once_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Failing()
    with registrar_on(store) as (registrar, _):
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
        for reason in ("NOPERM no permission", "no answer in time"):
            store.error, store.failed = StoreUnavailable(reason), 0
            assert comes_true(registrar, lambda: store.failed >= 4, 5.0)
        store.error = None
    first, second = caplog.records
    assert first.levelno == second.levelno == logging.WARNING
    assert "NOPERM no permission" in first.getMessage()
    assert "no answer in time" in second.getMessage()


class WithoutInvalidations(MemoryStore):
    """Of a cluster, the one server that has their list is down."""

    def invalidations(self) -> NoReturn:
        raise StoreUnavailable("server 2 of the cluster is down")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_list_of_invalidations_that_is_not_read_is_retried(read_only: bool) -> None:
    with registrar_on(WithoutInvalidations()) as (registrar, _):
        registrar.read_only = read_only
        assert comes_true(registrar, lambda: registrar.store_up, 3.0)
        assert not comes_true(registrar, lambda: not registrar.store_up, 5.0)


def test_only_the_last_namespaces_are_kept() -> None:
    """Those in use; also if others come while they are written."""
    count, parts = descriptions.DESCRIPTIONS_MAX, {"model": "m"}
    store = Interrupted()
    with registrar_on(store) as (registrar, _):
        registrar.describe("first", parts)
        registrar.describe("second", parts)
        registrar.describe("first", parts)  # an engine that attached again

        def meanwhile() -> None:
            for number in range(count - 1):
                registrar.describe(f"{number}", parts)

        store.meanwhile = meanwhile
        registrar.describe("large", {"model": "m" * descriptions.BYTES_MAX})
        assert comes_true(registrar, lambda: f"{count - 2}" in store.namespaces(), 3.0)
        kept = {"first", *map(str, range(count - 1))}
        assert store.namespaces().keys() == kept


def test_a_client_fills_no_redis_with_descriptions() -> None:
    """They stay there for a week, those of ever new namespaces too."""
    store, size = MemoryStore(), descriptions.BYTES_MAX - len("model")
    one = descriptions.BYTES_MAX + descriptions.KEY_BYTES
    at_once = descriptions.NEW_MAX // one
    with registrar_on(store) as (registrar, _):
        for number in range(200):
            registrar.describe(f"{number}", {"model": "m" * size})
        registrar.describe("0", {"model": "m" * size})  # an engine that attached again
        comes_true(registrar, lambda: False, 30.0)  # time passes
        assert store.namespaces().keys() == set(map(str, range(at_once)))
        registrar.describe("small", {"model": "m"})
        assert comes_true(registrar, lambda: "small" in store.namespaces(), 3.0), "after 30 s"


def test_a_node_that_only_reads_describes_nothing() -> None:
    store = MemoryStore()
    with registrar_on(store) as (registrar, _):
        registrar.read_only = True
        registrar.describe("f" * 64, {"content": "test"})
        assert not comes_true(registrar, store.namespaces, 5.0)
