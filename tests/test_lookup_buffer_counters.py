"""The node's counters, while nobody takes them."""

from lookup_buffer.counters import HITS_KEYS_MAX, Counters


def test_hits_that_nobody_takes_are_bounded() -> None:
    counters = Counters()
    for n in range(HITS_KEYS_MAX + 10):
        counters.hit(("ns", f"k{n}"), "local")
    counters.hit(("ns", "k0"), "local")
    totals, hits = counters.take_unflushed()
    assert totals["hits_local"] == HITS_KEYS_MAX + 11
    assert len(hits) == HITS_KEYS_MAX
    assert hits["ns", "k0"] == 2


def test_what_comes_back_is_added_and_bounded() -> None:
    counters = Counters()
    for n in range(HITS_KEYS_MAX):
        counters.hit(("ns", f"k{n}"), "local")
    taken = counters.take_unflushed()
    counters.hit(("ns", "k0"), "local")
    counters.hit(("ns", "new"), "local")
    counters.put_back(*taken)
    totals, hits = counters.take_unflushed()
    assert totals["hits_local"] == HITS_KEYS_MAX + 2
    assert len(hits) == HITS_KEYS_MAX
    assert (hits["ns", "k0"], hits["ns", "new"]) == (2, 1)
