"""The mirror on one real server that pushes, evicts, freezes and dies."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest

from mirrors import HASTY_SECONDS, Mirroring, kill_tracked
from nodes import wait_until
from server_clients import Monitor, place_of, records_read
from servers import StartServer, alive, command, flush, frozen, valkey_executable
from store import BlockingStore, EmbeddedServer, Record, StoreUnavailable, layout, open_store
from store.testing.samples import a_location, a_record

PUSHED_SECONDS = 0.5
"""A push takes a fraction of a millisecond on an idle machine."""
RECOVERED_SECONDS = 2.0
"""The longest pause before the mirror connects again is one second."""


@pytest.fixture
def store(valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
        yield store


@pytest.fixture
def mirroring(valkey_server: EmbeddedServer) -> Iterator[Mirroring]:
    with Mirroring(valkey_server.url) as mirroring:
        yield mirroring


def publish(store: BlockingStore, namespace: str, key: str, *, ttl_seconds: float = 60.0) -> None:
    store.publish(a_record(namespace, key), a_location(), ttl_seconds=ttl_seconds)


# ---- pushes


def test_an_absent_record_appears_and_is_removed_again(
    mirroring: Mirroring, store: BlockingStore, namespace: str
) -> None:
    assert mirroring.has(namespace, "k") is False
    assert mirroring.knows(namespace, "k")
    publish(store, namespace, "k")
    wait_until(lambda: not mirroring.knows(namespace, "k"), PUSHED_SECONDS, "a push")
    assert mirroring.has(namespace, "k") is True
    store.withdraw(namespace, "k", "node-1", reason="evicted")
    wait_until(lambda: not mirroring.knows(namespace, "k"), PUSHED_SECONDS, "a push")
    assert mirroring.has(namespace, "k") is False


def test_an_answer_that_is_known_costs_no_round_trip(
    mirroring: Mirroring, valkey_server: EmbeddedServer, namespace: str
) -> None:
    keys = [f"k{n}" for n in range(32)]
    mirroring.ask(namespace, keys)
    before = _commands(valkey_server.url)
    for _ in range(10):
        mirroring.ask(namespace, keys)
    assert _commands(valkey_server.url) - before < 10, "beside looking at the figure, a PING"


def test_a_renewal_in_the_first_half_of_a_records_life_is_not_pushed(
    mirroring: Mirroring, store: BlockingStore, namespace: str
) -> None:
    keys = [f"k{n}" for n in range(300)]
    for key in keys:
        publish(store, namespace, key)
    mirroring.ask(namespace, keys)
    for _ in range(3):
        for key in keys:
            publish(store, namespace, key)
        # Pushes come in order: this one comes after those of the renewals.
        assert mirroring.has(namespace, "last") is False
        publish(store, namespace, "last")
        wait_until(lambda: not mirroring.knows(namespace, "last"), PUSHED_SECONDS, "a push")
        store.withdraw(namespace, "last", "node-1", reason="evicted")
        assert all(mirroring.knows(namespace, key) for key in keys)
        assert mirroring.has(namespace, "last") is False
    publish(store, namespace, keys[0], ttl_seconds=200.0)  # less than half of it is left
    wait_until(lambda: not mirroring.knows(namespace, keys[0]), PUSHED_SECONDS, "a push")


def _commands(url: str) -> int:
    info = command(url, "INFO", "stats").decode()
    return int(info.partition("total_commands_processed:")[2].split()[0])


@pytest.mark.parametrize(
    "ends",
    [
        lambda url, name: command(url, "PEXPIRE", name, 1),
        lambda url, name: command(url, "HDEL", name, "at:node-1"),
        lambda url, name: command(url, "RENAME", name, "elsewhere"),
        lambda url, name: command(url, "SET", name, "something foreign"),
        lambda url, name: command(url, "FLUSHALL"),
        lambda url, name: command(url, "FLUSHDB", "ASYNC"),
    ],
    ids=["expiry", "field", "rename", "foreign", "flushall", "flushdb"],
)
def test_every_end_of_a_record_is_pushed(
    mirroring: Mirroring,
    store: BlockingStore,
    valkey_server: EmbeddedServer,
    namespace: str,
    ends: Callable[[str, str], bytes],
) -> None:
    publish(store, namespace, "k")
    watching = mirroring.watch(namespace, "k")
    watching.wait(there=True)
    ends(valkey_server.url, layout.record(namespace, "k"))
    watching.wait(there=False, seconds=PUSHED_SECONDS)
    assert mirroring.has(namespace, "k") is False
    watching.cancel()


def test_keys_without_a_valid_record_are_watched_too(
    mirroring: Mirroring, store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    name = layout.record(namespace, "k")
    command(valkey_server.url, "SET", name, "something foreign")
    assert mirroring.has(namespace, "k") is False
    command(valkey_server.url, "DEL", name)
    wait_until(lambda: not mirroring.knows(namespace, "k"), PUSHED_SECONDS, "a push")


def test_eviction_is_pushed(start_server: StartServer, namespace: str) -> None:
    server = start_server(policy="allkeys-lru")
    with Mirroring(server.url) as mirroring:
        keys = [f"k{n}" for n in range(200)]
        for key in keys:
            publish(mirroring.store, namespace, key)
        assert None not in mirroring.ask(namespace, keys)
        used = mirroring.store.server_info().used_memory_bytes
        command(server.url, "CONFIG", "SET", "maxmemory", used)
        for n in range(300):
            publish(mirroring.store, namespace, f"more{n}")
        there = {key for key in keys if _exists(server.url, namespace, key)}
        assert len(there) < len(keys)
        wait_until(
            lambda: all(not mirroring.knows(namespace, key) for key in set(keys) - there), 2.0
        )


def _exists(url: str, namespace: str, key: str) -> bool:
    return command(url, "EXISTS", layout.record(namespace, key)) == b":1"


# ---- watches


def test_a_watch_reports_records_and_claims(
    mirroring: Mirroring, store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    claim = layout.claim(namespace, "k")
    watching = mirroring.watch(namespace, "k")
    watching.wait(there=False)
    count = len(watching.seen)
    command(valkey_server.url, "SET", claim, "n:encoding:t", "PX", 30)
    wait_until(lambda: len(watching.seen) > count, 2.0, "notified of its expiry")
    count = len(watching.seen)
    command(valkey_server.url, "SET", claim, "n:intent:t", "PX", 60_000)
    command(valkey_server.url, "SET", claim, "n:encoding:t", "PX", 60_000)
    late = mirroring.watch(namespace, "k")
    for behind in ("the pushes", "what was read for them"):
        assert mirroring.has(namespace, behind) is False
    assert (len(watching.seen), late.seen) == (count, []), (
        "reported although the claim is still held"
    )
    command(valkey_server.url, "DEL", claim)
    wait_until(lambda: len(watching.seen) > count and late.seen, 2.0)
    late.cancel()
    publish(store, namespace, "k")
    watching.wait(there=True)
    watching.cancel()
    count = len(watching.seen)
    store.withdraw(namespace, "k", "node-1", reason="evicted")
    mirroring.wait_to_know(namespace, "k", there=False, seconds=1.0)
    assert len(watching.seen) == count, "cancelled"


def test_many_watches_on_one_key_and_one_that_ends_itself(
    mirroring: Mirroring, store: BlockingStore, namespace: str
) -> None:
    many = [mirroring.watch(namespace, "k") for _ in range(300)]
    for watching in many:
        watching.wait(there=False)
        watching.cancel_in_notify = True
    publish(store, namespace, "k")
    for watching in many:
        watching.wait(there=True)
    counts = [len(watching.seen) for watching in many]
    store.withdraw(namespace, "k", "node-1", reason="evicted")
    mirroring.wait_to_know(namespace, "k", there=False, seconds=1.0)
    assert [len(watching.seen) for watching in many] == counts, "a cancelled watch was notified"
    assert mirroring.do(lambda: len(mirroring.mirror._watches)) == 0


def test_an_exception_in_a_watcher_does_not_affect_others(
    mirroring: Mirroring, store: BlockingStore, namespace: str
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    publish(store, namespace, "k3")
    for n in range(4):
        mirroring.do(partial(mirroring.mirror.ask, namespace, [f"k{n}"], fail))
    mirroring.do(lambda: mirroring.mirror.watch(namespace, "k0", fail))
    assert [mirroring.has(namespace, f"k{n}") for n in range(5)] == [False] * 3 + [True, False]
    publish(store, namespace, "k0")
    mirroring.wait_to_know(namespace, "k0", there=True, seconds=1.0)
    assert {type(error) for error in mirroring.failures} == {ZeroDivisionError}
    mirroring.failures.clear()


# ---- size and age


def test_no_more_entries_than_allowed(valkey_server: EmbeddedServer, namespace: str) -> None:
    with Mirroring(valkey_server.url, entries_max=100) as mirroring:
        mirroring.ask(namespace, [f"k{n}" for n in range(150)])
        assert mirroring.mirror.size == 100
        assert not mirroring.knows(namespace, "k49")
        assert mirroring.knows(namespace, "k50")


def test_no_entry_is_older_than_allowed(valkey_server: EmbeddedServer, namespace: str) -> None:
    with Mirroring(valkey_server.url, age_seconds_max=0.5) as mirroring:
        for start in range(0, 6000, 1000):
            mirroring.ask(namespace, [f"k{n}" for n in range(start, start + 1000)])
        assert mirroring.mirror.size > 1000, "the test came too late to see anything"
        # One tick, of a second, after the maximum age.
        wait_until(lambda: mirroring.mirror.size == 0, 2.0, "all are forgotten")


# ---- connections end


def test_after_a_lost_connection_watched_keys_are_read_again(
    mirroring: Mirroring, store: BlockingStore, valkey_server: EmbeddedServer, namespace: str
) -> None:
    publish(store, namespace, "there")
    assert [mirroring.has(namespace, key) for key in ("there", "absent")] == [True, False]
    watching = mirroring.watch(namespace, "watched")
    watching.wait(there=False)
    for n in range(5):
        kill_tracked(valkey_server.url)
        wait_until(lambda: not mirroring.knows(namespace, "there"), 1.0, "all is forgotten")
        publish(store, namespace, f"watched-{n}")
        mirroring.wait_to_know(namespace, "there", there=True, seconds=RECOVERED_SECONDS)
    kill_tracked(valkey_server.url)
    publish(store, namespace, "watched")
    waited = watching.wait(there=True, seconds=RECOVERED_SECONDS)
    print(f"notified {waited:.3f} s after its connection ended")
    assert mirroring.has(namespace, "watched") is True
    watching.cancel()


@pytest.fixture
def server(start_server: StartServer) -> EmbeddedServer:
    return start_server()


def test_a_frozen_server(server: EmbeddedServer, namespace: str) -> None:
    call_seconds = 4.0
    with Mirroring(server.url, call_seconds=call_seconds) as mirroring:
        assert mirroring.has(namespace, "k") is False
        watching = mirroring.watch(namespace, "k")
        watching.wait(there=False)
        with frozen(server):
            assert mirroring.has(namespace, "other") is None
            assert call_seconds * 0.9 < mirroring.slowest < call_seconds * 1.9
            started = time.monotonic()
            for _ in range(100):
                assert mirroring.has(namespace, "other") is None
            assert time.monotonic() - started < 20 * call_seconds, "it tries all the time"
        waited = mirroring.wait_to_know(namespace, "other", there=False, seconds=RECOVERED_SECONDS)
        print(f"answers {waited:.3f} s after the server woke")
        publish(mirroring.store, namespace, "k")
        watching.wait(there=True, seconds=RECOVERED_SECONDS)
        watching.cancel()


def test_a_paused_server(server: EmbeddedServer, namespace: str) -> None:
    with Mirroring(server.url, call_seconds=HASTY_SECONDS) as mirroring:
        assert mirroring.has(namespace, "k") is False
        command(server.url, "CLIENT", "PAUSE", 1200, "ALL")
        assert mirroring.has(namespace, "other") is None
        mirroring.wait_to_know(namespace, "other", there=False, seconds=RECOVERED_SECONDS)


@pytest.mark.parametrize("pause_ms", [300, 1000])
def test_a_late_answer_costs_no_entries(
    server: EmbeddedServer, namespace: str, pause_ms: int
) -> None:
    keys = [f"k{n}" for n in range(300)]
    names = {layout.record(namespace, key) for key in keys}
    with (
        open_store(server.url, call_timeout_seconds=5.0) as other,
        Mirroring(server.url, call_seconds=0.25) as mirroring,
        Monitor(place_of(server.url)) as monitor,
    ):
        for key in keys:
            publish(other, namespace, key)

        def hits() -> int:
            return sum(isinstance(found, Record) for found in mirroring.ask(namespace, keys))

        wait_until(lambda: hits() == len(keys), 5.0, "all are read")
        monitor.commands()
        new = count()

        def an_answer_is_late() -> bool:
            command(server.url, "CLIENT", "PAUSE", pause_ms, "ALL")
            is_late = mirroring.has(namespace, f"new{next(new)}") is None
            assert hits() == len(keys), "during the pause"
            return is_late

        wait_until(an_answer_is_late, 5.0)
        mirroring.wait_to_know(namespace, "after", there=False, seconds=RECOVERED_SECONDS)
        assert hits() == len(keys), "after the pause"
        assert not names & set(records_read(monitor.commands()))
        other.withdraw(namespace, "k0", "node-1", reason="evicted")
        mirroring.wait_to_know(namespace, "k0", there=False, seconds=RECOVERED_SECONDS)


def test_a_killed_server_that_comes_back_empty(server: EmbeddedServer, namespace: str) -> None:
    with Mirroring(server.url) as mirroring:
        publish(mirroring.store, namespace, "k")
        watching = mirroring.watch(namespace, "k")
        watching.wait(there=True)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not alive(server.pid), 2.0)
        wait_until(lambda: mirroring.has(namespace, "k") is None, 1.0)
        again = EmbeddedServer.start(
            server.directory, timeout_seconds=10, executable=valkey_executable()
        )
        with again:
            waited = watching.wait(there=False, seconds=RECOVERED_SECONDS)
            print(f"notified {waited:.3f} s after the server came back")
            assert mirroring.has(namespace, "k") is False
            publish(mirroring.store, namespace, "k")
            watching.wait(there=True)
        watching.cancel()


def test_a_mirror_that_rested_while_its_server_was_replaced_connects_again(
    server: EmbeddedServer, namespace: str
) -> None:
    with Mirroring(server.url) as mirroring:
        assert mirroring.has(namespace, "k") is False
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not alive(server.pid), 2.0)
        with EmbeddedServer.start(
            server.directory, timeout_seconds=10, executable=valkey_executable()
        ):
            for _ in range(6):  # the store sees that another server answers; nobody asks the mirror
                mirroring.store.ping()
                time.sleep(1.0)
            assert mirroring.has(namespace, "k") is False


def test_a_server_that_refuses_tracking_is_logged(server: EmbeddedServer, namespace: str) -> None:
    command(server.url, "ACL", "SETUSER", "lb", "on", ">pw", "~lb:*", "+@all", "-client|tracking")
    with Mirroring(f"unix://lb:pw@{server.url.removeprefix('unix://')}") as mirroring:
        for _ in range(3):
            (found,) = mirroring.ask(namespace, ["k"])
            assert isinstance(found, StoreUnavailable)
            assert "CLIENT TRACKING" in str(found)
        command(server.url, "ACL", "SETUSER", "lb", "+@all")
        mirroring.wait_to_know(namespace, "k", there=False, seconds=RECOVERED_SECONDS)


# ---- size of requests


def test_a_request_larger_than_the_socket_buffer(
    valkey_server: EmbeddedServer, store: BlockingStore, namespace: str
) -> None:
    keys = [f"{n:064x}" + "x" * 60 for n in range(2000)]
    with Mirroring(valkey_server.url) as mirroring:
        publish(store, namespace, keys[1999])
        found = mirroring.ask(namespace, keys)
        assert [isinstance(one, StoreUnavailable) for one in found] == [False] * 2000
        assert [one is not None for one in found] == [False] * 1999 + [True]


# ---- nothing leaks


def test_closing_leaves_no_descriptors_and_no_threads(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def use() -> None:
        with Mirroring(valkey_server.url) as mirroring:
            mirroring.has(namespace, "k")
            mirroring.watch(namespace, "k").wait(there=False)
            kill_tracked(valkey_server.url)
            mirroring.do(lambda: mirroring.mirror.ask(namespace, ["j"], lambda _: None))

    use()
    before, threads = open_files(), threading.active_count()
    for _ in range(5):
        use()
    wait_until(lambda: open_files() <= before, 2.0, "descriptors are closed")
    assert threading.active_count() <= threads


def test_a_closed_mirror_neither_answers_nor_connects(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    with Mirroring(valkey_server.url) as mirroring:
        mirroring.do(mirroring.mirror.close)
        assert mirroring.has(namespace, "k") is None
        assert mirroring.do(lambda: mirroring.mirror._connections) == {}
