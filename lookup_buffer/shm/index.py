"""A digest table: entries in shared memory, found by the digest of (namespace, key).

One writes, the node; clients map the table read-only and find entries without asking it. An entry
begins with a sequence that is never given twice, 0 while nothing is there or it is being written.
Whoever finds the same sequence before and after has read what belongs together (a seqlock).

Relies on stores being seen in their order, which x86-64 promises: elsewhere tables stay empty.

The board: what the node holds, for every client of the host to read without asking.

A digest table beside the arena. The node lists an item once its bytes are complete and strikes it
off before they can be given to another. A reader takes an entry, copies the bytes, and looks again:
if the entry is unchanged, so were the bytes. So a read on one host costs no round trip, and a
stopped node holds nobody up. What is not on the board is asked for.

An entry that does not fit (a full bucket, too many dimensions) or that would need a clock (a time
to live) is left off.

Elsewhere: keys that other nodes hold, for every client of the host to see without asking.

A digest table beside the board. The node lists a key that its mirror knows to be held by a node
that lives, and strikes it off the moment either may no longer be so. What is not listed, also what
nobody holds, is asked of the node.
"""

import hashlib
import os
import platform
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from lookup_buffer.key import QualifiedKey
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.shm.memory import Mapping, SealedMemory

IS_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
BUCKET_ENTRIES: Final = 8
DIGEST_BYTES: Final = 32
WORD_BYTES: Final = 8
HEADER_BYTES: Final = 64
"""At the beginning of a table: words for its owner."""
_NO_DIGEST: Final = bytes(DIGEST_BYTES)


@lru_cache(maxsize=4096)  # hashing 32 keys anew is a quarter of looking them up
def digest_of(namespace: str, key: str) -> bytes:
    """What an entry is found by; cryptographic, because clients may choose keys."""
    return hashlib.blake2b(f"{namespace} {key}".encode(), digest_size=DIGEST_BYTES).digest()


class _Table:
    def __init__(self, view: memoryview, entry_bytes: int) -> None:
        self.view = view
        self.words = view.cast("Q")
        self._entry_bytes = entry_bytes
        self._entry_words = entry_bytes // WORD_BYTES
        self._bucket_bytes = BUCKET_ENTRIES * entry_bytes
        self._bucket_words = BUCKET_ENTRIES * self._entry_words
        self._buckets = (len(view) - HEADER_BYTES) // self._bucket_bytes

    def find(self, digest: bytes) -> tuple[int, int] | None:
        """Where the entry of `digest` begins, and the sequence that was there meanwhile."""
        # By the digests' first words, a third of what a search for the whole digest takes.
        tag = int.from_bytes(digest[:WORD_BYTES], "little")
        start = self._bucket_of(tag)
        word = start // WORD_BYTES
        tags = self.words[word + 1 : word + self._bucket_words : self._entry_words].tolist()
        if tag not in tags:
            return None
        for index, other in enumerate(tags):
            if other == tag:
                found = self._read(start + index * self._entry_bytes, digest)
                if found is not None:
                    return found
        return None

    def _read(self, position: int, digest: bytes) -> tuple[int, int] | None:
        sequence = self.words[position // WORD_BYTES]
        if sequence == 0:
            return None
        listed = self.view[position + WORD_BYTES : position + WORD_BYTES + DIGEST_BYTES]
        stands = listed == digest and self.stands(position, sequence)
        return (position, sequence) if stands else None

    def _bucket_of(self, tag: int) -> int:
        return HEADER_BYTES + tag % self._buckets * self._bucket_bytes

    def stands(self, position: int, sequence: int) -> bool:
        """Whether the entry is unchanged."""
        return self.words[position // WORD_BYTES] == sequence


class DigestTable(_Table):
    """The writer's side; one thread at a time."""

    def __init__(self, name: str, entries: int, entry: struct.Struct) -> None:
        self._memory = SealedMemory(name, HEADER_BYTES + entries * entry.size)
        super().__init__(self._memory.view, entry.size)
        self._entry = entry
        self.sequence = 0
        """The last one that was given."""

    @property
    def fd(self) -> int:
        return self._memory.fd

    def oldest(self, digest: bytes) -> tuple[int, int]:
        """Where a new entry of `digest` may go with the least loss, and the sequence there."""
        start = self._bucket_of(int.from_bytes(digest[:WORD_BYTES], "little"))
        positions = range(start, start + self._bucket_bytes, self._entry_bytes)
        return min((self.words[at // WORD_BYTES], at) for at in positions)[::-1]

    def write(self, position: int, digest: bytes, *fields: int) -> None:
        self.words[position // WORD_BYTES] = 0
        self._entry.pack_into(self.view, position, 0, digest, *fields)
        self.sequence += 1
        self.words[position // WORD_BYTES] = self.sequence

    def erase(self, position: int) -> None:
        self.words[position // WORD_BYTES] = 0
        self.view[position + WORD_BYTES : position + WORD_BYTES + DIGEST_BYTES] = _NO_DIGEST

    def close(self) -> None:
        self.words.release()
        self._memory.close()


class DigestReader(_Table):
    """A client's side. Any thread."""

    def __init__(self, fd: int, entry: struct.Struct) -> None:
        self._mapping = Mapping(fd, os.fstat(fd).st_size, writable=False)
        super().__init__(self._mapping.view, entry.size)

    def close(self) -> None:
        self.words.release()
        self._mapping.close()


LOCAL_ENTRY: Final = struct.Struct("@Q32sQBBB13x8Q")
"""sequence, digest, offset, kind, dtype, dimensions, sizes; two cache lines."""
DIMENSIONS_MAX: Final = 8
BYTES_AN_ENTRY: Final = 256 << 10
"""An arena of this many bytes per entry is expected; smaller items may be left off."""
ENTRIES_MIN, ENTRIES_MAX = 1024, 65536
_DTYPE_NAMES: Final = tuple(DTYPES)
_DTYPE_CODES: Final = {name: code for code, name in enumerate(_DTYPE_NAMES)}
_KINDS: Final = ("tensor", "none")


def entries_for(capacity_bytes: int) -> int:
    wanted = min(max(capacity_bytes // BYTES_AN_ENTRY, ENTRIES_MIN), ENTRIES_MAX)
    return 1 << (wanted - 1).bit_length()


class Board:
    """The node's side. Called under the shelf's lock."""

    def __init__(self, capacity_bytes: int) -> None:
        entries = entries_for(capacity_bytes)
        self._table = DigestTable("lookup-buffer-board", entries, LOCAL_ENTRY)
        self._positions: dict[QualifiedKey, int] = {}

    @property
    def fd(self) -> int:
        return self._table.fd

    def list(self, address: QualifiedKey, header: TensorHeader, offset: int) -> None:
        """Put a complete item up, where it fits."""
        if not IS_ORDERED or len(header.shape) > DIMENSIONS_MAX:
            return
        digest = digest_of(*address)
        position, there = self._table.oldest(digest)
        if there:
            return
        sizes = header.shape + (0,) * (DIMENSIONS_MAX - len(header.shape))
        kind, dtype = _KINDS.index(header.kind), _DTYPE_CODES.get(header.dtype, 0)
        self._table.write(position, digest, offset, kind, dtype, len(header.shape), *sizes)
        self._positions[address] = position

    def strike(self, address: QualifiedKey) -> None:
        """Take an item off, before its bytes can be given to another."""
        position = self._positions.pop(address, None)
        if position is not None:
            self._table.erase(position)

    def close(self) -> None:
        self._table.close()


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an item lay when the board was read. Good as long as `BoardReader.stands`."""

    position: int
    sequence: int
    header: TensorHeader
    offset: int


class BoardReader:
    """A client's side. Any thread."""

    def __init__(self, fd: int) -> None:
        self._table = DigestReader(fd, LOCAL_ENTRY)

    def lists(self, digest: bytes) -> bool:
        """Whether the item is here; False where the node has to be asked."""
        return self._table.find(digest) is not None

    def find(self, digest: bytes) -> Entry | None:
        """The entry of an item that is here, None where the node has to be asked."""
        place = self._table.find(digest)
        if place is None:
            return None
        fields = LOCAL_ENTRY.unpack_from(self._table.view, place[0])
        if not self._table.stands(*place):
            return None
        _, _, offset, kind, dtype, dimensions, *sizes = fields
        if _KINDS[kind] == "none":
            header = TensorHeader.of_none()
        else:
            header = TensorHeader.for_tensor(_DTYPE_NAMES[dtype], tuple(sizes[:dimensions]))
        return Entry(*place, header, offset)

    def stands(self, entry: Entry) -> bool:
        """Whether the entry is unchanged, and with it the bytes that were read since."""
        return self._table.stands(entry.position, entry.sequence)

    def close(self) -> None:
        self._table.close()


ENTRIES: Final = 65536
"""2.6 MB where all are used; past it those that were listed longest ago make room."""
REMOTE_ENTRY: Final = struct.Struct("@Q32s")
"""sequence, digest"""
BELIEVED_SECONDS: Final = 1.0
"""A node that did not confirm its table for so long is frozen, and knows no more than we do."""
_FLOOR, _CONFIRMED_AT = 0, 1
"""Words of the header: the last sequence that is void, and nanoseconds of CLOCK_MONOTONIC, which
all processes of a host share. (Where they do not, in a time namespace, nothing is believed.)"""


class Elsewhere:
    """The node's side. One thread."""

    def __init__(self) -> None:
        self._table = DigestTable("lookup-buffer-elsewhere", ENTRIES, REMOTE_ENTRY)

    @property
    def fd(self) -> int:
        return self._table.fd

    def list(self, address: QualifiedKey) -> None:
        if not IS_ORDERED:
            return
        digest = digest_of(*address)
        position, _ = self._table.find(digest) or self._table.oldest(digest)
        self._table.write(position, digest)

    def strike(self, address: QualifiedKey) -> None:
        """Take a key off; one that is not listed is no matter."""
        found = self._table.find(digest_of(*address))
        if found is not None:
            self._table.erase(found[0])

    def strike_all(self) -> None:
        self._table.words[_FLOOR] = self._table.sequence

    def confirm(self) -> None:
        """What is listed is so now. To be called more often than each `BELIEVED_SECONDS`."""
        self._table.words[_CONFIRMED_AT] = time.monotonic_ns()

    def close(self) -> None:
        self._table.close()


class ElsewhereReader:
    """A client's side. Any thread."""

    def __init__(self, fd: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._table = DigestReader(fd, REMOTE_ENTRY)
        self._clock = clock

    def is_current(self) -> bool:
        """Whether the node has confirmed lately what is listed."""
        age = self._clock() - self._table.words[_CONFIRMED_AT]
        return 0 <= age < BELIEVED_SECONDS * 1e9

    def lists(self, digest: bytes) -> bool:
        """Whether a living node holds the key; False where this host's node has to be asked."""
        found = self._table.find(digest)
        return found is not None and found[1] > self._table.words[_FLOOR]

    def close(self) -> None:
        self._table.close()
