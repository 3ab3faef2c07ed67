"""The memory that two ends of a pipe share."""

import os
import time
from collections.abc import Iterator

import pytest

from lookup_buffer.errors import ProtocolError
from lookup_buffer.pipes.shared_region import PLACED_BYTES, PREFAULT_BYTES, SharedMemory

SIZE = 1 << 20
Pair = tuple[SharedMemory, SharedMemory]


def made(nbytes: int) -> Pair:
    pair = SharedMemory(nbytes), SharedMemory(nbytes)
    pair[0].adopt(pair[1].descriptor)
    pair[1].adopt(pair[0].descriptor)
    return pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = made(SIZE)
    yield pair
    for memory in pair:
        memory.close()


def put(memory: SharedMemory, content: bytes) -> int:
    placed = memory.put(memoryview(content))
    assert placed is not None
    return placed[1]


def test_the_remote_end_reads_the_bytes(pair: Pair) -> None:
    a, b = pair
    contents = [os.urandom(PLACED_BYTES + n) for n in range(10)]
    places = [put(a, content) for content in contents]
    for content, at in zip(contents, places, strict=True):
        view = b.get(at, len(content))
        assert view == content
        assert view.readonly


def test_the_whole_memory_can_be_reused(pair: Pair) -> None:
    a, b = pair
    for n in range(3):
        at = put(a, bytes([n]) * SIZE)
        assert a.put(memoryview(bytes(PLACED_BYTES))) is None, "full"
        assert b.get(at, SIZE) == bytes([n]) * SIZE
        a.free(at)


@pytest.mark.parametrize("nbytes", [1, 4095, 1 << 50])
def test_memory_of_any_size(nbytes: int) -> None:
    a, b = made(nbytes)
    placed = a.put(memoryview(b"x" * PLACED_BYTES))
    assert (placed is None) == (nbytes < PLACED_BYTES)
    for memory in (a, b):
        memory.close()


def test_few_bytes_are_not_put(pair: Pair) -> None:
    assert pair[0].put(memoryview(bytes(PLACED_BYTES - 1))) is None


@pytest.mark.parametrize(("at", "nbytes"), [(-1, 1), (SIZE, 1), (1, SIZE), (0, 1 << 70)])
def test_offsets_outside_are_refused(pair: Pair, at: int, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="outside"):
        pair[1].get(at, nbytes)


def test_views_outlive_close_and_nothing_is_put_after_it(pair: Pair) -> None:
    a, b = pair
    at = put(a, b"x" * SIZE)
    view = b.get(at, SIZE)
    for memory in (a, a, b, b):
        memory.close()
    assert view == b"x" * SIZE
    a.free(at)
    assert a.put(memoryview(bytes(SIZE))) is None
    with pytest.raises(ProtocolError, match="not shared"):
        b.get(at, SIZE)


def test_no_descriptor_remains_once_the_views_are_gone() -> None:
    before = len(os.listdir("/proc/self/fd"))
    a, b = made(SIZE)
    view = b.get(put(a, b"x" * SIZE), SIZE)
    a.close()
    b.close()
    del view
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_large_memory_is_not_allocated_at_once() -> None:
    a, b = made(1_000_000_000)
    try:
        assert os.fstat(a.descriptor).st_blocks == 0, "nothing was sent"
        b.get(put(a, bytes(PLACED_BYTES)), PLACED_BYTES)
        deadline = time.monotonic() + 10.0
        while os.fstat(a.descriptor).st_blocks * 512 < PREFAULT_BYTES:
            assert time.monotonic() < deadline, "pages are allocated ahead of use"
            time.sleep(0.01)
        time.sleep(0.1)
        assert os.fstat(a.descriptor).st_blocks * 512 == PREFAULT_BYTES
    finally:
        a.close()
        b.close()
