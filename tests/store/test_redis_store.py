"""RedisStore: the contract on real servers, and the keys that it writes there."""

import time
from collections.abc import Iterator

import pytest

from servers import command, flush, patient
from store import (
    LOCATIONS_MAX,
    NODES_MAX,
    BlockingStore,
    ClaimState,
    EmbeddedServer,
    Publication,
    Publishing,
    StoreCorrupt,
    Withdrawing,
    layout,
    open_store,
)
from store.redis_store import _ServerClock
from store.testing import BrowsingContract, CoreContract
from store.testing.claims import ask
from store.testing.samples import BOOT, a_location, a_record


class TestValkeyStore(CoreContract, BrowsingContract):
    @pytest.fixture
    def store(self, valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
        flush(valkey_server.url)
        with patient(valkey_server.url) as store:
            yield store


class TestRedis70Store(CoreContract, BrowsingContract):
    @pytest.fixture
    def store(self, redis_server: EmbeddedServer) -> Iterator[BlockingStore]:
        flush(redis_server.url)
        with patient(redis_server.url) as store:
            yield store


@pytest.fixture
def store(valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
    flush(valkey_server.url)
    with patient(valkey_server.url) as store:
        yield store


def test_a_single_server_says_so(store: BlockingStore) -> None:
    assert store.server_info().mode == "standalone"


# ---- the documented layout, as redis-cli shows it


def test_the_layout_is_as_documented(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    url = valkey_server.url
    store.publish(a_record(namespace, "k"), a_location(), ttl_seconds=1800)
    name = f"lb:rec:{namespace}:{{k}}"
    fields = ["v", "dtype", "shape", "nbytes", "kind", "created", "at:node-1"]
    values = [command(url, "HGET", name, field).decode() for field in fields]
    assert values == [
        "1", "bfloat16", "[729,1152]", "1679616", "tensor", "1763718000.125",
        f"{BOOT}:1:000000000000feed",
    ]  # fmt: skip
    assert command(url, "HLEN", name) == b":7"
    store.publish(a_record(namespace, "with space"), a_location())
    hashed = layout.record(namespace, "with space")
    assert command(url, "HGET", hashed, "key") == b"with space"
    assert command(url, "HLEN", hashed) == b":8"
    assert 1_790_000 < int(command(url, "PTTL", name)[1:]) <= 1_800_000
    for state in (ClaimState.INTENT, ClaimState.ENCODING):
        ask(store, namespace, "node-1", 9, state=state)
        claim = command(url, "GET", f"lb:claim:{namespace}:{{k}}")
        assert claim == f"node-1:1:{state.value}:token-of-node-1".encode()
    assert 8_000 < int(command(url, "PTTL", f"lb:claim:{namespace}:{{k}}")[1:]) <= 9_000
    store.beat("node-1", BOOT, 3)
    assert command(url, "HGET", "lb:nodes", "node-1") == f"{BOOT}:3".encode()
    assert command(url, "TTL", "lb:nodes") == b":-1", "beats must not be evicted"
    store.withdraw(namespace, "k", "node-1", reason="evicted")
    assert command(url, "GET", f"lb:gone:{namespace}:{{k}}") == b"evicted:node-1"
    assert 3590 < int(command(url, "TTL", f"lb:gone:{namespace}:{{k}}")[1:]) <= 3600


def test_a_record_of_four_copies_stays_compact(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    key = "f" * 64
    name = layout.record(namespace, key)
    used = []
    for n in range(LOCATIONS_MAX):
        largest = a_location(f"host-name-{n}-ab12", generation=2**53 - 1, checksum=2**64 - 1)
        store.publish(a_record(namespace, key, device="x" * 12), largest)
        assert len(largest.text) <= 64
        used.append(int(command(valkey_server.url, "MEMORY", "USAGE", name)[1:]))
    assert command(valkey_server.url, "OBJECT", "ENCODING", name) == b"listpack"
    assert used[2] < 600, used


def test_the_keys_of_one_item_share_a_slot(valkey_server: EmbeddedServer) -> None:
    for key in ("plain", "}{", "{}", "", "x" * 300, "a{b}c", "h.0"):
        names = [layout.record("ns", key), layout.claim("ns", key), layout.gone("ns", key)]
        tags = {name[name.index("{") + 1 : name.index("}")] for name in names}
        assert len(tags) == 1
        assert tags != {""}


def test_a_colliding_name_is_a_miss_and_a_conflict(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    mine = "x" * 300
    store.publish(a_record(namespace, mine), a_location())
    name = layout.record(namespace, mine)
    # What another long key with the same 128-bit hash would find.
    command(valkey_server.url, "HSET", name, "key", "y" * 300)
    assert store.locate(namespace, [mine]) == [None]
    assert store.publish(a_record(namespace, mine), a_location()) is Publication.CONFLICT
    assert not store.withdraw(namespace, mine, "node-1", reason="evicted")
    assert list(store.scan(namespace)) == []
    command(valkey_server.url, "HDEL", name, "key")
    assert store.locate(namespace, [mine]) == [None]
    assert not store.withdraw(namespace, mine, "node-1", reason="evicted")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", "[1,-2]"), ("shape", "1,2"), ("shape", "[1_0]"), ("shape", f"[{'1,' * 99}1]"),
        ("nbytes", "-1"), ("nbytes", "many"), ("nbytes", "9" * 40), ("created", "now"),
        ("kind", "pickle"), ("dtype", b"\xff"), ("v", "2"),
        ("at:node-1", "nonsense"), ("at:node-1", b"\xff:1:2"),
    ],
)  # fmt: skip
def test_a_garbled_record_is_a_miss(
    store: BlockingStore,
    valkey_server: EmbeddedServer,
    namespace: str,
    field: str,
    value: str | bytes,
) -> None:
    for key in ("good", "bad"):
        store.publish(a_record(namespace, key), a_location())
    name = layout.record(namespace, "bad")
    command(valkey_server.url, "HSET", name, field, value)
    good, bad = store.locate(namespace, ["good", "bad"])
    assert good is not None
    assert bad is None
    assert [record.key for record in store.scan(namespace)] == ["good"]


def test_a_record_with_a_field_missing_is_published_anew(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    store.publish(a_record(namespace, "k"), a_location("node-2"))
    command(valkey_server.url, "HDEL", layout.record(namespace, "k"), "dtype")
    assert store.locate(namespace, ["k"]) == [None]
    assert store.publish(a_record(namespace, "k"), a_location()) is Publication.ADDED
    (found,) = store.locate(namespace, ["k"])
    assert found == a_record(namespace, "k")._replace(locations=(a_location(),))


def test_one_garbled_copy_does_not_hide_the_others(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    store.publish(a_record(namespace, "k"), a_location())
    command(valkey_server.url, "HSET", layout.record(namespace, "k"), "at:node-2", "nonsense")
    (found,) = store.locate(namespace, ["k"])
    assert found is not None
    assert found.locations == (a_location(),)


def test_a_foreign_or_garbled_record_names_no_owner_of_a_hand_off(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    name = layout.record(namespace, "k@r")
    ours = Publishing(a_record(namespace, "k@r"), a_location("node-2"), 60.0, sole=True)
    changes = [
        (("HSET", name, "v", "2"), Publication.CONFLICT),
        (("HSET", name, "at:node-1", "nonsense"), Publication.ADDED),
        (("HDEL", name, "dtype"), Publication.ADDED),
    ]
    for change, outcome in changes:
        command(valkey_server.url, "DEL", name)
        store.publish(ours.record, a_location("node-1"))
        assert store.publish_many([ours]) == [Publication.OWNED]
        command(valkey_server.url, *change)
        assert store.publish_many([ours]) == [outcome], change


def test_a_foreign_type_is_a_miss_to_readers_and_a_conflict_to_writers(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    store.publish(a_record(namespace, "good"), a_location())
    command(valkey_server.url, "SET", layout.record(namespace, "bad"), "a string")
    good, bad = store.locate(namespace, ["good", "bad"])
    assert good is not None
    assert bad is None
    assert store.publish(a_record(namespace, "bad"), a_location()) is Publication.CONFLICT
    assert store.withdraw(namespace, "bad", "node-1", reason="evicted") is False
    assert store.locate(namespace, ["good"]) == [good], "the connection is still in step"


@pytest.mark.parametrize("value", ["a:1:token-of-old", "a:1:pondering:t", "no colon", ""])
def test_an_unreadable_claim_is_taken_over(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str, value: str
) -> None:
    command(valkey_server.url, "SET", layout.claim(namespace, "k"), value, "PX", 60_000)
    assert ask(store, namespace, "b").granted
    assert not ask(store, namespace, "a").granted


def test_a_claim_without_an_end_is_taken_over(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    command(valkey_server.url, "SET", layout.claim(namespace, "k"), "a:1:encoding:t")
    assert ask(store, namespace, "b", 9).granted
    assert int(command(valkey_server.url, "PTTL", layout.claim(namespace, "k"))[1:]) <= 9_000


@pytest.mark.parametrize(
    "garble",
    [("SET", "a string"), ("HSET", "key", "another"), ("HDEL", "dtype"), ("HSET", "v", "2")],
    ids=["foreign type", "colliding", "incomplete", "other version"],
)
def test_a_claim_is_granted_beside_an_invalid_record(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str, garble: tuple[str, ...]
) -> None:
    key = "a key whose name is a hash"
    store.publish(a_record(namespace, key), a_location())
    name = layout.record(namespace, key)
    command(valkey_server.url, garble[0], name, *garble[1:])
    answer = ask(store, namespace, "a", key=key)
    assert (answer.granted, answer.record) == (True, None)


@pytest.mark.parametrize(
    "value",
    [
        "no beat", f"{BOOT}:", ":3", f"{BOOT}:-1", "b:" + "9" * 20,
        "b" * 25 + ":1", "b" * 60 + ":1", f"{BOOT}:007", f"{BOOT}:00",
    ],
)  # fmt: skip
def test_an_unreadable_beat_occupies_no_id(
    store: BlockingStore, valkey_server: EmbeddedServer, value: str
) -> None:
    command(valkey_server.url, "HSET", "lb:nodes", "node-1", value)
    assert not store.beat("node-1", BOOT[:15], 1)
    assert store.beat("node-1", BOOT[:15], 2)


def test_a_foreign_counter_costs_no_other(
    store: BlockingStore, valkey_server: EmbeddedServer
) -> None:
    store.beat("node-1", BOOT, 1)
    command(valkey_server.url, "HSET", layout.stats("node-1"), "hits", "many")
    with pytest.raises(StoreCorrupt, match="not an integer"):
        store.add_stats("node-1", {"first": 1, "hits": 1, "last": 1})
    assert store.stats() == {"node-1": {"first": 1, "last": 1}}
    assert command(valkey_server.url, "HGET", layout.stats("node-1"), "hits") == b"many"


def test_counters_under_a_foreign_value_are_not_written(
    store: BlockingStore, valkey_server: EmbeddedServer
) -> None:
    command(valkey_server.url, "SET", layout.stats("node-1"), "text")
    with pytest.raises(StoreCorrupt, match="lb:stats:node-1 was not written by us"):
        store.add_stats("node-1", {"hits": 1})
    assert command(valkey_server.url, "TTL", layout.stats("node-1")) == b":-1"


@pytest.mark.parametrize("left", [8_000, 2 * NODES_MAX])
def test_beats_in_a_large_table_are_read_up_to_a_bound(
    store: BlockingStore, valkey_server: EmbeddedServer, left: int
) -> None:
    """A table that was larger before is read in several round trips."""
    names = [f"n{number}" for number in range(4 * NODES_MAX)]
    for start in range(0, len(names), 4096):
        page = names[start : start + 4096]
        command(valkey_server.url, "HSET", layout.NODES, *(t for n in page for t in (n, "b:1")))
    for start in range(left, len(names), 4096):
        command(valkey_server.url, "HDEL", layout.NODES, *names[start : start + 4096])
    beats = store.beats()
    assert len(beats) == min(left, NODES_MAX)
    assert set(beats) <= set(names[:left])


def test_a_batch_takes_one_round_trip_and_survives_a_script_flush(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    many = [Publishing(a_record(namespace, f"k{n}"), a_location(), 60.0) for n in range(64)]
    store.publish_many(many)
    command(valkey_server.url, "CONFIG", "RESETSTAT")
    assert store.publish_many(many) == [Publication.PRESENT] * 64
    stats = command(valkey_server.url, "INFO", "stats").decode()
    reads = int(stats.partition("total_reads_processed:")[2].split()[0])
    assert reads <= 12, "64 calls are 50 KB: a few reads of 16 KB, and not one each"
    command(valkey_server.url, "SCRIPT", "FLUSH")
    assert store.publish_many(many) == [Publication.PRESENT] * 64
    command(valkey_server.url, "SCRIPT", "FLUSH")
    withdrawings = [Withdrawing(namespace, f"k{n}", "node-1", "evicted") for n in range(64)]
    assert store.withdraw_many(withdrawings) == [True] * 64


def test_one_foreign_key_in_a_batch_does_not_block_the_others(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    command(valkey_server.url, "SET", layout.record(namespace, "bad"), "a string")
    keys = ["first", "bad", "last"]
    publishings = [Publishing(a_record(namespace, key), a_location(), 60) for key in keys]
    added, conflict = Publication.ADDED, Publication.CONFLICT
    assert store.publish_many(publishings) == [added, conflict, added]
    found = store.locate(namespace, keys)
    assert [record and record.key for record in found] == ["first", None, "last"]


def test_a_foreign_type_under_a_claims_name_blocks_no_claim(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    claim = layout.claim(namespace, "key")
    command(valkey_server.url, "HSET", claim, "by", "hand")
    assert not store.release_claim(namespace, "key", token="token-of-a")
    answer = store.publish(a_record(namespace, "key"), a_location(), claim_token="token-of-a")
    assert answer is Publication.ADDED
    assert command(valkey_server.url, "TYPE", claim) == b"+hash"
    assert ask(store, namespace, "a", key="key").granted
    assert not ask(store, namespace, "b", key="key").granted


def test_hit_counts_written_by_hand_are_read_as_numbers(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    scores = ["inf", "a", "-inf", "b", "1e300", "c", "2.5", "d"]
    command(valkey_server.url, "ZADD", layout.hits(namespace), *scores)
    assert store.hits(namespace, list("abcde")) == [2**63, 0, 2**63, 2, 0]


def test_scripts_are_loaded_again_after_a_flush(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    store.beat("node-1", BOOT, 1)
    command(valkey_server.url, "SCRIPT", "FLUSH")
    assert store.beat("node-1", BOOT, 2)


def test_the_next_beat_detects_a_server_that_lost_its_data(
    store: BlockingStore, valkey_server: EmbeddedServer
) -> None:
    store.beat("node-1", BOOT, 1)
    assert store.beat("node-1", BOOT, 2)
    flush(valkey_server.url)
    assert not store.beat("node-1", BOOT, 3)


def test_a_clock_that_goes_ahead_of_time_has_jumped() -> None:
    clock, jumped = _ServerClock(), []
    readings = ((1_000_000, 5.0), (1_000_100, 105.0), (1_000_120, 105.9), (1_000_160, 107.0))
    for server, here in (*readings, (1_000_161, 108.0), (900_000, 109.0), (1_000_000, 110.0)):
        clock.note(server, here)
        jumped.append(clock.take_jump())
    assert jumped == [False, False, False, True, False, False, True]


def test_scan_pages_through_five_thousand_records(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    for n in range(5000):
        store.publish(a_record(namespace, f"k{n}"), a_location())
    command(valkey_server.url, "CONFIG", "RESETSTAT")
    assert {record.key for record in store.scan(namespace)} == {f"k{n}" for n in range(5000)}
    calls = command(valkey_server.url, "INFO", "commandstats").decode()
    scans = int(calls.partition("cmdstat_scan:calls=")[2].partition(",")[0])
    assert 5 <= scans <= 20, "in pages, and not one call for each record"
    assert "cmdstat_keys" not in calls
    assert len(list(store.scan(limit=1500))) == 1500


def test_whoever_reads_a_scan_may_take_longer_than_a_call(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    flush(valkey_server.url)
    with open_store(
        valkey_server.url, call_timeout_seconds=0.5, connect_timeout_seconds=0.5
    ) as store:
        records = [a_record(namespace, f"k{n}") for n in range(2500)]
        for first in range(0, len(records), 500):
            page = records[first : first + 500]
            store.publish_many([Publishing(record, a_location(), 60.0) for record in page])
        found = 0
        for _ in store.scan(namespace):
            found += 1
            if found % 1000 == 0:
                time.sleep(1.2)
        assert found == len(records)


def test_locate_reads_a_list_in_one_round_trip(
    store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    store.ping()
    command(valkey_server.url, "CONFIG", "RESETSTAT")
    store.locate(namespace, [f"k{n}" for n in range(32)])
    stats = command(valkey_server.url, "INFO", "stats").decode()
    reads = int(stats.partition("total_reads_processed:")[2].split()[0])
    # One for the list; the others are the end of RESETSTAT's connection, and INFO.
    assert reads <= 3
