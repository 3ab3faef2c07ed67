"""Headers and plain data: valid ones pass, all others are refused at little cost."""

import pickle
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.errors import ProtocolError
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.framing import MAX_DEPTH, MAX_LIST_ITEMS, pack, unpack
from lookup_buffer.protocol.header import DTYPES, MAX_DIMENSIONS, PayloadHeader, TensorHeader

GOOD = PayloadHeader(
    namespace="a" * 64,
    key=TensorKey("hash", None, "part").text,
    generation=7,
    checksum=2**64 - 1,
    ttl_ms=1_800_000,
    tensor=TensorHeader.for_tensor("bfloat16", (729, 1152)),
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=20)
    ),
    max_leaves=40,
)


def fields(**changes: Any) -> dict[str, Any]:
    return GOOD.to_fields() | changes


@pytest.mark.parametrize(
    "header",
    [
        GOOD,
        PayloadHeader("n", "k", 1, 0, None, TensorHeader.of_none()),
        PayloadHeader("n", "k@r", 2**64 - 1, 0, 0, TensorHeader.for_tensor("bool", ())),
        PayloadHeader("n", "k", 1, 5, 1, TensorHeader.for_tensor("int64", (0, 5))),
        PayloadHeader("n", "k", 1, 5, 1, TensorHeader.for_tensor("int8", (1,) * MAX_DIMENSIONS)),
    ],
)
def test_a_valid_header_is_decoded(header: PayloadHeader) -> None:
    assert PayloadHeader.unpack(header.pack()) == header
    assert PayloadHeader.unpack(memoryview(bytearray(header.pack()))) == header


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=MAX_DIMENSIONS // 2))
def test_every_tensor_header_validates_and_survives_pickle(dtype: str, shape: list[int]) -> None:
    header = TensorHeader.for_tensor(dtype, tuple(shape))
    header.validate()
    assert TensorHeader.from_fields(unpack(pack(header.to_fields()))) == header
    assert pickle.loads(pickle.dumps(header)) == header


LIES: list[dict[str, Any]] = [
    {"dtype": "float3"},
    {"dtype": ""},
    {"dtype": 3},
    {"dtype": ["bfloat16"]},
    {"dtype": "torch.bfloat16"},
    {"shape": None},
    {"shape": 5},
    {"shape": "ab"},
    {"shape": [729, -1152]},
    {"shape": [-729, -1152]},
    {"shape": [729, 1152.0]},
    {"shape": [729, "1152"]},
    {"shape": [729, [1152]]},
    {"shape": [True, 729 * 1152]},
    {"shape": [729, 1151]},
    {"shape": []},
    {"shape": [1] * 15 + [729, 1152]},
    {"shape": [2**63, 2], "nbytes": 0},
    {"shape": [2**32, 2**32], "nbytes": 0},
    {"shape": [2**62] * 16, "nbytes": 0},
    {"shape": [2**64 - 1, 0], "nbytes": 0},
    {"nbytes": 729 * 1152 * 2 + 1},
    {"nbytes": -1},
    {"nbytes": 2**63},
    {"nbytes": float(729 * 1152 * 2)},
    {"nbytes": None},
    {"kind": "none"},
    {"kind": "pickle"},
    {"kind": 1},
    {"kind": ["tensor"]},
    {"namespace": ""},
    {"namespace": "n" * 257},
    {"namespace": b"a" * 64},
    {"key": ""},
    {"key": "not\ncanonical"},
    {"key": "x" * 5000},
    {"key": 12},
    {"generation": 0},
    {"generation": -1},
    {"generation": True},
    {"generation": 1.0},
    {"checksum": -1},
    {"checksum": 1.5},
    {"checksum": None},
    {"checksum": False},
    {"ttl_ms": -1},
    {"ttl_ms": 2**63},
    {"ttl_ms": 1.5},
    {"ttl_ms": True},
    {"more": 1},
]


@pytest.mark.parametrize("lie", LIES, ids=repr)
def test_an_inconsistent_header_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        PayloadHeader.from_fields(fields(**lie))
    with pytest.raises(ProtocolError):
        PayloadHeader.unpack(msgpack.packb(fields(**lie)))


@pytest.mark.parametrize("name", sorted(GOOD.to_fields()))
def test_a_missing_field_is_refused(name: str) -> None:
    incomplete = GOOD.to_fields()
    del incomplete[name]
    with pytest.raises(ProtocolError):
        PayloadHeader.from_fields(incomplete)


@pytest.mark.parametrize("value", [None, [], "text", 5, {}, {1: 2}])
def test_other_values_are_no_header(value: object) -> None:
    with pytest.raises(ProtocolError):
        PayloadHeader.from_fields(value)
    with pytest.raises(ProtocolError):
        TensorHeader.from_fields(value)


@pytest.mark.parametrize(
    "header",
    [
        TensorHeader("", (), 1, "none"),
        TensorHeader("int8", (), 0, "none"),
        TensorHeader("", (0,), 0, "none"),
        TensorHeader("", (), 0, "tensor"),
    ],
)
def test_a_none_has_nothing_else(header: TensorHeader) -> None:
    with pytest.raises(ProtocolError):
        header.validate()


def test_the_bound_on_the_size_is_inclusive() -> None:
    header = TensorHeader.for_tensor("int32", (25,))
    header.validate(max_nbytes=100)
    with pytest.raises(ProtocolError):
        header.validate(max_nbytes=99)
    packed = GOOD.pack()
    with pytest.raises(ProtocolError):
        PayloadHeader.unpack(packed, max_nbytes=GOOD.tensor.nbytes - 1)
    assert PayloadHeader.unpack(packed, max_nbytes=GOOD.tensor.nbytes) == GOOD


@given(PLAIN)
def test_plain_data_comes_back(value: object) -> None:
    assert unpack(pack(value)) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_plain_data_or_refused(data: bytes) -> None:
    try:
        unpack(data)
    except ProtocolError:
        return


@given(st.integers(0, len(GOOD.pack()) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_raises_anything_else(position: int, flip: int) -> None:
    damaged = bytearray(GOOD.pack())
    damaged[position] ^= flip
    try:
        header = PayloadHeader.unpack(damaged)
    except ProtocolError:
        return
    header.validate()


@pytest.mark.parametrize("cut", range(len(GOOD.pack())))
def test_every_truncation_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        PayloadHeader.unpack(GOOD.pack()[:cut])


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError):
        PayloadHeader.unpack(GOOD.pack() + b"\xc0")


BOMBS = {
    "list of lists": b"\xdd\x00\x00\x40\x00" * 1000 + b"\xc0" * 20_000,
    "list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "extension": b"\xd4\x01a",
    "empty extension": b"\xc7\x00\x05",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "deep": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1k" * 100_000,
    "16-bit lists in a map": b"\x81\xa1k" + b"\xdc\x40\x00" * 900 + b"\xc0" * 20_000,
    "list as a map's key": b"\x81\x90\x01",
    "number as a map's key": b"\x81\x01\x01",
    "reserved byte": b"\xc1",
    "no UTF-8": b"\xa2\xff\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_allocating_its_stated_size(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            unpack(BOMBS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_longest_list_and_the_next() -> None:
    assert unpack(pack([0] * MAX_LIST_ITEMS)) == [0] * MAX_LIST_ITEMS
    with pytest.raises(ProtocolError):
        unpack(pack([0] * (MAX_LIST_ITEMS + 1)))


def test_lists_full_of_the_marker_of_lists_are_not_mistaken() -> None:
    value = {"checksums": [0xDCDD_DCDD_DCDD_DCDD] * 500, "text": "Ý" * 100, "deep": [[[[{}]]]]}
    value["raw"] = b"\xdc\xdd" * 300
    value["widths"] = [1.5, -1, -200, 2**40, "x" * 40, "y" * 70_000, "z" * 300, None]
    assert unpack(pack(value)) == value


def test_the_deepest_of_long_lists_and_the_next() -> None:
    def nested(depth: int) -> bytes:
        value: list[Any] = [0] * 20
        for _ in range(depth - 1):
            value = [value] + [0xDC] * 20
        return pack(value)

    assert unpack(nested(MAX_DEPTH))
    with pytest.raises(ProtocolError, match="nested"):
        unpack(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize("value", [{1, 2}, object(), 2**64, -(2**63) - 1, "\ud800", 1j])
def test_other_things_are_not_plain_data(value: object) -> None:
    with pytest.raises(ProtocolError):
        pack(value)


def test_a_pickle_is_just_garbled_bytes() -> None:
    with pytest.raises(ProtocolError):
        unpack(pickle.dumps({"a": struct.calcsize("Q")}))
