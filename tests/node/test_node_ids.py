"""Two nodes with one id, and a store that loses data: real processes on a real server."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import MissingTensor
from lookup_buffer.inspection.findings import Code
from lookup_buffer.inspection.history import history_of
from lookup_buffer.namespace import Namespace
from lookup_buffer.runtime import to_json
from nodes import ROOT, NodeProcess, StartNode, key, wait_until
from patience import quickest, scaled
from servers import StartServer, command, flush, patient
from store import EmbeddedServer, layout, open_store

NAMESPACE = Namespace.named("tests").fingerprint
WATCH_SECONDS = 3.0
LONG_DEAD = 10.0
"""Seconds: more than those after which a node counts as dead."""
PAUSE_SECONDS = 2.0
"""Without a beat: after a little more the silence of others is counted from zero, see liveness."""


def run_node(node: NodeProcess, directory: Path) -> "subprocess.CompletedProcess[bytes]":
    """A second node with the settings of `node`, elsewhere, until it ends by itself."""
    settings = BufferConfig.of({**node.settings.model_dump(), "directory": directory})
    program = "from lookup_buffer.node.main import main; main()"
    directory.mkdir(mode=0o700)
    return subprocess.run(
        [sys.executable, "-c", program],
        input=to_json(settings).encode(),
        stderr=subprocess.PIPE,
        cwd=ROOT,
        timeout=scaled(20.0),
        check=False,
    )


def test_an_id_with_a_foreign_live_boot_refuses_to_start(
    start_node: StartNode, valkey_server: EmbeddedServer, tmp_path: Path
) -> None:
    node = start_node()
    name, tensor = key(), torch.randn(50)
    with node.client() as client:
        client.insert(name, tensor)
        wait_until(lambda: client.stats()["unpublished"] == 0, 5.0)
        second = run_node(node, tmp_path / "second")
        assert second.returncode == 2
        assert second.stderr.count(b"\n") == 1
        for part in (node.node_id, f"boot {client.boot}", "on host ", "another id"):
            assert part in second.stderr.decode()
        with open_store(valkey_server.url, call_timeout_seconds=2.0) as store:
            assert store.beats()[node.node_id].boot == client.boot
            (record,) = store.locate(NAMESPACE, [name.text])
        assert record is not None
        assert [at.boot for at in record.locations] == [client.boot]
        assert client.stats()["store_up"] == 1


def test_an_id_without_new_beats_is_taken_over(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    node, reader = start_node(), start_node()
    with node.client() as client:
        wait_until(lambda: client.stats()["store_up"], 5.0)
        old_boot = client.boot
    node.kill()
    node.start()
    started = time.monotonic()
    name, tensor = key(), torch.randn(50)
    with (
        node.client() as client,
        reader.client() as other,
        open_store(valkey_server.url, call_timeout_seconds=2.0) as store,
    ):
        client.insert(name, tensor)
        found = client.select(name)
        assert found is not None, "this host is served meanwhile"
        while True:
            located = store.locate(NAMESPACE, [name.text])
            if store.beats()[node.node_id].boot != old_boot:
                break
            assert located == [None], "published under a foreign id"
            assert time.monotonic() - started < scaled(WATCH_SECONDS)
            time.sleep(0.02)
        assert store.beats()[node.node_id].boot == client.boot
        found = other.select(name, timeout=5.0)
        assert found is not None
        assert torch.equal(found, tensor)


def test_a_frozen_node_that_was_replaced_ends(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    node = start_node()
    wait_until(lambda: node.stats()["store_up"], 5.0)
    with node.client() as client:
        boot = client.boot
    with node.frozen():
        second = start_node(node_id=node.node_id)
        with (
            second.client() as client,
            open_store(valkey_server.url, call_timeout_seconds=2.0) as store,
        ):
            new_boot = client.boot
            wait_until(lambda: store.beats()[node.node_id].boot == new_boot, WATCH_SECONDS + 3.0)
    wait_until(lambda: not node.alive(), 5.0)
    assert node.wait() == 2
    for part in (node.node_id, f"boot {new_boot}", f"boot {boot}", "took this id over"):
        assert part in node.log_text()
    assert second.stats()["store_up"] == 1
    with open_store(valkey_server.url, call_timeout_seconds=2.0) as store:
        assert store.beats()[node.node_id].boot == new_boot, "it did not remove the other's beat"


def test_a_snapshot_of_an_earlier_boot_ends_no_node(
    start_server: StartServer, start_node: StartNode
) -> None:
    url, name = start_server().url, key()
    node = start_node(store_url=url)
    with open_store(url, call_timeout_seconds=2.0) as store:
        wait_until(lambda: node.node_id in store.beats(), 5.0)
        earlier = store.beats()[node.node_id]
        node.kill()
        node.start()
        with node.client() as client:
            client.insert(name, torch.ones(3))
            wait_until(lambda: store.locate(NAMESPACE, [name.text]) != [None], 20.0)
            beat = f"{earlier.boot}:{earlier.sequence}"
            assert command(url, "HSET", "lb:nodes", node.node_id, beat) == b":0"
            assert command(url, "UNLINK", layout.record(NAMESPACE, name.text)) == b":1"
            wait_until(lambda: store.locate(NAMESPACE, [name.text]) != [None], 20.0)
            assert store.beats()[node.node_id].boot == client.boot
            assert client.select(name) is not None


def test_a_node_that_left_makes_room_at_once(start_node: StartNode) -> None:
    node = start_node()
    wait_until(lambda: node.stats()["store_up"], 5.0)

    def publish_after_a_restart() -> None:
        assert node.terminate() == 0
        node.start()
        with node.client() as client:
            client.insert(key(), torch.ones(3))
            wait_until(lambda: client.stats()["unpublished"] == 0, 5.0)

    assert quickest(publish_after_a_restart, WATCH_SECONDS) < WATCH_SECONDS, "it watched the id"


def test_after_a_loss_the_inventory_comes_back_at_its_pace_and_fresh_keys_at_once(
    start_server: StartServer, start_node: StartNode
) -> None:
    items, per_second = 10_000, 2000
    server = start_server()
    node, other = (start_node(store_url=server.url) for _ in range(2))
    names = [key(f"k{number}") for number in range(items)]
    with (
        node.client() as client,
        other.client() as reader,
        # It reads ten thousand records, and what does not come in time counts as absent.
        open_store(server.url, call_timeout_seconds=scaled(10.0)) as store,
    ):
        for name in names:
            client.insert(name, None)
        wait_until(lambda: client.stats()["unpublished"] == 0, 30.0)

        def published() -> int:
            found = store.locate(NAMESPACE, [name.text for name in names])
            return sum(record is not None for record in found)

        def all_keys() -> int:  # at once, also on a slow machine
            return int(command(server.url, "DBSIZE").removeprefix(b":"))

        wait_until(lambda: published() == items, 20.0)
        flush(server.url)
        wait_until(lambda: all_keys() > items / 100, 5.0)
        before, started = all_keys(), time.monotonic()
        fresh = key("fresh")
        client.insert(fresh, torch.ones(3))
        assert wait_until(lambda: reader.has_caches([fresh], timeout=0.5)[0], 2.0)
        assert all_keys() < items, "it did not come first: all the others were there already"
        wait_until(lambda: published() == items, 20.0)
        seconds = time.monotonic() - started
        assert (items - before) / seconds < 1.3 * per_second
        # No node counted as dead although no node's beat was there.
        assert reader.has_caches([names[0]], timeout=5.0) == [True]


def test_a_loss_of_beats_alone_makes_no_node_dead(
    start_server: StartServer, start_node: StartNode
) -> None:
    server = start_server()
    node, other = (start_node(store_url=server.url) for _ in range(2))
    for one in (node, other):
        wait_until(lambda one=one: one.stats()["store_up"], 5.0)  # type: ignore[misc]
    name = key()
    with node.client() as client, other.client() as reader:
        client.insert(name, torch.ones(3))
        wait_until(lambda: reader.has_caches([name], timeout=0.5)[0], 5.0)
        # The holder is late to beat again; the reader must not take that for a departure.
        with node.frozen():
            assert command(server.url, "DEL", "lb:nodes") == b":1"
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                assert reader.has_caches([name], timeout=5.0) == [True]
                time.sleep(0.01)
        wait_until(lambda: command(server.url, "HEXISTS", "lb:nodes", node.node_id) == b":1", 3.0)
        assert reader.has_caches([name], timeout=5.0) == [True]


def test_a_node_dead_for_long_is_evicted(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    """A minute is long: tests of the directory let it pass by their clock. Here it is shorter, so
    that it passes for real."""
    shorter = (
        f"from lookup_buffer.node import membership; membership.LONG_DEAD_SECONDS = {LONG_DEAD}"
    )
    node, observer, name = start_node(), start_node(prelude=shorter), key()
    for one in (node, observer):
        wait_until(lambda one=one: one.stats()["store_up"], 5.0)  # type: ignore[misc]
    with node.client() as client, observer.client() as reader:
        client.insert(name, torch.ones(3))
        wait_until(lambda: reader.has_caches([name], timeout=1.0)[0], 5.0)
    node.kill()
    with open_store(valkey_server.url, call_timeout_seconds=2.0) as store:
        beats = store.beats()
        assert node.node_id in beats
        started = counted_from = moved_at = time.monotonic()
        while node.node_id in beats:
            before = beats[observer.node_id]
            time.sleep(0.05)
            beats, now = store.beats(), time.monotonic()
            if beats[observer.node_id] != before:
                if now - moved_at > PAUSE_SECONDS:
                    counted_from = now  # as the observer does, which was delayed
                moved_at = now
            if counted_from - started > 60.0:
                pytest.skip("the machine was held up too late to wait for it once more")
            assert now - counted_from < LONG_DEAD + 10.0
    assert now - started > LONG_DEAD - 2.0
    assert observer.alive()
    with patient(valkey_server.url) as store, observer.client() as reader:

        def code() -> Code:
            (found,) = store.run(history_of(store.browsed, name.text, NAMESPACE)).findings()
            assert node.node_id in found.sentence
            return found.code

        assert code() is Code.HOLDER_DIED
        with pytest.raises(MissingTensor):  # a look-up withdraws its location
            reader.select(name)
        wait_until(lambda: code() is Code.OWNER_DEAD, 10.0)
