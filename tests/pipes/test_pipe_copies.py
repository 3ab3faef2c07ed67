"""Copies of sent tensors reuse memory, and never memory that is still in use."""

import os
import threading

from lookup_buffer.pipes.copies import KEPT_BYTES, LEAST_BYTES, Copies
from lookup_buffer.shm.memory import pointer_to

MIB = 1 << 20


def source(nbytes: int, value: int) -> memoryview:
    return memoryview(bytes([value]) * nbytes)


def test_memory_is_reused_once_no_view_of_it_exists() -> None:
    copies = Copies()
    first = copies.copy(source(3 * MIB, 1))
    second = copies.copy(source(3 * MIB, 2))
    part = first[MIB:]
    address = pointer_to(first)
    del first
    third = copies.copy(source(3 * MIB, 3))
    assert part == source(2 * MIB, 1), "it is still in use"
    del part
    fourth = copies.copy(source(4 * MIB - 5, 4))
    assert pointer_to(fourth) == address
    for number, copy in ((2, second), (3, third), (4, fourth)):
        assert copy == source(len(copy), number)


def test_small_and_empty_copies() -> None:
    copies = Copies()
    for nbytes in (0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1):
        assert copies.copy(source(nbytes, 7)) == source(nbytes, 7)


def test_kept_memory_is_bounded_and_released_at_close() -> None:
    def mapped_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    copies = Copies()
    before = mapped_bytes()
    held = [copies.copy(source(16 * MIB, number)) for number in range(8)]
    assert mapped_bytes() - before >= 128 * MIB
    assert all(copy[-1] == number for number, copy in enumerate(held))
    last = held.pop()
    held.clear()
    assert mapped_bytes() - before >= 128 * MIB, "the next ones may need it"
    copies.trim()
    assert mapped_bytes() - before < KEPT_BYTES + 48 * MIB
    copies.close()
    assert mapped_bytes() - before < 48 * MIB
    assert last == source(16 * MIB, 7)
    del last
    assert mapped_bytes() - before < 32 * MIB


def test_many_threads_copy_at_once() -> None:
    copies = Copies()
    wrong: list[int] = []

    def work(number: int) -> None:
        for nbytes in (MIB, 2 * MIB, 5 * MIB) * 20:
            copy = copies.copy(source(nbytes, number))
            if copy[0] != number or copy[-1] != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
