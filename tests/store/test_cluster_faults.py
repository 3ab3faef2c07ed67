"""RedisStore on real clusters whose servers are killed or frozen, and whose slots move."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import pytest

from clusters import MASTERS, SLOTS, ValkeyCluster, slot_of
from nodes import wait_until
from patience import quickest
from proxies import Blackhole, Relay
from servers import ServerProcess, redis_executable, valkey_executable
from store import (
    BlockingStore,
    EmbeddedServer,
    Publication,
    Publishing,
    Releasing,
    StoreUnavailable,
    Withdrawing,
    layout,
    open_store,
)
from store.testing.samples import a_location, a_record
from store_load import CALL_SECONDS, LIMIT_SECONDS, MANY_KEYS, MARGIN_SECONDS, under_load

FAILOVER_SECONDS = 10.0
PATIENT_SECONDS = 3.0


def open_at(url: str) -> BlockingStore:
    return open_store(url, call_timeout_seconds=CALL_SECONDS, connect_timeout_seconds=CALL_SECONDS)


def _in_vain(call: Callable[[], object]) -> None:
    with pytest.raises(StoreUnavailable):
        call()


@pytest.fixture
def store(own_cluster: ValkeyCluster) -> Iterator[BlockingStore]:
    for member in own_cluster.members:  # keys of live masters must be found throughout
        member.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
    with open_at(own_cluster.url) as store:
        yield store


@pytest.fixture
def patient_store(own_cluster: ValkeyCluster, store: BlockingStore) -> Iterator[BlockingStore]:
    """Its calls last until their timeout where a server is stopped, and the other servers have that
    long to answer."""
    with open_store(
        own_cluster.url, call_timeout_seconds=PATIENT_SECONDS, connect_timeout_seconds=CALL_SECONDS
    ) as patient:
        yield patient


@pytest.mark.parametrize(
    ("own_cluster", "fault"),
    [
        pytest.param(valkey_executable, "stopped", id="stopped"),
        pytest.param(redis_executable, "killed", id="killed-redis-7.0"),
    ],
    indirect=["own_cluster"],
)
def test_a_master_fails_during_writes(
    own_cluster: ValkeyCluster, store: BlockingStore, namespace: str, fault: str
) -> None:
    victim = own_cluster.owner(0)
    successor = own_cluster.replica_of(victim)
    with under_load(store, namespace, keys=MANY_KEYS) as load:
        reader = load.readers[0]
        names = {key: layout.record(namespace, key) for key in load.lasting}
        his = {key for key in names if own_cluster.owner(names[key]) is victim}
        assert 0 < len(his) < len(names)
        load.moves(5.0)
        load.within_budget()
        before = store.failovers()
        _stop_replicating(successor)
        load.write(100)
        started = time.monotonic()
        victim.kill() if fault == "killed" else victim.stop()
        healthy_from = time.monotonic() + 2 * CALL_SECONDS
        wait_until(lambda: all(reader.had_at[k] > healthy_from for k in names if k not in his), 5.0)
        # Before the failover the other masters can be read and written.
        went_on = time.monotonic() - started
        assert not any(reader.had_at[key] > healthy_from for key in his), "the test came too late"
        assert any(writer.partly for writer in load.writers)
        wait_until(
            lambda: all(at > healthy_from for at in reader.had_at.values()), FAILOVER_SECONDS
        )
        print(f"healthy after {went_on:.2f} s, whole again after {time.monotonic() - started:.2f}")
        load.moves(5.0)
        assert store.failovers() > before
        load.within_budget()
        if fault == "stopped":
            victim.go_on()
            own_cluster.wait_until_whole()
            load.moves(5.0)
        load.settle()
        load.within_budget()
        restored = sum(writer.restored for writer in load.writers)
        print(f"{restored} lost and restored")
        assert restored > 0
    assert own_cluster.owner(0) is successor


def _stop_replicating(replica: ServerProcess) -> None:
    """What is acknowledged after this is lost when the replica takes over."""
    replica.command("CONFIG", "SET", "masterauth", "which the master does not know")
    replica.command("CLIENT", "KILL", "TYPE", "master")


def test_a_slot_moves_to_another_master_under_load(
    valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    before = _refusals(valkey_cluster)
    with (
        open_at(valkey_cluster.url) as store,
        under_load(store, namespace, keys=100) as load,
    ):
        load.moves(5.0)
        a_while = partial(load.write, 60)  # each of the 300 keys is written once or twice
        names = [layout.record(namespace, key) for key in load.writers[0].keys[:12]]
        slots = {slot_of(name): valkey_cluster.owner(name) for name in names}
        for slot, source in slots.items():
            target = next(m for m in valkey_cluster.masters() if m is not source)
            valkey_cluster.move_slot(slot, target, between=a_while, emptied=a_while)
        load.settle()
        load.within_budget()
        assert not any(reader.raised for reader in load.readers), "reading was held up"
    counted = _refusals(valkey_cluster) - before
    print(counted)
    for slot, source in slots.items():
        valkey_cluster.move_slot(slot, source)
    assert counted["MOVED"] > 0
    assert counted["ASK"] > 0
    assert counted["TRYAGAIN"] > 0


def _refusals(cluster: ValkeyCluster) -> Counter[str]:
    """How often the servers replied with an error, by the error's code."""
    counts: Counter[str] = Counter()
    for member in cluster.members:
        for code, count in re.findall(
            rb"errorstat_(\w+):count=(\d+)", member.command("INFO", "errorstats")
        ):
            counts[code.decode()] += int(count)
    return counts


def test_all_members_are_frozen_and_resumed(
    own_cluster: ValkeyCluster, store: BlockingStore, namespace: str
) -> None:
    with under_load(store, namespace) as load:
        load.moves(5.0)
        for member in own_cluster.members:
            member.stop()
        time.sleep(4 * CALL_SECONDS)
        for caller in load.callers:
            assert caller.raised, "frozen, but no call failed"
        for member in own_cluster.members:
            member.go_on()
        print(f"whole again after {load.moves(FAILOVER_SECONDS):.2f} s")
        load.within_budget()
        own_cluster.wait_until_whole()
        load.settle()


def test_each_operation_of_a_frozen_cluster_has_one_budget(
    own_cluster: ValkeyCluster, store: BlockingStore, namespace: str
) -> None:
    keys = [f"k{n}" for n in range(64)]
    publishings = [Publishing(a_record(namespace, k), a_location(), 60.0) for k in keys]
    store.publish_many(publishings)
    with open_at(own_cluster.url) as fresh:
        for member in own_cluster.members:
            member.stop()
        for one in (store, fresh):
            for call in (
                lambda: one.publish_many(publishings),  # noqa: B023
                lambda: one.locate(namespace, keys),  # noqa: B023
                lambda: one.withdraw_many(  # noqa: B023
                    [Withdrawing(namespace, key, "node-1", "evicted") for key in keys]
                ),
                lambda: one.server_info(),  # noqa: B023
                lambda: one.ping(),  # noqa: B023
                lambda: one.beat("node-1", "b" * 16, 1),  # noqa: B023
                lambda: list(one.scan()),  # noqa: B023
            ):
                assert quickest(partial(_in_vain, call), LIMIT_SECONDS) < LIMIT_SECONDS
        for member in own_cluster.members:
            member.go_on()


def test_unreachable_servers_leave_time_for_the_others(
    valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    publishings = [Publishing(a_record(namespace, "k"), a_location(), 60.0)]
    with Blackhole() as first, Blackhole() as second:
        seeds = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        living = valkey_cluster.members[0].port

        def publish() -> None:
            with open_at(f"redis-cluster://{seeds},127.0.0.1:{living}") as store:
                (outcome,) = store.publish_many(publishings)
                assert outcome in (Publication.ADDED, Publication.PRESENT)

        assert quickest(publish, LIMIT_SECONDS) < LIMIT_SECONDS
        # Connecting has its own timeout.
        limit = CALL_SECONDS + LIMIT_SECONDS
        for url in (f"redis-cluster://{seeds}", f"redis://127.0.0.1:{first.port}"):

            def publish_in_vain(url: str = url) -> None:
                with open_at(url) as store:
                    _in_vain(lambda: store.publish_many(publishings))

            assert quickest(publish_in_vain, limit) < limit


def test_the_whole_cluster_is_gone_and_comes_back_empty(
    own_cluster: ValkeyCluster, store: BlockingStore, namespace: str
) -> None:
    record = a_record(namespace, "k")
    store.publish(record, a_location())
    before = store.failovers()
    for member in own_cluster.members:
        member.kill()
    assert store.failovers() == before
    for _ in range(3):
        refused = partial(_in_vain, lambda: store.publish(record, a_location()))
        assert quickest(refused, MARGIN_SECONDS) < MARGIN_SECONDS, "a refused call does not wait"
    for member in own_cluster.members:
        member.restart()
    own_cluster.wait_until_whole()
    waited = wait_until(lambda: _published(store, namespace), 5.0)
    print(f"published after {waited:.3f} s")
    assert store.failovers() > before


def _published(store: BlockingStore, namespace: str) -> bool:
    with suppress(StoreUnavailable):
        return store.publish(a_record(namespace, "k"), a_location()) is Publication.ADDED
    return False


def test_only_the_keys_of_an_unserved_slot_fail(
    own_cluster: ValkeyCluster, store: BlockingStore, namespace: str
) -> None:
    keys = [f"k{n}" for n in range(8)]
    publishings = [Publishing(a_record(namespace, k), a_location(), 60.0) for k in keys]
    assert store.publish_many(publishings) == [Publication.ADDED] * len(keys)
    slot = slot_of(layout.record(namespace, keys[3]))
    for member in own_cluster.members:
        member.command("CLUSTER", "DELSLOTS", slot)
    with open_at(own_cluster.url) as fresh:  # its slot map never had this slot
        for one in (store, fresh, store, fresh):
            found = one.look_up([(namespace, key) for key in keys])
            assert [isinstance(each, StoreUnavailable) for each in found] == [
                key == keys[3] for key in keys
            ]
            answers = one.publish_many(publishings)
            assert answers.count(Publication.PRESENT) == len(keys) - 1
            assert answers[3] is Publication.UNREACHED
            assert one.locate(namespace, keys)[3] is None
            with pytest.raises(StoreUnavailable, match="slot"):
                one.look_up([(namespace, keys[3])])


def test_keys_of_one_place_lie_on_one_master(
    own_cluster: ValkeyCluster, patient_store: BlockingStore, namespace: str
) -> None:
    store = patient_store
    assert store.place_of(namespace, "k0") == "", "no server was queried yet"
    store.ping()
    for key in (f"k{n}" for n in range(30)):
        port = own_cluster.owner(layout.record(namespace, key)).port
        assert store.place_of(namespace, key) == f"127.0.0.1:{port}"
    victim = own_cluster.owner(layout.record(namespace, "k0"))
    place = store.place_of(namespace, "k0")
    victim.stop()
    with pytest.raises(StoreUnavailable):
        store.locate(namespace, ["k0"])
    assert store.place_of(namespace, "k0") == place, "a server in doubt keeps its keys"
    victim.go_on()


def test_a_server_that_is_not_reached_is_no_miss(
    own_cluster: ValkeyCluster, patient_store: BlockingStore, namespace: str
) -> None:
    store = patient_store
    items = [(namespace, f"k{n}") for n in range(1200)]  # more than fit in one round trip
    store.look_up(items)
    victim = own_cluster.owner(layout.record(*items[-1]))
    his = [owner is victim for owner in _owners(own_cluster, items)]
    tokens = [Releasing(*item, "t") for item in items[:64]]
    for member in (victim, own_cluster.replica_of(victim)):
        member.stop()

    # A healthy master refuses all commands for as long as it takes the other for dead, too.
    def looked_up() -> bool:
        found = [isinstance(one, StoreUnavailable) for one in store.look_up(items)]
        assert all(unreached for unreached, lost in zip(found, his, strict=True) if lost)
        return found == his

    def released() -> bool:
        found = store.release_many(tokens)
        assert all(one is None for one, lost in zip(found, his[:64], strict=True) if lost)
        return found == [None if lost else False for lost in his[:64]]

    wait_until(looked_up, 5 * PATIENT_SECONDS)
    wait_until(released, 5 * PATIENT_SECONDS)
    # A second page on its own would have no reached server.
    last = [item for item, lost in zip(items, his, strict=True) if not lost][:700]

    def only_the_last_fails() -> bool:
        found = store.look_up([*last, *last[:300], items[-1]])
        assert isinstance(found[-1], StoreUnavailable)
        return found[:-1] == [None] * 1000

    wait_until(only_the_last_fails, 5 * PATIENT_SECONDS)


def _owners(cluster: ValkeyCluster, items: Sequence[tuple[str, str]]) -> list[ServerProcess]:
    thirds = [cluster.owner(SLOTS * n // MASTERS) for n in range(MASTERS)]
    return [thirds[slot_of(layout.record(*item)) * MASTERS // SLOTS] for item in items]


def test_seeds_that_are_down_and_a_single_one(own_cluster: ValkeyCluster, namespace: str) -> None:
    keys = [f"k{n}" for n in range(32)]
    publishings = [Publishing(a_record(namespace, k), a_location(), 60.0) for k in keys]
    one_seed = f"redis-cluster://127.0.0.1:{own_cluster.members[0].port}"
    with open_at(one_seed) as store:
        assert store.publish_many(publishings) == [Publication.ADDED] * len(keys)
    frozen, killed = own_cluster.members[4], own_cluster.members[5]  # replicas
    frozen.stop()
    killed.kill()
    for first in (frozen, killed):
        seeds = f"127.0.0.1:{first.port},127.0.0.1:{own_cluster.members[0].port}"

        def locate(seeds: str = seeds) -> None:
            with open_at(f"redis-cluster://{seeds}") as store:
                assert None not in store.locate(namespace, keys)

        assert quickest(locate, LIMIT_SECONDS) < LIMIT_SECONDS

    def refused() -> None:
        named = pytest.raises(StoreUnavailable, match=str(killed.port))
        with open_at(f"redis-cluster://127.0.0.1:{killed.port}") as store, named:
            store.locate(namespace, keys)

    assert quickest(refused, MARGIN_SECONDS) < MARGIN_SECONDS
    frozen.go_on()


def test_a_first_call_takes_the_time_of_a_slow_dial(
    valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    """The slot map is loaded within the connect timeout and the call timeout, as any call."""
    seconds = 2.0
    relay = Relay()
    relay.connect_to(valkey_cluster.members[0].port)
    relay.hold_after(0)
    released = threading.Timer(1.5 * seconds, relay.let_go)
    released.start()
    try:
        with open_store(
            f"redis-cluster://127.0.0.1:{relay.port}",
            call_timeout_seconds=seconds,
            connect_timeout_seconds=20.0,
        ) as store:
            assert store.locate(namespace, ["k"]) == [None]
    finally:
        released.join()
        relay.close()


def test_a_shard_that_hung_is_called_again_without_a_loop_of_an_owner(
    own_cluster: ValkeyCluster, store: BlockingStore, namespace: str
) -> None:
    """The loop only runs during calls, here one a second: a program that asks now and then."""
    keys = [f"k{n}" for n in range(32)]
    assert store.locate(namespace, keys) == [None] * len(keys)
    server = own_cluster.owner(layout.record(namespace, keys[0]))
    frozen = [server, own_cluster.replica_of(server)]
    for member in frozen:
        member.stop()
    _in_vain(lambda: store.locate(namespace, keys[:1]))
    for member in frozen:
        member.go_on()
    own_cluster.wait_until_whole()

    def is_served() -> bool:
        with suppress(StoreUnavailable):
            return store.locate(namespace, keys[:1]) == [None]
        time.sleep(1.0)
        return False

    wait_until(is_served, 15.0, "it is called again")


def test_a_question_of_many_keys_has_one_budget(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    relay = Relay()
    relay.connect_to(valkey_server.url.removeprefix("unix://"))
    try:
        with open_store(f"redis://127.0.0.1:{relay.port}", call_timeout_seconds=1.0) as store:
            assert store.look_up([(namespace, "k")]) == [None]
            relay.hold_after(6_000)  # a reply has 4 bytes
            items = [(namespace, f"k{n}") for n in range(10_000)]
            started = time.monotonic()
            found = store.look_up(items)
            assert time.monotonic() - started < 3.0, "each page of 1,000 had a second"
            assert found[0] is None
            assert isinstance(found[-1], StoreUnavailable)
            assert len(found) == len(items)
    finally:
        relay.close()
