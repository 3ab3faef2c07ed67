"""Plain data as strict msgpack: the one place that turns bytes from outside into Python values.

Plain data is None, bool, int (64 bit), float, str, bytes, list, and dict with str keys. No
extension types, no pickle, nothing that runs code. Pure functions; any thread.

A msgpack list states its length up front and the decoder allocates it at once, so a few bytes that
open list in list would cost gigabytes. Hence two bounds: list length and nesting depth.
"""

import re
from typing import Any, Final, NoReturn

import msgpack

from lookup_buffer.errors import ProtocolError

MAX_LIST_ITEMS: Final = 16_384
"""Longer lists and maps are refused; send them in several messages."""

MAX_DEPTH: Final = 16

# The decoder knows no depth bound, so it is checked before; exactly, but only where it can matter.
# Few markers of a long list (they may also be part of a string or number) cannot claim much.
_HARMLESS_LONG_LISTS: Final = 16
_LONG_LIST: Final = re.compile(rb"[\xdc\xdd]")

_FIXED_WIDTHS: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_LENGTH_WIDTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNT_WIDTHS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


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
    """The plain data in exactly these bytes; memory stays in proportion to `len(data)`.

    Raises:
        ProtocolError: truncated, trailing bytes, or outside the bounds of this module.
    """
    if len(_LONG_LIST.findall(data)) > _HARMLESS_LONG_LISTS:
        _check_depth(bytes(data))
    try:
        return msgpack.unpackb(
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
    """Walk the structure without building it; a malformed tail is left for the decoder to name."""
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
