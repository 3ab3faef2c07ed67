"""The mirror over networks that cut, delay and drop traffic, and over TLS."""

import time
from collections.abc import Iterator

import pytest

from mirrors import HASTY_SECONDS, Mirroring
from nodes import wait_until
from proxies import Relay
from servers import TlsServer, flush
from store import BlockingStore, EmbeddedServer, StoreUnavailable, open_store
from store.testing.samples import a_location, a_record

RECOVERED_SECONDS = 2.0
NOTICED_SECONDS = 1.0 + HASTY_SECONDS + RECOVERED_SECONDS
"""The interval of probes, a probe's timeout, and the pause before the mirror connects again."""
KEYS = [f"{n:064x}" for n in range(500)]


@pytest.fixture
def store(valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
    flush(valkey_server.url)
    with open_store(valkey_server.url, call_timeout_seconds=5.0) as store:
        yield store


@pytest.fixture
def relay(valkey_server: EmbeddedServer) -> Iterator[Relay]:
    relay = Relay()
    relay.connect_to(valkey_server.url.removeprefix("unix://"))
    yield relay
    relay.close()


@pytest.fixture
def mirroring(relay: Relay) -> Iterator[Mirroring]:
    with Mirroring(f"redis://127.0.0.1:{relay.port}", call_seconds=HASTY_SECONDS) as mirroring:
        yield mirroring


def publish(store: BlockingStore, namespace: str, key: str) -> None:
    store.publish(a_record(namespace, key), a_location())


@pytest.mark.parametrize("nbytes", [0, 1, 200, 400, 1000, 2047, 3500, 5000])
def test_cut_in_the_middle_of_replies(
    mirroring: Mirroring, relay: Relay, store: BlockingStore, namespace: str, nbytes: int
) -> None:
    there = KEYS[::2]
    for key in there:
        publish(store, namespace, key)
    assert mirroring.has(namespace, KEYS[0]) is True
    relay.cut_after(nbytes)
    found = mirroring.ask(namespace, KEYS[:50])
    assert any(isinstance(one, StoreUnavailable) for one in found)
    mirroring.wait_to_know(namespace, KEYS[0], there=True, seconds=RECOVERED_SECONDS)
    found = mirroring.ask(namespace, KEYS)
    assert [one is not None for one in found] == [n % 2 == 0 for n in range(len(KEYS))]
    assert {one.key for one in found if one is not None} == set(there)  # type: ignore[union-attr]


def test_lost_pushes_are_detected(
    mirroring: Mirroring, relay: Relay, store: BlockingStore, namespace: str
) -> None:
    """The connection stays open at both ends and carries nothing, as behind a firewall. A second
    one shows that the server answers."""
    assert mirroring.has(namespace, "absent") is False
    watching = mirroring.watch(namespace, "watched")
    watching.wait(there=False)
    relay.silence()
    publish(store, namespace, "absent")
    publish(store, namespace, "watched")
    started = time.monotonic()
    wait_until(lambda: not mirroring.knows(namespace, "absent"), 1.0 + 2 * HASTY_SECONDS)
    print(f"noticed after {time.monotonic() - started:.2f} s")
    watching.wait(there=True, seconds=NOTICED_SECONDS)
    mirroring.wait_to_know(namespace, "absent", there=True, seconds=RECOVERED_SECONDS)
    watching.cancel()


def test_late_replies_are_dropped(
    mirroring: Mirroring, relay: Relay, store: BlockingStore, namespace: str
) -> None:
    assert mirroring.has(namespace, "k") is False
    relay.hold_after(3)
    assert mirroring.has(namespace, "held") is None
    publish(store, namespace, "k")
    relay.let_go()  # the held bytes arrive now, on a connection that the mirror has closed
    mirroring.wait_to_know(namespace, "held", there=False, seconds=RECOVERED_SECONDS)
    assert mirroring.has(namespace, "k") is True


@pytest.mark.parametrize(("delay_seconds", "answers"), [(0.05, True), (3.0, False)])
def test_delays(
    mirroring: Mirroring,
    relay: Relay,
    store: BlockingStore,
    namespace: str,
    delay_seconds: float,
    answers: bool,
) -> None:
    assert mirroring.has(namespace, "k") is False
    relay.delay(delay_seconds)
    for n in range(6):
        found = mirroring.has(namespace, f"k{n}")
        assert (found is False) if answers else (found is None)
        time.sleep(0.05)
    relay.delay(0.0)
    publish(store, namespace, "k")
    mirroring.wait_to_know(namespace, "k", there=True, seconds=RECOVERED_SECONDS)


def test_over_tls(tls_server: TlsServer, namespace: str) -> None:
    with (
        open_store(tls_server.url, call_timeout_seconds=5.0, connect_timeout_seconds=5.0) as store,
        Mirroring(tls_server.url) as mirroring,
    ):
        assert mirroring.has(namespace, "k") is False
        watching = mirroring.watch(namespace, "k")
        watching.wait(there=False)
        publish(store, namespace, "k")
        watching.wait(there=True, seconds=1.0)
        assert mirroring.has(namespace, "k") is True
        # More than a TLS record, in both directions, and more than the socket accepts at once.
        many = [f"{n:064x}" + "x" * 60 for n in range(2000)]
        for key in many[::10]:
            publish(store, namespace, key)
        found = mirroring.ask(namespace, many)
        assert [one is not None for one in found] == [n % 10 == 0 for n in range(2000)]
        tls_server.admin("CLIENT", "KILL", "TYPE", "normal")
        store.withdraw(namespace, "k", "node-1", reason="evicted")
        watching.wait(there=False, seconds=RECOVERED_SECONDS)
        watching.cancel()
