"""Elsewhere: keys that other nodes hold, for every client of the host to see without asking.

A digest table beside the board. The node lists a key that its mirror knows to be held by a node
that lives, and strikes it off the moment either may no longer be so. What is not listed, also what
nobody holds, is asked of the node.
"""

import struct
import time
from collections.abc import Callable
from typing import Final

from lookup_buffer.item import Address
from lookup_buffer.shm.index import IS_ORDERED, DigestReader, DigestTable, digest_of

ENTRIES: Final = 65536
"""2.6 MB where all are used; past it those that were listed longest ago make room."""
ENTRY: Final = struct.Struct("@Q32s")
"""sequence, digest"""
BELIEVED_SECONDS: Final = 1.0
"""A node that did not confirm its table for so long is frozen, and knows no more than we do."""
_FLOOR, _CONFIRMED_AT = 0, 1
"""Words of the header: the last sequence that is void, and nanoseconds of CLOCK_MONOTONIC, which
all processes of a host share. (Where they do not, in a time namespace, nothing is believed.)"""


class Elsewhere:
    """The node's side. One thread."""

    def __init__(self) -> None:
        self._table = DigestTable("lookup-buffer-elsewhere", ENTRIES, ENTRY)

    @property
    def fd(self) -> int:
        return self._table.fd

    def list(self, address: Address) -> None:
        if not IS_ORDERED:
            return
        digest = digest_of(*address)
        position, _ = self._table.find(digest) or self._table.oldest(digest)
        self._table.write(position, digest)

    def strike(self, address: Address) -> None:
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
        self._table = DigestReader(fd, ENTRY)
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
