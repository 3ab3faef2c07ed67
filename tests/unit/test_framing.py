"""Frames: any split decodes equal, any bytes are refused cleanly, memory is bounded."""

import struct
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from lookup_buffer.errors import ProtocolError
from lookup_buffer.protocol.framing import (
    MAGIC,
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    Frame,
    FrameDecoder,
    encode_frame,
    unpack,
)

SCALARS = st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.binary(max_size=30)
HEADERS: st.SearchStrategy[Any] = st.lists(SCALARS, max_size=8) | st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8), SCALARS, max_size=8
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    places = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_the_layout_of_a_frame() -> None:
    frame = encode_frame({"op": "get"}, 5)
    assert frame == b"LB01" + (8).to_bytes(4, "big") + (5).to_bytes(8, "big") + b"\x81\xa2op\xa3get"


@given(st.lists(HEADERS, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_of_frames_decodes_equal(headers: list[Any], places: list[int]) -> None:
    decoder = FrameDecoder()
    frames: list[Frame] = []
    for piece in cut(b"".join(map(encode_frame, headers)), places):
        frames += decoder.feed(piece)
    assert frames == [(header, 0) for header in headers]
    assert decoder.buffered_bytes == 0


def test_byte_by_byte() -> None:
    decoder = FrameDecoder()
    stream = encode_frame([1]) + encode_frame({"a": "b" * 300})
    frames = [frame for i in range(len(stream)) for frame in decoder.feed(stream[i : i + 1])]
    assert frames == [([1], 0), ({"a": "b" * 300}, 0)]


MAX = 256


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.binary(max_size=80)
        | HEADERS.map(encode_frame)
        | st.builds(
            lambda header, payload: MAGIC + struct.pack(">IQ", header, payload),
            st.integers(0, 300) | st.integers(0, 2**32 - 1),
            st.sampled_from([0, 0, 0, 1, 2**64 - 1]),
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_any_bytes_are_frames_or_refused(parts: list[bytes], places: list[int]) -> None:
    decoder = FrameDecoder(max_header_bytes=MAX)
    failed = False
    for piece in cut(b"".join(parts), places):
        try:
            for header, payload_nbytes in decoder.feed(piece):
                assert isinstance(header, dict | list)
                assert payload_nbytes == 0
                assert not failed
        except ProtocolError:
            failed = True
        assert decoder.buffered_bytes <= MAX + PROLOGUE_BYTES


def test_after_a_bad_frame_nothing_is_accepted_or_kept() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(b"GET / HTTP/1.1\r\n\r\n")
    assert decoder.buffered_bytes == 0
    with pytest.raises(ProtocolError):
        decoder.feed(encode_frame([1]))


@pytest.mark.parametrize(
    "frame",
    [
        b"LB02" + struct.pack(">IQ", 1, 0) + b"\x90",
        MAGIC + struct.pack(">IQ", 0, 0),
        MAGIC + struct.pack(">IQ", 1, 0) + b"\xc0",
        MAGIC + struct.pack(">IQ", 1, 0) + b"\x05",
        MAGIC + struct.pack(">IQ", 2, 0) + b"\x90\x90",
        MAGIC + struct.pack(">IQ", 2, 0) + b"\x92\x01",
        MAGIC + struct.pack(">IQ", 1, 1) + b"\x90",
        MAGIC + struct.pack(">IQ", MAX_HEADER_BYTES + 1, 0),
        MAGIC + struct.pack(">IQ", 2**32 - 1, 2**64 - 1),
    ],
    ids=repr,
)
def test_frames_that_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(frame)


def test_a_too_large_length_is_refused_before_its_bytes_arrive() -> None:
    decoder = FrameDecoder(max_header_bytes=100)
    with pytest.raises(ProtocolError):
        decoder.feed(MAGIC + struct.pack(">IQ", 101, 0))


def test_payload_beside_the_stream_is_announced_within_its_bound() -> None:
    decoder = FrameDecoder(max_payload_bytes=10)
    assert decoder.feed(encode_frame([1], 10)) == [([1], 10)]
    with pytest.raises(ProtocolError):
        decoder.feed(encode_frame([1], 11))


def test_a_large_piece_with_a_partial_tail_keeps_only_the_tail() -> None:
    decoder = FrameDecoder(max_header_bytes=MAX)
    stream = encode_frame(["x" * 100]) * 5000
    assert len(decoder.feed(memoryview(stream + stream[:50]))) == 5000
    assert decoder.buffered_bytes == 50


def test_frames_are_decoded_one_by_one() -> None:
    """A later one under the bound of then, and one that is garbled only when it is its turn."""
    decoder = FrameDecoder(max_header_bytes=100)
    small, large = encode_frame([1]), encode_frame(["x" * 200])
    decoder.put(small + large + small + b"garbled" + small)
    assert decoder.buffered_bytes == decoder.unread_bytes > 2 * len(small) + len(large)
    assert decoder.next() == ([1], 0)
    decoder.max_header_bytes = 300
    assert [decoder.next(), decoder.next()] == [(["x" * 200], 0), ([1], 0)]
    assert decoder.unread_bytes == len(b"garbled" + small)
    with pytest.raises(ProtocolError):
        decoder.next()
    assert decoder.buffered_bytes == decoder.unread_bytes == 0
    assert decoder.next() is None


def test_what_was_decoded_is_not_kept() -> None:
    """A node has a thousand of these, and each reads 64 KiB at once."""
    data = bytearray(encode_frame([1]) + encode_frame([2])[:5])
    decoder = FrameDecoder()
    assert decoder.feed(data) == [([1], 0)]
    data.clear()  # not while there are views of it


def test_the_names_of_a_map_are_not_kept() -> None:
    """Python 3.12.0 to 3.12.6 keeps all that was interned: a stranger's hellos added 9 kB each."""
    before = sys.getallocatedblocks()
    for number in range(5_000):
        names = {f"{number}-{n}": True for n in range(10)}
        assert FrameDecoder().feed(encode_frame(names))[0].header == names
    assert sys.getallocatedblocks() - before < 10_000
    with pytest.raises(ProtocolError):
        unpack(b"\x81\x01\x01")


@pytest.mark.parametrize("header", [None, "text", 5, (1, 2), {"a": object()}, {"a": 2**64}])
def test_other_values_are_no_header(header: Any) -> None:
    with pytest.raises(ProtocolError):
        encode_frame(header)


def test_bounds_hold_for_the_sender_too() -> None:
    with pytest.raises(ProtocolError):
        encode_frame(["x" * 100], max_header_bytes=100)
    for nbytes in (-1, 2**64):
        with pytest.raises(ProtocolError):
            encode_frame([], nbytes)
