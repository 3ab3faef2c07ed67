"""The local index: its entries are true, also during additions and removals."""

import os
import struct
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.key import QualifiedKey
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.shm.index import (
    BUCKET_ENTRIES,
    BYTES_PER_ENTRY,
    DIMENSIONS_MAX,
    ENTRIES_MAX,
    ENTRIES_MIN,
    HEADER_BYTES,
    IS_ORDERED,
    LOCAL_ENTRY,
    Entry,
    LocalIndex,
    LocalIndexReader,
    digest_of,
    entries_for,
)
from patience import scaled

pytestmark = pytest.mark.skipif(not IS_ORDERED, reason="the board stays empty on this machine")
ROOT = Path(__file__).resolve().parents[2]
BUCKETS = ENTRIES_MIN // BUCKET_ENTRIES
NAMESPACE = "0123456789abcdef" * 4


def crowded(bucket: int, count: int) -> list[QualifiedKey]:
    """Addresses that all belong to one bucket of the smallest index."""
    found: list[QualifiedKey] = []
    number = 0
    while len(found) < count:
        address = (NAMESPACE, f"key{number}")
        if int.from_bytes(digest_of(*address)[:8], "little") % BUCKETS == bucket:
            found.append(address)
        number += 1
    return found


CROWD = crowded(3, BUCKET_ENTRIES + 4) + crowded(BUCKETS - 1, 3)
SHAPES = st.lists(st.integers(0, 9), max_size=DIMENSIONS_MAX).map(tuple)
HEADERS = st.one_of(
    st.just(TensorHeader.of_none()),
    st.builds(TensorHeader.for_tensor, st.sampled_from(sorted(DTYPES)), SHAPES),
)


@dataclass
class Both:
    """A local index and its reader."""

    local_index: LocalIndex = field(default_factory=lambda: LocalIndex(1 << 20))
    reader: LocalIndexReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = LocalIndexReader(self.local_index.fd)

    def find(self, address: QualifiedKey) -> Entry | None:
        found = self.reader.find(digest_of(*address))
        assert self.reader.contains(digest_of(*address)) == (found is not None)
        return found

    def __enter__(self) -> "Both":
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.local_index.close()


# (index into CROWD, what is listed there at which offset; None: removed)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, len(CROWD) - 1),
        st.one_of(st.none(), st.tuples(HEADERS, st.integers(0, (1 << 64) - 1))),
    ),
    max_size=60,
)


@given(CHANGES)
def test_it_equals_a_dictionary_within_its_capacity(
    changes: list[tuple[int, tuple[TensorHeader, int] | None]],
) -> None:
    with Both() as both:
        held: dict[QualifiedKey, tuple[TensorHeader, int]] = {}
        seen: dict[QualifiedKey, Entry] = {}
        left_off: set[QualifiedKey] = set()
        for index, change in changes:
            address = CROWD[index]
            both.local_index.remove(address)
            before = held.pop(address, None)
            assert (
                before is None or address not in seen or not both.reader.is_unchanged(seen[address])
            )
            seen.pop(address, None)
            left_off.discard(address)
            if change is not None:
                crowd = CROWD[:-3] if address in CROWD[:-3] else CROWD[-3:]
                listed = sum(other in held and other not in left_off for other in crowd)
                held[address] = change
                both.local_index.add(address, *change)
                if listed == BUCKET_ENTRIES:
                    left_off.add(address)
            for other in CROWD:
                entry = both.find(other)
                if other not in held or other in left_off:
                    assert entry is None
                else:
                    assert entry is not None, "there was room"
                    assert (entry.header, entry.offset) == held[other]
                    assert seen.setdefault(other, entry) == entry
                    assert both.reader.is_unchanged(entry)


def test_an_entry_does_not_stand_for_the_next_one_in_its_place() -> None:
    """Even if all fields are equal, because the bytes were written again."""
    header, address = TensorHeader.for_tensor("uint8", (4,)), CROWD[0]
    with Both() as both:
        both.local_index.add(address, header, 64)
        before = both.find(address)
        both.local_index.remove(address)
        both.local_index.add(address, header, 64)
        after = both.find(address)
        assert before is not None
        assert after is not None
        assert (before.position, before.offset) == (after.position, after.offset)
        assert both.reader.is_unchanged(after)
        assert not both.reader.is_unchanged(before)


def test_a_half_written_entry_is_not_found() -> None:
    """A writer that was stopped in the middle: an offset that cannot be packed stops it."""
    header = TensorHeader.for_tensor("uint8", (4,))
    with Both() as both:
        with pytest.raises(struct.error):
            both.local_index.add(CROWD[0], header, -1)
        assert digest_of(*CROWD[0]) in os.pread(
            both.local_index.fd, HEADER_BYTES + ENTRIES_MIN * LOCAL_ENTRY.size, 0
        )
        assert both.find(CROWD[0]) is None
        both.local_index.add(CROWD[1], header, 64)
        assert both.find(CROWD[1]) is not None


def test_items_with_too_many_dimensions_are_not_listed() -> None:
    with Both() as both:
        for dimensions in range(DIMENSIONS_MAX + 3):
            address = (NAMESPACE, str(dimensions))
            both.local_index.add(address, TensorHeader.for_tensor("int8", (1,) * dimensions), 0)
            assert (both.find(address) is not None) == (dimensions <= DIMENSIONS_MAX)
            both.local_index.remove(address)


def test_the_largest_numbers_fit() -> None:
    header = TensorHeader.for_tensor("uint8", (0, (1 << 63) - 1))
    with Both() as both:
        both.local_index.add(CROWD[0], header, (1 << 56) - 64)
        entry = both.find(CROWD[0])
        assert entry is not None
        assert (entry.header, entry.offset) == (header, (1 << 56) - 64)


def test_a_digest_in_the_wrong_place_is_not_found() -> None:
    """A client chooses the sizes of an empty tensor: they may equal the digest of another item."""
    honest, forged = CROWD[0], CROWD[1]
    sizes = struct.unpack("<4Q", digest_of(*honest))
    with Both() as both:
        both.local_index.add(forged, TensorHeader.for_tensor("uint8", (0, *sizes)), 0)
        assert both.find(honest) is None
        both.local_index.add(honest, TensorHeader.for_tensor("uint8", (1,)), 64)
        entry = both.find(honest)
        assert entry is None or entry.offset == 64  # None: the client queries the node


def test_digests_with_an_equal_beginning_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are found by the first words of the digest, which a chosen key can make equal."""
    first, second, third = (bytes(8) + bytes([n]) * 24 for n in (1, 2, 3))
    digests = {"first": first, "second": second}
    monkeypatch.setattr("lookup_buffer.shm.index.digest_of", lambda _, key: digests[key])
    with Both() as both:
        for number, key in enumerate(digests):
            both.local_index.add(
                (NAMESPACE, key), TensorHeader.for_tensor("uint8", (1,)), 64 * number
            )
        entries = [both.reader.find(digest) for digest in (first, second, third)]
        assert [entry and entry.offset for entry in entries] == [0, 64, None]
        both.local_index.remove((NAMESPACE, "first"))
        assert not both.reader.contains(first)
        assert both.reader.contains(second)


def test_digests_differ_by_namespace_and_by_key() -> None:
    digests = defaultdict(set)
    for namespace in (NAMESPACE, NAMESPACE[::-1]):
        for name in ("a", "b", "a b", " a", "a@1", "a#1"):
            digests[digest_of(namespace, name)].add((namespace, name))
    assert len(digests) == 12


@pytest.mark.parametrize("capacity_bytes", [1, 1 << 20, 300 << 20, 8 << 30, 1 << 50])
def test_its_size_is_a_power_of_two_within_bounds(capacity_bytes: int) -> None:
    entries = entries_for(capacity_bytes)
    assert entries & (entries - 1) == 0
    assert ENTRIES_MIN <= entries <= ENTRIES_MAX
    assert entries * BYTES_PER_ENTRY >= min(capacity_bytes, ENTRIES_MAX * BYTES_PER_ENTRY)


# What the reader of another process checks: size and offset follow from the key.
READER = """
import sys, time
from lookup_buffer.shm.index import LocalIndexReader
from lookup_buffer.shm.index import digest_of
reader = LocalIndexReader(int(sys.argv[1]))
names = sys.argv[4:]
digests = [digest_of(sys.argv[3], name) for name in names]
print("begins", flush=True)
until = time.monotonic() + float(sys.argv[2])
found = missed = wrong = 0
while time.monotonic() < until:
    for number, digest in enumerate(digests):
        entry = reader.find(digest)
        if entry is None:
            missed += 1
        elif (entry.offset, entry.header.shape) != (number, (number,) * (number % 9)):
            wrong += 1
        else:
            found += 1
print(found, missed, wrong)
"""


@pytest.mark.processes
def test_a_reader_of_another_process_never_sees_halves() -> None:
    """While a writer adds and removes entries without pause, all in one bucket."""
    with Both() as both:
        headers = [TensorHeader.for_tensor("int8", (n,) * (n % 9)) for n in range(len(CROWD))]
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(both.local_index.fd), "0.6", NAMESPACE]
            + [key for _, key in CROWD],
            pass_fds=[both.local_index.fd],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None
        reader.stdout.readline()
        until = time.monotonic() + 20.0
        turn = 0
        while reader.poll() is None and time.monotonic() < until:
            index = turn * 7 % len(CROWD)
            both.local_index.add(CROWD[index], headers[index], index)
            both.local_index.remove(CROWD[(turn - 4) * 7 % len(CROWD)])
            turn += 1
        output, _ = reader.communicate(timeout=scaled(5.0))
        found, missed, wrong = map(int, output.split())
    assert wrong == 0, f"{wrong} of {found + wrong}"
    assert min(found, missed) > 100, "it must have happened at once"
