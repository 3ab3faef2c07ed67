"""The client against real nodes: tensors come back bit for bit, and every miss is true."""

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.codec import contiguous_bytes
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    TensorTooLarge,
)
from lookup_buffer.protocol.header import DTYPES
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import MIB, NodeProcess, at_rest, key, tensor_of, wait_until
from patience import scaled

Pair = tuple[NodeProcess, NodeProcess]
HERE = [name for name in DTYPES if hasattr(torch, name)]
SHARED_SECONDS = 5.0  # until another node sees a new key; 0.05 s on an idle machine


@pytest.fixture
def buffer(node_pair: Pair) -> Iterator[LookupBuffer]:
    with node_pair[0].client() as buffer:
        yield buffer
    at_rest(node_pair[0])


@pytest.fixture
def elsewhere(node_pair: Pair) -> Iterator[LookupBuffer]:
    with node_pair[1].client() as buffer:
        yield buffer
    at_rest(node_pair[1])


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    owner, address, nbytes = contiguous_bytes(tensor)
    data = ctypes.string_at(address, nbytes)
    del owner
    return tensor.dtype, tuple(tensor.shape), data


def sample(name: str, *shape: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = tensor_of(name, count * dtype.itemsize)
    return (values & 1 if name == "bool" else values).view(dtype).view(shape)


def test_every_dtype_on_both_nodes(buffer: LookupBuffer, elsewhere: LookupBuffer) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5), (), (0, 4)]
    tensors = {key(name): sample(name, *shape) for name in HERE for shape in shapes}
    for where, tensor in tensors.items():
        assert buffer.insert(where, tensor) is InsertOutcome.STORED
    for where, tensor in tensors.items():
        for reader in (buffer, elsewhere):
            found = reader.select(where, timeout=SHARED_SECONDS)
            assert found is not None
            assert bits(found) == bits(tensor), where


def test_odd_tensors(buffer: LookupBuffer, elsewhere: LookupBuffer) -> None:
    base = torch.randn(6, 8, dtype=torch.complex64)
    odd = [base.t(), base[::2, 1::3], base.conj(), base.conj().imag, base.expand(2, 6, 8)]
    odd.append(torch.randn(4, requires_grad=True))
    odd.append(torch.zeros((1,) * 16))
    for tensor in odd:
        where = key()
        buffer.insert(where, tensor)
        for reader in (buffer, elsewhere):
            found = reader.select(where, timeout=SHARED_SECONDS)
            assert found is not None
            assert bits(found) == bits(tensor)
    assert bits(base.conj()) != bits(base)


def test_none_is_a_value_here_and_elsewhere(node_pair: Pair) -> None:
    where = key()
    with node_pair[0].client() as fresh, node_pair[1].client() as other:
        fresh.insert(where, None)
        assert fresh.select(where) is None
        assert other.select(where, timeout=SHARED_SECONDS) is None
        with other.view(where) as seen:
            assert seen is None
        with pytest.raises(MissingTensor):
            fresh.select(key())


def test_the_first_content_stays(buffer: LookupBuffer) -> None:
    where = key()
    assert buffer.insert(where, torch.ones(4)) is InsertOutcome.STORED
    assert buffer.insert(where, torch.zeros(4)) is InsertOutcome.EXISTS
    found = buffer.select(where)
    assert found is not None
    assert found.eq(1).all()


def test_exists_means_that_a_reader_has_it(node_pair: Pair) -> None:
    """Many insert one key at once: after EXISTS, the key is found."""
    failures: list[object] = []
    tensor = tensor_of("race", 8 * MIB)

    def insert(client: LookupBuffer, names: list[str], start: threading.Barrier) -> None:
        for name in names:
            start.wait(10.0)
            try:
                outcome = client.insert(key_of[name], tensor)
                found = client.select(key_of[name])
                assert found is not None
            except LookupBufferError as error:
                failures.append((name, error))
                continue
            if not torch.equal(found, tensor):
                failures.append((name, outcome))

    names = [f"race{number}" for number in range(6)]
    key_of = {name: key(name) for name in names}
    start = threading.Barrier(2)
    with node_pair[0].client() as one, node_pair[0].client() as two:
        threads = [
            threading.Thread(target=insert, args=(client, names, start)) for client in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    at_rest(node_pair[0])


def test_the_tensor_may_be_changed_after_insert(buffer: LookupBuffer) -> None:
    where, tensor = key(), torch.ones(MIB)
    buffer.insert(where, tensor)
    tensor.zero_()
    found = buffer.select(where)
    assert found is not None
    assert found.eq(1).all()


def test_larger_than_the_arena_is_refused_at_once(buffer: LookupBuffer) -> None:
    tensor = torch.empty(65 * MIB, dtype=torch.uint8)
    started = time.monotonic()
    with pytest.raises(TensorTooLarge, match="capacity_bytes"):
        buffer.insert(key(), tensor, timeout=60.0)
    assert time.monotonic() - started < 30.0


def test_out_is_filled_or_refused(buffer: LookupBuffer) -> None:
    where, tensor = key(), torch.randn(4, 6)
    buffer.insert(where, tensor)
    out = torch.zeros(4, 6)
    assert buffer.select(where, out=out) is out
    assert torch.equal(out, tensor)
    strided = torch.zeros(6, 4).t()
    buffer.select(where, out=strided)
    assert torch.equal(strided, tensor)
    for wrong in (torch.zeros(6, 4), torch.zeros(4, 6).double(), torch.zeros(1, 6).expand(4, 6)):
        before = wrong.clone()
        with pytest.raises(CodecError):
            buffer.select(where, out=wrong)
        assert torch.equal(wrong, before)


def test_a_view_is_pinned_and_in_place(buffer: LookupBuffer) -> None:
    where, tensor = key(), tensor_of("view", 20 * MIB)
    buffer.insert(where, tensor)
    with buffer.view(where) as seen:
        assert seen is not None
        assert torch.equal(seen, tensor)
        stats = buffer.stats()
        assert stats["pinned_bytes"] == 20 * MIB
        for number in range(8):  # more than the arena holds: everything else is evicted
            try:
                buffer.insert(key(), tensor_of(str(number), MIB))
            except BufferFull:
                break
        assert torch.equal(seen, tensor)
    assert buffer.stats()["pins"] == 0


def test_misses(buffer: LookupBuffer) -> None:
    with pytest.raises(MissingTensor, match="absent"):
        buffer.select(key())
    with pytest.raises(KeyError):
        buffer.select(key())
    started = time.monotonic()
    with pytest.raises(LookupTimeout):
        buffer.select(key(), timeout=0.3)
    assert 0.29 < time.monotonic() - started < scaled(0.3)
    with pytest.raises(MissingTensor), buffer.view(key()):
        pass


def test_namespaces_are_separate(node_pair: Pair) -> None:
    where = key()
    with node_pair[0].client("one") as one, node_pair[0].client("other") as other:
        one.insert(where, torch.ones(2))
        with pytest.raises(MissingTensor):
            other.select(where)
        assert other.has_caches([where]) == [False]
        other.insert(where, torch.zeros(2))
        found = one.select(where)
        assert found is not None
        assert found.eq(1).all()


@pytest.mark.parametrize("node", [0, 1])
def test_a_waiting_select_returns_when_the_item_is_inserted(
    node_pair: Pair, buffer: LookupBuffer, node: int
) -> None:
    where, tensor, found = key(), torch.randn(100), list[torch.Tensor | None]()
    seconds = list[float]()

    def wait() -> None:
        found.append(buffer.select(where, timeout=120.0))
        seconds.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    with node_pair[node].client() as writer:
        inserted = time.monotonic()
        writer.insert(where, tensor)
        thread.join()
    assert found[0] is not None
    assert torch.equal(found[0], tensor)
    assert seconds[0] - inserted < 60.0


def test_time_to_live_travels_with_the_copies(
    buffer: LookupBuffer, elsewhere: LookupBuffer
) -> None:
    where, lasting = key("brief"), key("lasting")
    started = time.monotonic()
    buffer.insert(where, torch.ones(3), ttl_seconds=2.0)
    buffer.insert(lasting, torch.ones(3))
    for one in (where, lasting):
        elsewhere.select(one, timeout=1.5)
        for reader in (buffer, elsewhere):
            reader.select(one)
    time.sleep(max(0.0, started + 2.05 - time.monotonic()))
    for reader in (buffer, elsewhere):
        # What the copy was on its way is added to its time.
        wait_until(lambda: not reader.has_caches([where], timeout=1.0)[0], 2.0)  # noqa: B023
        with pytest.raises(MissingTensor):
            reader.select(where)
        assert reader.has_caches([where, lasting], timeout=1.0) == [False, True]
        reader.select(lasting)


def test_an_expired_key_can_be_stored_again_at_once(buffer: LookupBuffer) -> None:
    where, ttl_seconds = key(), 1.5
    for value in range(2):
        outcome = buffer.insert(where, torch.full((3,), float(value)), ttl_seconds=ttl_seconds)
        assert outcome is InsertOutcome.STORED
        found = buffer.select(where)
        assert found is not None
        assert found.eq(value).all()
        time.sleep(ttl_seconds + 0.01)


@pytest.mark.parametrize("ttl", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_time_to_live_that_no_node_accepts_is_refused(buffer: LookupBuffer, ttl: float) -> None:
    with pytest.raises(ValueError, match="ttl_seconds"):
        buffer.insert(key(), torch.ones(2), ttl_seconds=ttl)


def test_has_caches_is_about_complete_copies_anywhere(
    buffer: LookupBuffer, elsewhere: LookupBuffer
) -> None:
    here, there, nowhere = key(), key(), key()
    buffer.insert(here, torch.ones(2))
    elsewhere.insert(there, torch.ones(2))
    wait_until(lambda: all(buffer.has_caches([here, there], timeout=1.0)), SHARED_SECONDS)
    assert buffer.has_caches([nowhere, here, there, nowhere], timeout=1.0) == [
        False, True, True, False,
    ]  # fmt: skip
    assert buffer.has_caches([]) == []


def test_more_keys_than_one_request_takes(buffer: LookupBuffer) -> None:
    """Neither an error nor the end of the session."""
    here = key()
    buffer.insert(here, torch.ones(2))
    with buffer.view(here):
        many = [key() for _ in range(5000)]
        answers = buffer.has_caches([*many, here], timeout=5.0)
        assert len(answers) == 5001
        handles = buffer.prefetch([*many, here], timeout=20.0)
        assert handles[-1].state.value == "resident"
        assert all(handle.state.value == "missing" for handle in handles[:-1])
        for handle in handles:
            buffer.release(handle)
        assert buffer.stats()["pins"] == 1
