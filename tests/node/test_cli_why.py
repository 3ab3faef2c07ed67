"""`why`: each sentence that it can print, with its cause really done to real nodes."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from command_line import run, run_json
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import BufferFull, MissingTensor
from lookup_buffer.inspection.findings import Code, Finding
from lookup_buffer.inspection.history import OTHERS_MAX, history_of
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import MIB, NodeProcess, StartNode, handoff, key, tensor_of, wait_until
from proxies import PeerProxy, behind
from servers import command, patient
from store import BlockingStore, ClaimState, EmbeddedServer, Failure, layout

SPACE = Namespace.named("tests").fingerprint


@pytest.fixture
def store(valkey_server: EmbeddedServer) -> Iterator[BlockingStore]:
    with patient(valkey_server.url) as store:
        yield store


@pytest.fixture
def client(node_pair: tuple[NodeProcess, NodeProcess]) -> Iterator[LookupBuffer]:
    with node_pair[0].client() as client:
        yield client


def findings(store: BlockingStore, name: TensorKey, namespace: str = SPACE) -> list[Finding]:
    found = list(store.run(history_of(store.browsed, name.text, namespace)).findings())
    assert all(one.sentence and one.hint for one in found)
    assert {one.key for one in found} == {name.text}
    return found


def the_finding(
    store: BlockingStore, name: TensorKey, code: Code, *words: str, namespace: str = SPACE
) -> Finding:
    """What is found of `name`, once it is of that code: nodes write a moment later."""
    found: list[Finding] = []

    def is_found() -> bool:
        found[:] = findings(store, name, namespace)
        return [one.code for one in found] == [code]

    wait_until(is_found, 10.0, f"{code}: {found}")
    for word in words:
        assert word in found[0].sentence, found
    return found[0]


# -- it is there, or will be


def test_stored(
    store: BlockingStore, client: LookupBuffer, node_pair: tuple[NodeProcess, NodeProcess]
) -> None:
    name, none = key(), key()
    client.insert(name, torch.ones(3))
    client.insert(none, None)
    holder = node_pair[0].node_id
    words = ("stored on", holder, "which is alive", "12 B", "first published", " s ago")
    found = the_finding(store, name, Code.STORED, *words)
    assert (found.node, found.namespace) == (holder, SPACE)
    the_finding(store, none, Code.STORED, "a stored None")
    for _ in range(2):
        client.select(name)
    wait_until(lambda: "hit 2 times" in findings(store, name)[0].sentence, 10.0)


def test_an_offered_hand_off(store: BlockingStore, start_node: StartNode) -> None:
    node, name, blocking = start_node(capacity_bytes=8 * MIB), handoff(), handoff()
    with node.client() as producer, node.client() as taker:
        producer.insert(blocking, tensor_of("blocks", 4 * MIB))
        writer = threading.Thread(
            target=lambda: producer.insert(name, tensor_of("waits", MIB), timeout=30.0)
        )
        writer.start()
        the_finding(store, name, Code.OFFERED, "offered by", node.node_id, "not read")
        shown = run("show", name.text, "--store-url", node.settings.store_url).stdout
        assert "offered, no room yet" in shown
        assert "0000000000000000" not in shown
        (record,) = run_json("show", name.text, "--store-url", node.settings.store_url)["records"]
        (location,) = record["locations"]
        assert (location["checksum"], location["offered"]) == (None, True)
        listed = run("ls", "--limit", "0", "--store-url", node.settings.store_url).stdout
        assert f"~{node.node_id}" in listed
        assert taker.drop_select(blocking) is not None
        writer.join(30.0)
        the_finding(store, name, Code.STORED)
        assert taker.drop_select(name) is not None
        the_finding(store, name, Code.TAKEN, "taken from", node.node_id, "s ago")


def test_claims(
    store: BlockingStore, client: LookupBuffer, node_pair: tuple[NodeProcess, NodeProcess]
) -> None:
    name, node = key(), node_pair[0].node_id
    client.claim(name, lease_seconds=1.0, state=ClaimState.INTENT)
    assert the_finding(store, name, Code.INTENDED, "has not begun to encode it", node).node == node
    client.claim(name, lease_seconds=30.0)
    the_finding(store, name, Code.ENCODING, "being encoded by an engine of", node)

    def is_older() -> bool:
        (found,) = findings(store, name)
        return found.seconds is not None and found.seconds >= 1.5

    wait_until(is_older, 10.0)
    client.claim(name, lease_seconds=30.0)  # a sign of progress: the same claim continues
    assert is_older()
    client.release_claim(name)
    the_finding(store, name, Code.ABSENT)


# -- it went


def test_expired(store: BlockingStore, client: LookupBuffer) -> None:
    name = key()
    client.insert(name, torch.ones(3), ttl_seconds=0.5)
    found = the_finding(store, name, Code.EXPIRED, "expired on node", "s ago")
    assert found.seconds is not None
    assert found.seconds < 30


def test_evicted(store: BlockingStore, start_node: StartNode) -> None:
    node, name = start_node(capacity_bytes=4 * MIB), key()
    with node.client() as client:
        client.insert(name, tensor_of("old", MIB))
        for n in range(8):
            client.insert(key(), tensor_of(str(n), MIB))
        words = ("evicted on", node.node_id, "arena was full")
        assert the_finding(store, name, Code.EVICTED, *words).node == node.node_id


def test_retracted(store: BlockingStore, start_node: StartNode) -> None:
    node, name = start_node(capacity_bytes=4 * MIB), handoff()
    with node.client() as client:
        client.insert(handoff(), tensor_of("blocks", 2 * MIB))
        with pytest.raises(BufferFull):
            client.insert(name, tensor_of("late", MIB), timeout=0.5)
        the_finding(
            store, name, Code.RETRACTED, "only offered by", node.node_id, "stopped waiting for room"
        )


def test_stale(
    store: BlockingStore, client: LookupBuffer, node_pair: tuple[NodeProcess, NodeProcess]
) -> None:
    name, real = key(), key()
    client.insert(real, torch.ones(3))
    wait_until(lambda: store.locate(SPACE, [real.text]) != [None], 10.0)
    (record,) = store.locate(SPACE, [real.text])
    assert record is not None
    store.publish(record._replace(key=name.text, locations=()), record.locations[0])
    with node_pair[1].client() as reader:
        with pytest.raises(MissingTensor):
            reader.select(name, timeout=0.0)
        the_finding(store, name, Code.STALE, "named a copy on", "did not have it")


def test_gone_for_a_reason_of_another_version(
    store: BlockingStore, valkey_server: EmbeddedServer
) -> None:
    name = key()
    command(valkey_server.url, "SET", layout.gone(SPACE, name.text), "swallowed", "EX", "60")
    found = list(store.run(history_of(store.browsed, name.text, SPACE)).findings())
    assert [one.code for one in found] == [Code.GONE]
    assert "gone from a node: swallowed" in found[0].sentence


def test_hit_once_and_gone_without_a_reason(store: BlockingStore, start_node: StartNode) -> None:
    node, name = start_node(record_ttl_seconds=3), key()
    with node.client() as client:
        client.insert(name, torch.ones(3))
        assert client.select(name) is not None
        wait_until(lambda: store.hits(SPACE, [name.text]) == [1], 10.0)
    node.kill()
    the_finding(
        store, name, Code.ENDED, "hit once within the last week", "without a recorded reason"
    )


def test_never_published(store: BlockingStore) -> None:
    the_finding(store, key(), Code.ABSENT, "no trace of it", "over an hour", namespace="")
    the_finding(store, handoff(), Code.ABSENT, "over a minute", namespace="")


# -- states of holders


def test_states_of_holders(
    store: BlockingStore, start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    """Frozen, dead, stopped and restarted; the test does what its peers do after a minute."""
    node, leaving, name, other = start_node(), start_node(), key(), key()
    with node.client() as client, leaving.client() as second:
        client.insert(name, torch.ones(3))
        second.insert(other, torch.ones(3))
        for each in (name, other):
            the_finding(store, each, Code.STORED)
        boot = client.boot
    with node.frozen():
        found = the_finding(
            store, name, Code.HOLDER_SILENT, node.node_id, "has sent no heartbeat for"
        )
        assert found.seconds is not None
        assert 0 < found.seconds < 60
    the_finding(store, name, Code.STORED)
    node.kill()
    the_finding(store, name, Code.HOLDER_SILENT, "dead, frozen")
    store.leave(node.node_id, boot, reason="died")
    the_finding(
        store, name, Code.HOLDER_DIED, node.node_id, "other nodes evicted that node", " s ago"
    )
    command(valkey_server.url, "DEL", layout.left(node.node_id))  # a day later
    the_finding(store, name, Code.HOLDER_UNKNOWN, node.node_id, "not in the fleet")
    node.start()
    the_finding(store, name, Code.HOLDER_RESTARTED, node.node_id, "restarted since")
    (record,) = store.locate(SPACE, [name.text])
    assert record is not None
    (location,) = record.locations
    store.withdraw(SPACE, name.text, node.node_id, reason="owner_dead", exactly=location)
    the_finding(store, name, Code.OWNER_DEAD, node.node_id, "other nodes removed the copy")

    assert leaving.terminate() == 0
    the_finding(store, other, Code.HOLDER_STOPPED, leaving.node_id, "which was stopped")


# -- it could not be had


def test_a_wrong_checksum(store: BlockingStore, start_node: StartNode) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(PeerProxy(flip_after_bytes=100_000))
        bad, reader, name = behind(proxy, start_node), start_node(), key()
        writer, client = (stack.enter_context(node.client()) for node in (bad, reader))
        writer.insert(name, tensor_of("flip", MIB))
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        with pytest.raises(MissingTensor, match="checksum"):
            client.select(name)
        wait_until(lambda: len(findings(store, name)) == 2, 10.0)
        stored, failed = findings(store, name)
        assert (stored.code, failed.code) == (Code.STORED, Code.CHECKSUM_FAILED)
        for word in (bad.node_id, reader.node_id, "its checksum was wrong"):
            assert word in failed.sentence


def test_a_holder_that_does_not_answer(store: BlockingStore, start_node: StartNode) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(PeerProxy(hold_after_bytes=100_000))
        holder, reader, name = behind(proxy, start_node), start_node(), key()
        writer, client = (stack.enter_context(node.client()) for node in (holder, reader))
        writer.insert(name, tensor_of("held", MIB))
        wait_until(lambda: client.has_caches([name], timeout=1.0)[0], 5.0)
        with pytest.raises(MissingTensor, match="peer_failed"):
            client.select(name)
        wait_until(lambda: store.failure(SPACE, name.text) is not None, 10.0)
        assert store.failure(SPACE, name.text) == Failure(
            SPACE, name.text, "peer_failed", holder.node_id, reader.node_id
        )
        failed = findings(store, name)[-1]
        assert failed.code is Code.FETCH_FAILED
        for word in (holder.node_id, reader.node_id, "could not fetch"):
            assert word in failed.sentence


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("HSET", "v", "2", "dtype", "float8"), "of version 2"),
        (("HSET", "note", "by hand"), "without a version"),
        (("SET", "foreign"), "a string"),
    ],
)
def test_a_record_of_another_version(
    store: BlockingStore, valkey_server: EmbeddedServer, words: tuple[str, ...], said: str
) -> None:
    name = key()
    command(valkey_server.url, words[0], layout.record(SPACE, name.text), *words[1:])
    the_finding(store, name, Code.UNREADABLE, said, "a miss to nodes of this version")


# -- under another namespace


def test_under_another_namespace(
    store: BlockingStore, node_pair: tuple[NodeProcess, NodeProcess]
) -> None:
    name, node = key(), node_pair[0]
    spaces = [
        Namespace({"model": "org/m", "dtype": "float16", "processor": '{"size":1}'}),
        Namespace({"model": "org/m", "dtype": "bfloat16", "processor": '{"size":2}'}),
        Namespace({"model": "org/other", "dtype": "bfloat16", "processor": '{"size":3}'}),
    ]
    with ExitStack() as stack:
        _, second, third = (
            stack.enter_context(LookupBuffer(node.config, space)) for space in spaces
        )
        for buffer, space in ((second, spaces[1]), (third, spaces[2])):
            buffer.insert(name, torch.ones(3))
            the_finding(store, name, Code.STORED, namespace=space.fingerprint)
        mine, theirs = (space.fingerprint for space in spaces[:2])
        wait_until(lambda: mine in store.namespaces(), 10.0)
        words = (mine[:8], theirs[:8], "dtype (float16 here, bfloat16 there)")
        found = the_finding(store, name, Code.OTHER_NAMESPACE, *words, namespace=mine)
        assert found.other_namespace == theirs, "of the two the one that is more like it"
        assert dict(found.differs) == {
            "dtype": ("float16", "bfloat16"),
            "processor.size": ("1", "2"),
        }
        for number in range(2 * OTHERS_MAX):  # in the order of fingerprints some come before
            unlike = Namespace({"model": f"org/unlike {number}", "revision": "1", "tower": "2"})
            store.describe_namespace(unlike.fingerprint, unlike.parts)
        everywhere = findings(store, name, "")
        assert [one.code for one in everywhere[:2]] == [Code.STORED] * 2
        assert everywhere[2].namespace == mine, "of those without it the one that is most like it"
        assert [one.code for one in everywhere[2:]] == [Code.OTHER_NAMESPACE] * OTHERS_MAX


def test_an_unused_namespace(store: BlockingStore, client: LookupBuffer) -> None:
    name, nobody = key(), "f" * 64
    client.insert(name, torch.ones(3))
    the_finding(store, name, Code.STORED)
    found = findings(store, name, nobody)
    assert [one.code for one in found] == [Code.NO_NAMESPACE]
    assert f"no namespace that begins with '{nobody}'" in found[0].sentence
