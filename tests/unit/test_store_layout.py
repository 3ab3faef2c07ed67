"""A record is read as it was written; foreign values are skipped."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import (
    POOLS_MAX,
    Beat,
    DeviceLocation,
    Invalidation,
    Location,
    NodeInfo,
    PoolEndpoint,
    Record,
    layout,
    record_fields,
)
from store.record import DEVICE, SAFE_NAME

COMPACT_BYTES = 64
"""`hash-max-listpack-value` as servers have it: one longer field, and it is another form."""
NAMES = st.from_regex(SAFE_NAME, fullmatch=True)
LOCATIONS = st.builds(
    Location,
    NAMES,
    st.from_regex(r"[A-Za-z0-9]{1,24}", fullmatch=True),
    st.integers(1, 2**53 - 1),
    st.integers(0, 2**64 - 1),
)
DEVICES = st.builds(
    DeviceLocation,
    st.just("node"),
    st.integers(1, 10**16 - 1),
    st.sampled_from(["gloo", "nccl"]),
    st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    st.integers(1, 65535),
    st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
)


def with_devices(record: Record, devices: list[DeviceLocation]) -> Record:
    """A location on a device beside some of the others."""
    pairs = zip(record.locations, devices, strict=False)
    return record._replace(devices=tuple(on._replace(node=at.node) for at, on in pairs))


RECORDS = st.builds(
    Record,
    NAMES,
    st.text(min_size=1),
    st.sampled_from(["bfloat16", "float32"]),
    st.lists(st.integers(0, 2**31), max_size=16).map(tuple),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["tensor", "none"]),
    st.integers(0, 2**40).map(lambda milliseconds: milliseconds / 1000),
    st.lists(LOCATIONS, min_size=1, max_size=4, unique_by=lambda at: at.node).map(tuple),
    st.just(()),
    st.one_of(st.just(""), st.from_regex(DEVICE, fullmatch=True)),
)
RECORDS = st.builds(with_devices, RECORDS, st.lists(DEVICES, max_size=4))
GOOD_TEXT = b"boot:1:" + b"0" * 16
BAD_TEXTS = [
    b"boot:1:" + b"A" * 16, b"boot:1:" + b"0" * 15, b"boot:0:" + b"0" * 16,
    b"boot:01:" + b"0" * 16, b"boot:1:" + b"0" * 16 + b"\n",
    b"boot:" + b"1" * 17 + b":" + b"0" * 16, b"b" * 25 + b":1:" + b"0" * 16,
    b":1:" + b"0" * 16, b"b-t:1:" + b"0" * 16,
    b"bo\xc3\xb6t:1:" + b"0" * 16, b"\xff:1:" + b"0" * 16, b"",
]  # fmt: skip
BAD_NAMES = [
    b"at:", b"at:n\n", b"at:\xff", b"at:\xc3\xb6", b"at:a b", b"AT:n", b"at", b"note",
    b"at:" + b"n" * 129,
]  # fmt: skip
GARBAGE = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([GOOD_TEXT, *BAD_TEXTS]),
    st.sampled_from([b"1", b"2", b"-1", b"1_0", b"+1", b" 1", b"9" * 20, b"1" * 4301, b"nan"]),
    st.sampled_from([b"[1,2]", b"[1,]", b"[-1]", b"[" + b"1," * 16 + b"1]", b"tensor", b"none"]),
)
FIELDS = st.one_of(
    st.sampled_from([b"v", b"key", b"dtype", b"shape", b"nbytes", b"kind", b"created", b"device"]),
    st.sampled_from([b"at:n", b"on:n", b"on:", b"at:" + b"n" * 128, *BAD_NAMES]),
    st.binary(max_size=8),
)


def fields_of(record: Record) -> dict[bytes, bytes]:
    """What the publisher's script writes."""
    parts = iter([_raw(part) for part in record_fields.identity_fields(record)])
    fields = {b"created": _raw(f"{record.created:.3f}")} | dict(zip(parts, parts, strict=True))
    fields |= {_raw(f"on:{on.node}"): _raw(on.text) for on in record.devices}
    fields |= {b"device": _raw(record.device)} if record.device else {}
    return fields | {_raw(f"at:{at.node}"): _raw(at.text) for at in record.locations}


def _raw(part: str | int | bytes) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert record_fields.read_record(record.namespace, record.key, fields_of(record)) == record
    name = layout.record(record.namespace, record.key).encode()
    assert record_fields.read_named_record(name, fields_of(record)) == record


def test_many_records_have_the_texts_of_a_boot_and_a_pool_once() -> None:
    """A mirror keeps 200,000 of them."""
    on_device = DeviceLocation("node", 1, "nccl", "0a" * 4, 41000, "f" * 12)
    record = Record(
        "ns",
        "key",
        "uint8",
        (4,),
        4,
        "tensor",
        1.0,
        (Location("node", "boot", 1, 1),),
        (on_device,),
    )
    first, second = (record_fields.read_record("ns", "key", fields_of(record)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.locations[0].boot is second.locations[0].boot
    for name in ("kind", "library", "pool"):
        assert getattr(first.devices[0], name) is getattr(second.devices[0], name)


@given(RECORDS, st.dictionaries(FIELDS, GARBAGE, max_size=3), st.sets(FIELDS, max_size=2))
def test_a_record_written_by_hand_is_a_miss_or_valid(
    record: Record, changes: dict[bytes, bytes], without: set[bytes]
) -> None:
    fields = fields_of(record) | changes
    for name in without:
        fields.pop(name, None)
    found = record_fields.read_record(record.namespace, record.key, fields)
    if found is not None:
        found.check()
        assert fields[b"v"] == layout.VERSION.encode()
        assert all(fields[_raw(f"at:{at.node}")] == _raw(at.text) for at in found.locations)
        assert found.locations
        assert all(SAFE_NAME.match(at.node) for at in found.locations)
        kept = [at for at in record.locations if _raw(f"at:{at.node}") not in {*changes, *without}]
        assert [at for at in found.locations if at in kept] == kept


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, GOOD_TEXT) for name in BAD_NAMES] + [(b"at:n", text) for text in BAD_TEXTS],
)
def test_an_invalid_copy_is_skipped(name: bytes, text: bytes) -> None:
    mine = Location("mine", "boot", 2, 3)
    record = Record("ns", "key", "uint8", (2,), 2, "tensor", 1.5, (mine,))
    assert record_fields.read_record("ns", "key", {name: text} | fields_of(record)) == record
    alone = fields_of(record._replace(locations=())) | {name: text}
    assert record_fields.read_record("ns", "key", alone) is None


def test_the_longest_places_leave_a_record_in_its_compact_form() -> None:
    longest = Location("n", "b" * 24, 2**53 - 1, 2**64 - 1)
    on_device = DeviceLocation("n", 10**16 - 1, "nccl", "f" * 8, 65535, "f" * 12)
    for place in (longest, on_device):
        place.check()
        assert len(place.text.encode()) <= COMPACT_BYTES
    for longer in (on_device._replace(mark=10**16), on_device._replace(port=100_000)):
        with pytest.raises(ValueError):
            longer.check()


POOL = PoolEndpoint("gloo", "0a" * 4, 41000, "f" * 12)
INFO = NodeInfo("n", "boot", "tcp://h:1", "h", "0.1", 1, 2, 3, 4, (POOL,))
NO_POOLS = [
    b"", b" ", b"gloo", b"tcp:" + b"0a" * 4 + b":1:" + b"f" * 12, b"\xff\xfe", b"\xd9\xa3",
    POOL.text.encode() + b"0", POOL.text.replace("41000", "65536").encode(),
    POOL.text.replace("41000", "0").encode(),
]  # fmt: skip


def described(pools: bytes | None) -> NodeInfo | None:
    """What is read of a node that names these; of an older one, for None."""
    parts = iter([_raw(part) for part in layout.node_fields(INFO)])
    fields = dict(zip(parts, parts, strict=True))
    del fields[b"pools"]
    return layout.read_node("n", fields if pools is None else fields | {b"pools": pools})


@pytest.mark.parametrize("other", NO_POOLS)
def test_pools_of_an_unknown_form_are_skipped(other: bytes) -> None:
    assert described(POOL.text.encode()) == INFO
    assert described(other + b" " + POOL.text.encode() + b" " + other) == INFO
    assert described(other) == described(None) == replace(INFO, pools=())


@given(st.binary(max_size=200))
def test_pools_written_by_hand_are_read_if_valid(value: bytes) -> None:
    info = described(value)
    assert info is not None
    info.check()


def test_the_pools_of_a_node_are_read_up_to_a_limit() -> None:
    info = described(b" ".join([POOL.text.encode()] * 100_000))
    assert info is not None
    assert info.pools == (POOL,) * POOLS_MAX


@given(st.text(max_size=140))
def test_a_name_is_hashed_only_if_necessary(key: str) -> None:
    harmless = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._%#@=+,/-"
    spelled = 0 < len(key) <= 128 and set(key) <= set(harmless) and not key.startswith("h.")
    assert (layout.key_name(key) == key) == spelled


def test_a_digest_is_spelled_out_up_to_128_characters() -> None:
    assert layout.key_name("a1" * 64) == "a1" * 64
    assert layout.key_name("a1" * 64 + "a").startswith("h.")


@pytest.mark.parametrize("name", ["dtype", "shape", "nbytes", "kind", "created", "device"])
def test_a_record_with_a_huge_field_is_a_miss_and_is_not_kept(name: str) -> None:
    record = Record("ns", "k", "uint8", (4,), 4, "tensor", 1.0, (Location("n", "boot", 1, 7),))
    fields = fields_of(record)
    assert record_fields.read_record("ns", "k", fields) is not None
    huge = b"[" + b"1" * 4096 + b"]" if name == "shape" else b"1" * 4096
    assert record_fields.read_record("ns", "k", fields | {name.encode(): huge}) is None


def test_huge_and_many_locations_are_skipped() -> None:
    record = Record("ns", "k", "uint8", (4,), 4, "tensor", 1.0, (Location("n", "boot", 1, 7),))
    fields = fields_of(record)
    others = {b"at:" + b"m" * 4096: GOOD_TEXT, b"at:m": GOOD_TEXT + b"0" * 4096, b"x" * 4096: b""}
    record_fields._node_in.cache_clear()
    assert record_fields.read_record("ns", "k", fields | others) == record
    assert record_fields._node_in.cache_info().currsize == 1
    many = {f"at:m{number}".encode(): GOOD_TEXT for number in range(100)}
    assert record_fields.read_record("ns", "k", fields | many) is None


@pytest.mark.parametrize("name", ["boot", "endpoint", "host", "version"])
def test_a_huge_description_of_a_node_is_no_description(name: str) -> None:
    described = NodeInfo("n", "boot", "tcp://n:1", "n", "0", 1, 0, 0)
    parts = iter([_raw(part) for part in layout.node_fields(described)])
    fields = dict(zip(parts, parts, strict=True))
    assert layout.read_node("n", fields) == described
    assert layout.read_node("n", fields | {name.encode(): b"x" * 4096}) is None


def test_huge_beats_and_invalidations_are_left_out() -> None:
    huge = b"1" * 4096
    beats = {b"n": b"boot:1", b"m": huge + b":1", b"l": b"boot:" + huge, huge: b"boot:1"}
    assert layout.read_beats(beats) == {"n": Beat("boot", 1)}
    mark = b"0123456789abcdef:1763718000"
    marks = {b"ns": mark, huge: mark, b"n": huge, b"m": mark + b"0" * 4096}
    assert layout.read_invalidations(marks) == {"ns": Invalidation(mark[:16].decode(), 1763718000)}


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"1.5", b"1e300", b"nan", b"0123456789abcdef", b"0123456789abcdef:"),
        *(b":1", b"0123456789ABCDEF:1", b"0123456789abcde:1", b"0123456789abcdef:-1"),
        *(b"0123456789abcdef:1e300", b"0123456789abcdef:nan", b"0123456789abcdef:1\n"),
        b"0123456789abcdef:1234567890123",
    ],
)
def test_what_is_no_mark_of_an_invalidation_is_left_out(value: bytes) -> None:
    assert layout.read_invalidations({b"ns": value}) == {}
