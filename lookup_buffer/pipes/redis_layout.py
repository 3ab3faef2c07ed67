"""What a `redis` pipe writes into the database: names, and the elements of its lists. Pure.

A list for each direction holds the frames, numbered, so that a lost one is noticed. The bytes of a
large one lie beside it, in chunks of a mebibyte under names of their own, in batches.

    <session>:up               LIST    frames to the end that listens; `down`: to the other one
    <session>:up:<frame>:<i>   STRING  a chunk of a frame's bytes
    <session>:up:had           LIST    which batches of them were taken, or missing

All that is written expires.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lookup_buffer.errors import PipeBroken, ProtocolError

CHUNK_BYTES: Final = 1 << 20
BATCH_CHUNKS: Final = 4
BATCH_BYTES: Final = BATCH_CHUNKS * CHUNK_BYTES

_NUMBER: Final = struct.Struct(">Q")
ABORTED: Final = _NUMBER.pack((1 << 64) - 1)
"""In the place of a frame, from an end that was aborted."""
_HAD: Final = struct.Struct(">QQ?")
"""The frame's number, the batch's, and whether all of it was there."""


@dataclass(frozen=True, slots=True)
class Session:
    """The names that belong to two ends which have met."""

    prefix: str

    def list_to(self, listener: bool) -> bytes:
        return f"{self.prefix}:{'up' if listener else 'down'}".encode()


def had_list(frames: bytes) -> bytes:
    """The list that says what of the bytes of `frames` was taken."""
    return frames + b":had"


def numbered(number: int, frame: bytes) -> bytes:
    """A frame as an element of its list."""
    return _NUMBER.pack(number) + frame


def read_numbered(element: bytes) -> tuple[int, memoryview]:
    """The reverse of `numbered`.

    Raises:
        PipeBroken: the other end was aborted.
        ProtocolError: it has no number.
    """
    if element == ABORTED:
        raise PipeBroken("the other end was aborted")
    if len(element) < _NUMBER.size:
        raise ProtocolError("no frame")
    (number,) = _NUMBER.unpack_from(element)
    return number, memoryview(element)[_NUMBER.size :]


def had(number: int, batch: int, *, all_of_it: bool) -> bytes:
    """That a batch of a frame was taken, or that some of it was missing."""
    return _HAD.pack(number, batch, all_of_it)


def read_had(element: bytes) -> tuple[int, int, bool]:
    """The reverse of `had`: frame, batch, and whether all of it was there."""
    if len(element) != _HAD.size:
        raise ProtocolError("no word of a batch")
    number, batch, all_of_it = _HAD.unpack(element)
    return number, batch, all_of_it


def element_of(reply: Any) -> bytes:
    """What BLPOP has found."""
    match reply:
        case [_, bytes(element)]:
            return element
    raise ProtocolError("no element of a list")


def batches_of(nbytes: int) -> int:
    return -(-nbytes // BATCH_BYTES)


def chunks_of(
    frames: bytes, number: int, batch: int, nbytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of each chunk of a batch, of a frame with so many bytes."""
    for index in range(batch * BATCH_CHUNKS, (batch + 1) * BATCH_CHUNKS):
        start = index * CHUNK_BYTES
        if start < nbytes:
            yield b"%b:%d:%d" % (frames, number, index), start, min(start + CHUNK_BYTES, nbytes)
