"""Sessions of clients: refused, closed, forked, with an engine rank, with claims."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.client.session import CONNECTIONS_MAX
from lookup_buffer.errors import (
    BufferFull,
    Closed,
    LookupBufferError,
    LookupTimeout,
    NodeRefused,
)
from lookup_buffer.key import TensorKey
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
)
from patience import scaled

Pair = tuple[NodeProcess, NodeProcess]


@pytest.fixture
def buffer(node_pair: Pair) -> Iterator[LookupBuffer]:
    with node_pair[0].client() as buffer:
        yield buffer
    at_rest(node_pair[0])


def test_a_node_of_another_configuration_refuses_and_names_both(node_pair: Pair) -> None:
    node = node_pair[0]
    wrong = node.config.model_copy(update={"capacity_bytes": 32 * MIB})
    with pytest.raises(NodeRefused) as caught:
        LookupBuffer(wrong)
    for said in ("capacity_bytes", str(32 * MIB), str(64 * MIB)):
        assert said in str(caught.value)


def test_close_is_idempotent_and_final(node_pair: Pair) -> None:
    client = node_pair[0].client()
    where = key()
    client.insert(where, torch.ones(2))
    handle = client.prefetch([where], timeout=2.0)[0]
    started = time.monotonic()
    for _ in range(3):
        client.close()
    assert time.monotonic() - started < scaled(1.0)
    for use in (
        lambda: client.insert(key(), torch.ones(2)),
        lambda: client.select(where),
        lambda: client.has_caches([where]),
        client.stats,
    ):
        with pytest.raises(Closed):
            use()
    client.release(handle)
    assert client.prefetch([where])[0].state.value == "failed"
    at_rest(node_pair[0])


def test_close_gives_pins_back_also_where_its_thread_is_held_up(
    node_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the node keeps them until this process ends, since it might still read."""

    class HeldUp(threading.Event):
        def set(self) -> None:
            super().set()
            time.sleep(0.5)  # the listening thread ends meanwhile

    client = node_pair[0].client()
    where = key()
    client.insert(where, torch.ones(2))
    (handle,) = client.prefetch([where], timeout=2.0)
    assert handle.state is PrefetchState.RESIDENT
    monkeypatch.setattr(client._session, "_closing", HeldUp())
    client.close()
    at_rest(node_pair[0])


WAITS: dict[str, Callable[[LookupBuffer, TensorKey], object]] = {
    "select": lambda client, _: client.select(key(), timeout=300.0),
    "drop_select": lambda client, _: client.drop_select(handoff(), timeout=300.0),
    "claim": lambda client, held: client.claim(held, lease_seconds=1.0, timeout=300.0),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_close_ends_waits(
    node_pair: Pair, buffer: LookupBuffer, wait: Callable[[LookupBuffer, TensorKey], object]
) -> None:
    """Also of those that wait for a connection."""
    client, held = node_pair[0].client(), key()
    assert buffer.claim(held, lease_seconds=300.0).granted
    errors = list[type[Exception]]()

    def wait_in_vain() -> None:
        try:
            wait(client, held)
        except LookupBufferError as error:
            errors.append(type(error))

    threads = [threading.Thread(target=wait_in_vain) for _ in range(CONNECTIONS_MAX + 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    client.close()
    for thread in threads:
        thread.join(scaled(5.0))
    assert time.monotonic() - started < scaled(2.0)
    assert errors == [Closed] * len(threads)


def _use_in_child(client: LookupBuffer, answers: "multiprocessing.SimpleQueue[str]") -> None:
    for use in (client.stats, lambda: client.insert(key(), torch.ones(2)), client.close):
        try:
            use()
            answers.put("nothing")
        except Exception as error:
            answers.put(type(error).__name__)


def test_a_forked_child_is_refused_and_does_not_hurt_its_parent(buffer: LookupBuffer) -> None:
    where = key()
    buffer.insert(where, torch.ones(2))
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    with buffer.view(where):
        child = context.Process(target=_use_in_child, args=(buffer, answers))
        child.start()
        assert [answers.get() for _ in range(3)] == ["Closed", "Closed", "nothing"]
        child.join(10.0)
        answers.close()
        time.sleep(0.2)
        assert buffer.attached
        assert buffer.stats()["pins"] == 1
    assert buffer.select(where) is not None


# -- tickets of an engine

WORKER = """
send("attached")
while (order := receive()) is not None:
    send(int(buffer.load(order).sum()))
    buffer.done([order])
buffer.close()
"""


def test_a_ticket_ends_when_all_ranks_have_released_it(node_pair: Pair) -> None:
    node = node_pair[0]
    names = [key("layer") for _ in range(3)]
    engine = f"engine-{names[0]}"
    with node.client(engine=EngineRank(engine, None, 2)) as scheduler:
        for name in names:
            scheduler.insert(name, tensor_of(str(name), 1000))
        with ClientProcess(node.config, WORKER, seat=(engine, 0, 2)) as first:
            assert first.receive() == "attached"
            early = scheduler.prefetch(names, timeout=2.0)
            assert {(h.state, h.reason) for h in early} == {
                (PrefetchState.FAILED, "ranks_not_attached")
            }
            with ClientProcess(node.config, WORKER, seat=(engine, 1, 2)) as second:
                assert second.receive() == "attached"
                handles = scheduler.prefetch([*names, key()], timeout=2.0)
                assert [h.state.value for h in handles] == ["resident"] * 3 + ["missing"]
                assert node.stats()["pins"] == 3
                for rank, expected in ((first, 3), (second, 0)):
                    for name, handle in zip(names, handles, strict=False):
                        rank.send(handle.order)  # pickled, as vLLM does
                        assert rank.receive() == int(tensor_of(str(name), 1000).sum())
                    wait_until(lambda n=expected: node.stats()["pins"] == n, 2.0)  # type: ignore[misc]
                # One that the scheduler releases without a message of any rank.
                again = scheduler.prefetch(names[:1], timeout=2.0)
                assert node.stats()["pins"] == 1
                for _ in range(2):
                    scheduler.release(again[0])
                wait_until(lambda: node.stats()["pins"] == 0, 2.0)
                second.send(None)
                assert second.wait() == 0

            def is_gone() -> bool:
                handles = scheduler.prefetch(names, timeout=2.0)
                for handle in handles:
                    scheduler.release(handle)
                return {handle.reason for handle in handles} == {"ranks_not_attached"}

            wait_until(is_gone, 2.0, "the node sees the end of the second")
    at_rest(node)


def test_a_worker_that_attaches_again_counts(node_pair: Pair) -> None:
    node, name, engine = node_pair[0], key(), f"engine-{key()}"
    with node.client(engine=EngineRank(engine, None, 1)) as scheduler:
        scheduler.insert(name, torch.ones(2))
        worker = node.client(engine=EngineRank(engine, 0, 1))
        again = node.client(engine=EngineRank(engine, 0, 1))
        worker.close()
        handle = scheduler.prefetch([name], timeout=2.0)[0]
        assert handle.state is PrefetchState.RESIDENT
        again.close()
    at_rest(node)


def test_the_pins_of_a_killed_engine_are_released(node_pair: Pair) -> None:
    node, name, engine = node_pair[0], key(), f"engine-{key()}"
    source = """
name = receive()
buffer.insert(name, tensor_of("x", 5 << 20))
receive()
handles = buffer.prefetch([name], timeout=5.0)
send(handles[0].state.value)
receive()
"""
    with ClientProcess(node.config, source, seat=(engine, None, 1)) as scheduler:
        scheduler.send(name)
        with ClientProcess(node.config, WORKER, seat=(engine, 0, 1)) as worker:
            assert worker.receive() == "attached"
            scheduler.send("go")
            assert scheduler.receive() == "resident"
            assert node.stats()["pinned_bytes"] == 5 * MIB
            scheduler.kill()
            at_rest(node, seconds=2.0)


FORKS = """
import os, time
name, claimed = receive()
(handle,) = buffer.prefetch([name], timeout=5.0)
buffer.claim(claimed, lease_seconds=60.0)
child = os.fork()
if child == 0:
    time.sleep(600.0)
    os._exit(0)
send((handle.state.value, child))
receive()
for _ in range(7):
    buffer.select(name)
buffer._local_reads.report()
os._exit(0)
"""


@contextmanager
def forking_client(
    node: NodeProcess, name: TensorKey, claimed: TensorKey
) -> Iterator[ClientProcess]:
    """A client with a pin and a claim. Its child has its sockets, so that these do not end with
    it."""
    with ClientProcess(node.config, FORKS) as client:
        client.send((name, claimed))
        state, child = client.receive()
        assert state == "resident"
        try:
            yield client
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_killed_client_gives_back_all_though_its_forked_child_lives(
    node_pair: Pair, buffer: LookupBuffer
) -> None:
    node, name, claimed = node_pair[0], key(), key()
    buffer.insert(name, torch.ones(2))
    with forking_client(node, name, claimed) as client:
        assert node.stats()["pins"] == 1
        client.kill()
        at_rest(node)
        wait_until(lambda: buffer.claim(claimed, lease_seconds=1.0).granted, 5.0)
        buffer.release_claim(claimed)


def test_what_a_client_sent_before_its_end_is_read_though_its_forked_child_lives(
    node_pair: Pair, buffer: LookupBuffer
) -> None:
    node, name = node_pair[0], key()
    buffer.insert(name, torch.ones(2))
    with forking_client(node, name, key()) as client:
        before = node.stats()["hits_local"]
        with node.frozen():  # then it sees the message and the end at the same time
            client.send("go")
            assert client.wait() == 0
        at_rest(node)
        assert node.stats()["hits_local"] == before + 7


# -- prefetch


def test_prefetch_fetches_an_item_of_another_node(node_pair: Pair, buffer: LookupBuffer) -> None:
    there, nowhere = [key() for _ in range(20)], key()
    with node_pair[1].client() as elsewhere:
        for name in there:
            elsewhere.insert(name, tensor_of(str(name), 50_000))
        wait_until(lambda: all(buffer.has_caches(there, timeout=1.0)), 5.0)
    handles = buffer.prefetch([*there, nowhere, there[0]], timeout=10.0)
    assert [h.state.value for h in handles] == ["resident"] * 20 + ["missing", "resident"]
    assert {h.source for h in handles[:20]} == {node_pair[1].node_id}
    assert handles[20].reason == "absent"
    for handle in (*handles[:20], handles[21]):
        assert handle.order is not None
        found = buffer.load(handle.order)
        assert found is not None
        assert torch.equal(found, tensor_of(str(handle.key), 50_000))
    assert buffer.stats()["pins"] == 21
    for handle in handles:
        buffer.release(handle)
        buffer.release(handle)
    wait_until(lambda: buffer.stats()["pins"] == 0, 2.0)


def test_a_handle_released_before_it_settles_leaves_no_pin(node_pair: Pair) -> None:
    with node_pair[1].client() as elsewhere, node_pair[0].client() as buffer:
        names = [key() for _ in range(10)]
        for name in names:
            elsewhere.insert(name, tensor_of(str(name), MIB))
        wait_until(lambda: all(buffer.has_caches(names, timeout=1.0)), 5.0)
        with node_pair[1].frozen():
            handles = buffer.prefetch(names)
            assert handles[-1].state is PrefetchState.PENDING
            for handle in handles:
                buffer.release(handle)
        at_rest(node_pair[0])
        wait_until(lambda: all(buffer.has_caches(names)), 5.0)


def test_a_prefetch_beyond_the_pin_budget_fails(node_pair: Pair, buffer: LookupBuffer) -> None:
    names = [key() for _ in range(5)]
    for name in names:
        buffer.insert(name, tensor_of(str(name), 6 * MIB))
    handles = buffer.prefetch(names, timeout=5.0)
    states = [(h.state.value, h.reason) for h in handles]
    assert states == [("resident", "")] * 3 + [("failed", "no_room")] * 2  # a third of 64 MiB
    for handle in handles:
        buffer.release(handle)
    again = buffer.prefetch(names[3:], timeout=5.0)
    assert {h.state.value for h in again} == {"resident"}
    for handle in again:
        buffer.release(handle)


def test_a_claim_belongs_to_the_session_that_requested_it_last(node_pair: Pair) -> None:
    """An engine attaches again before the end of its last session was noticed."""
    name, seat = key(), EngineRank("engine-3", None, 1)
    first, again = node_pair[0].client(engine=seat), node_pair[0].client(engine=seat)
    with node_pair[1].client() as other:
        assert first.claim(name, lease_seconds=30.0).granted
        assert again.claim(name, lease_seconds=30.0).granted
        first.close()
        time.sleep(0.3)
        assert not other.claim(name, lease_seconds=1.0).granted
        again.close()
        wait_until(lambda: other.claim(name, lease_seconds=1.0).granted, 2.0)


def test_handles_that_are_released_before_they_settle_wait_no_longer(start_node: StartNode) -> None:
    """They used up the client's share of requests that wait."""
    prelude = "from lookup_buffer.node import connection\nconnection.WAITS_MAX = 16"
    node, name = start_node(prelude=prelude), key()
    with node.client() as client:

        def may_wait() -> bool:
            try:
                client.select(key(), timeout=0.01)
            except LookupTimeout:
                return True
            except BufferFull:
                return False
            raise AssertionError("nobody inserts it")

        handles = client.prefetch([key() for _ in range(40)], wait_seconds=600.0)
        wait_until(lambda: any(one.state is PrefetchState.MISSING for one in handles), 10.0)
        assert not may_wait(), "the control: more may not"
        assert client.has_caches([key()], timeout=scaled(1.0)) == [False], "it is not known"
        client.release(*handles)
        wait_until(may_wait, 10.0)
        (handle,) = client.prefetch([name], wait_seconds=600.0)
        client.insert(name, torch.ones(3))
        assert handle.wait(scaled(10.0)) is PrefetchState.RESIDENT
        client.release(handle)
    at_rest(node)
