"""The cost of faults: each is done to real processes, and its effect has a stated bound."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.client.session import CONNECTIONS_MAX
from lookup_buffer.errors import (
    Closed,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    MissReason,
    NodeUnavailable,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import (
    MIB,
    ClientProcess,
    NodeProcess,
    StartNode,
    at_rest,
    handoff,
    key,
    tensor_of,
    wait_until,
    with_store,
)
from patience import quickest, scaled
from proxies import PeerProxy, behind
from servers import free_port

BIG_BYTES = 64 * MIB
BIG_ARENA_BYTES = 96 * MIB


@pytest.fixture
def proxies() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def nothing_left(node: NodeProcess) -> None:
    at_rest(node)
    stats = node.stats()
    assert (stats["items"], stats["used_bytes"]) == (0, 0)


# -- a holder dies, stops or lies in the middle of a transfer


def test_a_holder_killed_in_the_middle_of_a_transfer(
    start_node: StartNode, proxies: ExitStack
) -> None:
    proxy = proxies.enter_context(PeerProxy(hold_after_bytes=10 * MIB))
    holder = behind(proxy, start_node, capacity_bytes=BIG_ARENA_BYTES)
    reader = start_node(capacity_bytes=BIG_ARENA_BYTES)
    name = key()
    with holder.client() as writer, reader.client() as client:
        writer.insert(name, tensor_of("big", BIG_BYTES))
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        handle = client.prefetch([name])[0]
        assert proxy.held.wait(scaled(5.0))
        time.sleep(0.1)
        # In the middle: reserved, partly written, and not visible to clients.
        stats = reader.stats()
        assert stats["reserved_bytes"] == BIG_BYTES
        assert stats["pins"] == 0
        assert handle.state is PrefetchState.PENDING
        holder.kill()
        killed = time.monotonic()
        proxy.release()
        assert handle.wait(120.0) is PrefetchState.MISSING
        assert time.monotonic() - killed < scaled(2.0)
        assert handle.reason == "peer_failed"
        with pytest.raises(MissingTensor):
            client.select(name)
        nothing_left(reader)
        # The space is free again, and the key can be encoded here.
        assert client.insert(name, tensor_of("big", BIG_BYTES)) is InsertOutcome.STORED


def test_another_holder_takes_over_in_the_middle(start_node: StartNode, proxies: ExitStack) -> None:
    doors = [proxies.enter_context(PeerProxy(hold_after_bytes=MIB)) for _ in range(2)]
    holders = [behind(door, start_node) for door in doors]
    reader = start_node()
    name, tensor = key(), tensor_of("twice", 16 * MIB)
    with reader.client() as client:
        for holder in holders:
            with holder.client() as writer:
                writer.insert(name, tensor)
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        time.sleep(0.2)  # both locations are published
        handle = client.prefetch([name])[0]
        wait_until(lambda: any(door.held.is_set() for door in doors), 5.0)
        first = 0 if doors[0].held.is_set() else 1
        doors[1 - first].hold_after_bytes = None
        holders[first].kill()
        doors[first].release()
        assert handle.wait(scaled(5.0)) is PrefetchState.RESIDENT
        assert handle.source == holders[1 - first].node_id
        assert handle.order is not None
        found = client.load(handle.order)
        assert found is not None
        assert torch.equal(found, tensor)
        client.release(handle)
        assert reader.stats()["fetches_failed_peer_failed"] == 1
    at_rest(reader)


def test_a_holder_frozen_in_the_middle_of_a_transfer(
    start_node: StartNode, proxies: ExitStack
) -> None:
    """The bound: two seconds for the answer, and the bytes at 16 MB/s."""
    nbytes = 16 * MIB
    proxy = proxies.enter_context(PeerProxy(hold_after_bytes=2 * MIB))
    holder, reader = behind(proxy, start_node), start_node()
    name = key()
    with holder.client() as writer, reader.client() as client:
        writer.insert(name, tensor_of("ice", nbytes))
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        with holder.frozen():
            started = time.monotonic()
            with pytest.raises(MissingTensor, match="peer_failed"):
                client.select(name)
            assert time.monotonic() - started < scaled(2.0 + nbytes / 16e6)
            nothing_left(reader)


@pytest.mark.parametrize("place", [100_000, 2 * MIB])
def test_a_byte_flipped_in_transfer_is_detected(
    start_node: StartNode, proxies: ExitStack, place: int
) -> None:
    flipping = proxies.enter_context(PeerProxy(flip_after_bytes=place))
    faithful = proxies.enter_context(PeerProxy())
    bad, good = behind(flipping, start_node), behind(faithful, start_node)
    reader = start_node()
    name, tensor = key(), tensor_of("flip", 4 * MIB)
    with reader.client() as client, bad.client() as writer, good.client() as second:
        writer.insert(name, tensor)
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        with pytest.raises(MissingTensor, match="checksum"):
            client.select(name)
        assert reader.stats()["fetches_failed_checksum"] == 1
        assert reader.stats()["misses_checksum"] == 1
        nothing_left(reader)
        second.insert(name, tensor)
        found = client.select(name, timeout=5.0)  # whichever holder is tried first
        assert found is not None
        assert torch.equal(found, tensor)


# -- the node of this host


def test_a_restarted_node_voids_its_former_locations(start_node: StartNode) -> None:
    holder, reader = start_node(listen=f"tcp://127.0.0.1:{free_port()}"), start_node()
    name, other = key(), key()
    with holder.client() as writer, reader.client() as client:
        writer.insert(name, torch.ones(3))
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        writer.insert(other, torch.ones(3))
        assert client.select(other, timeout=5.0) is not None  # so that a link is kept
        boot = writer.boot
        holder.kill()
        holder.start()
        # The writer attaches again by itself, to the new boot.
        wait_until(lambda: writer.boot not in ("", boot), 5.0)
        wait_until(lambda: client.has_caches([name], timeout=1.0) == [False], 6.0)
        with pytest.raises(MissingTensor):
            client.select(name)
        with pytest.raises(MissingTensor):
            writer.select(name)
        assert client.select(other) is not None
        again = key()
        writer.insert(again, torch.zeros(2))
        wait_until(lambda: client.has_caches([again], timeout=1.0)[0], 3.0)
        # At the first try: a link to the node's last boot is no reason to miss.
        assert client.select(again) is not None


def test_orders_of_a_dead_node_can_still_be_loaded(start_node: StartNode) -> None:
    node, name, tensor = start_node(), key(), tensor_of("kept", MIB)
    with node.client() as client:
        client.insert(name, tensor)
        handle = client.prefetch([name], timeout=5.0)[0]
        assert handle.order is not None
        node.kill()
        wait_until(lambda: not client.attached, 2.0)
        found = client.load(handle.order)
        assert found is not None
        assert torch.equal(found, tensor)
        client.release(handle)
        client.done([handle.order])
        started = time.monotonic()
        assert client.has_caches([name]) == [False]
        assert client.prefetch([name])[0].reason == "node_down"
        with pytest.raises(NodeUnavailable):
            client.select(name, timeout=120.0)
        assert time.monotonic() - started < 60.0, "no wait for a node that is known to be dead"


def test_a_frozen_node_bounds_its_clients_and_then_serves_them(start_node: StartNode) -> None:
    node, name = start_node(), key()
    with node.client() as client:
        client.insert(name, torch.ones(3))
        files = node.open_files()
        mine = open_files()
        with node.frozen():
            for _ in range(2):
                for bound, use in (
                    (0.3, lambda: client.has_caches([name], timeout=0.05)),
                    (0.3, lambda: client.prefetch([name], timeout=0.1)),
                    (1.6, lambda: client.select(name)),
                    (0.9, lambda: client.insert(key(), torch.ones(MIB), timeout=0.5)),
                ):
                    assert quickest(lambda: unless_unavailable(use), bound) < bound  # noqa: B023
            assert open_files() <= mine + 1
        wait_until(lambda: attempt(lambda: client.select(name)), 5.0)
        for handle in client.prefetch([name], timeout=5.0):
            client.release(handle)
    at_rest(node, open_files=files)


def unless_unavailable(use: Callable[[], object]) -> None:
    with suppress(NodeUnavailable):
        use()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def attempt(use: Callable[[], object]) -> bool:
    try:
        use()
    except LookupBufferError:
        return False
    return True


# -- clients


def test_a_client_killed_with_pins_and_in_the_middle_of_inserts(start_node: StartNode) -> None:
    node = start_node(capacity_bytes=BIG_ARENA_BYTES)
    source = """
import itertools
name = TensorKey("held")
buffer.insert(name, tensor_of("held", 10 << 20))
handles = [buffer.prefetch([name], timeout=5.0)[0] for _ in range(5)]
send([handle.state.value for handle in handles])
tensor = tensor_of("much", 16 << 20)
for number in itertools.count():
    buffer.insert(TensorKey(f"n{number}"), tensor)
"""
    files = node.open_files()
    for pause in (0.0, 0.02, 0.05):
        with ClientProcess(node.config, source) as client:
            assert client.receive() == ["resident"] * 5
            assert node.stats()["pins"] >= 5
            time.sleep(pause)
            client.kill()
            at_rest(node, open_files=files, seconds=2.0)
    with node.client() as client_after:
        assert client_after.select(TensorKey("held")) is not None


def test_a_lost_main_connection_keeps_the_pins_while_the_process_lives(
    start_node: StartNode,
) -> None:
    """The process may be in the middle of a copy: its bytes stay until it has ended."""
    node = start_node(capacity_bytes=32 * MIB)
    source = """
import socket
name = TensorKey("held")
tensor = tensor_of("held", 10 << 20)
buffer.insert(name, tensor)
order = buffer.prefetch([name], timeout=5.0)[0].order
buffer._session._open_session.main_connection._socket.shutdown(socket.SHUT_RDWR)
send("broken")
receive()
send(bool(torch.equal(buffer.load(order), tensor)))
receive()
"""
    with ClientProcess(node.config, source) as client, node.client() as other:
        assert client.receive() == "broken"
        time.sleep(0.3)
        assert node.stats()["pinned_bytes"] == 10 * MIB
        for number in range(8):  # all else is evicted
            other.insert(key(), tensor_of(str(number), 5 * MIB // 8))
        for number in range(30):
            other.insert(key(), tensor_of(str(number), 512 << 10))
        client.send("load")
        assert client.receive() is True
        assert node.stats()["pinned_bytes"] == 10 * MIB
        client.kill()
        at_rest(node, seconds=2.0)


def test_after_a_lost_main_connection_no_handle_counts_as_resident(start_node: StartNode) -> None:
    """Its pins end two minutes later, and others write there."""
    node, name = start_node(), key()
    with node.client() as client:
        client.insert(name, torch.ones(3))
        held, released = client.prefetch([name, name], timeout=5.0)
        client.release(released)
        assert held.state is PrefetchState.RESIDENT
        break_session(client)
        assert held.wait(0.0) is PrefetchState.FAILED
        assert held.reason == MissReason.NODE_DOWN
        assert released.state is PrefetchState.RESIDENT, "nobody looks at it"
        (again,) = client.prefetch([name], timeout=5.0)
        assert again.state is PrefetchState.RESIDENT
        client.release(held, again)


def test_the_memory_of_a_dead_node_is_unmapped_during_the_next_session(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_node()
    with node.client() as client:
        before, boot = count_arenas(), client.boot
        node.kill()
        node.start()
        wait_until(lambda: client.boot not in ("", boot), 10.0)
        (handle,) = client.prefetch([key()], timeout=scaled(5.0))
        assert handle.state is PrefetchState.MISSING, "the session's events are heard"
        assert count_arenas() == before + 1
        monkeypatch.setattr("lookup_buffer.client.memories.LOST_SECONDS", 0.0)
        wait_until(lambda: count_arenas() == before, 5.0, "the arena of the dead node is unmapped")


def test_a_session_that_opens_after_the_close_of_its_client_keeps_no_memory(
    start_node: StartNode,
) -> None:
    """The thread that connects again may be within that when `close` no longer waits for it."""
    node = start_node()
    before, sessions = count_arenas(), node.stats()["sessions"]
    client = node.client()
    client.close()
    with pytest.raises(Closed) as raised:
        client._session._connect()
    assert raised.traceback, "its frames are alive, and have the memory"
    assert count_arenas() == before
    wait_until(lambda: node.stats()["sessions"] == sessions, 5.0, "the node has no such session")


def count_arenas() -> int:
    """Mapped by this process."""
    return Path("/proc/self/maps").read_text().count("lookup-buffer-arena")


def break_session(client: LookupBuffer) -> None:
    """Its main connection breaks; returns once it has a new session with the same node."""
    session, boot = client._session, client.boot
    before = session._open_session
    assert before is not None
    before.main_connection._socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: session._open_session not in (None, before), 5.0, "a new session")
    assert client.boot == boot


def test_no_thread_keeps_waiting_after_its_node_dies(start_node: StartNode) -> None:
    node, ended = start_node(), list[float]()
    with node.client() as client:

        def wait() -> None:
            try:
                client.select(key(), timeout=300.0)
            except LookupBufferError:
                ended.append(time.monotonic())

        threads = [threading.Thread(target=wait) for _ in range(24)]  # more than has channels
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        node.kill()
        killed = time.monotonic()
        for thread in threads:
            thread.join(scaled(5.0))
        assert len(ended) == 24
        assert max(ended) - killed < scaled(3.0)


def test_a_client_without_a_free_descriptor_connects_again_later(start_node: StartNode) -> None:
    node = start_node()
    source = """
import resource
from lookup_buffer.errors import NodeUnavailable
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
send("full")
receive()
try:
    buffer.stats()
except NodeUnavailable:
    send("not available")
resource.setrlimit(resource.RLIMIT_NOFILE, before)
receive()
send(buffer.attached)
"""
    with ClientProcess(node.config, source) as client:
        assert client.receive() == "full"
        node.kill()
        node.start()
        time.sleep(1.0)  # it tries
        client.send("go")
        assert client.receive() == "not available"
        with_store(node)
        time.sleep(3.0)
        client.send("go")
        assert client.receive() is True


def test_a_hand_off_that_waits_for_no_room_is_inserted_by_a_new_client(
    start_node: StartNode,
) -> None:
    node = start_node()
    with node.client() as client:
        assert client.insert(handoff(), torch.ones(3), timeout=0.0) is InsertOutcome.STORED
    with node.client() as client:
        outcomes = client.insert_many([(handoff(), torch.ones(3))], timeout=0.0)
        assert outcomes == [InsertOutcome.STORED]


def test_callers_beyond_the_connections_of_a_client_get_their_timeout(
    start_node: StartNode,
) -> None:
    """The node is healthy: only others wait for keys on all connections."""
    found: list[Exception] = []

    def wait() -> None:
        try:
            client.select(key(), timeout=2.0)
        except LookupBufferError as error:
            found.append(error)

    with start_node().client() as client:
        threads = [threading.Thread(target=wait) for _ in range(CONNECTIONS_MAX + 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(5.0))
    assert [type(error) for error in found] == (CONNECTIONS_MAX + 4) * [LookupTimeout]
