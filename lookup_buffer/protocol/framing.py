"""Frames: the format of messages on a byte stream, and strict msgpack for their headers.

A frame is a 16-byte prologue, a header and a payload:

    magic b"LB01" | header length, u32 | payload length, u64 | header | payload

Numbers are big endian; the header is a msgpack map or list of plain data: None, bool, int (64 bit),
float, str, bytes, list, and dict with str keys. No extension types, no pickle, nothing that runs
code. No other module turns bytes from outside into Python values. `FrameDecoder` decodes the stream
of a non-blocking control socket; it never gets payload bytes. No I/O; functions run on any thread,
an object belongs to one thread at a time.

Between nodes with a token, the header ends with a MAC (`Mac`), so that who is on the path can
neither inject, change, repeat nor drop one unnoticed.

The decoder allocates a msgpack list by its declared length, so a few bytes of nested lists could
cost gigabytes. Hence two bounds: list length and nesting depth.
"""

import hashlib
import hmac
import re
import struct
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import msgpack
import msgpack.fallback

from lookup_buffer.errors import ProtocolError
from store.record import INTERNS_FOREVER

MAX_LIST_ITEMS: Final = 16_384
"""Longer lists and maps are refused; send them in several messages."""

MAX_DEPTH: Final = 16

# msgpack's decoder has no depth bound, so a check runs before it: exact, but only if it can matter.
# A few markers of a long list (which may also be bytes of a string or number) cannot allocate much.
_HARMLESS_LONG_LISTS: Final = 16
_LONG_LIST: Final = re.compile(rb"[\xdc\xdd]")

_FIXED_WIDTHS: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_LENGTH_WIDTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNT_WIDTHS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def _named(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if not all(isinstance(name, str | bytes) for name in named):  # msgpack 1.0.8 does not look
        raise ValueError("a map with other keys than texts")
    return named


# msgpack's decoder in C interns the keys of maps; its slower one in Python does not, with a hook.
_unpackb: Final = (
    partial(msgpack.fallback.unpackb, object_pairs_hook=_named)
    if INTERNS_FOREVER
    else msgpack.unpackb
)


def pack(value: object) -> bytes:
    """The msgpack bytes of plain data.

    Raises:
        ProtocolError: the value is not plain data.
    """
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not plain data: {error}") from error
    return packed


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The plain data in exactly these bytes; memory use is proportional to `len(data)`.

    Raises:
        ProtocolError: truncated, trailing bytes, or outside the bounds of this module.
    """
    if len(_LONG_LIST.findall(data)) > _HARMLESS_LONG_LISTS:
        _check_depth(bytes(data))
    try:
        return _unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_array_len=min(len(data), MAX_LIST_ITEMS),
            max_map_len=min(len(data), MAX_LIST_ITEMS),
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"garbled message: {type(error).__name__} {error}") from error


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _check_depth(data: bytes) -> None:
    """Walk the structure without building it; the decoder reports a malformed tail."""
    open_counts: list[int] = []  # values still to come, per open container
    position, end = 0, len(data)
    while position < end:
        kind = data[position]
        position += 1
        children = 0
        if kind <= 0x7F or kind >= 0xE0:
            pass
        elif kind <= 0x8F:
            children = 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            children = kind & 0x0F
        elif kind <= 0xBF:
            position += kind & 0x1F
        elif kind in _FIXED_WIDTHS:
            position += _FIXED_WIDTHS[kind]
        elif kind in _LENGTH_WIDTHS:
            width = _LENGTH_WIDTHS[kind]
            position += width + int.from_bytes(data[position : position + width], "big")
        elif kind in _COUNT_WIDTHS:
            width = _COUNT_WIDTHS[kind]
            children = int.from_bytes(data[position : position + width], "big")
            children *= 2 if kind >= 0xDE else 1
            position += width
        else:
            raise ProtocolError("garbled message: an extension type or a reserved byte")
        if open_counts:
            open_counts[-1] -= 1
        if children:
            open_counts.append(children)
            if len(open_counts) > MAX_DEPTH:
                raise ProtocolError(f"garbled message: nested deeper than {MAX_DEPTH}")
        while open_counts and open_counts[-1] == 0:
            open_counts.pop()


MAGIC: Final = b"LB01"
MAX_HEADER_BYTES: Final = 1 << 20
_PROLOGUE: Final = struct.Struct(">4sIQ")
PROLOGUE_BYTES: Final = _PROLOGUE.size

Header = dict[str, Any] | list[Any]


class Frame(NamedTuple):
    """A decoded header, and how many payload bytes its frame announces."""

    header: Any
    payload_nbytes: int


class Mac:
    """Authenticates the headers of one direction, in their order, by keyed BLAKE2b.

    It covers a header, the length of its payload and the number of the frame. One thread at a time.
    """

    NBYTES: Final = 16

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def of(self, packed: bytes | bytearray | memoryview, payload_nbytes: int) -> bytes:
        """The MAC of the next frame; the same until `next`."""
        counted = _COUNTED.pack(self._number, payload_nbytes)
        return hashlib.blake2b(counted + packed, key=self._key, digest_size=self.NBYTES).digest()

    def next(self) -> None:
        """A frame was sent or received in full."""
        self._number += 1

    def check(self, received: memoryview, payload_nbytes: int) -> memoryview:
        """The packed header of the next frame, without its MAC.

        Raises:
            ProtocolError: it is not what the other end has sent.
        """
        packed = received[: -self.NBYTES]
        if not hmac.compare_digest(self.of(packed, payload_nbytes), received[-self.NBYTES :]):
            raise ProtocolError("a message without the MAC of this connection")
        self.next()
        return packed


_COUNTED: Final = struct.Struct(">QQ")


class Macs(NamedTuple):
    sends: Mac
    receives: Mac


def encode_frame(
    header: Header,
    payload_nbytes: int = 0,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    mac: Mac | None = None,
) -> bytes:
    """Prologue and header; the caller sends the payload's bytes after them. With a `mac`, the same
    arguments give the same bytes until `Mac.next`.

    Raises:
        ProtocolError: the header is not plain data, or larger than the bound.
    """
    if not isinstance(header, dict | list):
        raise ProtocolError("a frame's header is a map or a list")
    packed = pack(header)
    if len(packed) > max_header_bytes:
        raise ProtocolError(f"header of {len(packed)} bytes; allowed: {max_header_bytes}")
    if not 0 <= payload_nbytes < 1 << 64:
        raise ProtocolError(f"a payload cannot have {payload_nbytes} bytes")
    if mac is not None:
        packed += mac.of(packed, payload_nbytes)
    return _PROLOGUE.pack(MAGIC, len(packed), payload_nbytes) + packed


def decode_prologue(
    prologue: bytes | bytearray | memoryview, *, max_header_bytes: int, max_payload_bytes: int
) -> tuple[int, int]:
    """(header bytes, payload bytes) announced by exactly `PROLOGUE_BYTES` bytes.

    Raises:
        ProtocolError: not a prologue, or it announces more than is allowed.
    """
    magic, header_nbytes, payload_nbytes = _PROLOGUE.unpack(prologue)
    if magic != MAGIC:
        raise ProtocolError("not a frame: wrong magic")
    if header_nbytes == 0:
        raise ProtocolError("a frame without a header")
    if header_nbytes > max_header_bytes:
        raise ProtocolError(f"header of {header_nbytes} bytes; allowed: {max_header_bytes}")
    if payload_nbytes > max_payload_bytes:
        raise ProtocolError(f"payload of {payload_nbytes} bytes; allowed: {max_payload_bytes}")
    return header_nbytes, payload_nbytes


def decode_header(
    packed: bytes | bytearray | memoryview, payload_nbytes: int = 0, mac: Mac | None = None
) -> Any:
    """The map or list in exactly these bytes, the header of a frame with such a payload.

    Raises:
        ProtocolError: anything else.
    """
    if mac is not None:
        packed = mac.check(memoryview(packed), payload_nbytes)
    header = unpack(packed)
    if not isinstance(header, dict | list):
        raise ProtocolError("a frame's header is neither a map nor a list")
    return header


class FrameDecoder:
    """Decodes the frames of a control stream that arrives in arbitrary pieces.

    Control streams carry headers only. A payload length other than zero (up to
    `max_payload_bytes`) announces bytes in shared memory, which are never part of the stream.

    Beside the bytes of the last `put` it holds at most one incomplete frame: `max_header_bytes` and
    a prologue. After a ProtocolError it stays failed, because the stream's next frame boundary is
    unknown.
    """

    def __init__(
        self,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_payload_bytes: int = 0,
        mac: Mac | None = None,
    ) -> None:
        self._mac = mac
        self.max_header_bytes = max_header_bytes
        """Of the frames that follow; may be changed."""
        self._max_payload_bytes = max_payload_bytes
        self._pending = bytearray()
        self._wanted_bytes = PROLOGUE_BYTES  # of the incomplete frame, as known so far
        self._unread = _NOTHING
        self.unread_bytes = 0
        """Of the last `put`; if there are none, `next` returns None."""
        self._failed = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of frames that were not returned; 0 means that the stream may end here."""
        return len(self._pending) + self.unread_bytes

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames completed by these bytes, in order.

        Raises:
            ProtocolError: a frame is not valid. Frames before it in the same call are lost; close
                the connection.
        """
        self.put(data)
        frames = []
        while (frame := self.next()) is not None:
            frames.append(frame)
        return frames

    def put(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes for `next`, after it returned None.

        Raises:
            ProtocolError: a frame before was not valid.
        """
        if self._failed:
            raise ProtocolError("this stream had an invalid frame")
        self._unread, self.unread_bytes = memoryview(data), len(data)

    def next(self) -> Frame | None:
        """The next frame that the bytes of the last `put` complete; None if there are no more.

        Raises:
            ProtocolError: it is not valid; close the connection.
        """
        try:
            return self._next()
        except ProtocolError:
            self._failed = True
            self.discard()
            raise

    def discard(self) -> None:
        """The stream has ended: drop what was not returned."""
        self._pending.clear()
        self._unread, self.unread_bytes = _NOTHING, 0

    def _next(self) -> Frame | None:
        pending = self._pending
        while self.unread_bytes:
            # Only the bytes that the current frame is known to need: the bound always holds.
            piece = self._unread[: self._wanted_bytes - len(pending)]
            pending += piece
            self.unread_bytes -= len(piece)
            self._unread = self._unread[len(piece) :] if self.unread_bytes else _NOTHING
            if len(pending) < self._wanted_bytes:
                break
            header_nbytes, payload_nbytes = decode_prologue(
                pending[:PROLOGUE_BYTES],
                max_header_bytes=self.max_header_bytes,
                max_payload_bytes=self._max_payload_bytes,
            )
            self._wanted_bytes = PROLOGUE_BYTES + header_nbytes
            if len(pending) < self._wanted_bytes:
                continue
            header = decode_header(bytes(pending[PROLOGUE_BYTES:]), payload_nbytes, self._mac)
            pending.clear()
            self._wanted_bytes = PROLOGUE_BYTES
            return Frame(header, payload_nbytes)
        return None


_NOTHING: Final = memoryview(b"")
