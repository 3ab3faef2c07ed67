"""Requests: valid ones are decoded, all others raise ProtocolError and no other error."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from lookup_buffer import errors
from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.fields import COUNT_MAX, LANES, Fallback, is_fingerprint
from lookup_buffer.protocol.framing import pack, unpack
from lookup_buffer.protocol.messages import (
    Offer,
    OpenPool,
    Prepare,
    Received,
    Request,
    Retract,
    error_reply,
    parse,
)
from store import LOCATIONS_MAX

FINGERPRINT = "0123456789abcdef" * 4
KINDS: list[type[Request]] = [
    messages.Hello, messages.Join, messages.Stage, messages.Contains, messages.Insert,
    messages.Select, messages.Take, messages.Acknowledge, messages.GiveBack, messages.Leave,
    messages.Holds,
    messages.Prefetch, messages.EndPrefetch, messages.Release, messages.Touch, messages.Done,
    messages.Claim, messages.ReleaseClaim, messages.ClaimAll, messages.Encoding, messages.Unclaim,
    messages.Describe, messages.Reach, messages.AskDialBack, messages.DialBack, messages.Exchange,
    messages.Stats, messages.Metrics, messages.Goodbye, OpenPool, Offer,
    Retract, Received, Prepare,
]  # fmt: skip

counts = st.integers(0, (1 << 63) - 1)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=80)
keys = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=80)
seconds = st.one_of(st.integers(0, 86_400), st.floats(0, 86_400))
seats = st.integers(1, 64).flatmap(
    lambda world: st.tuples(
        texts,
        st.one_of(st.none(), st.integers(0, world - 1)),
        st.just(world),
        st.booleans(),
        st.sampled_from(["", "cpu", "H200"]),
    ).map(list)
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "id": counts,
    "version": counts,
    "seat": st.one_of(st.none(), seats),
    "expects": st.dictionaries(texts, st.one_of(texts, counts), max_size=4),
    "session": counts,
    "namespace": st.just(FINGERPRINT),
    "key": keys,
    "keys": st.lists(keys, max_size=8),
    "budget_seconds": st.one_of(st.none(), seconds),
    "headers": st.lists(
        st.fixed_dictionaries({"dtype": texts, "shape": st.lists(counts, max_size=3)}), max_size=3
    ),
    "offsets": st.lists(counts, max_size=3),
    "ttl_seconds": st.one_of(st.none(), seconds),
    "wait_seconds": seconds,
    "lease_seconds": seconds,
    "state": st.sampled_from(["intent", "encoding"]),
    "waiter": counts,
    "claimer": counts,
    "prefetch": counts,
    "indexes": st.lists(counts, max_size=8),
    "tickets": st.lists(counts, max_size=8),
    "token": counts,
    "take": counts,
    "reads": st.dictionaries(keys, st.integers(1, COUNT_MAX), max_size=8),
    "rank": counts,
    "dialler": texts,
    "node": texts,
    "boot": st.from_regex(r"[A-Za-z0-9]{1,24}", fullmatch=True),
    "data": st.binary(max_size=100),
    "parts": st.dictionaries(texts, texts, max_size=4),
    "lane": st.sampled_from(LANES),
    "library": st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
    "port": st.integers(1, 65535),
    "pool": st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
    "pool_bytes": counts,
    "receives": st.booleans(),
    "offers": st.booleans(),
    "checksum": st.integers(0, 2**64 - 1),
    "mark": st.integers(1, 2**53 - 1),
    "ticket": counts,
    "reason": st.sampled_from(["", *Fallback]),
    "source": st.integers(0, LOCATIONS_MAX),
}
requests = st.sampled_from(KINDS).flatmap(
    lambda kind: st.builds(kind, **{field.name: FIELDS[field.name] for field in fields(kind)})
)
plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), texts,
        st.binary(max_size=20),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)  # fmt: skip


@given(requests)
def test_every_request_survives_the_wire(request: Request) -> None:
    assert parse(unpack(pack(request.to_wire()))) == request


def test_all_requests_are_covered() -> None:
    ops, kinds = set(), list(Request.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        ops.add(getattr(kind, "op", None))
    assert {kind.op for kind in KINDS} == ops - {None}


@given(plain)
def test_garbage_is_a_protocol_error(garbage: Any) -> None:
    with pytest.raises(ProtocolError):
        parse(garbage)


@given(requests, st.data())
@settings(max_examples=examples(300))
def test_a_request_with_one_garbled_field_is_refused_or_still_valid(
    request: Request, data: st.DataObject
) -> None:
    wire = request.to_wire()
    wire[data.draw(st.sampled_from(sorted(wire)))] = data.draw(plain)
    try:
        parsed = parse(wire)
    except ProtocolError:
        return
    assert parsed.to_wire() == wire  # an accepted message is unchanged


@given(requests, st.data())
def test_a_field_too_few_or_too_many_is_refused(request: Request, data: st.DataObject) -> None:
    wire = request.to_wire()
    fewer = dict(wire)
    del fewer[data.draw(st.sampled_from(sorted(wire)))]
    for wrong in (fewer, {**wire, "more": 1}):
        with pytest.raises(ProtocolError):
            parse(wrong)


LIMITS = [
    ("keys", ["k"] * 4096, ["k"] * 4097),
    ("keys", ["k" * 4096], ["k" * 4097]),
    ("keys", ["k"], ["k", ""]),
    ("keys", ["k"], ["k", 1]),
    ("keys", ["k e~y"], ["a line\nof its own"]),
    ("keys", ["k%1B"], ["k\x1b"]),
    ("keys", ["k%C3%A9"], ["k\u00e9"]),
    ("budget_seconds", 86_400, 86_401),
    ("budget_seconds", 0, -0.001),
    ("budget_seconds", None, float("nan")),
    ("budget_seconds", 0.5, float("inf")),
    ("budget_seconds", 1, True),
    ("namespace", FINGERPRINT, FINGERPRINT[:-1]),
    ("namespace", FINGERPRINT, FINGERPRINT.upper()),
    ("namespace", FINGERPRINT, FINGERPRINT + "\n"),
    ("namespace", FINGERPRINT, None),
    ("id", (1 << 63) - 1, 1 << 63),
    ("id", 0, -1),
    ("id", 1, True),
    ("id", 1, 1.0),
]


@pytest.mark.parametrize(("name", "good", "bad"), LIMITS)
def test_bounds_are_as_documented(name: str, good: object, bad: object) -> None:
    request = messages.Contains(1, FINGERPRINT, ["k"], 0.5)
    assert isinstance(parse({**request.to_wire(), name: good}), messages.Contains)
    with pytest.raises(ProtocolError):
        parse({**request.to_wire(), name: bad})


@pytest.mark.parametrize(
    "reads",
    [
        {"k": 0},
        {"k": COUNT_MAX + 1},
        {"k": -1},
        {"k": True},
        {"k": 1.0},
        {"": 1},
        {1: 1},
        [["k", 1]],
        dict.fromkeys(map(str, range(4097)), 1),
    ],
)
def test_reads_that_no_client_can_have_made_are_refused(reads: object) -> None:
    touch = messages.Touch(1, FINGERPRINT, dict.fromkeys(map(str, range(4096)), COUNT_MAX))
    assert parse(touch.to_wire()) == touch
    with pytest.raises(ProtocolError):
        parse({**touch.to_wire(), "reads": reads})


@pytest.mark.parametrize(
    "seat",
    [
        ["engine", 2, 2, True, ""],
        ["engine", 0, 0, True, ""],
        ["engine", -1, 2, True, ""],
        ["engine", None, 5000, True, ""],
        ["", 0, 1, True, ""],
        ["engine", 0, 1, True],
        ["engine", 0, 1, 1, ""],
        ["engine", 0, 1, True, "", 1],
        ["engine", 0.0, 1, True, ""],
        ["engine", 0, 1, True, 7],
        ["engine", 0, 1, True, "x" * 13],
        ["engine", 0, 1, True, "a\nline"],
        "engine",
        {},
    ],
)
def test_an_invalid_engine_rank_is_refused(seat: object) -> None:
    hello = messages.Hello(1, messages.VERSION, ["engine", 1, 2, False, "cpu"], {})
    assert parse(hello.to_wire()) == hello
    with pytest.raises(ProtocolError):
        parse({**hello.to_wire(), "seat": seat})


def test_error_messages_do_not_repeat_the_request() -> None:
    """A garbled request may hold anything, a secret included."""
    with pytest.raises(ProtocolError) as caught:
        parse({"op": "hello", "id": 1, "version": "s3cret", "seat": None, "expects": {}})
    assert "s3cret" not in str(caught.value)


def test_failures_name_a_class_that_the_client_knows() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, LookupBufferError):
            reply = error_reply(7, kind("why"))
            assert reply == {"id": 7, "error": name, "message": "why"}


def test_fingerprints() -> None:
    assert is_fingerprint(FINGERPRINT)
    assert not is_fingerprint("x" * 64)
    assert not is_fingerprint(FINGERPRINT.encode())
