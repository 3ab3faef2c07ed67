"""`insert_many` and `select_many`: as many single calls, in few round trips."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lookup_buffer import LookupBuffer
from lookup_buffer.client.inserts import STAGED_BYTES, STAGED_MAX
from lookup_buffer.client.session import NodeConnection
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    LookupBufferError,
    MissReason,
    TensorTooLarge,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import Insert, InsertOutcome, Request
from nodes import NodeProcess, StartNode, handoff, key, tensor_of, wait_until
from patience import scaled
from servers import StartServer, frozen

Pair = tuple[NodeProcess, NodeProcess]
MIB = 1 << 20


@pytest.fixture(scope="module")
def node_pair(module_nodes: StartNode) -> Pair:
    return module_nodes(capacity_bytes=512 * MIB), module_nodes(capacity_bytes=512 * MIB)


def same(found: torch.Tensor | MissReason | None, name: TensorKey, nbytes: int) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, tensor_of(str(name), nbytes))


def insert(buffer: LookupBuffer, names: Sequence[TensorKey], nbytes: int) -> None:
    outcomes = buffer.insert_many((name, tensor_of(str(name), nbytes)) for name in names)
    assert outcomes == [InsertOutcome.STORED] * len(names)


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(0, 1), (1, 1), (7, 0), (300, 1), (2 * STAGED_MAX + 1, 100), (40, MIB), (3, STAGED_BYTES + 1)],
)
def test_many_are_inserted_and_selected_here_and_elsewhere(
    node_pair: Pair, count: int, nbytes: int
) -> None:
    names = [key() for _ in range(count)]
    with node_pair[0].client() as here, node_pair[1].client() as there:
        insert(here, names, nbytes)
        for buffer in (here, there):
            wait_until(lambda: all(buffer.has_caches(names, timeout=1.0)), 10.0)  # noqa: B023
            found = buffer.select_many(names, timeout=5.0)
            assert all(map(same, found, names, [nbytes] * count))
        for buffer in (here, there):
            wait_until(lambda: buffer.stats()["pins"] == 0, 5.0)  # noqa: B023


def test_results_come_in_the_order_of_the_items(node_pair: Pair) -> None:
    there, nothing, absent, small, large = (key() for _ in range(5))
    handoff = TensorKey(key().mm_hash, request_id="1")
    with node_pair[0].client() as here, node_pair[1].client() as other:
        here.insert(there, torch.ones(3))
        items: list[tuple[TensorKey, torch.Tensor | None]] = [
            (there, torch.zeros(3)),
            (nothing, None),
            (small, torch.arange(3)),
            (handoff, torch.arange(4)),
            (small, torch.zeros(3)),
            (large, torch.zeros(1 << 30, dtype=torch.uint8)),
        ]
        outcomes = here.insert_many(items, timeout=20.0)
        stored, exists = InsertOutcome.STORED, InsertOutcome.EXISTS
        assert outcomes[:5] == [exists, stored, stored, stored, exists]
        assert isinstance(outcomes[5], TensorTooLarge)
        wait_until(lambda: all(other.has_caches([there, nothing, small], timeout=1.0)), 10.0)
        for buffer in (here, other):
            found = buffer.select_many([small, absent, nothing, there, handoff, small])
            first, miss, none, one, two, last = found
            assert (miss, none) == (MissReason.ABSENT, None)
            expected = (torch.arange(3), torch.ones(3), torch.arange(4), torch.arange(3))
            for tensor, wanted in zip((first, one, two, last), expected, strict=True):
                assert isinstance(tensor, torch.Tensor)
                assert torch.equal(tensor, wanted)
        taken = other.drop_select(handoff, timeout=5.0)
        assert taken is not None


def test_into_the_callers_memory(node_pair: Pair) -> None:
    names = [key() for _ in range(100)]
    out = [torch.empty(1000, dtype=torch.uint8) for _ in names]
    with node_pair[0].client() as here, node_pair[1].client() as there:
        insert(here, names, 1000)
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 10.0)
        found = there.select_many(names, out=out)
        assert all(one is mine for one, mine in zip(found, out, strict=True))
        assert all(map(same, out, names, [1000] * 100))
        with pytest.raises(CodecError):
            there.select_many(names, out=out[:99])
        with pytest.raises(CodecError):
            there.select_many([*names[:5], key(), *names[5:]], out=[torch.empty(1)] * 101)
        wait_until(lambda: there.stats()["pins"] == 0, 5.0)


def test_waits_for_what_is_inserted_meanwhile(node_pair: Pair) -> None:
    names = [key() for _ in range(150)]
    with node_pair[0].client() as here, node_pair[1].client() as there:
        insert(here, names[:70], 100)
        late = threading.Timer(0.5, insert, (here, names[70:], 100))
        late.start()
        found = there.select_many(names, timeout=scaled(10.0))
        late.join()
        assert all(map(same, found, names, [100] * 150))
        assert there.select_many([key()], timeout=0.2) == [MissReason.ABSENT]


def test_more_than_the_arena_holds_at_a_time(start_node: StartNode) -> None:
    names = [key() for _ in range(64)]
    node, other = start_node(capacity_bytes=256 * MIB), start_node(capacity_bytes=16 * MIB)
    with node.client() as here, other.client() as there:
        insert(here, names, MIB)
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 10.0)
        found = there.select_many(names)
        assert all(map(same, found, names, [MIB] * 64))
        outcomes = there.insert_many((key(), tensor_of("x", MIB)) for _ in range(64))
        assert outcomes == [InsertOutcome.STORED] * 64, "the oldest are evicted"


def test_hand_offs_that_find_no_room_are_errors_of_their_own(start_node: StartNode) -> None:
    node = start_node(capacity_bytes=4 * MIB)
    names = [TensorKey(key().mm_hash, request_id="1") for _ in range(4)]
    with node.client() as buffer:
        items = [(name, tensor_of(str(name), MIB)) for name in names]
        outcomes = buffer.insert_many(items, timeout=0.3)
        stored = [one for one in outcomes if one is InsertOutcome.STORED]
        full = [one for one in outcomes if isinstance(one, BufferFull)]
        assert (len(stored), len(full)) in ((1, 3), (2, 2))
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome is InsertOutcome.STORED:
                assert same(buffer.drop_select(name), name, MIB)
        insert(buffer, [names[0]], MIB)


def test_a_node_that_dies_is_an_error_of_what_was_not_stored(
    start_node: StartNode, node_pair: Pair
) -> None:
    names, node = [key() for _ in range(64)], start_node()
    with node.client() as buffer, node_pair[0].client() as other:
        insert(buffer, names[:10], MIB)
        wait_until(lambda: all(other.has_caches(names[:10], timeout=1.0)), 10.0)
        node.kill()
        outcomes = buffer.insert_many((name, tensor_of(str(name), MIB)) for name in names)
        assert all(isinstance(one, LookupBufferError) for one in outcomes)
        found = buffer.select_many(names)
        assert set(found) <= {MissReason.NODE_DOWN}
        found = other.select_many(names[:10])
        assert {type(one) for one in found} == {MissReason}


def test_a_store_that_hangs_is_a_miss(start_server: StartServer, start_node: StartNode) -> None:
    server = start_server()
    node = start_node(store_url=server.url)
    with node.client() as buffer:
        wait_until(lambda: buffer.stats()["store_up"], 10.0)
        names = [key() for _ in range(10)]
        with frozen(server):
            insert(buffer, names[:5], 100)
            found = buffer.select_many(names)
        assert all(map(same, found[:5], names[:5], [100] * 5))
        assert set(found[5:]) <= {MissReason.STORE_DOWN, MissReason.ABSENT}


def test_many_threads_use_batches_at_a_time(node_pair: Pair) -> None:
    """More than there are connections: none waits for a second one."""
    results: list[bool] = []
    with node_pair[0].client() as buffer:

        def work() -> None:
            names = [key() for _ in range(20)]
            insert(buffer, names, MIB // 2)
            results.append(all(map(same, buffer.select_many(names), names, [MIB // 2] * 20)))

        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 20


def test_a_frozen_node_costs_a_call_and_not_one_for_each_key(start_node: StartNode) -> None:
    node = start_node()
    with node.client() as buffer:
        with node.frozen():
            started = time.monotonic()
            assert set(buffer.select_many([key() for _ in range(500)])) == {MissReason.NODE_DOWN}
            assert time.monotonic() - started < scaled(3.0)
        wait_until(lambda: buffer.attached and buffer.stats(), 20.0)


def test_more_than_the_arena_holds_at_a_time_with_time_to_wait(start_node: StartNode) -> None:
    names = [key() for _ in range(64)]
    node, other = start_node(capacity_bytes=256 * MIB), start_node(capacity_bytes=16 * MIB)
    with node.client() as here, other.client() as there:
        insert(here, names, MIB)
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 10.0)
        started = time.monotonic()
        assert all(map(same, there.select_many(names, timeout=300.0), names, [MIB] * 64))
        assert time.monotonic() - started < scaled(30.0)


def test_an_error_in_the_middle_leaves_no_pin(node_pair: Pair) -> None:
    names = [key() for _ in range(100)]
    with node_pair[0].client() as here, node_pair[1].client() as there:
        insert(here, names, 100)
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 10.0)
        out = [torch.empty(100, dtype=torch.uint8) for _ in names]
        out[50] = torch.empty(7)
        with pytest.raises(CodecError) as error:
            there.select_many(names, out=out)
        wait_until(lambda: there.stats()["pins"] == 0, 5.0)
        assert error.value is not None, "its traceback lives on"


def test_keys_as_long_as_allowed(node_pair: Pair) -> None:
    names = [TensorKey(f"{n:04}" + "k" * 900) for n in range(1200)]
    with node_pair[0].client() as here:
        outcomes = here.insert_many((name, torch.ones(1)) for name in names)
        assert outcomes == [InsertOutcome.STORED] * 1200
        assert all(isinstance(one, torch.Tensor) for one in here.select_many(names))


def test_values_of_one_key_are_sent_one_after_the_other(
    node_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the older value of a hand-off may be the one that stays: in requests at the same time
    they are stored in any order."""
    in_flight = [0]
    send, reply = NodeConnection.send, NodeConnection.reply

    def count_sent(connection: NodeConnection, request: Request, **arguments: Any) -> None:
        in_flight[0] += isinstance(request, Insert)
        assert in_flight[0] <= 1
        send(connection, request, **arguments)

    def count_answered(
        connection: NodeConnection, request: Request, deadline: float
    ) -> dict[str, Any]:
        answer = reply(connection, request, deadline)
        in_flight[0] -= isinstance(request, Insert)
        return answer

    monkeypatch.setattr(NodeConnection, "send", count_sent)
    monkeypatch.setattr(NodeConnection, "reply", count_answered)
    name, shared = handoff(), key()
    large, small = torch.zeros(STAGED_BYTES, dtype=torch.uint8), torch.ones(3)
    with node_pair[0].client() as buffer:
        for one in (name, shared):
            outcomes = buffer.insert_many([(one, large), (key(), large), (one, small)])
            assert outcomes[:2] == [InsertOutcome.STORED] * 2
        taken, kept = buffer.drop_select(name), buffer.select(shared)
        assert taken is not None
        assert torch.equal(taken, small), "the later value replaces the earlier one"
        assert kept is not None
        assert torch.equal(kept, large), "the earlier one stays"


def test_an_interrupted_insert_closes_its_connection(
    node_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node may copy its staging area later, so that nobody else may write into it."""
    reply = NodeConnection.reply
    used: list[NodeConnection] = []

    def interrupted(connection: NodeConnection, *arguments: Any) -> dict[str, Any]:
        used.append(connection)
        raise KeyboardInterrupt

    with node_pair[0].client() as buffer:
        buffer.insert(key(), torch.ones(3))
        monkeypatch.setattr(NodeConnection, "reply", interrupted)
        for act in (
            lambda: buffer.insert(key(), torch.ones(3)),
            lambda: buffer.insert_many([(key(), torch.ones(3))]),
        ):
            with pytest.raises(KeyboardInterrupt):
                act()
        monkeypatch.setattr(NodeConnection, "reply", reply)
        assert [connection.open for connection in used] == [False, False]
        names = [key() for _ in range(5)]
        insert(buffer, names, 1000)
        assert all(map(same, buffer.select_many(names), names, [1000] * 5))
