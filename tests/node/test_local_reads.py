"""Reads by the local index: right in every race, counted, and possible without the node.

A stopped node does not answer: what a client still gets meanwhile came by the local index.
"""

import threading
import time

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import CodecError, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import InsertOutcome
from lookup_buffer.shm.index import IS_ORDERED
from nodes import MIB, ClientProcess, StartNode, at_rest, key, wait_until
from patience import scaled
from store import EmbeddedServer, open_store

pytestmark = pytest.mark.skipif(not IS_ORDERED, reason="the board stays empty on this machine")
NAMESPACE = Namespace.named("tests").fingerprint

VALUES: list[torch.Tensor | None] = [
    None,
    torch.tensor(7.5),
    torch.empty(0, 3),
    torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4),
    torch.ones((1,) * 8, dtype=torch.complex64),
    torch.randint(0, 256, (MIB,), dtype=torch.uint8),
]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def test_a_stopped_node_delays_no_local_read(start_node: StartNode) -> None:
    node = start_node()
    keys = [key() for _ in VALUES]
    deep, passing, absent = key(), key(), key()
    with node.client() as client:
        for name, value in zip(keys, VALUES, strict=True):
            assert client.insert(name, value) is InsertOutcome.STORED
        client.insert(deep, torch.ones((1,) * 9))
        client.insert(passing, torch.ones(3), ttl_seconds=60)
        with node.frozen():
            started = time.monotonic()
            for name, value in zip(keys, VALUES, strict=True):
                assert same(client.select(name), value)
                if value is not None:
                    out = torch.zeros(value.shape, dtype=value.dtype)
                    assert client.select(name, out=out) is out
                    assert same(out, value)
                    with pytest.raises(CodecError):
                        client.select(name, out=torch.zeros(5))
            assert client.has_caches(keys) == [True] * len(keys)
            assert time.monotonic() - started < scaled(0.5)
            for left_off in (deep, passing, absent):
                assert client.has_caches([left_off]) == [False], "only the node knows"
            with pytest.raises(NodeUnavailable):
                client.select(passing)
        wait_until(lambda: client.has_caches([deep, passing]) == [True, True], 5.0)
        for name in (deep, passing):
            assert client.select(name) is not None


def test_with_a_timeout_of_zero_only_the_local_index_is_read(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, absent = key(), key()
    with start_node().client() as client:
        client.insert(here, torch.ones(2))
        asked = []
        monkeypatch.setattr(client._session, "call", lambda *given: asked.append(given))
        assert client.has_caches([absent, here], timeout=0.0) == [False, True]
        assert asked == []


def test_a_busy_reader_of_a_stopped_node_keeps_its_session(start_node: StartNode) -> None:
    """All its reads are reported later, instead of filling the socket until it breaks."""
    node = start_node()
    keys = [TensorKey(f"{number:01400}") for number in range(100)]
    with node.client() as client:
        for name in keys:
            client.insert(name, torch.ones(2))
        held = client.prefetch(keys[:1], timeout=5.0)
        reads = 0
        before = node.stats().get("hits_local", 0)
        with node.frozen():
            until = time.monotonic() + 1.5  # each tick reports 140 kB of keys
            while time.monotonic() < until:
                for name in keys:
                    client.select(name)
                    reads += 1
        assert client.attached
        wait_until(lambda: node.stats()["hits_local"] >= before + reads, 5.0)
        assert node.stats()["hits_local"] == before + reads
        assert node.stats()["pins"] == 1, "a session that was lost would have lost its pins"
        client.release(held[0])
    at_rest(node)


def test_reads_are_hits_of_the_node_and_of_the_key(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    first, second = start_node(), start_node()
    name = key()
    with first.client() as client, second.client() as elsewhere:
        client.insert(name, torch.ones(3))
        for _ in range(20):
            client.select(name)
        wait_until(lambda: client.stats().get("hits_local") == 20, 2.0)
        elsewhere.select(name, timeout=5.0)  # brings it there, by the node: the first hit
        for _ in range(10):
            elsewhere.select(name)
        wait_until(lambda: elsewhere.stats().get("hits_remote") == 11, 2.0)
    store = open_store(valkey_server.url)
    try:
        wait_until(lambda: store.hits(NAMESPACE, [name.text]) == [31], 10.0)
    finally:
        store.close()


def test_the_last_reads_before_a_close_are_reported(start_node: StartNode) -> None:
    node, name = start_node(), key()
    with node.client() as client:
        client.insert(name, torch.ones(3))
    for _ in range(5):
        with node.client() as client:
            client.select(name)
    wait_until(lambda: node.stats().get("hits_local") == 5, 2.0)


def test_an_item_being_read_is_not_evicted(start_node: StartNode) -> None:
    node, read, unread = start_node(capacity_bytes=4 * MIB), key(), key()
    large = torch.zeros(MIB // 8, dtype=torch.uint8)
    with node.client() as client:
        for name in (read, unread):
            client.insert(name, large)
        started = time.monotonic()
        while time.monotonic() - started < 1.5 or client.stats()["evicted"] <= 64:
            # Many ticks, and many times the arena.
            assert time.monotonic() - started < scaled(60.0)
            assert client.select(read) is not None
            client.insert(key(), large)
            time.sleep(0.01)  # else the whole arena is overwritten between two ticks
        with pytest.raises(MissingTensor):
            client.select(unread)


def test_a_restarted_node_has_a_new_local_index(start_node: StartNode) -> None:
    node, name, other = start_node(), key(), key()
    with node.client() as client:
        client.insert(name, torch.ones(3))
        client.insert(other, torch.ones(3))
        boot = client.boot
        node.kill()
        wait_until(lambda: not client.attached, 2.0)
        with pytest.raises(NodeUnavailable):
            client.select(name)
        assert client.has_caches([name]) == [False]
        node.start()
        wait_until(lambda: client.attached, 5.0)
        assert client.boot != boot
        with pytest.raises(MissingTensor):
            client.select(other)
        client.insert(name, torch.full((4,), 2.0))
        assert same(client.select(name), torch.full((4,), 2.0))


def test_a_node_killed_under_busy_readers_is_attached_to_again(start_node: StartNode) -> None:
    """Detected first by the listening thread, the reporting thread, or a reader."""
    node, name = start_node(), key()
    stop = threading.Event()

    def read(client: LookupBuffer) -> None:
        while not stop.is_set():
            try:
                client.select(name)
            except (MissingTensor, NodeUnavailable):
                time.sleep(0.001)

    with node.client() as client:
        threads = [threading.Thread(target=read, args=(client,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                client.insert(name, torch.ones(3))
                time.sleep(0.15)
                node.kill()
                node.start()
                wait_until(lambda: client.attached and client.stats(), 5.0)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


CLOSED_WHILE_IT_READS = """
import threading, time
from lookup_buffer.errors import Closed
where = TensorKey("large")
value = tensor_of("large", 48 * MIB)
buffer.insert(where, value)
ended = []
def read():
    out = torch.empty(len(value), 2, dtype=torch.uint8)[:, 0]  # slow to fill
    try:
        while True:
            buffer.select(where, out=out)
    except Closed:
        ended.append(torch.equal(out, value))
threads = [threading.Thread(target=read) for _ in range(2)]
for thread in threads:
    thread.start()
time.sleep(0.2)
buffer.close()
for thread in threads:
    thread.join(10.0)
send(ended)
"""


def test_close_unmaps_nothing_under_a_reader(start_node: StartNode) -> None:
    """It would be killed by SIGSEGV."""
    node = start_node(capacity_bytes=160 * MIB)
    for _ in range(3):
        with ClientProcess(node.config, CLOSED_WHILE_IT_READS) as client:
            assert client.receive() == [True, True]
            assert client.wait() == 0


# A tensor follows from its key's number, its size too, so that neighbours in the arena move.
TENSORS = """
import random, time
from lookup_buffer.errors import BufferFull
KEYS = 40
BASE = torch.arange(130_000)
def tensor(number):
    return BASE[: 1000 + number * 7919 % 129_000] + number * 1_000_003
expected = [tensor(number) for number in range(KEYS)]
def name(number):
    return TensorKey(f"stress{number}")
"""
WRITER = (
    TENSORS
    + """
until, stored = time.monotonic() + receive(), 0
while time.monotonic() < until:
    number = random.randrange(KEYS)
    try:
        stored += buffer.insert(name(number), expected[number]).value == "stored"
    except BufferFull:
        pass
send(stored)
"""
)
READER = (
    TENSORS
    + """
apart = [torch.empty(len(value), 3, dtype=value.dtype)[:, 1] for value in expected]
outs = [[None, torch.empty_like(value), slow] for value, slow in zip(expected, apart)]
until, found, missed, wrong = time.monotonic() + receive(), 0, 0, []
while time.monotonic() < until:
    number = random.randrange(KEYS)
    try:
        value = buffer.select(name(number), out=random.choice(outs[number]))
    except MissingTensor:
        missed += 1
        continue
    except BufferFull:
        continue
    if torch.equal(value, expected[number]):
        found += 1
    else:
        wrong.append(number)
send([found, missed, wrong[:5], len(wrong)])
"""
)
STRESS_SECONDS = 5.0


def test_readers_of_an_arena_that_is_always_written_anew(start_node: StartNode) -> None:
    """Two processes insert without pause, which evicts all the time; three read. What they get is
    what belongs to the key, always; a miss is allowed.

    It can fail: without the second read of the index, or if entries are removed only after their
    bytes were reused, readers get wrong bytes within this time.
    """
    node = start_node(capacity_bytes=10 * MIB)  # half of it all
    sources = [WRITER] * 2 + [READER] * 3
    clients = [ClientProcess(node.config, source) for source in sources]
    try:
        for client in clients:
            client.send(STRESS_SECONDS)
        stored = sum(client.receive() for client in clients[:2])
        answers = [client.receive() for client in clients[2:]]
        assert [client.wait() for client in clients] == [0] * 5
    finally:
        for client in clients:
            with client:
                pass
    for found, missed, wrong, count in answers:
        assert not wrong, f"{count} wrong of {found + count}: keys {wrong}"
        assert found > 20
        assert missed > 20
    assert stored > 100
    at_rest(node)
    # An abandoned read is no hit; a read is not counted if its item is evicted before the report.
    assert 0 < node.stats()["hits_local"] <= sum(found for found, *_ in answers)
