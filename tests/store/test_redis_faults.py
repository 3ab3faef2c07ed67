"""Connections that a server ends, or that lead to a server that no longer takes writes."""

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from redis.exceptions import MovedError

from clusters import FIRST_SLOTS, SLOTS, Sentinels, ValkeyCluster, names_in_slots
from mirrors import Mirroring
from nodes import wait_until
from patience import scaled
from server_clients import Monitor, Place, clients, cut_all, place_of, records_read, refusals
from servers import PATIENT_SECONDS, StartServer, command, frozen, patient
from store import (
    BlockingStore,
    ClaimAnswer,
    Claiming,
    ClaimState,
    EmbeddedServer,
    Publication,
    Record,
    StoreError,
    StoreUnavailable,
    layout,
    open_store,
)
from store.client import Client, Script
from store.connections import Access, Endpoint
from store.mirror_claims import RedisMirrorClaims
from store.server import Budget, Server
from store.testing.claims import ask
from store.testing.samples import BOOT, a_location, a_record
from store.topology import open_topology
from store.url import parse
from switchovers import Switchover

SLOW_SECONDS = 5.0
RECOVERED_SECONDS = 2.0
"""The mirror looks after its connections each second."""


def publish(store: BlockingStore, namespace: str, key: str) -> Publication:
    return store.publish(a_record(namespace, key), a_location())


def is_published(store: BlockingStore, namespace: str, key: str) -> bool:
    try:
        return publish(store, namespace, key) in (Publication.ADDED, Publication.PRESENT)
    except StoreUnavailable:
        return False


# ---- a server cuts its connections


def test_cut_connections_are_no_failover(valkey_server: EmbeddedServer, namespace: str) -> None:
    _cut_and_count(valkey_server.url, [place_of(valkey_server.url)], namespace)


def test_cut_connections_of_a_cluster_are_no_failover(
    valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    masters = [master.port for master in valkey_cluster.masters()]
    _cut_and_count(valkey_cluster.url, masters, namespace)


def test_cut_connections_behind_sentinels_are_no_failover(
    sentinels: Sentinels, namespace: str
) -> None:
    _cut_and_count(sentinels.url, [sentinels.master().port], namespace)


def _cut_and_count(url: str, places: Sequence[Place], namespace: str) -> None:
    keys = [f"k{n}" for n in range(30)]
    with patient(url) as store, Mirroring(url) as mirroring:
        for key in keys:
            publish(store, namespace, key)

        def mirror_has_all() -> bool:
            return all(isinstance(found, Record) for found in mirroring.ask(namespace, keys))

        def both_are_cut() -> bool:
            """The mirror may not have noticed the last cut yet."""
            store.locate(namespace, keys)
            return mirror_has_all() and sum(map(cut_all, places)) >= 2

        assert mirror_has_all()
        for _ in range(3):
            wait_until(both_are_cut, RECOVERED_SECONDS)
            assert None not in store.locate(namespace, keys), "the next call connects anew"
            wait_until(mirror_has_all, RECOVERED_SECONDS)
        assert store.failovers() == 0
        assert mirroring.store.failovers() == 0


def test_an_idle_timeout_is_no_failover(start_server: StartServer, namespace: str) -> None:
    server = start_server()
    place = place_of(server.url)
    command(server.url, "CONFIG", "SET", "timeout", 1)
    with patient(server.url) as store:
        for n in range(2):
            assert publish(store, namespace, f"k{n}") is Publication.ADDED, "at the first attempt"
            assert clients(place)
            wait_until(lambda: not clients(place), 5.0, "the server closes what is idle")
        store.ping()
        assert store.failovers() == 0


# ---- a server takes no more writes, and its address leads to another one


def test_a_demoted_server_is_left(switchover: Switchover, namespace: str) -> None:
    old, new = switchover.old.port, switchover.new.port
    with (
        patient(f"redis://127.0.0.1:{new}") as other,
        patient(switchover.url) as store,
        Mirroring(switchover.url) as mirroring,
    ):
        for one, key in ((store, "there"), (mirroring.store, "there too")):
            publish(one, namespace, key)
            assert mirroring.has(namespace, key) is True
        watching = mirroring.watch(namespace, "watched")
        watching.wait(there=False)
        assert len(clients(old)) >= 3
        switchover.demote()
        with Monitor(old) as monitor:
            for _ in range(3):
                for one in (store, mirroring.store):
                    with pytest.raises(StoreUnavailable, match="READONLY"):
                        publish(one, namespace, "k")
                time.sleep(0.5)
                assert mirroring.has(namespace, "there") is True
            assert records_read(monitor.commands()) == [], "the server is still the same"
        switchover.lead_to_the_new_one()
        refused = refusals(old, "READONLY")
        for one in (store, mirroring.store):
            wait_until(lambda s=one: is_published(s, namespace, "k"), RECOVERED_SECONDS)  # type: ignore[misc]
        assert refusals(old, "READONLY") - refused <= 2, "the next call of each connects anew"
        assert None not in other.locate(namespace, ["there", "there too", "k"])
        # The mirror hears of changes that the old server does not know.
        publish(other, namespace, "watched")
        other.withdraw(namespace, "there", "node-1", reason="evicted")
        watching.wait(there=True, seconds=RECOVERED_SECONDS)
        mirroring.wait_to_know(namespace, "there", there=False, seconds=RECOVERED_SECONDS)
        wait_until(lambda: clients(old) == [], RECOVERED_SECONDS, "nobody uses it any more")
        watching.cancel()


def test_a_demoted_server_is_left_after_a_claim(switchover: Switchover, namespace: str) -> None:
    """Here the mirror's connection alone learns of it."""
    claiming = Claiming(namespace, "k", "holder", "token", ClaimState.ENCODING, 60.0)
    with Mirroring(switchover.url) as mirroring:
        claims = RedisMirrorClaims(mirroring.mirror, Script("claim"), Script("release"))

        def claimed() -> ClaimAnswer | StoreError:
            answered: Future[ClaimAnswer | StoreError] = Future()
            mirroring.do(lambda: claims.claim(claiming, answered.set_result))
            return answered.result(scaled(10.0))

        assert isinstance(claimed(), ClaimAnswer)
        switchover.demote()
        assert isinstance(claimed(), StoreUnavailable)
        switchover.lead_to_the_new_one()

        def is_granted() -> bool:
            answer = claimed()
            return isinstance(answer, ClaimAnswer) and answer.granted

        wait_until(is_granted, RECOVERED_SECONDS)
        assert switchover.new.command("EXISTS", layout.claim(namespace, "k"))
        wait_until(lambda: clients(switchover.old.port) == [], RECOVERED_SECONDS)


def test_a_socket_that_another_server_takes_over(start_server: StartServer, namespace: str) -> None:
    old, new = start_server(), start_server()
    with patient(old.url) as store, Mirroring(old.url) as mirroring:
        publish(store, namespace, "k")
        assert mirroring.has(namespace, "k") is True
        command(old.url, "REPLICAOF", "127.0.0.1", 1)
        os.replace(str(place_of(new.url)), str(place_of(old.url)))
        assert not is_published(store, namespace, "k"), "its connection is to the old one"
        assert publish(store, namespace, "k") is Publication.ADDED, "the new one is empty"
        # Its own store tells the mirror, as in a node.
        wait_until(lambda: is_published(mirroring.store, namespace, "k2"), RECOVERED_SECONDS)
        mirroring.wait_to_know(namespace, "k2", there=True, seconds=RECOVERED_SECONDS)


# ---- keys move in a cluster


def test_a_question_for_keys_that_moved_is_repeated_once(
    own_cluster: ValkeyCluster, namespace: str
) -> None:
    names = list(names_in_slots(namespace, 1500, FIRST_SLOTS).items())
    ports = [member.port for member in own_cluster.members]
    with patient(own_cluster.url) as store, Monitor(*ports) as monitor:
        for key, _ in names:
            publish(store, namespace, key)
        own_cluster.move_slots(FIRST_SLOTS[0], FIRST_SLOTS[-1], own_cluster.owner(SLOTS - 1))
        monitor.commands()
        for asked, moved, maps in ((names[:1000], 1000, 1), (names[1000:], 0, 0)):
            refused = sum(refusals(port, "MOVED") for port in ports)
            found = store.look_up([(namespace, key) for key, _ in asked])
            assert all(isinstance(one, Record) for one in found)
            # All were sent before the first one was refused.
            assert sum(refusals(port, "MOVED") for port in ports) - refused == moved
            commands = monitor.commands()
            assert sorted(records_read(commands)) == sorted(name for _, name in asked)
            assert sum(words[:2] == ["CLUSTER", "SLOTS"] for words in commands) == maps


# ---- a shard hangs


def test_a_shard_that_hangs_delays_one_call(own_cluster: ValkeyCluster, namespace: str) -> None:
    for member in own_cluster.members:  # the others go on
        member.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
    victim = own_cluster.owner(FIRST_SLOTS[0])
    if own_cluster.owner(layout.NODES) is victim:
        victim = own_cluster.owner(SLOTS - 1)
    names = names_in_slots(namespace, 64, range(SLOTS))
    lost = [key for key, name in names.items() if own_cluster.owner(name) is victim]
    healthy = [key for key in names if key not in lost]
    items = [(namespace, key) for key in (*lost, *healthy)]
    frozen = (victim, own_cluster.replica_of(victim))
    with open_store(
        own_cluster.url, call_timeout_seconds=SLOW_SECONDS, connect_timeout_seconds=SLOW_SECONDS
    ) as store:
        for key in names:
            publish(store, namespace, key)
        for member in frozen:
            member.stop()
        found = store.look_up(items)
        assert [isinstance(one, StoreUnavailable) for one in found] == [
            key in lost for _, key in items
        ]
        started = time.monotonic()
        for n in range(20):
            assert publish(store, namespace, healthy[n]) is Publication.PRESENT
            assert ask(store, namespace, "a", key=healthy[n], lease_seconds=60.0).granted
            store.beat("node-1", BOOT, n)
            found = store.look_up(items)
            assert sum(isinstance(one, Record) for one in found) == len(healthy)
            # Whoever calls for its keys only may be who has to beat.
            assert not is_published(store, namespace, lost[0])
        assert time.monotonic() - started < SLOW_SECONDS, "the time-out of one call"
        for member in frozen:
            member.go_on()
        wait_until(lambda: all(is_published(store, namespace, key) for key in lost), 10.0)


def test_the_rest_of_a_budget_tells_of_no_server_that_it_hangs(
    start_server: StartServer,
) -> None:
    started = start_server()

    async def ask() -> list[bool]:
        access = Access(PATIENT_SECONDS, PATIENT_SECONDS)
        server = Server(Endpoint(path=started.url.removeprefix("unix://")), access)
        await server.exchange([("PING",)])
        found = []
        with frozen(started):
            for seconds in (0.01, PATIENT_SECONDS):
                with pytest.raises(StoreUnavailable, match="no answer in time"):
                    await server.exchange([("PING",)], Budget(seconds, seconds))
                found.append(server.hangs)
        await server.close()
        return found

    assert asyncio.run(ask()) == [False, True]


def test_a_redirect_to_a_host_without_a_name_leads_to_the_known_one() -> None:
    async def target(error: str) -> str:
        topology = open_topology(
            parse("redis-cluster://node-a:7000"),
            call_timeout_seconds=1.0,
            connect_timeout_seconds=1.0,
        )
        route = topology.server_at(Endpoint("node-a", 7000))
        found = Client(topology)._target(MovedError(error), route)
        assert isinstance(found, Server)
        return str(found.endpoint)

    assert asyncio.run(target("1 ?:7001")) == "node-a:7001"
    assert asyncio.run(target("1 node-b:7001")) == "node-b:7001"
