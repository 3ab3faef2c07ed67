"""The node's counters while they are not written to the store."""

import pytest

from lookup_buffer.node import counters as counters_module
from lookup_buffer.node.counters import (
    BOUNDS_SECONDS,
    ENCODE_MILLISECONDS,
    HITS_KEYS_MAX,
    Counters,
    Histogram,
)
from lookup_buffer.node.items import Item
from lookup_buffer.protocol.framing import pack
from lookup_buffer.protocol.header import TensorHeader
from store import COUNTER_MAX


def item_of(key: str, origin: str = "local") -> Item:
    return Item(("ns", key), TensorHeader("uint8", (7,), 7), 0, 1, origin, 0.0, None)


def test_hits_that_are_not_written_are_bounded() -> None:
    counters = Counters()
    for n in range(HITS_KEYS_MAX + 10):
        counters.hit(item_of(f"k{n}"))
    counters.hit(item_of("k0"))
    taken = counters.take_unflushed()
    assert taken[None]["hits_local"] == HITS_KEYS_MAX + 11
    assert len(taken["ns"]) == HITS_KEYS_MAX
    assert taken["ns"]["k0"] == 2


def test_hits_of_long_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses the keys, and may replace what it has stored and read by more."""
    monkeypatch.setattr(counters_module, "HITS_CHARACTERS_MAX", 50 * len("ns" + "k" * 4000))
    counters = Counters()
    for _ in range(2):
        for n in range(100):
            counters.hit(item_of(f"{n}".zfill(4000)))
        first = counters.take_unflushed(10)
        counters.put_back("ns", first["ns"])
        taken = counters.take_unflushed()
        assert len(taken["ns"]) == 50, "also when there is room again"
        counters.put_back("ns", {"short": 1})
        assert counters.take_unflushed()["ns"] == {"short": 1}


def test_returned_hits_are_added_and_bounded() -> None:
    counters = Counters()
    for n in range(HITS_KEYS_MAX):
        counters.hit(item_of(f"k{n}"))
    taken = counters.take_unflushed()
    counters.hit(item_of("k0"))
    counters.hit(item_of("new"))
    for namespace, counts in taken.items():
        counters.put_back(namespace, counts)
    taken = counters.take_unflushed()
    assert taken[None]["hits_local"] == HITS_KEYS_MAX + 2
    assert len(taken["ns"]) == HITS_KEYS_MAX
    assert (taken["ns"]["k0"], taken["ns"]["new"]) == (2, 1)


def test_hits_are_taken_in_pages_the_oldest_first() -> None:
    counters = Counters()
    for n in range(5):
        counters.hit(item_of(f"k{n}"), count=n + 1)
    first = counters.take_unflushed(3)
    assert first["ns"] == {"k0": 1, "k1": 2, "k2": 3}
    counters.put_back("ns", {"k0": 1})
    assert counters.take_unflushed(2) == {"ns": {"k3": 4, "k4": 5}}
    assert counters.take_unflushed(2) == {"ns": {"k0": 1}}
    assert counters.take_unflushed(2) == {}


def test_hits_and_their_bytes_are_counted_by_source() -> None:
    counters = Counters()
    counters.hit(item_of("a"), count=3)
    counters.hit(item_of("b", origin="node-b"))
    counters.hit(item_of("c", origin="node-b"), by_key=False)
    taken = counters.take_unflushed()
    totals = taken[None]
    assert (totals["hits_local"], totals["bytes_hit_local"]) == (3, 21)
    assert (totals["hits_remote"], totals["bytes_hit_remote"]) == (2, 14)
    assert set(taken["ns"]) == {"a", "b"}


def test_a_counter_stays_at_its_most() -> None:
    counters, huge = Counters(), COUNTER_MAX // 2 + 1
    for _ in range(3):
        counters.hit(item_of("k"), count=huge)
        counters.hit(item_of("k", origin="node-b"), count=huge)
        counters.hit_lane(("ns", "k"), huge)
        counters.add("bytes_inserted", huge)
        counters.spare(huge)
        counters.encoded(huge / 1e3)
    totals = counters.totals()
    assert totals["hits_local"] == totals["bytes_hit_local"] == COUNTER_MAX
    assert totals["bytes_hit_remote"] == totals["bytes_hit_lane"] == COUNTER_MAX
    assert totals["bytes_inserted"] == totals["encodes_saved"] == COUNTER_MAX
    assert totals[ENCODE_MILLISECONDS] == COUNTER_MAX
    assert pack(totals)
    taken = counters.take_unflushed()
    assert taken[None] == totals
    assert taken["ns"] == {"k": COUNTER_MAX}
    for namespace, counts in taken.items():
        counters.put_back(namespace, counts)
    counters.hit(item_of("k"), count=huge)
    assert counters.take_unflushed() == taken
    counters.hit(item_of("k"))
    assert counters.take_unflushed() == {"ns": {"k": 1}}, "what is at its most grows no more"


def test_a_histogram_counts_durations_up_to_each_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0004, 0.001, 0.0011, 0.3, 99.0):
        histogram.observe(seconds)
    counts, sum_seconds = histogram.read()
    by_bound = dict(zip(BOUNDS_SECONDS, counts, strict=False))
    assert (by_bound[0.001], by_bound[0.0025], by_bound[0.25], by_bound[0.5]) == (2, 3, 3, 4)
    assert (by_bound[10.0], counts[-1]) == (4, 5)
    assert sum_seconds == pytest.approx(99.3025)
