"""A tracked connection whose server hangs: one request times out, later ones fail at once."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from mirrors import HASTY_SECONDS, Mirroring, kill_tracked
from nodes import wait_until
from proxies import Relay
from servers import StartServer, command, frozen
from store import EmbeddedServer, tracking
from store.mirror import RECHECK_SECONDS
from store.testing.samples import a_location, a_record

CALL_SECONDS = 5.0
HANG_SECONDS = 6.0
"""Long enough for many retries: the pauses between them are 0.1 to 1 s."""
RECOVERED_SECONDS = 2.0


@pytest.fixture
def relay(valkey_server: EmbeddedServer) -> Iterator[Relay]:
    relay = Relay()
    relay.connect_to(valkey_server.url.removeprefix("unix://"))
    yield relay
    relay.close()


def test_a_server_that_hangs_costs_one_timeout(start_server: StartServer, namespace: str) -> None:
    server = start_server()
    with Mirroring(server.url, call_seconds=CALL_SECONDS) as mirroring:
        watching = mirroring.watch(namespace, "k")
        watching.wait(there=False)
        with frozen(server):
            assert mirroring.has(namespace, "other") is None
            mirroring.slowest = 0.0
            until = time.monotonic() + HANG_SECONDS
            while time.monotonic() < until:
                assert mirroring.has(namespace, "other") is None
                time.sleep(0.01)
            assert mirroring.slowest < 0.9 * CALL_SECONDS, "another caller waited for it"
        mirroring.wait_to_know(namespace, "other", there=False, seconds=RECOVERED_SECONDS)
        mirroring.store.publish(a_record(namespace, "k"), a_location())
        watching.wait(there=True, seconds=RECOVERED_SECONDS)
        watching.cancel()


def test_a_late_answer_ends_the_pause(
    monkeypatch: pytest.MonkeyPatch, start_server: StartServer, namespace: str
) -> None:
    """The pause is for dials that failed; the first connection answers again."""
    monkeypatch.setattr(tracking, "PAUSE_SECONDS_MIN", 3600.0)
    monkeypatch.setattr(tracking, "PAUSE_SECONDS_MAX", 3600.0)
    server = start_server()
    with Mirroring(server.url, call_seconds=HASTY_SECONDS) as mirroring:
        assert mirroring.has(namespace, "k") is False
        with frozen(server):
            assert mirroring.has(namespace, "other") is None
            time.sleep(2 * HASTY_SECONDS)  # a dial fails
        mirroring.wait_to_know(namespace, "a third", there=False, seconds=10.0)


def test_a_cut_connection_is_retried_after_the_pause(
    valkey_server: EmbeddedServer, namespace: str
) -> None:
    with Mirroring(valkey_server.url) as mirroring:
        for _ in range(3):
            assert mirroring.has(namespace, "k") is False
            kill_tracked(valkey_server.url)
            wait_until(lambda: not mirroring.knows(namespace, "k"), 1.0, "it is noticed")
            time.sleep(tracking.PAUSE_SECONDS_MIN + 0.05)


def test_garbled_pushes_end_the_connection_and_are_reported_once(
    relay: Relay, namespace: str
) -> None:
    """Who is between a node and its server could fill the disk with what a node logs of each."""
    push = b">2\r\n$10\r\ninvalidate\r\n*1\r\n*0\r\n"
    with Mirroring(f"redis://127.0.0.1:{relay.port}") as mirroring:
        for _ in range(3):
            wait_until(lambda: mirroring.has(namespace, "k") is False, 5.0)
            for end in list(relay._sockets):
                with suppress(OSError):
                    if end.family == socket.AF_INET:
                        end.sendall(1000 * push)
            wait_until(lambda: not mirroring.knows(namespace, "k"), 5.0, "it is noticed")
        wait_until(lambda: mirroring.has(namespace, "k") is False, 5.0, "it is used again")
        (failure,) = mirroring.failures
        mirroring.failures.clear()
    assert "unhashable" in str(failure)


def test_it_reconnects_in_the_background_one_attempt_at_a_time(
    valkey_server: EmbeddedServer, relay: Relay, namespace: str
) -> None:
    with Mirroring(f"redis://127.0.0.1:{relay.port}", call_seconds=HASTY_SECONDS) as mirroring:
        assert mirroring.has(namespace, "k") is False
        relay.hold_after(0)
        assert mirroring.has(namespace, "other") is None
        before, most = relay.connections, 0
        until = time.monotonic() + HANG_SECONDS
        while time.monotonic() < until:
            most = max(most, tracked_open(valkey_server.url))
        assert relay.connections - before >= 3
        assert most <= 2, "the first connection, and one attempt"
        relay.let_go()
        time.sleep(tracking.PAUSE_SECONDS_MAX + HASTY_SECONDS)
        assert mirroring.has(namespace, "other") is False, "the question found it well"


def test_the_connection_that_notices_another_server_stays(
    valkey_server: EmbeddedServer, relay: Relay, start_server: StartServer, namespace: str
) -> None:
    successor = start_server()
    with Mirroring(f"redis://127.0.0.1:{relay.port}") as mirroring:
        assert mirroring.has(namespace, "k") is False
        relay.connect_to(successor.url.removeprefix("unix://"))
        kill_tracked(valkey_server.url)
        mirroring.wait_to_know(namespace, "other", there=False, seconds=RECOVERED_SECONDS)
        until = time.monotonic() + 2 * RECHECK_SECONDS
        while time.monotonic() < until:
            assert mirroring.ask(namespace, [f"{time.monotonic()}"]) == [None]
            time.sleep(0.01)


def tracked_open(url: str) -> int:
    return command(url, "CLIENT", "LIST").decode().count(" resp=3")


@pytest.mark.parametrize("watched", [False, True])
def test_an_unused_server_is_not_reconnected(
    monkeypatch: pytest.MonkeyPatch, relay: Relay, namespace: str, watched: bool
) -> None:
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.5)
    with Mirroring(f"redis://127.0.0.1:{relay.port}", call_seconds=HASTY_SECONDS) as mirroring:
        watching = mirroring.watch(namespace, "k")
        watching.wait(there=False)
        if not watched:
            watching.cancel()
        relay.hold_after(0)
        assert mirroring.has(namespace, "other") is None
        time.sleep(0.5 + tracking.PAUSE_SECONDS_MAX + 2 * HASTY_SECONDS)
        before = relay.connections
        time.sleep(2 * (tracking.PAUSE_SECONDS_MAX + HASTY_SECONDS))
        assert (relay.connections > before) is watched
        relay.cut()
        relay.let_go()
        mirroring.wait_to_know(namespace, "other", there=False, seconds=RECOVERED_SECONDS)
