"""The board: what the node holds, for every client of the host to read without asking.

A table in shared memory beside the arena. The node lists an item once its bytes are complete and
strikes it off before they can be given to another; clients map it read-only. A reader takes an
entry, copies the bytes, and looks again: if the entry is unchanged, so were the bytes (a seqlock).
So a read on one host costs no round trip, and a stopped node holds nobody up. What is not on the
board is asked for.

An entry that does not fit (a full bucket, too many dimensions) or that would need a clock (a time
to live) is left off. Relies on stores being seen in their order, which x86-64 promises: elsewhere
the board stays empty.
"""

import hashlib
import os
import platform
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from lookup_buffer.arena import Mapping, SealedMemory
from lookup_buffer.header import DTYPES, TensorHeader
from lookup_buffer.inventory import Address

ENTRY: Final = struct.Struct("@Q32sQBBB13x8Q")
"""sequence, digest, offset, kind, dtype, dimensions, sizes; two cache lines."""
DIMENSIONS_MAX: Final = 8
BUCKET_ENTRIES: Final = 8
BUCKET_BYTES: Final = BUCKET_ENTRIES * ENTRY.size
BYTES_AN_ENTRY: Final = 256 << 10
"""An arena of this many bytes per entry is expected; smaller items may be left off."""
ENTRIES_MIN, ENTRIES_MAX = 1024, 65536
DIGEST_BYTES: Final = 32
_NO_DIGEST: Final = bytes(DIGEST_BYTES)
_WORD: Final = 8
_DTYPE_NAMES: Final = tuple(DTYPES)
_DTYPE_CODES: Final = {name: code for code, name in enumerate(_DTYPE_NAMES)}
_KINDS: Final = ("tensor", "none")
IS_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")


@lru_cache(maxsize=4096)  # hashing 32 keys anew is a quarter of looking them up
def digest_of(namespace: str, key: str) -> bytes:
    """What an entry is found by; cryptographic, because clients may choose keys."""
    return hashlib.blake2b(f"{namespace} {key}".encode(), digest_size=DIGEST_BYTES).digest()


def entries_for(capacity_bytes: int) -> int:
    wanted = min(max(capacity_bytes // BYTES_AN_ENTRY, ENTRIES_MIN), ENTRIES_MAX)
    return 1 << (wanted - 1).bit_length()


class Board:
    """The node's side. Called under the shelf's lock."""

    def __init__(self, capacity_bytes: int) -> None:
        nbytes = entries_for(capacity_bytes) * ENTRY.size
        self._memory = SealedMemory("lookup-buffer-board", nbytes)
        self._words = self._memory.view.cast("Q")
        self._buckets = nbytes // BUCKET_BYTES
        self._sequence = 0
        self._positions: dict[Address, int] = {}

    @property
    def fd(self) -> int:
        return self._memory.fd

    def list(self, address: Address, header: TensorHeader, offset: int) -> None:
        """Put a complete item up, where it fits."""
        if not IS_ORDERED or len(header.shape) > DIMENSIONS_MAX:
            return
        digest = digest_of(*address)
        position = self._free_position(digest)
        if position is None:
            return
        self._sequence += 2
        sizes = header.shape + (0,) * (DIMENSIONS_MAX - len(header.shape))
        word = position // _WORD
        self._words[word] = self._sequence - 1  # odd: being written
        ENTRY.pack_into(
            self._memory.view,
            position,
            self._sequence - 1,
            digest,
            offset,
            _KINDS.index(header.kind),
            _DTYPE_CODES.get(header.dtype, 0),
            len(header.shape),
            *sizes,
        )
        self._words[word] = self._sequence
        self._positions[address] = position

    def strike(self, address: Address) -> None:
        """Take an item off, before its bytes can be given to another."""
        position = self._positions.pop(address, None)
        if position is not None:
            self._words[position // _WORD] = 0
            self._memory.view[position + _WORD : position + _WORD + DIGEST_BYTES] = _NO_DIGEST

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def _free_position(self, digest: bytes) -> int | None:
        start = _bucket_of(digest, self._buckets) * BUCKET_BYTES
        for position in range(start, start + BUCKET_BYTES, ENTRY.size):
            if self._words[position // _WORD] == 0:
                return position
        return None


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
        self._mapping = Mapping(fd, os.fstat(fd).st_size, writable=False)
        self._words = self._mapping.view.cast("Q")
        self._buckets = self._mapping.nbytes // BUCKET_BYTES

    def lists(self, digest: bytes) -> bool:
        """Whether the item is here; False where the node has to be asked."""
        return self._place(digest) is not None

    def find(self, digest: bytes) -> Entry | None:
        """The entry of an item that is here, None where the node has to be asked."""
        place = self._place(digest)
        if place is None:
            return None
        position, sequence = place
        fields = ENTRY.unpack_from(self._mapping.view, position)
        if not self._is(position, sequence):
            return None
        _, _, offset, kind, dtype, dimensions, *sizes = fields
        if _KINDS[kind] == "none":
            header = TensorHeader.of_none()
        else:
            header = TensorHeader.for_tensor(_DTYPE_NAMES[dtype], tuple(sizes[:dimensions]))
        return Entry(position, sequence, header, offset)

    def stands(self, entry: Entry) -> bool:
        """Whether the entry is unchanged, and with it the bytes that were read since."""
        return self._is(entry.position, entry.sequence)

    def close(self) -> None:
        self._words.release()
        self._mapping.close()

    def _place(self, digest: bytes) -> tuple[int, int] | None:
        """Where the item is listed, and the sequence that was there meanwhile."""
        view = self._mapping.view
        start = _bucket_of(digest, self._buckets) * BUCKET_BYTES
        found = bytes(view[start : start + BUCKET_BYTES]).find(digest)
        if found % ENTRY.size != _WORD:
            return None
        position = start + found - _WORD
        sequence = self._words[position // _WORD]
        if sequence == 0 or sequence % 2:
            return None  # struck off, or being written
        listed = view[position + _WORD : position + _WORD + DIGEST_BYTES]
        return (position, sequence) if listed == digest and self._is(position, sequence) else None

    def _is(self, position: int, sequence: int) -> bool:
        return self._words[position // _WORD] == sequence


def _bucket_of(digest: bytes, buckets: int) -> int:
    return int.from_bytes(digest[:8], "little") % buckets
