"""Claims in virtual time: what a cancelled or ended request leaves; a store that does not answer.

The store and the way to it are those of `virtual_nodes`.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cancelling import cancel_at_each_wait
from lookup_buffer.node.counters import UNASKED
from lookup_buffer.node.held_claims import CLAIMS_MAX
from lookup_buffer.protocol.messages import Claim, ClaimAll, ClaimOutcome, Encoding, Unclaim
from store import ClaimState
from virtual_loop import VirtualLoop
from virtual_nodes import NAMESPACE, Store, VirtualNode

LONG_SECONDS = 100.0


class Pair:
    """Two nodes at one store."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.store = Store(self.loop)
        chance = random.Random(1)
        self.here, self.there = (VirtualNode(name, self.store, chance) for name in "ab")

    def claim_of(self, *keys: str, node: VirtualNode | None = None, number: int = 1) -> list[str]:
        """Ask for a set; the outcomes of its events, as they come."""
        events: list[str] = []
        request = ClaimAll(number, NAMESPACE, list(keys), LONG_SECONDS)
        (node or self.here).handle(request, lambda event: events.append(event["outcome"]))
        return events

    def at_rest(self) -> None:
        """After all leases nothing is held, watched or waited for."""
        self.loop.run(LONG_SECONDS)
        assert all(self.store.holder(key) is None for key in list(self.store.claims))
        for node in (self.here, self.there):
            assert node.is_at_rest
            assert len(node.claims.held) == 0
            assert not node.claims.held.shares._used
            assert not node.claims.held._asked
            assert not node.session.tasks
            assert not node.claims.waiting._waiters
        assert not self.store.watches


def claim(key: str, state: str = "encoding", wait_seconds: float = 5.0) -> Claim:
    return Claim(1, NAMESPACE, key, 1.0, state, wait_seconds)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_claim_that_is_cancelled_at_any_wait_leaves_nothing(is_held: bool) -> None:
    pair = Pair()
    session: Any = pair.here.session

    async def check() -> None:
        await settle(pair)
        if is_held:
            pair.claim_of("k", node=pair.there)
            await asyncio.sleep(0.1)  # the store has it

    async def settle(pair: Pair) -> None:
        await asyncio.sleep(10.0)
        assert len(pair.here.claims.held) == 0
        assert not pair.here.claims.waiting._waiters

    if is_held:
        pair.claim_of("k", node=pair.there)
        pair.loop.run(0.1)
    waits = run(pair, lambda: pair.here.claims.claim(session, claim("k")), check)
    assert waits >= (2 if is_held else 1)
    pair.at_rest()


def run(pair: Pair, make: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Any]) -> int:
    task = pair.loop.create_task(cancel_at_each_wait(make, check))
    pair.loop.run(1000.0)
    return task.result()


def test_a_session_that_ends_at_its_event_leaves_no_watch() -> None:
    """Sending fails then, which ends the session in the middle of the attempt."""
    pair = Pair()
    assert pair.claim_of("k", node=pair.there) == []
    pair.loop.run(0.1)
    events: list[str] = []

    def tell(event: dict[str, Any]) -> None:
        events.append(event["outcome"])
        pair.here.end()

    pair.here.handle(ClaimAll(1, NAMESPACE, ["k"], LONG_SECONDS), tell)
    pair.loop.run(0.2)
    assert events == [ClaimOutcome.PENDING]
    assert not pair.store.watches
    pair.at_rest()


def test_a_wait_that_is_given_up_takes_no_claim_from_the_next_request() -> None:
    """Both have the same fencing token: a release after the second one's grant would end it."""
    for milliseconds in range(40):
        pair = Pair()
        first = pair.claim_of("a", "k")
        pair.loop.run(milliseconds / 1000)
        pair.here.handle(Unclaim(2, NAMESPACE, [], 1), lambda _: None)
        second = pair.claim_of("k", number=3)
        pair.loop.run(0.8)
        assert (first in ([], ["granted"]), second) == (True, ["granted"])
        assert pair.store.holder("k") is pair.here
        pair.at_rest()


def test_messages_of_a_session_precede_attempts() -> None:
    pair = Pair()
    sets = [pair.claim_of(f"k{n}", number=n) for n in range(1, 30)]
    pair.here.handle(Encoding(50, NAMESPACE, ["e"], 5.0), lambda _: None)
    while pair.store.holder("e") is None:
        pair.loop.run(0.001)
    assert [] in sets, "most attempts come later"
    pair.at_rest()


def test_a_store_that_does_not_answer_grants_every_claim() -> None:
    pair = Pair()
    pair.here.to_store.send = lambda *_: None  # type: ignore[method-assign]
    session: Any = pair.here.session
    task = pair.loop.create_task(pair.here.claims.claim(session, claim("k")))
    pair.loop.run(1.0)
    assert task.result()["outcome"] is ClaimOutcome.GRANTED
    counted = pair.here.claims.counters.totals()
    assert {name: n for name, n in counted.items() if n} == {f"claims_{UNASKED}": 1}
    pair.at_rest()


def test_a_claim_that_is_cancelled_beside_an_intent_ends_with_its_session() -> None:
    pair = Pair()
    session: Any = pair.here.session
    encode = Claim(2, NAMESPACE, "k", LONG_SECONDS, "encoding", 0.0)

    async def check() -> None:
        await pair.here.claims.claim(session, claim("k", "intent", 0.0))
        request = asyncio.ensure_future(pair.here.claims.claim(session, encode))
        await asyncio.sleep(0)
        request.cancel()  # the store grants it nevertheless
        await asyncio.sleep(10.0)
        assert pair.store.holder("k") is pair.here
        pair.here.end()
        await asyncio.sleep(1.0)
        assert pair.store.holder("k") is None

    checking = pair.loop.create_task(check())
    pair.loop.run(20.0)
    checking.result()
    pair.at_rest()


# -- releases


def test_what_an_engine_does_not_have_is_not_released_at_the_store() -> None:
    pair = Pair()
    pair.claim_of("k", "m")
    pair.loop.run(0.5)
    for _ in range(2):
        unclaim = Unclaim(2, NAMESPACE, ["absent", "k", "k", "m"], 0)
        pair.here.handle(unclaim, lambda _: None)
        assert pair.here.to_store.under_way == 2
    pair.at_rest()


def test_a_claim_that_is_asked_for_is_released_a_bounded_number_of_times() -> None:
    pair = Pair()
    session, held = pair.here.session, pair.here.claims.held
    asking = pair.loop.create_task(pair.here.claims.claim(session, claim("k")))
    pair.loop.run(0.0)
    for _ in range(CLAIMS_MAX):
        pair.here.claims.unclaim(session, Unclaim(2, NAMESPACE, ["k"], 0))
    assert pair.here.to_store.under_way == CLAIMS_MAX // 2
    assert not held.shares.fits(session.owner)
    pair.loop.run(0.3)
    assert asking.done()
    assert pair.store.holder("k") is None
    pair.at_rest()


def test_claims_that_are_given_up_count_until_the_store_answers() -> None:
    pair = Pair()
    pair.here.to_store.send = lambda *_: None  # type: ignore[method-assign]
    session, shares = pair.here.session, pair.here.claims.held.shares
    for n in range(20):
        task = pair.loop.create_task(pair.here.claims.claim(session, claim(f"k{n}")))
        pair.loop.run(0.0)
        task.cancel()
        pair.loop.run(0.0)
    assert shares._held == {session.owner: 20}


def test_claims_and_releases_leave_no_garbage() -> None:
    """A collection of all that a node has takes long, so it is seldom."""
    pair = Pair()
    keys = [f"k{n:03}" for n in range(300)]
    gc.collect()
    gc.disable()
    try:
        for request in (
            Encoding(1, NAMESPACE, keys, 5.0),
            Unclaim(2, NAMESPACE, keys, 0),
            ClaimAll(3, NAMESPACE, keys, 5.0),
        ):
            pair.here.handle(request, lambda _: None)
            pair.loop.run(10.0)
        assert gc.collect() < 30
    finally:
        gc.enable()
    assert pair.here.claims.counters.totals()["claims_granted"] == 600


# -- a store that is far away


@pytest.mark.parametrize(("seconds", "count"), [(0.05, 12), (0.1, 8), (0.2, 4)])
def test_the_claims_of_another_request_cost_no_claim_of_a_running_encode(
    seconds: float, count: int
) -> None:
    """`seconds`: for a round trip. An intent has become ENCODING in the store within a second."""
    pair = Pair()
    for way in (pair.here.to_store, pair.here.from_store):
        way.seconds = (seconds / 2,)
    assert pair.claim_of("a") == []
    pair.loop.run(seconds + 0.001)
    waits = pair.claim_of("a", node=pair.there)
    pair.here.handle(Encoding(2, NAMESPACE, ["a"], 3.0), lambda _: None)
    pair.loop.run(0.45)
    keys = [f"k{n:02}" for n in range(count)]
    granted = pair.claim_of(*keys, number=3)
    for _ in range(200):
        pair.loop.run(0.01)
        assert pair.store.holder("a") is pair.here, f"lost after {pair.loop.now:.2f} s"
    assert granted == [ClaimOutcome.GRANTED]
    assert waits == [ClaimOutcome.PENDING]
    pair.at_rest()


def test_of_a_set_that_is_granted_no_claim_has_lapsed() -> None:
    pair = Pair()
    for way in (pair.here.to_store, pair.here.from_store):
        way.seconds = (0.025,)
    keys = [f"k{n:02}" for n in range(24)]
    events = pair.claim_of(*keys)
    while not events:
        pair.loop.run(0.01)
    assert events == [ClaimOutcome.GRANTED]
    assert [key for key in keys if pair.store.holder(key) is None] == []
    pair.at_rest()


@pytest.mark.parametrize("claims_again", [False, True])
def test_a_promise_that_is_being_kept_revives_no_claim_that_is_given_up(claims_again: bool) -> None:
    for milliseconds in range(0, 110, 5):
        pair = Pair()
        for way in (pair.here.to_store, pair.here.from_store):
            way.seconds = (0.05,)
        pair.claim_of("a")
        pair.loop.run(0.1 + 1e-6)
        pair.here.handle(Encoding(2, NAMESPACE, ["a"], 60.0), lambda _: None)
        pair.loop.run(0.6 + milliseconds / 1000)  # it is kept now: the round trip takes 0.1 s
        pair.here.handle(Unclaim(3, NAMESPACE, ["a"], 0), lambda _: None)
        events = pair.claim_of("a", number=4) if claims_again else []
        pair.loop.run(0.3)
        claim = pair.here.claims.held.find(pair.here.session, (NAMESPACE, "a"))
        if claims_again:
            assert events == ["granted"]
            assert claim is not None
            assert claim.encoding_since is None, "an intent"
            assert pair.store.claims["a"][1] is ClaimState.INTENT
        else:
            assert claim is None
            assert pair.store.holder("a") is None
        pair.at_rest()


def test_a_set_of_which_one_key_is_held_gives_back_all_others() -> None:
    pair = Pair()
    pair.claim_of("k1", node=pair.there)
    pair.loop.run(0.2)
    events = pair.claim_of("k0", "k1", "k2")
    pair.loop.run(0.2)
    assert events == [ClaimOutcome.PENDING]
    assert [pair.store.holder(key) for key in ("k0", "k2")] == [None, None]
    pair.there.handle(Unclaim(2, NAMESPACE, ["k1"], 0), lambda _: None)
    pair.loop.run(0.3)
    assert events == [ClaimOutcome.PENDING, ClaimOutcome.GRANTED]
    pair.at_rest()


def test_the_claims_of_a_set_are_asked_for_server_by_server() -> None:
    """Of two that take those of two servers at once each could get what the other needs, always."""
    pair = Pair()
    pair.here.place_of = lambda address: address[1][-1]  # type: ignore[method-assign]
    pair.claim_of("k1a", "k2b", "k3a", "k4a")
    pair.loop.run(0.0)
    assert pair.here.to_store.under_way == 3
    pair.at_rest()
