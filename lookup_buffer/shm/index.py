"""The local and the remote index: digest tables in shared memory, written by the node only.

The local index (`LocalIndex`) lists complete items of the arena, except those with a time to live,
with too many dimensions, or whose bucket is full. The node removes an entry before the item's bytes
are reused, so an unchanged entry means unchanged bytes. A stopped node therefore blocks no local
read. The remote index (`RemoteIndex`) lists the keys that live nodes hold, as far as the node's
mirror has their records and is current. Keys in neither index need a request.

A digest table finds entries by the digest of (namespace, key). Clients map it read-only and read it
on any thread without a request. An entry begins with a sequence number that is never reused; 0
means empty or being written. A reader that finds the same number before and after has read a
consistent entry (a seqlock). This needs stores to become visible in order, which x86-64 guarantees;
on other machines the tables stay empty.
"""

import hashlib
import platform
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from lookup_buffer.key import QualifiedKey
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.shm.memory import Mapping, SealedMemory, adopt

IS_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
WITHOUT_ORDER: Final = (
    f"on {platform.machine()} the local and the remote index are off: each read asks the node, "
    "and has_caches without a timeout finds nothing"
)
BUCKET_ENTRIES: Final = 8
DIGEST_BYTES: Final = 32
WORD_BYTES: Final = 8
HEADER_BYTES: Final = 64
"""Bytes at the start of a table: words for the table's own use."""
_NO_DIGEST: Final = bytes(DIGEST_BYTES)


@lru_cache(maxsize=4096)  # hashing 32 keys again is a quarter of the cost of looking them up
def digest_of(namespace: str, key: str) -> bytes:
    """The digest that finds an entry; cryptographic, because clients may choose keys."""
    return hashlib.blake2b(f"{namespace} {key}".encode(), digest_size=DIGEST_BYTES).digest()


class _Table:
    """A digest table in mapped memory, as both sides see it."""

    def __init__(self, memory: Mapping, entry_bytes: int) -> None:
        self._memory = memory
        self._view = memory.view
        self._words = memory.view.cast("Q")
        self._entry_bytes = entry_bytes
        self._entry_words = entry_bytes // WORD_BYTES
        self._bucket_bytes = BUCKET_ENTRIES * entry_bytes
        self._bucket_words = BUCKET_ENTRIES * self._entry_words
        self._buckets = (memory.nbytes - HEADER_BYTES) // self._bucket_bytes

    def _find(self, digest: bytes) -> tuple[int, int] | None:
        """(position, sequence) of the entry of `digest`, None if there is none."""
        # By the first words of the digests: a third of the time of a search for whole digests.
        tag = int.from_bytes(digest[:WORD_BYTES], "little")
        start = self._bucket_of(tag)
        word = start // WORD_BYTES
        tags = self._words[word + 1 : word + self._bucket_words : self._entry_words].tolist()
        if tag not in tags:
            return None
        for index, other in enumerate(tags):
            if other == tag:
                found = self._read(start + index * self._entry_bytes, digest)
                if found is not None:
                    return found
        return None

    def _read(self, position: int, digest: bytes) -> tuple[int, int] | None:
        sequence = self._words[position // WORD_BYTES]
        if sequence == 0:
            return None
        listed = self._view[position + WORD_BYTES : position + WORD_BYTES + DIGEST_BYTES]
        is_valid = listed == digest and self._words[position // WORD_BYTES] == sequence
        return (position, sequence) if is_valid else None

    def _bucket_of(self, tag: int) -> int:
        return HEADER_BYTES + tag % self._buckets * self._bucket_bytes

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class _WrittenTable(_Table):
    """A digest table, for the node that writes it. One thread."""

    def __init__(self, name: str, entries: int, entry: struct.Struct) -> None:
        memory = SealedMemory(name, HEADER_BYTES + entries * entry.size)
        super().__init__(memory, entry.size)
        self.fd: Final = memory.fd
        self._entry = entry
        self._sequence = 0
        """The last sequence number in use."""

    def _oldest(self, digest: bytes) -> tuple[int, int]:
        """(position, sequence) of the empty or oldest entry that a new one of `digest` may
        replace."""
        start = self._bucket_of(int.from_bytes(digest[:WORD_BYTES], "little"))
        positions = range(start, start + self._bucket_bytes, self._entry_bytes)
        return min((self._words[at // WORD_BYTES], at) for at in positions)[::-1]

    def _write(self, position: int, digest: bytes, *fields: int) -> None:
        """Write a new entry; its sequence number comes last."""
        self._words[position // WORD_BYTES] = 0
        self._entry.pack_into(self._view, position, 0, digest, *fields)
        self._sequence += 1
        self._words[position // WORD_BYTES] = self._sequence

    def _erase(self, position: int) -> None:
        self._words[position // WORD_BYTES] = 0
        self._view[position + WORD_BYTES : position + WORD_BYTES + DIGEST_BYTES] = _NO_DIGEST


class _ReadTable(_Table):
    """A digest table, for a client that reads it. Any thread."""

    def __init__(self, fd: int, entry_bytes: int) -> None:
        """Raises ProtocolError: see `adopt`."""
        super().__init__(adopt(fd, most_bytes=TABLE_BYTES_MAX), entry_bytes)


LOCAL_ENTRY: Final = struct.Struct("@Q32sQBBB13x8Q")
"""sequence, digest, offset, kind, dtype, dimensions, sizes; two cache lines."""
DIMENSIONS_MAX: Final = 8
BYTES_PER_ENTRY: Final = 256 << 10
"""The index has one entry per this many bytes of the arena; with smaller items it may be
incomplete."""
ENTRIES_MIN, ENTRIES_MAX = 1024, 65536
TABLE_BYTES_MAX: Final = HEADER_BYTES + ENTRIES_MAX * LOCAL_ENTRY.size
_DTYPE_NAMES: Final = tuple(DTYPES)
_DTYPE_CODES: Final = {name: code for code, name in enumerate(_DTYPE_NAMES)}
_KINDS: Final = ("tensor", "none")


def entries_for(capacity_bytes: int) -> int:
    wanted = min(max(capacity_bytes // BYTES_PER_ENTRY, ENTRIES_MIN), ENTRIES_MAX)
    return 1 << (wanted - 1).bit_length()


class LocalIndex(_WrittenTable):
    """The local index, for the node that writes it. One thread."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("lookup-buffer-local-index", entries_for(capacity_bytes), LOCAL_ENTRY)
        self._positions: dict[QualifiedKey, int] = {}

    def add(self, address: QualifiedKey, header: TensorHeader, offset: int) -> None:
        """Add a complete item, unless it has too many dimensions or its bucket is full."""
        if not IS_ORDERED or len(header.shape) > DIMENSIONS_MAX:
            return
        digest = digest_of(*address)
        position, sequence = self._oldest(digest)
        if sequence:
            return  # the bucket is full
        sizes = header.shape + (0,) * (DIMENSIONS_MAX - len(header.shape))
        kind, dtype = _KINDS.index(header.kind), _DTYPE_CODES.get(header.dtype, 0)
        self._write(position, digest, offset, kind, dtype, len(header.shape), *sizes)
        self._positions[address] = position

    def remove(self, address: QualifiedKey) -> None:
        """Remove an item. Call it before the item's bytes can be reused. Idempotent."""
        position = self._positions.pop(address, None)
        if position is not None:
            self._erase(position)


@dataclass(frozen=True, slots=True)
class Entry:
    """The location of an item when the index was read. It is valid while
    `LocalIndexReader.is_unchanged` returns True."""

    position: int
    sequence: int
    header: TensorHeader
    offset: int


class LocalIndexReader(_ReadTable):
    """The local index, for a client that reads it. Any thread."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, LOCAL_ENTRY.size)

    def contains(self, digest: bytes) -> bool:
        """Whether this host holds the item; False if that is unknown and needs a request."""
        return self._find(digest) is not None

    def find(self, digest: bytes) -> Entry | None:
        """The entry of an item on this host; None if it is not listed and needs a request."""
        found = self._find(digest)
        if found is None:
            return None
        position, sequence = found
        fields = LOCAL_ENTRY.unpack_from(self._view, position)
        if self._words[position // WORD_BYTES] != sequence:
            return None
        _, _, offset, kind, dtype, dimensions, *sizes = fields
        if _KINDS[kind] == "none":
            header = TensorHeader.of_none()
        else:
            header = TensorHeader.for_tensor(_DTYPE_NAMES[dtype], tuple(sizes[:dimensions]))
        return Entry(position, sequence, header, offset)

    def is_unchanged(self, entry: Entry) -> bool:
        """Whether the entry is unchanged. If so, the bytes read since `find` are valid."""
        return self._words[entry.position // WORD_BYTES] == entry.sequence


ENTRIES: Final = 65536
"""2.6 MB if all are used. In a full bucket a new entry replaces the oldest one."""
REMOTE_ENTRY: Final = struct.Struct("@Q32s")
"""sequence, digest"""
CURRENT_SECONDS: Final = 1.0
"""How long the table counts as current after `RemoteIndex.mark_current`. A node that has not called
it for this long is frozen, and its table may be out of date."""
_FLOOR, _CURRENT_AT = 0, 1
"""Words of the table's header: the last invalid sequence number, and nanoseconds of
CLOCK_MONOTONIC, which all processes of a host share. (In another time namespace, with another
clock, no entry is valid.)"""


class RemoteIndex(_WrittenTable):
    """The remote index, for the node that writes it. One thread."""

    def __init__(self) -> None:
        super().__init__("lookup-buffer-remote-index", ENTRIES, REMOTE_ENTRY)

    def add(self, address: QualifiedKey) -> None:
        """Add a key; in a full bucket it replaces the oldest entry."""
        if not IS_ORDERED:
            return
        digest = digest_of(*address)
        position, _ = self._find(digest) or self._oldest(digest)
        self._write(position, digest)

    def remove(self, address: QualifiedKey) -> None:
        """Remove a key. Idempotent."""
        found = self._find(digest_of(*address))
        if found is not None:
            self._erase(found[0])

    def clear(self) -> None:
        """Invalidate all entries, by one write."""
        self._words[_FLOOR] = self._sequence

    def mark_current(self) -> None:
        """Store the time at which the table was current: now. Call it more often than every
        `CURRENT_SECONDS`."""
        self._words[_CURRENT_AT] = time.monotonic_ns()


class RemoteIndexReader(_ReadTable):
    """The remote index, for a client that reads it. Any thread."""

    def __init__(self, fd: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(fd, REMOTE_ENTRY.size)
        self._clock = clock

    def is_current(self) -> bool:
        """Whether the node marked the table as current within `CURRENT_SECONDS`."""
        age = self._clock() - self._words[_CURRENT_AT]
        return 0 <= age < CURRENT_SECONDS * 1e9

    def contains(self, digest: bytes) -> bool:
        """Whether a live node holds the key; False if that is unknown and needs a request."""
        found = self._find(digest)
        return found is not None and found[1] > self._words[_FLOOR]
