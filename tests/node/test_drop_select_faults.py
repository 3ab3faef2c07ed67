"""What a fault costs a hand-off: takers, their nodes and owners are really killed and stopped."""

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.errors import BufferFull, LookupBufferError, LookupTimeout, MissingTensor
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
    with_store,
)
from patience import scaled
from proxies import PeerProxy, behind
from servers import StartServer, flush, frozen

DEAD_SECONDS = 7.0
"""Takers get the miss this long after their node was killed or stopped, on an idle machine: 6 s
until every node has detected the death, and a second for the replies."""
SLACK = 3.0
"""The factor for a machine that is not idle."""
TAKER = """
from lookup_buffer.client.load import Loads

def load(order, out=None):
    tensor = Loads.load(buffer._loads, order, out=out)
    send("taken")
    receive()
    return tensor

buffer._loads.load = load
key = TensorKey("h", request_id=receive())
try:
    tensor = buffer.drop_select(key, timeout=receive())
    send(int(tensor[0]))
except Exception as error:
    send(type(error).__name__)
"""
"""Reports "taken" before it acknowledges the bytes, and continues after a message of the test."""


@pytest.fixture
def takers() -> Iterator[Callable[[NodeProcess, TensorKey], ClientProcess]]:
    """takers(node, key, timeout): a process that takes the key and has got its bytes."""
    with ExitStack() as stack:

        def start(node: NodeProcess, name: TensorKey, timeout: float = 20.0) -> ClientProcess:
            taker = stack.enter_context(ClientProcess(node.config, TAKER))
            taker.send(name.request_id)
            taker.send(timeout)
            return taker

        yield start


OWNER: dict[str, object] = {"log_level": "info", "handoff_lease_seconds": 30.0}


def owner_of(start_node: StartNode, **settings: object) -> NodeProcess:
    return start_node(**{**OWNER, **settings})


def acknowledged(owner: NodeProcess, name: TensorKey) -> Counter[int]:
    """How often each generation was acknowledged, by the owner's log."""
    lines = re.findall(rf"taken: {re.escape(name.text)}, generation (\d+),", owner.log_text())
    return Counter(map(int, lines))


def nothing_held(*nodes: NodeProcess) -> None:
    for node in nodes:
        at_rest(node)
        assert node.stats()["handoff_bytes"] == 0


class Waiters:
    """Threads that take `name`, all at once, and what became of each and when."""

    def __init__(self, node: NodeProcess, name: TensorKey, count: int, timeout: float) -> None:
        self.outcomes: list[tuple[str, float]] = []
        self.buffer = node.client()
        self._threads = [
            threading.Thread(target=self._take, args=(name, timeout)) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _take(self, name: TensorKey, timeout: float) -> None:
        try:
            self.buffer.drop_select(name, timeout=timeout)
            outcome = "won"
        except LookupBufferError as error:
            outcome = type(error).__name__
        self.outcomes.append((outcome, time.monotonic()))

    def end(self, seconds: float = 20.0) -> Counter[str]:
        """How often which outcome, once all have one."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a taker hangs"
        self.buffer.close()
        return Counter(outcome for outcome, _ in self.outcomes)


def test_a_taker_killed_before_it_acknowledged(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    """On another node than the owner's; the same on one node, in virtual time: test_takes."""
    owner, node = owner_of(start_node), start_node()
    name, tensor = handoff(), tensor_of("kill", MIB)
    with owner.client() as producer:
        producer.insert(name, tensor)
        taker = takers(node, name)
        assert taker.receive() == "taken"
        next_in_line = Waiters(owner, name, 1, timeout=20.0)
        time.sleep(0.2)
        assert not next_in_line.outcomes
        taker.kill()
        # Its session ended: the lease outlives the wait of the next one.
        assert next_in_line.end() == {"won": 1}
    assert set(acknowledged(owner, name).values()) == {1}
    nothing_held(owner, node)


def test_the_takers_node_killed_before_it_acknowledged(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    owner, node = owner_of(start_node), start_node()
    name = handoff()
    with owner.client() as producer:
        producer.insert(name, tensor_of("kill", MIB))
        taker = takers(node, name)
        assert taker.receive() == "taken"
        node.kill()
        found = producer.drop_select(name, timeout=5.0)
        assert found is not None
        taker.send("go on")
        assert taker.receive() == "NodeUnavailable"
    assert set(acknowledged(owner, name).values()) == {1}
    nothing_held(owner)


def test_a_stopped_taker_loses_it_to_the_next_taker(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    """On another node than the owner's; the same on one node, in virtual time: test_handoffs."""
    owner, node = owner_of(start_node, handoff_lease_seconds=1.0), start_node()
    name = handoff()
    with owner.client() as producer:
        producer.insert(name, tensor_of("ice", MIB))
        taker = takers(node, name, 4.0)
        assert taker.receive() == "taken"
        os.kill(taker.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert producer.drop_select(name, timeout=60.0) is not None
            assert time.monotonic() - started < 30.0
            taker.send("go on")
        finally:
            os.kill(taker.pid, signal.SIGCONT)
        assert taker.receive() == "LookupTimeout", "it has lost, and waited on"
        # Another generation is another matter.
        again = takers(node, name)
        producer.insert(name, torch.full((9,), 5))
        assert again.receive() == "taken"
        again.send("go on")
        assert again.receive() == 5
    assert list(acknowledged(owner, name).values()) == [1, 1]
    nothing_held(owner, node)


def test_a_queued_taker_gets_the_reason_that_another_took_it(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    owner, node = owner_of(start_node), start_node()
    with_store(owner, node)  # else the reason may be that the store is not reached yet
    name = handoff()
    with owner.client() as producer, node.client() as buffer:
        producer.insert(name, tensor_of("line", MIB))
        taker = takers(owner, name)
        assert taker.receive() == "taken"
        with pytest.raises(LookupTimeout, match="taken"):
            buffer.drop_select(name, timeout=0.5)
        taker.kill()
        assert buffer.drop_select(name, timeout=20.0) is not None
    nothing_held(owner, node)


def test_all_waiting_takers_of_a_killed_owner_get_a_miss(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    """Queued and later takers get the miss from the failure detector alone. A taker whose
    acknowledgement is in flight gets it when its lease has certainly expired."""
    owner, node = owner_of(start_node, handoff_lease_seconds=10.0), start_node()
    name, untouched, never = handoff(), handoff(), handoff()
    with owner.client() as producer, node.client() as late:
        producer.insert(name, tensor_of("lost", MIB))
        producer.insert(untouched, torch.ones(3))
        wait_until(lambda: late.has_caches([untouched], timeout=1.0)[0], 5.0)
        taker = takers(node, name)
        assert taker.receive() == "taken"
        in_line = Waiters(node, name, 5, timeout=60.0)
        elsewhere = Waiters(node, never, 1, timeout=3.0)
        time.sleep(0.3)
        owner.kill()
        killed = time.monotonic()
        assert in_line.end() == {"MissingTensor": 5}
        assert max(at for _, at in in_line.outcomes) - killed < DEAD_SECONDS * SLACK
        with pytest.raises(MissingTensor):
            late.drop_select(untouched, timeout=60.0)
        assert time.monotonic() - killed < DEAD_SECONDS * SLACK
        taker.send("go on")
        assert taker.receive() == "MissingTensor"
        assert elsewhere.end() == {"LookupTimeout": 1}, "a key that was never inserted is not lost"
    nothing_held(node)


def test_a_stopped_owner_is_a_miss_and_gives_no_item_twice(start_node: StartNode) -> None:
    owner, node = owner_of(start_node, handoff_lease_seconds=2.0), start_node()
    before, name = handoff(), handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(before, torch.ones(3))
        assert taker.drop_select(before, timeout=5.0) is not None  # so that there is a link
        producer.insert(name, tensor_of("ice", MIB))
        wait_until(lambda: taker.has_caches([name], timeout=1.0)[0], 5.0)
        with owner.frozen():
            waiters = Waiters(node, name, 4, timeout=60.0)
            started = time.monotonic()
            assert waiters.end() == {"MissingTensor": 4}
            assert time.monotonic() - started < DEAD_SECONDS * SLACK
        # It is alive again with its next beat. No taker gets the hand-offs that they waited for.
        wait_until(lambda: taker.has_caches([name], timeout=1.0)[0], 5.0)
        assert taker.drop_select(name, timeout=20.0) is not None
    assert set(acknowledged(owner, name).values()) == {1}
    nothing_held(owner, node)


def test_an_owner_stopped_under_an_acknowledgement(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    """No answer before the outcome is sure: the lease outlives the pause, so the taker has won."""
    owner, node = owner_of(start_node), start_node()
    name = handoff()
    with owner.client() as producer:
        producer.insert(name, torch.full((9,), 3))
        taker = takers(node, name)
        assert taker.receive() == "taken"
        with owner.frozen():
            taker.send("go on")
            time.sleep(2.0)
        assert taker.receive() == 3
        with pytest.raises(MissingTensor):
            producer.drop_select(name)
    assert set(acknowledged(owner, name).values()) == {1}


def test_a_broken_connection_loses_nothing(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    with PeerProxy() as proxy:
        owner = behind(proxy, start_node, **OWNER)
        node, name = start_node(), handoff()
        with owner.client() as producer:
            producer.insert(name, torch.full((9,), 4))
            taker = takers(node, name, 3.0)
            assert taker.receive() == "taken"
            in_line = Waiters(node, name, 3, timeout=3.0)
            time.sleep(0.2)
            proxy.cut()
            taker.send("go on")
            # Its lease ended with the connection; now either it or one of the queued takers wins.
            answer = taker.receive()
            if answer == "taken":
                taker.send("go on")
                answer = taker.receive()
            outcomes = in_line.end()
            assert (answer == 4) + outcomes["won"] == 1
            assert outcomes["won"] + outcomes["LookupTimeout"] == 3
        assert set(acknowledged(owner, name).values()) == {1}
        nothing_held(owner, node)


def test_a_reply_lost_with_its_connection_is_requested_again(
    start_node: StartNode, takers: Callable[..., ClientProcess]
) -> None:
    with PeerProxy() as proxy:
        owner = behind(proxy, start_node, **OWNER)
        node, name = start_node(), handoff()
        with owner.client() as producer:
            producer.insert(name, torch.full((9,), 6))
            taker = takers(node, name)
            assert taker.receive() == "taken"
            proxy.hold_after_bytes = 0
            taker.send("go on")
            wait_until(lambda: acknowledged(owner, name), 5.0)
            proxy.hold_after_bytes = None
            proxy.cut()
            proxy.release()
            assert taker.receive() == 6, "it had won, and gets this reply"
        assert list(acknowledged(owner, name).values()) == [1]


def test_a_stopped_store_does_not_affect_takers_that_need_none(
    start_node: StartNode, start_server: StartServer
) -> None:
    server = start_server()
    settings = {"store_url": server.url, "store_timeout_seconds": 0.5}
    owner, node = (owner_of(start_node, **settings) for _ in range(2))
    before, name = handoff(), handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(before, torch.ones(3))
        wait_until(lambda: taker.has_caches([before], timeout=1.0)[0], 5.0)
        with frozen(server):
            producer.insert(name, torch.ones(3))
            assert producer.drop_select(name) is not None
            assert taker.drop_select(before) is not None, "its owner was known"
            producer.insert(name, torch.ones(3))
            started = time.monotonic()
            with pytest.raises(LookupTimeout):
                taker.drop_select(name, timeout=0.5)
            assert time.monotonic() - started < scaled(0.5)
        assert taker.drop_select(name, timeout=20.0) is not None
    nothing_held(owner, node)


def test_hand_offs_are_published_again_after_the_store_lost_its_data(
    start_node: StartNode, start_server: StartServer
) -> None:
    server = start_server()
    owner, node = (owner_of(start_node, store_url=server.url) for _ in range(2))
    name = handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(name, torch.ones(3))
        wait_until(lambda: owner.stats()["unpublished"] == 0, 5.0)
        flush(server.url)
        assert taker.drop_select(name, timeout=20.0) is not None
    nothing_held(owner, node)


def test_an_acknowledgement_is_not_refused_if_too_many_requests_wait(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner would have removed the item by then, and nobody would have it."""
    owner = owner_of(start_node)
    prelude = "from lookup_buffer.node import connection\nconnection.WAITS_MAX = 16"
    node, name = owner_of(start_node, prelude=prelude), handoff()
    with owner.client() as producer, node.client() as taker:
        producer.insert(name, torch.ones(3))
        load = taker._loads.load

        def is_full() -> bool:
            taker.prefetch([key()], wait_seconds=600.0)
            try:
                taker.select(key(), timeout=0.01)
            except BufferFull:
                return True
            except LookupBufferError:
                return False
            return False

        def load_later(order: LoadOrder, out: torch.Tensor | None = None) -> torch.Tensor | None:
            wait_until(is_full, 10.0)
            return load(order, out)

        monkeypatch.setattr(taker._loads, "load", load_later)
        taken = taker.drop_select(name, timeout=20.0)
        assert taken is not None
        assert torch.equal(taken, torch.ones(3))
    assert sum(acknowledged(owner, name).values()) == 1
    nothing_held(owner, node)
