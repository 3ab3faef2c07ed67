"""The mirror on clusters and behind Sentinel, during failovers and while slots move."""

import asyncio
import time
from collections.abc import Iterator
from itertools import count

import pytest

from clusters import (
    FIRST_SLOTS,
    SLOTS,
    Sentinels,
    ValkeyCluster,
    names_in_slots,
    slot_of,
)
from mirrors import HASTY_SECONDS, MARGIN_SECONDS, Mirroring
from nodes import wait_until
from patience import scaled
from server_clients import Monitor, records_read, refusals
from servers import ServerProcess
from store import BlockingStore, Record, layout, open_store
from store.testing.samples import a_location, a_record
from store.topology import ClusterTopology

TRUE_SECONDS = 1.5
"""A check of the topology each second, and the time to read again."""
FAILOVER_SECONDS = 15.0
KEYS = [f"k{n}" for n in range(24)]


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[BlockingStore]:
    """Another process' store, so that the mirror's own store gets changes from servers
    only.
    """
    names = {"valkey_cluster", "own_cluster", "own_sentinels"} & set(request.fixturenames)
    servers = request.getfixturevalue(names.pop())
    with open_store(servers.url, call_timeout_seconds=2.0) as store:
        yield store


def publish(store: BlockingStore, namespace: str, key: str, generation: int = 1) -> None:
    store.publish(a_record(namespace, key), a_location(generation=generation))


def where_all_are(
    cluster: ValkeyCluster, namespace: str
) -> tuple[list[ServerProcess], dict[str, ServerProcess]]:
    """The masters, and the keys of each."""
    masters = cluster.masters()
    return masters, {key: cluster.owner(layout.record(namespace, key)) for key in KEYS}


def move(cluster: ValkeyCluster, slot: int, target: ServerProcess, how: str) -> None:
    if how == "key by key":
        cluster.move_slot(slot, target)
        return
    cluster.move_slots(slot, slot, target)


@pytest.mark.parametrize("how", ["key by key", "at once"])
def test_entries_of_a_moved_slot_are_corrected(
    valkey_cluster: ValkeyCluster, other: BlockingStore, namespace: str, how: str
) -> None:
    masters, owners = where_all_are(valkey_cluster, namespace)
    there, absent, watched, waited_for = KEYS[:4]
    publish(other, namespace, there)
    publish(other, namespace, watched)
    with Mirroring(valkey_cluster.url) as mirroring:
        assert mirroring.ask(namespace, KEYS).count(None) == len(KEYS) - 2
        watchings = {key: mirroring.watch(namespace, key) for key in (watched, waited_for)}
        watchings[watched].wait(there=True)
        watchings[waited_for].wait(there=False)
        slots = {slot_of(layout.record(namespace, key)): owners[key] for key in KEYS[:4]}
        for slot, source in slots.items():
            target = next(master for master in masters if master is not source)
            move(valkey_cluster, slot, target, how)
        other.withdraw(namespace, there, "node-1", reason="evicted")
        other.withdraw(namespace, watched, "node-1", reason="evicted")
        publish(other, namespace, absent)
        publish(other, namespace, waited_for)
        moved_at = time.monotonic()
        mirroring.wait_to_know(namespace, there, there=False, seconds=TRUE_SECONDS)
        mirroring.wait_to_know(namespace, absent, there=True, seconds=TRUE_SECONDS)
        watchings[watched].wait(there=False, seconds=TRUE_SECONDS)
        watchings[waited_for].wait(there=True, seconds=TRUE_SECONDS)
        took = time.monotonic() - moved_at
        print(f"all is true {took:.2f} s after the last slot moved")
        assert took < scaled(TRUE_SECONDS)
        assert not any(isinstance(one, Exception) for one in mirroring.ask(namespace, KEYS))
    for slot, source in slots.items():
        move(valkey_cluster, slot, source, how)


@pytest.mark.parametrize("how", ["key by key", "at once"])
def test_an_empty_slot_moves_without_a_redirection(
    valkey_cluster: ValkeyCluster, other: BlockingStore, namespace: str, how: str
) -> None:
    """The old master has nothing to push and gets no request: only a check of the slot map shows
    it.
    """
    masters, owners = where_all_are(valkey_cluster, namespace)
    slot, source = slot_of(layout.record(namespace, "k0")), owners["k0"]
    with Mirroring(valkey_cluster.url) as mirroring:
        assert mirroring.has(namespace, "k0") is False
        target = next(master for master in masters if master is not source)
        move(valkey_cluster, slot, target, how)
        publish(other, namespace, "k0")
        took = mirroring.wait_to_know(namespace, "k0", there=True, seconds=TRUE_SECONDS)
        print(f"true {took:.2f} s after the slot moved")
    move(valkey_cluster, slot, source, how)


def test_a_server_that_fails_while_a_slot_of_others_moves_keeps_its_entries(
    valkey_cluster: ValkeyCluster, other: BlockingStore, namespace: str
) -> None:
    """A call that fails between the reading of the new map and the check of the entries."""
    for key in KEYS:
        publish(other, namespace, key)
    with Mirroring(valkey_cluster.url) as mirroring:
        assert all(isinstance(found, Record) for found in mirroring.ask(namespace, KEYS))
        mirror, name = mirroring.mirror, layout.record(namespace, KEYS[0])
        topology = mirror._topology
        assert isinstance(topology, ClusterTopology)

        async def fail_and_check() -> int:
            await topology.suspect(topology.known_server_for(name))
            await mirror._drop_moved()
            return len(mirror.entries(namespace))

        checked = asyncio.run_coroutine_threadsafe(fail_and_check(), mirroring._loop)
        assert checked.result(scaled(10.0)) == len(KEYS)


@pytest.mark.parametrize("how", ["key by key", "at once"])
def test_the_move_of_an_empty_slot_costs_no_entries(
    valkey_cluster: ValkeyCluster, other: BlockingStore, namespace: str, how: str
) -> None:
    keys = [f"k{n}" for n in range(300)]
    masters = valkey_cluster.masters()
    ours = {slot_of(layout.record(namespace, key)) for key in keys}
    absent = next(n for n in count() if slot_of(layout.record(namespace, f"absent{n}")) not in ours)
    slot = slot_of(layout.record(namespace, f"absent{absent}"))
    source = valkey_cluster.owner(slot)
    target = next(master for master in masters if master is not source)
    for key in keys:
        publish(other, namespace, key)
    with (
        Mirroring(valkey_cluster.url) as mirroring,
        Monitor(*(master.port for master in masters)) as monitor,
    ):
        assert all(isinstance(found, Record) for found in mirroring.ask(namespace, keys))
        monitor.commands()
        move(valkey_cluster, slot, target, how)
        place = f"127.0.0.1:{target.port}"
        wait_until(
            lambda: mirroring.store.place_of(namespace, f"absent{absent}") == place, TRUE_SECONDS
        )
        time.sleep(0.1)  # what was dropped would be read again
        assert all(isinstance(found, Record) for found in mirroring.ask(namespace, keys))
        assert records_read(monitor.commands()) == []
        for key in keys:
            other.withdraw(namespace, key, "node-1", reason="evicted")
        wait_until(lambda: mirroring.ask(namespace, keys) == [None] * len(keys), TRUE_SECONDS)
    move(valkey_cluster, slot, source, how)


def test_a_question_for_keys_that_moved_is_repeated_once(
    own_cluster: ValkeyCluster, other: BlockingStore, namespace: str
) -> None:
    names = names_in_slots(namespace, 1000, FIRST_SLOTS)
    for key in names:
        publish(other, namespace, key)
    ports = [member.port for member in own_cluster.members]
    with Mirroring(own_cluster.url) as mirroring:
        own_cluster.move_slots(FIRST_SLOTS[0], FIRST_SLOTS[-1], own_cluster.owner(SLOTS - 1))
        refused = sum(refusals(port, "MOVED") for port in ports)
        with Monitor(*ports) as monitor:
            found = mirroring.ask(namespace, list(names))
            assert all(isinstance(one, Record) for one in found)
            assert sorted(records_read(monitor.commands())) == sorted(names.values())
        # None at all if the mirror's check of each second came first.
        assert sum(refusals(port, "MOVED") for port in ports) - refused in (0, len(names))


def test_while_a_slot_moves_only_its_missing_keys_are_unknown(
    valkey_cluster: ValkeyCluster, other: BlockingStore, namespace: str
) -> None:
    masters, owners = where_all_are(valkey_cluster, namespace)
    slot = slot_of(layout.record(namespace, "k0"))
    target = next(master for master in masters if master is not owners["k0"])
    for key in KEYS[1:]:
        publish(other, namespace, key)
    with Mirroring(valkey_cluster.url) as mirroring:

        def look() -> None:
            for _ in range(30):
                assert mirroring.has(namespace, "k0") is None
                assert [mirroring.has(namespace, key) for key in KEYS[1:]] == [True] * 23

        valkey_cluster.move_slot(slot, target, between=look)
        mirroring.wait_to_know(namespace, "k0", there=False, seconds=TRUE_SECONDS)
    valkey_cluster.move_slot(slot, owners["k0"])


def test_a_master_of_a_cluster_is_stopped(
    own_cluster: ValkeyCluster, other: BlockingStore, namespace: str
) -> None:
    for member in own_cluster.members:
        member.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
    _, owners = where_all_are(own_cluster, namespace)
    victim = owners["k0"]
    his = [key for key in KEYS if owners[key] is victim]
    others = [key for key in KEYS if owners[key] is not victim]
    for key in others:
        publish(other, namespace, key)
    with Mirroring(own_cluster.url) as mirroring:
        assert [mirroring.has(namespace, key) for key in his] == [False] * len(his)
        watching = mirroring.watch(namespace, "k0")
        watching.wait(there=False)
        victim.stop()
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            mirroring.store.locate(namespace, KEYS)  # makes the victim suspect each time
            mirroring.has(namespace, f"{his[0]}-another")
            assert [mirroring.has(namespace, key) for key in others] == [True] * len(others)
        wait_until(lambda: own_cluster.owner(0) is not None and _published(other, namespace), 10.0)
        took = time.monotonic()
        mirroring.wait_to_know(namespace, "k0", there=True, seconds=2 * TRUE_SECONDS)
        watching.wait(there=True, seconds=2 * TRUE_SECONDS)
        print(f"true {time.monotonic() - took:.2f} s after it was published anew")
        for key in his[1:]:
            assert mirroring.has(namespace, key) is False
        victim.go_on()
        own_cluster.wait_until_whole()
        other.withdraw(namespace, "k0", "node-1", reason="evicted")
        watching.wait(there=False, seconds=2 * TRUE_SECONDS)
        watching.cancel()


def _published(store: BlockingStore, namespace: str) -> bool:
    try:
        publish(store, namespace, "k0")
    except Exception:
        return False
    return True


def test_the_master_behind_sentinels_is_killed(
    own_sentinels: Sentinels, other: BlockingStore, namespace: str
) -> None:
    old, new = own_sentinels.master(), own_sentinels.replica()
    publish(other, namespace, "there")
    with Mirroring(own_sentinels.url, call_seconds=HASTY_SECONDS) as mirroring:
        assert mirroring.has(namespace, "there") is True
        assert mirroring.has(namespace, "absent") is False
        watching = mirroring.watch(namespace, "watched")
        watching.wait(there=False)
        old.kill()
        own_sentinels.sentinels[0].stop()
        for _ in range(5):
            mirroring.has(namespace, "another")  # in time, whatever the result
        wait_until(lambda: own_sentinels.is_master(new), FAILOVER_SECONDS)
        wait_until(lambda: _published(other, namespace), FAILOVER_SECONDS)
        publish(other, namespace, "absent")
        publish(other, namespace, "watched")
        other.withdraw(namespace, "there", "node-1", reason="evicted")
        started = time.monotonic()
        for key, there in (("there", False), ("absent", True), ("watched", True)):
            mirroring.wait_to_know(namespace, key, there=there, seconds=2 * TRUE_SECONDS)
        watching.wait(there=True, seconds=2 * TRUE_SECONDS)
        print(f"true {time.monotonic() - started:.2f} s after it was changed on the new master")
        assert mirroring.slowest < HASTY_SECONDS + MARGIN_SECONDS
        watching.cancel()
    own_sentinels.sentinels[0].go_on()


def test_a_key_that_moved_to_a_server_that_hangs_costs_one_timeout(
    monkeypatch: pytest.MonkeyPatch, own_cluster: ValkeyCluster, namespace: str
) -> None:
    """The same server was the source of the slot map, which is loaded in between."""
    monkeypatch.setattr("store.mirror.RECHECK_SECONDS", 3600.0)  # it learns of the move by MOVED
    with Mirroring(own_cluster.url) as mirroring:
        mirroring.ask(namespace, KEYS)
        topology = mirroring.mirror._topology
        assert isinstance(topology, ClusterTopology)
        port = mirroring.do(lambda: topology._map_source.endpoint.port)  # type: ignore[union-attr]
        source = next(master for master in own_cluster.masters() if master.port == port)
        moved = next(
            key for key in KEYS if own_cluster.owner(layout.record(namespace, key)) is not source
        )
        mirroring.do(lambda: mirroring.mirror.forget(namespace, moved))
        own_cluster.move_slot(slot_of(layout.record(namespace, moved)), source)
        hanging = [source, own_cluster.replica_of(source)]
        for member in hanging:
            member.stop()
        try:
            mirroring.slowest = 0.0
            assert mirroring.has(namespace, moved) is None
            assert mirroring.slowest > 0.9 * mirroring.call_seconds, "it did hang"
        finally:
            for member in hanging:
                member.go_on()
