"""RedisStore behind real sentinels: masters and sentinels are killed, frozen and resumed."""

import statistics
import time
from collections.abc import Iterator
from functools import partial

import pytest

from clusters import Sentinels
from nodes import wait_until
from patience import quickest
from servers import ServerProcess, redis_executable, valkey_executable
from store import BlockingStore, Publication, StoreUnavailable, open_store
from store.testing.samples import BOOT, a_location, a_record
from store_load import CALL_SECONDS, LIMIT_SECONDS, MANY_KEYS, MARGIN_SECONDS, under_load

FAILOVER_SECONDS = 15.0


def open_at(url: str) -> BlockingStore:
    return open_store(url, call_timeout_seconds=CALL_SECONDS, connect_timeout_seconds=CALL_SECONDS)


@pytest.fixture
def store(own_sentinels: Sentinels) -> Iterator[BlockingStore]:
    with open_at(own_sentinels.url) as store:
        yield store


@pytest.mark.parametrize(
    ("own_sentinels", "fault"),
    [
        pytest.param(valkey_executable, "stopped", id="stopped"),
        pytest.param(redis_executable, "killed", id="killed-redis-7.0"),
    ],
    indirect=["own_sentinels"],
)
def test_the_master_fails_during_writes(
    own_sentinels: Sentinels, store: BlockingStore, namespace: str, fault: str
) -> None:
    old, new = own_sentinels.master(), own_sentinels.replica()
    frozen = own_sentinels.sentinels[0]  # it would be queried first
    with under_load(store, namespace, keys=MANY_KEYS) as load:
        load.moves(5.0)
        load.within_budget()
        before = store.failovers()
        # What is acknowledged after this is lost with the master.
        own_sentinels.ask(new, "CONFIG", "SET", "masterauth", "a wrong one")
        own_sentinels.ask(new, "CLIENT", "KILL", "TYPE", "master")
        load.write(100)
        started = time.monotonic()
        old.kill() if fault == "killed" else old.stop()
        own_sentinels.wait_for_master(new, FAILOVER_SECONDS)
        load.moves(5.0)
        print(f"written again after {time.monotonic() - started:.2f} s")
        assert store.failovers() > before
        load.within_budget()
        own_sentinels.ask(new, "CONFIG", "SET", "masterauth", "of-servers")
        if fault == "stopped":  # it resumes as a master; Sentinel demotes it within ten seconds
            old.go_on()
            wait_until(lambda: _is_replica(own_sentinels, old), FAILOVER_SECONDS)
        frozen.stop()
        time.sleep(1.0)
        load.moves(2.0)
        frozen.go_on()
        roles = [own_sentinels.is_master(server) for server in (old, new)]
        print(f"master: old {roles[0]}, new {roles[1]}; failovers seen: {store.failovers()}")
        load.settle()
        load.within_budget()
        restored = sum(writer.restored for writer in load.writers)
        print(f"{restored} lost and restored")
        assert restored > 0
    assert own_sentinels.master() is new


def _is_replica(sentinels: Sentinels, server: ServerProcess) -> bool:
    return b"role:slave" in sentinels.ask(server, "INFO", "replication")


def test_a_replica_is_not_written_to(
    own_sentinels: Sentinels, store: BlockingStore, namespace: str
) -> None:
    """A master that was demoted by hand, which no sentinel has noticed yet."""
    store.ping()
    master = own_sentinels.master()
    for sentinel in own_sentinels.sentinels:
        sentinel.stop()
    own_sentinels.ask(master, "REPLICAOF", "127.0.0.1", 1)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="READONLY"):
            store.publish(a_record(namespace, "k"), a_location())
    own_sentinels.ask(master, "REPLICAOF", "NO", "ONE")
    assert store.publish(a_record(namespace, "k"), a_location()) is Publication.ADDED
    for sentinel in own_sentinels.sentinels:
        sentinel.go_on()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_sentinels_are_needed_only_to_find_a_master(
    own_sentinels: Sentinels, store: BlockingStore, namespace: str, fault: str
) -> None:
    record = a_record(namespace, "k")
    store.publish(record, a_location())
    first, *others = own_sentinels.sentinels
    first.kill() if fault == "killed" else first.stop()

    def is_located() -> bool:
        with open_at(own_sentinels.url) as fresh:
            return _answers(fresh, namespace)

    located = partial(wait_until, is_located, 5.0, "a fresh store answers")
    assert quickest(located, LIMIT_SECONDS) < LIMIT_SECONDS, "one of three is enough"
    for sentinel in others:
        sentinel.kill() if fault == "killed" else sentinel.stop()
    assert store.publish(record, a_location(generation=2)) is Publication.ADDED
    # Also after a failure, which makes it query the sentinels.
    own_sentinels.ask(own_sentinels.servers[0], "CLIENT", "PAUSE", 700, "ALL")
    with pytest.raises(StoreUnavailable):
        store.publish(record, a_location(generation=3))
    time.sleep(0.2)
    answers = partial(_answers, store, namespace)
    assert quickest(answers, LIMIT_SECONDS) < LIMIT_SECONDS
    waited = wait_until(answers, 3.0)
    print(f"goes on after {waited:.3f} s")
    took = []
    for generation in range(4, 30):
        started = time.monotonic()
        assert store.publish(record, a_location(generation=generation)) is Publication.ADDED
        took.append(time.monotonic() - started)
    assert statistics.median(took) < MARGIN_SECONDS, (
        "each call queries dead sentinels for the master"
    )
    with open_at(own_sentinels.url) as fresh:

        def beat() -> None:
            with pytest.raises(StoreUnavailable, match="no sentinel"):
                fresh.beat("node-1", BOOT, 1)

        for _ in range(2):
            assert quickest(beat, LIMIT_SECONDS) < LIMIT_SECONDS
    for sentinel in own_sentinels.sentinels:
        if fault == "stopped":
            sentinel.go_on()


def _answers(store: BlockingStore, namespace: str) -> bool:
    try:
        return store.locate(namespace, ["k"]) != [None]
    except StoreUnavailable:
        return False
