"""The estimate of the store's round trip, in virtual time, and the wait of a look-up."""

import asyncio
import random
from collections.abc import Iterable
from typing import Any

from awaited import at_once, awaited
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.storage import RoundTrip
from lookup_buffer.times import LOOK_UP_SECONDS_MAX, LOOK_UP_SECONDS_MIN
from memory_store import MemoryStore
from store import Beat


class FarStore(MemoryStore):
    """Each reading of the beats takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = 100.0

    def beats(self) -> dict[str, Beat]:
        self.now += self.seconds
        return super().beats()


class Node:
    def __init__(self, seconds: float) -> None:
        self.store = FarStore(seconds)
        self.directory = Directory("us", lambda: self.store.now)
        nothing: Any = None
        loop = asyncio.new_event_loop()
        self.locator = Locator(loop, nothing, self.directory, nothing, mirrored=True)
        loop.close()

    def waits_after(self, readings: int) -> float:
        for _ in range(readings):
            self.store.now += 1.0
            at_once(self.directory.refresh(awaited(self.store)))
        return self.locator.look_up_seconds


def observed(seconds: Iterable[float]) -> RoundTrip:
    estimate = RoundTrip()
    for one in seconds:
        estimate.observe(one)
    return estimate


def test_the_first_ones_are_those_of_rfc_6298() -> None:
    assert observed([]).bound_seconds == 0.0
    assert observed([0.1]).bound_seconds == 0.1 + 4 * 0.05
    # RTTVAR = 3/4 * 0.05 + 1/4 * |0.1 - 0.2|, then SRTT = 7/8 * 0.1 + 1/8 * 0.2
    assert abs(observed([0.1, 0.2]).bound_seconds - (0.1125 + 4 * 0.0625)) < 1e-9


def test_it_exceeds_nearly_all_round_trips_and_not_by_much() -> None:
    chance = random.Random(7)
    estimate, exceeded = RoundTrip(), 0
    for number in range(2000):
        seconds = 0.05 + chance.expovariate(1 / 0.005)
        exceeded += number > 20 and seconds > estimate.bound_seconds
        estimate.observe(seconds)
    assert exceeded < 100, "of 2,000"
    assert 0.05 < estimate.bound_seconds < 0.12


def test_a_near_store_leaves_the_least_time() -> None:
    node = Node(0.0005)
    assert node.locator.look_up_seconds == LOOK_UP_SECONDS_MIN, "nothing is measured yet"
    assert node.waits_after(10) == LOOK_UP_SECONDS_MIN


def test_it_follows_the_distance() -> None:
    node = Node(0.05)
    assert 3 * 0.05 < node.waits_after(30) < 4 * 0.05, "three round trips"
    node.store.seconds = 0.1
    assert node.waits_after(1) > 3 * 0.1, "one reading is enough"
    node.store.seconds = 0.0005
    assert node.waits_after(60) == LOOK_UP_SECONDS_MIN


def test_it_is_bounded() -> None:
    node = Node(0.2)
    assert 3 * 0.2 < node.waits_after(30) < LOOK_UP_SECONDS_MAX
    node.store.seconds = 3.0
    assert node.waits_after(1) == LOOK_UP_SECONDS_MAX
