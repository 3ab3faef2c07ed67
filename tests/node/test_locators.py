"""Both locators, with the mirror and without, on real nodes: same answers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from lookup_buffer.errors import MissingTensor
from lookup_buffer.namespace import Namespace
from lookup_buffer.times import BEAT_SECONDS, LOOK_UP_SECONDS_MIN
from nodes import StartNode, key, wait_until
from patience import scaled
from proxies import Relay
from servers import StartServer, command, flush
from store import EmbeddedServer, open_store

NAMESPACE = Namespace.named("tests").fingerprint
SOON_SECONDS = 2.0
DEATH_SECONDS = 6.0
"""A death is noticed within six, see lookup_buffer.node.membership."""


class Pair:
    """Two nodes, `here` with the locator under test."""

    def __init__(self, server: EmbeddedServer, start_node: StartNode, *, mirror: bool) -> None:
        self.server = server
        self.mirror = mirror
        self.node_here = start_node(store_url=server.url, mirror=mirror)
        self.node_there = start_node(store_url=server.url)
        self.here = self.node_here.client()
        self.there = self.node_there.client()

    def has(self, *names: object) -> list[bool]:
        return self.here.has_caches(list(names), timeout=1.0)  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["mirror", "asking"])
def pair(
    start_server: StartServer, start_node: StartNode, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    pair = Pair(start_server(), start_node, mirror=request.param)
    yield pair
    pair.here.close()
    pair.there.close()


def soon(condition: Callable[[], object], seconds: float = SOON_SECONDS) -> float:
    return wait_until(condition, seconds)


def test_an_absent_key_is_found_as_soon_as_it_is_published(pair: Pair) -> None:
    names = [key() for _ in range(8)]
    assert pair.has(*names) == [False] * 8
    assert pair.has(*names) == [False] * 8
    pair.there.insert(names[0], torch.arange(3))
    soon(lambda: pair.has(*names) == [True] + [False] * 7)


@pytest.mark.parametrize("mirror", [True, False])
def test_a_look_up_waits_for_a_store_that_is_far_away(
    start_server: StartServer, start_node: StartNode, mirror: bool
) -> None:
    server = start_server()
    with closing(Relay()) as relay:
        relay.connect_to(str(server.directory / "server.sock"))
        far = start_node(store_url=f"redis://127.0.0.1:{relay.port}", mirror=mirror)
        near = start_node(store_url=server.url)
        wait_until(lambda: far.stats()["nodes_alive"] == 2, 10.0, "they know each other")
        with far.client() as here, near.client() as there:
            relay.delay(2 * LOOK_UP_SECONDS_MIN)
            time.sleep(2 * BEAT_SECONDS + 1.0)  # the node measures it
            names = [key() for _ in range(8)]
            for name in names:
                there.insert(name, torch.ones(3))
            wait_until(lambda: there.stats()["unpublished"] == 0, 5.0, "they are published")
            assert here.has_caches(names, timeout=LOOK_UP_SECONDS_MIN) == [False] * 8
            other = key()
            there.insert(other, torch.ones(3))
            wait_until(lambda: there.stats()["unpublished"] == 0, 5.0, "it is published")
            assert here.has_caches([other]) == [True]


def test_a_withdrawn_key_is_gone(pair: Pair) -> None:
    name = key()
    pair.there.insert(name, torch.arange(3), ttl_seconds=2.0)
    soon(lambda: pair.has(name) == [True])
    soon(lambda: pair.has(name) == [False], 4.0)


def test_a_publication_of_another_node_ends_a_waiting_select(pair: Pair) -> None:
    for _ in range(5):
        name, tensor = key(), torch.randn(100)
        found: list[torch.Tensor | None] = []
        waiter = threading.Thread(
            target=lambda name=name, found=found: found.append(
                pair.here.select(name, timeout=120.0)
            )
        )
        waiter.start()
        time.sleep(0.1)
        pair.there.insert(name, tensor)
        waiter.join(scaled(SOON_SECONDS))
        assert not waiter.is_alive()
        assert found[0] is not None
        assert torch.equal(found[0], tensor)


def test_all_waiters_for_one_key_get_it(pair: Pair) -> None:
    name, tensor = key(), torch.randn(100)
    found: list[torch.Tensor | None] = []
    clients = [pair.node_here.client() for _ in range(10)]
    waiters = [
        threading.Thread(target=lambda c=c: found.append(c.select(name, timeout=120.0)))
        for c in clients
    ]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.2)
    pair.there.insert(name, tensor)
    for waiter in waiters:
        waiter.join(scaled(SOON_SECONDS))
    for client in clients:
        client.close()
    assert len(found) == 10
    assert all(one is not None and torch.equal(one, tensor) for one in found)


def test_the_death_of_the_holder_is_detected(pair: Pair) -> None:
    name = key()
    pair.there.insert(name, torch.arange(3))
    soon(lambda: pair.has(name) == [True])
    pair.node_there.kill()
    assert soon(lambda: pair.has(name) == [False], DEATH_SECONDS) > 1.0
    for _ in range(20):
        time.sleep(0.05)
        assert pair.has(name) == [False], "once it was noticed it stays dead"


def test_a_node_that_leaves_is_gone_at_once(pair: Pair) -> None:
    name = key()
    pair.there.insert(name, torch.arange(3))
    soon(lambda: pair.has(name) == [True])
    pair.there.close()
    assert pair.node_there.terminate() == 0
    soon(lambda: pair.has(name) == [False], 3.0)


def test_a_store_that_lost_everything_is_filled_again(pair: Pair) -> None:
    names = [key() for _ in range(20)]
    for name in names:
        pair.there.insert(name, torch.arange(3))
    soon(lambda: pair.has(*names) == [True] * 20)
    flush(pair.server.url)
    with open_store(pair.server.url, call_timeout_seconds=1.0) as store:
        texts = [name.text for name in names]
        soon(lambda: all(store.locate(NAMESPACE, texts)), 5.0)
    soon(lambda: pair.has(*names) == [True] * 20)


def test_cut_connections_come_back(pair: Pair) -> None:
    before, after = key(), key()
    pair.there.insert(before, torch.arange(3))
    soon(lambda: pair.has(before, after) == [True, False])
    command(pair.server.url, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    pair.there.insert(after, torch.arange(3))
    soon(lambda: pair.has(before, after) == [True, True], 4.0)


def test_a_record_of_a_missing_copy_is_repaired_by_its_holder(pair: Pair) -> None:
    name, anchor = key(), key()
    pair.there.insert(anchor, torch.arange(3))
    soon(lambda: pair.has(anchor) == [True])
    with open_store(pair.server.url, call_timeout_seconds=1.0) as store:
        (record,) = store.locate(NAMESPACE, [anchor.text])
        assert record is not None
        store.publish(record._replace(key=name.text, locations=()), record.locations[0])
        soon(lambda: pair.has(name) == [True])
        with pytest.raises(MissingTensor):
            pair.here.select(name)
        soon(lambda: store.locate(NAMESPACE, [name.text]) == [None])
        assert store.gone(NAMESPACE, name.text) == "stale"
    soon(lambda: pair.has(name) == [False])


def test_a_look_up_in_the_mirror_needs_no_round_trip(
    start_server: StartServer, start_node: StartNode
) -> None:
    pair = Pair(start_server(), start_node, mirror=True)
    names = [key() for _ in range(4)]
    pair.there.insert(names[0], torch.arange(3))
    soon(lambda: pair.has(*names) == [True, False, False, False])
    before = _reads(pair.server)
    for _ in range(50):
        assert pair.has(*names) == [True, False, False, False]
    # Beats and the directory still read one or two hashes per second.
    assert _reads(pair.server) - before < 20
    pair.here.close()
    pair.there.close()


def _reads(server: EmbeddedServer) -> int:
    stats = command(server.url, "INFO", "commandstats").decode()
    (line,) = [line for line in stats.splitlines() if line.startswith("cmdstat_hgetall:")]
    return int(line.partition("calls=")[2].partition(",")[0])
