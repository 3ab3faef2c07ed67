"""The clusters of tests/support/clusters.py themselves: whole, moved about and broken."""

import time

import pytest

from clusters import ValkeyCluster, slot_of
from patience import scaled
from resp import RespError

pytestmark = pytest.mark.processes


def test_slots_are_those_of_the_specification() -> None:
    assert slot_of("123456789") == 0x31C3
    assert slot_of("{user1000}.following") == slot_of("{user1000}.followers") == slot_of("user1000")
    assert slot_of("foo{}{bar}") != slot_of("bar")
    assert slot_of("foo{{bar}}zap") == slot_of("{bar")


def test_a_cluster_answers(valkey_cluster: ValkeyCluster) -> None:
    masters = valkey_cluster.masters()
    assert len(masters) == 3
    assert {valkey_cluster.replica_of(master) for master in masters} == set(
        valkey_cluster.members
    ) - set(masters)
    for key in ("a", "b", "c", "d"):
        owner = valkey_cluster.owner(key)
        assert owner.command("SET", key, key) == b"OK"
        for other in {*masters} - {owner}:
            with pytest.raises(RespError, match=f"MOVED {slot_of(key)} 127.0.0.1:{owner.port}"):
                other.command("GET", key)


def test_a_slot_moves_with_its_keys(valkey_cluster: ValkeyCluster) -> None:
    slot = slot_of("{tag}")
    source = valkey_cluster.owner(slot)
    target = next(master for master in valkey_cluster.masters() if master is not source)
    for n in range(250):
        source.command("SET", f"{n}{{tag}}", n, "PX", 60_000)
    asked = []

    def ask() -> None:
        with pytest.raises(RespError, match="ASK") as refusal:
            source.command("GET", "missing{tag}")
        asked.append(refusal)

    valkey_cluster.move_slot(slot, target, between=ask)
    assert len(asked) == 1
    assert valkey_cluster.owner(slot) is target
    assert target.command("GET", "249{tag}") == b"249"
    assert target.command("PTTL", "0{tag}") > 0
    with pytest.raises(RespError, match="MOVED"):
        source.command("GET", "0{tag}")
    valkey_cluster.wait_until_whole()
    valkey_cluster.move_slot(slot, source)
    valkey_cluster.wait_until_whole()


def test_a_replica_takes_over(own_cluster: ValkeyCluster) -> None:
    master = own_cluster.masters()[0]
    replica = own_cluster.replica_of(master)
    own_cluster.owner(0).command("SET", "{06S}", "kept")  # of slot 0
    with master.connect() as connection:
        assert connection("WAIT", 1, 1000) == 1
    master.kill()
    own_cluster.wait_until_whole()
    assert own_cluster.owner(0) is replica
    assert own_cluster.command("{06S}", "GET", "{06S}") == b"kept"
    master.restart()
    own_cluster.wait_until_whole()
    assert own_cluster.replica_of(replica) is master


def test_a_frozen_master_is_replaced(own_cluster: ValkeyCluster) -> None:
    master = own_cluster.owner(0)
    replica = own_cluster.replica_of(master)
    started = time.monotonic()
    master.stop()
    while b"role:master" not in replica.command("INFO", "replication"):
        time.sleep(0.01)
        assert time.monotonic() - started < scaled(10)
    master.go_on()
    own_cluster.wait_until_whole()
    assert own_cluster.owner(0) is replica


def test_a_cluster_of_redis_70(redis_cluster: ValkeyCluster) -> None:
    assert len(redis_cluster.masters()) == 3
    assert redis_cluster.command("k", "SET", "k", 1) == b"OK"
