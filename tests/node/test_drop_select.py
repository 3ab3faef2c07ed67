"""Hand-offs as programs use them: inserted on one host, taken once, on that host or another."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.client.session import CONNECTIONS_MAX
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    InvalidKey,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    TensorTooLarge,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import MIB, NodeProcess, StartNode, at_rest, handoff, key, tensor_of, wait_until
from patience import scaled

BOTH = pytest.mark.parametrize("consumer", ["here", "there"])


def nothing_held(node: NodeProcess) -> None:
    at_rest(node)
    wait_until(lambda: node.stats()["handoff_bytes"] == 0, 5.0)


@pytest.fixture
def buffers(
    node_pair: tuple[NodeProcess, NodeProcess], consumer: str
) -> Iterator[tuple[LookupBuffer, LookupBuffer]]:
    """A producer's, and a consumer's on its host or on another."""
    first, second = node_pair
    with first.client() as producer, (first if consumer == "here" else second).client() as taker:
        yield producer, taker
    for node in node_pair:
        nothing_held(node)


@BOTH
@pytest.mark.parametrize("nbytes", [0, 5, 200_000, 3 * MIB])
def test_it_is_taken_once(buffers: tuple[LookupBuffer, LookupBuffer], nbytes: int) -> None:
    producer, taker = buffers
    name, tensor = handoff(), tensor_of("once", nbytes)
    assert producer.insert(name, tensor) is InsertOutcome.STORED
    found = taker.drop_select(name, timeout=5.0)
    assert found is not None
    assert torch.equal(found, tensor)
    for buffer in buffers:
        with pytest.raises(MissingTensor):
            buffer.drop_select(name)
        with pytest.raises(MissingTensor):
            buffer.select(name)
        wait_until(lambda: buffer.has_caches([name], timeout=1.0) == [False], 5.0)  # noqa: B023


@BOTH
def test_into_a_tensor_of_the_callers(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name, out = handoff(), torch.zeros(3, 4)
    producer.insert(name, torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(CodecError):
        taker.drop_select(name, timeout=5.0, out=out)
    producer.insert(name, torch.ones(3, 4))  # another dtype than the generation before it
    assert taker.drop_select(name, timeout=5.0, out=out) is out
    assert torch.equal(out, torch.ones(3, 4))


@BOTH
def test_a_none_is_a_value(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name = handoff()
    producer.insert(name, None)
    assert taker.drop_select(name, timeout=5.0) is None
    with pytest.raises(LookupTimeout):
        taker.drop_select(name, timeout=0.2)


@BOTH
def test_a_select_does_not_take_it(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name, tensor = handoff(), tensor_of("look", MIB)
    producer.insert(name, tensor)
    wait_until(lambda: taker.has_caches([name], timeout=1.0)[0], 5.0)
    for _ in range(2):
        found = taker.select(name)
        assert found is not None
        assert torch.equal(found, tensor)
    with taker.view(name) as seen:
        assert seen is not None
        assert torch.equal(seen, tensor)
        taken = taker.drop_select(name)
        assert torch.equal(seen, tensor), "who reads it still finishes"
    assert taken is not None
    handle = taker.prefetch([name], timeout=5.0)[0]
    assert handle.state is PrefetchState.MISSING


@BOTH
def test_a_prefetch_does_not_take_it(
    buffers: tuple[LookupBuffer, LookupBuffer],
) -> None:
    producer, taker = buffers
    name, shared = handoff(), key()
    producer.insert(name, torch.arange(7))
    producer.insert(shared, torch.arange(3))
    wait_until(lambda: all(taker.has_caches([name, shared], timeout=1.0)), 5.0)
    handles = taker.prefetch([name, shared, name], timeout=5.0)
    assert [handle.state for handle in handles] == [PrefetchState.RESIDENT] * 3
    assert handles[0].order is not None
    taken, loaded = taker.drop_select(name), taker.load(handles[0].order)
    assert taken is not None
    assert loaded is not None
    assert torch.equal(taken, loaded)
    for handle in handles:
        taker.release(handle)


@BOTH
def test_a_waiting_taker_gets_a_later_insert(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name, found = handoff(), list[torch.Tensor | None]()
    for number in range(
        3
    ):  # the same key repeatedly, by a taker that knows the outcome of the last one
        thread = threading.Thread(target=lambda: found.append(taker.drop_select(name, timeout=20)))
        thread.start()
        time.sleep(0.05)
        producer.insert(name, torch.full((5,), number))
        thread.join(20.0)
        assert len(found) == number + 1
        last = found[-1]
        assert last is not None
        assert last.tolist() == [number] * 5


@BOTH
def test_an_insert_replaces_an_untaken_hand_off(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name = handoff()
    for number in range(4):
        producer.insert(name, torch.full((number + 1,), number))  # of another shape each time
    wait_until(lambda: taker.has_caches([name], timeout=1.0)[0], 5.0)
    found = taker.drop_select(name, timeout=5.0)
    assert found is not None
    assert found.tolist() == [3, 3, 3, 3]
    with pytest.raises(MissingTensor):
        taker.drop_select(name)


@BOTH
def test_among_many_takers_one_wins(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name, won, lost = handoff(), list[torch.Tensor | None](), list[Exception]()

    def take() -> None:
        try:
            won.append(taker.drop_select(name, timeout=1.0))
        except LookupTimeout as error:
            lost.append(error)

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    producer.insert(name, torch.arange(1000))
    for thread in threads:
        thread.join(10.0)
    assert (len(won), len(lost)) == (1, 11)


@BOTH
def test_it_ends_after_its_time(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name = handoff()
    producer.insert(name, torch.ones(2), ttl_seconds=0.3)
    time.sleep(0.35)
    with pytest.raises(MissingTensor):
        taker.drop_select(name)


@BOTH
def test_shared_content_is_not_taken(buffers: tuple[LookupBuffer, LookupBuffer]) -> None:
    producer, taker = buffers
    name = key()
    producer.insert(name, torch.ones(2))
    with pytest.raises(InvalidKey, match="request_id"):
        taker.drop_select(name)
    assert producer.select(name) is not None


def test_an_acknowledgement_does_not_wait_for_other_requests(
    node_pair: tuple[NodeProcess, NodeProcess],
) -> None:
    """There are more threads than connections: a wait must not block an acknowledgement."""
    name, found = handoff(), list[bool]()
    with node_pair[0].client() as producer:
        with node_pair[1].client() as taker:

            def wait_in_vain() -> None:
                with suppress(LookupBufferError):  # closed
                    taker.drop_select(handoff(), timeout=300.0)

            def take() -> None:
                found.append(taker.drop_select(name, timeout=300.0) is not None)

            taking = threading.Thread(target=take)
            waiting = [threading.Thread(target=wait_in_vain) for _ in range(CONNECTIONS_MAX + 10)]
            for thread in [taking, *waiting]:
                thread.start()
                time.sleep(0.01)
            producer.insert(name, torch.arange(3))
            taking.join(scaled(20.0))
            assert found == [True]
            assert all(thread.is_alive() for thread in waiting), "no connection became free"
        for thread in waiting:
            thread.join(scaled(5.0))
        assert not any(thread.is_alive() for thread in waiting)


def test_closing_ends_waits(node_pair: tuple[NodeProcess, NodeProcess]) -> None:
    ended = list[str]()
    taker = node_pair[0].client()

    def take() -> None:
        try:
            taker.drop_select(handoff(), timeout=60.0)
        except LookupBufferError as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.2)
    taker.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert ended[0] in ("NodeUnavailable", "Closed")


def test_without_a_mirror(start_node: StartNode) -> None:
    first, second = start_node(mirror=False), start_node(mirror=False)
    name = handoff()
    with first.client() as producer, second.client() as taker:
        threading.Timer(0.2, lambda: producer.insert(name, torch.arange(3))).start()
        assert taker.drop_select(name, timeout=10.0) is not None
        with pytest.raises(LookupTimeout):
            taker.drop_select(name, timeout=0.2)
    nothing_held(first)
    nothing_held(second)


# -- budgets


def test_larger_than_their_share_is_refused_at_once(start_node: StartNode) -> None:
    node = start_node(capacity_bytes=8 * MIB)
    with node.client() as buffer:
        started = time.monotonic()
        with pytest.raises(TensorTooLarge, match="half"):
            buffer.insert(handoff(), tensor_of("big", 4 * MIB + 1), timeout=60.0)
        assert time.monotonic() - started < 30.0
        buffer.insert(handoff(), tensor_of("fits", 4 * MIB))
        assert node.stats()["handoff_bytes"] == 4 * MIB


def test_a_full_share_makes_the_writer_wait(start_node: StartNode) -> None:
    node = start_node(capacity_bytes=8 * MIB)
    names = [handoff() for _ in range(4)]
    with node.client() as buffer:
        for name in names:
            buffer.insert(name, tensor_of("full", MIB))
        started = time.monotonic()
        with pytest.raises(BufferFull, match="half"):
            buffer.insert(handoff(), tensor_of("more", MIB), timeout=0.5)
        assert 0.5 <= time.monotonic() - started < scaled(0.5)
        buffer.insert(names[0], tensor_of("again", MIB))  # in the place of what it replaces
        late = handoff()
        writer = threading.Thread(target=lambda: buffer.insert(late, torch.ones(9), timeout=20.0))
        writer.start()
        time.sleep(0.1)
        assert buffer.drop_select(names[1]) is not None
        writer.join(5.0)
        assert not writer.is_alive(), "a take makes room for the waiting writer"
        for name in (names[0], *names[2:], late):  # content that many share never drives one out
            for number in range(8):
                buffer.insert(key(), tensor_of(str(number), 2 * MIB))
            assert buffer.drop_select(name) is not None
    nothing_held(node)


@BOTH
def test_a_taker_gets_a_hand_off_without_room(start_node: StartNode, consumer: str) -> None:
    """The whole quota is full of hand-offs that the consumer does not take: it and the writer still
    continue."""
    node = start_node(capacity_bytes=8 * MIB)
    other = node if consumer == "here" else start_node(capacity_bytes=8 * MIB)
    with node.client() as producer, other.client() as taker:
        blocking = [handoff() for _ in range(4)]
        for name in blocking:
            producer.insert(name, tensor_of("blocks", MIB))
        for late in (False, True):
            name, tensor = handoff(), tensor_of("wanted", MIB)
            writer = threading.Thread(
                target=lambda: producer.insert(name, tensor, timeout=20.0)  # noqa: B023
            )
            if not late:
                writer.start()
                time.sleep(0.2)
                assert taker.has_caches([name], timeout=1.0) == [False], "offered is not held"
            else:
                threading.Timer(0.3, writer.start).start()
            started = time.monotonic()
            found = taker.drop_select(name, timeout=60.0)
            assert time.monotonic() - started < 30.0
            writer.join(scaled(5.0))
            assert not writer.is_alive()
            assert found is not None
            assert torch.equal(found, tensor)
        for name in blocking:
            assert taker.drop_select(name, timeout=5.0) is not None
    nothing_held(node)


def test_hand_offs_of_many_times_the_quota_in_any_order(start_node: StartNode) -> None:
    """As the seed's own stress test has it, of which some orders could never end."""
    owner, other = (start_node(capacity_bytes=8 * MIB) for _ in range(2))
    names = [handoff() for _ in range(14)]
    with owner.client() as producer, other.client() as taker:

        def write(name: TensorKey) -> None:
            producer.insert(name, tensor_of(name.text, MIB), timeout=30.0)

        writers = [threading.Thread(target=write, args=(name,)) for name in names]
        for writer in writers:
            writer.start()
            time.sleep(0.02)
        for name in reversed(names):  # those for which there was no room come first
            found = taker.drop_select(name, timeout=10.0)
            assert found is not None
            assert torch.equal(found, tensor_of(name.text, MIB))
        for writer in writers:
            writer.join(5.0)
            assert not writer.is_alive()
    nothing_held(owner)
    nothing_held(other)
