"""Shares: what each owner may hold, and what is left for others."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.errors import BufferFull
from lookup_buffer.node.shares import KEY_BYTES, REQUEST_BYTES, Shares, size_of
from store import Claiming, ClaimState
from virtual_loop import VirtualLoop
from virtual_nodes import NAMESPACE, Store, VirtualNode

TOTAL, OWN = 64, 2


def fill(shares: Shares, owner: int) -> int:
    """Hold as much as this owner may."""
    held = 0
    while shares.fits(owner):
        shares.add(owner)
        held += 1
    return held


def test_whoever_comes_next_finds_room() -> None:
    shares = Shares("things", TOTAL, OWN)
    held = [fill(shares, owner) for owner in range(8)]
    assert held == [32, 16, 8, 4, 2, 2, 2, 2]
    with pytest.raises(BufferFull, match="32 things"):
        shares.check(0)
    for owner, count in enumerate(held):
        shares.add(owner, -count)
    assert shares.fits(0, TOTAL)
    assert not shares._held


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=100))
def test_all_together_never_exceed_the_total(asked: list[tuple[int, int]]) -> None:
    """Except by what is each one's own."""
    shares = Shares("things", TOTAL, OWN)
    for owner, count in asked:
        if shares.fits(owner, count):
            shares.add(owner, count)
    assert sum(shares._held.values()) == shares._used <= TOTAL + OWN * len(shares._held)


def test_a_request_for_many_keys_counts_more() -> None:
    assert size_of([]) == size_of(["k"]) == 1
    assert size_of(["k" * REQUEST_BYTES]) == 2
    assert size_of([""] * 4096) == 1 + 4096 * KEY_BYTES // REQUEST_BYTES


def test_a_claim_that_was_given_back_leaves_no_timer() -> None:
    """One for a day, each time."""
    loop = VirtualLoop()
    node = VirtualNode("a", Store(loop), random.Random(1))
    claiming = Claiming(NAMESPACE, "k", "a", "token", ClaimState.ENCODING, 86_400.0)
    for _ in range(10):
        node.claims.held.keep(node.session, claiming, 86_400.0)
        node.claims.held.drop(node.session, (NAMESPACE, "k"))
    assert node.claims.held.shares.fits(node.session.owner, node.claims.held.shares.total)
    assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
