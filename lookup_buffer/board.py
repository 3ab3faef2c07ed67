"""The board: what the node holds, for every client of the host to read without asking.

A digest table beside the arena. The node lists an item once its bytes are complete and strikes it
off before they can be given to another. A reader takes an entry, copies the bytes, and looks again:
if the entry is unchanged, so were the bytes. So a read on one host costs no round trip, and a
stopped node holds nobody up. What is not on the board is asked for.

An entry that does not fit (a full bucket, too many dimensions) or that would need a clock (a time
to live) is left off.
"""

import struct
from dataclasses import dataclass
from typing import Final

from lookup_buffer.item import Address
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.shm.index import IS_ORDERED, DigestReader, DigestTable, digest_of

ENTRY: Final = struct.Struct("@Q32sQBBB13x8Q")
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
        self._table = DigestTable("lookup-buffer-board", entries, ENTRY)
        self._positions: dict[Address, int] = {}

    @property
    def fd(self) -> int:
        return self._table.fd

    def list(self, address: Address, header: TensorHeader, offset: int) -> None:
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

    def strike(self, address: Address) -> None:
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
        self._table = DigestReader(fd, ENTRY)

    def lists(self, digest: bytes) -> bool:
        """Whether the item is here; False where the node has to be asked."""
        return self._table.find(digest) is not None

    def find(self, digest: bytes) -> Entry | None:
        """The entry of an item that is here, None where the node has to be asked."""
        place = self._table.find(digest)
        if place is None:
            return None
        fields = ENTRY.unpack_from(self._table.view, place[0])
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
