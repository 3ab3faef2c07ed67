"""A digest table: entries in shared memory, found by the digest of (namespace, key).

One writes, the node; clients map the table read-only and find entries without asking it. An entry
begins with a sequence that is never given twice, 0 while nothing is there or it is being written.
Whoever finds the same sequence before and after has read what belongs together (a seqlock).

Relies on stores being seen in their order, which x86-64 promises: elsewhere tables stay empty.
"""

import hashlib
import os
import platform
import struct
from functools import lru_cache
from typing import Final

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
