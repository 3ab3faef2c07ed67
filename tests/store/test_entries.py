"""Entries: bounds on number and age, and what is dropped with a connection."""

import time

from mirrors import Mirroring
from servers import command
from store import EmbeddedServer
from store.entries import ABSENT_SECONDS_MAX, Entries
from store.record import Record
from store.testing.samples import a_location, a_record
from store.tracking import TrackedConnection

MANY = 50_000
NAMESPACE = "ns"


def a_connection() -> TrackedConnection:
    """Never used for I/O: entries only distinguish connections."""
    return TrackedConnection.__new__(TrackedConnection)


def put(entries: Entries, connection: TrackedConnection, *keys: str, now: float = 1.0) -> None:
    for key in keys:
        record = Record(NAMESPACE, key, "uint8", (4,), 4, "tensor", 1.0)
        entries.put(key.encode(), NAMESPACE, key, connection, record, now)


def known(entries: Entries) -> set[str]:
    found = entries.of(NAMESPACE)
    assert len(found) == len(entries)
    assert all(found.get(key) is found[key] for key in found)
    return set(found)


def test_entries_are_dropped_with_their_connection() -> None:
    entries, connections = Entries(10 * MANY), [a_connection(), a_connection()]
    keys = [[f"{n}-{m}" for m in range(MANY)] for n in range(2)]
    started = time.thread_time()
    put(entries, connections[0], *keys[0])
    filling = time.thread_time() - started
    put(entries, connections[1], *keys[1])
    started = time.thread_time()
    entries.drop_all(connections[0])
    assert time.thread_time() - started < filling / 50
    assert known(entries) == set(keys[1])
    assert entries.of(NAMESPACE).get(keys[0][0]) is None


def test_lost_entries_are_freed_in_steps() -> None:
    entries, lost, kept = Entries(MANY), a_connection(), a_connection()
    put(entries, lost, *(f"l{n}" for n in range(10_000)))
    put(entries, kept, "old", now=1.0)
    put(entries, kept, "young", now=3.0)
    entries.drop_all(lost)
    entries.drop_all(lost)
    pieces = 0
    while entries._lost:
        assert entries.drop_older(0.0)
        pieces += 1
    assert pieces >= 10
    assert known(entries) == {"old", "young"}
    entries.drop_older(2.0)
    assert known(entries) == {"young"}
    assert not entries.drop_older(2.0)


def test_beyond_the_limit_the_least_recently_read_entries_are_evicted() -> None:
    entries, connections = Entries(10), [a_connection(), a_connection(), a_connection()]
    for n in range(15):
        put(entries, connections[n % 2], f"k{n}", now=float(n))
    assert known(entries) == {f"k{n}" for n in range(5, 15)}
    put(entries, connections[1], "k5", now=20.0)
    put(entries, connections[2], "k15", now=21.0)
    assert known(entries) == {"k5", *(f"k{n}" for n in range(7, 16))}


def test_entries_of_long_keys_count_more() -> None:
    """A client chooses the keys, also of what nobody has."""
    entries, connection = Entries(90), a_connection()
    put(entries, connection, *(f"{n:02}" + "k" * 4094 for n in range(50)))
    assert len(entries) == 10
    put(entries, connection, *(f"k{n}" for n in range(90)), now=2.0)
    assert known(entries) == {f"k{n}" for n in range(90)}
    entries.drop_older(3.0)
    put(entries, connection, *(f"{n:02}" + "k" * 4094 for n in range(10)), now=4.0)
    assert len(entries) == 10


def test_a_key_that_moved_belongs_to_the_new_connection() -> None:
    entries, before, after = Entries(10), a_connection(), a_connection()
    put(entries, before, "moved", "stays")
    put(entries, after, "moved", now=2.0)
    assert known(entries) == {"moved", "stays"}
    assert entries.of(NAMESPACE)["moved"].read_at == 2.0
    entries.drop_all(before)
    assert known(entries) == {"moved"}
    entries.drop(b"moved")
    assert known(entries) == set()


def test_an_absent_key_is_read_again_after_a_second(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    """Bounds what a lost push could hide; a present key is not read again."""
    with Mirroring(valkey_server.url) as mirroring:
        mirroring.store.publish(a_record(namespace, "there"), a_location())

        def there() -> list[bool]:
            return [one is not None for one in mirroring.ask(namespace, ["there", "absent"])]

        assert there() == [True, False]
        before = _reads(valkey_server.url)
        assert there() == [True, False]
        assert _reads(valkey_server.url) == before
        for _ in range(2):
            time.sleep(ABSENT_SECONDS_MAX + 0.1)
            for _ in range(3):
                assert there() == [True, False]
        assert _reads(valkey_server.url) == before + 2


def _reads(url: str) -> int:
    info = command(url, "INFO", "commandstats").decode()
    return int(info.partition("cmdstat_hgetall:calls=")[2].partition(",")[0])
