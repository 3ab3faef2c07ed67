"""`PinnedArena` over a device that records what it is asked: one arena at a time, and each once."""

import pytest

from connectors.counters import Counters, RateLimitedLog
from connectors.pinned import PinnedArena
from lookup_buffer.errors import NodeUnavailable


class Pins:
    def __init__(self) -> None:
        self.pinned: list[bytes] = []
        self.tried: list[bytes] = []
        self.refuses = False

    def pin(self, memory: memoryview) -> bool:
        self.tried.append(bytes(memory))
        if not self.refuses:
            self.pinned.append(bytes(memory))
        return not self.refuses

    def unpin(self, memory: memoryview) -> None:
        self.pinned.remove(bytes(memory))


@pytest.fixture
def pins() -> Pins:
    return Pins()


@pytest.fixture
def counters() -> Counters:
    return Counters()


ARENAS: dict[str, bytearray] = {}
"""By boot: where its arena is mapped now."""


def _of(boot: str) -> memoryview:
    if boot == "lost":
        raise NodeUnavailable("the node was lost again")
    return memoryview(ARENAS.setdefault(boot, bytearray(boot.encode())))


@pytest.fixture
def arena(pins: Pins, counters: Counters) -> PinnedArena:
    return PinnedArena(pins.pin, pins.unpin, _of, counters, RateLimitedLog())


def test_the_arena_of_the_last_start_is_pinned_once(arena: PinnedArena, pins: Pins) -> None:
    for boot in ("", "one", "one", "two"):
        arena.follow(boot)
    assert pins.tried == [b"one", b"two"]
    assert pins.pinned == [b"two"]
    arena.release()
    arena.release()
    assert pins.pinned == []


def test_the_next_arena_takes_the_place_of_the_one_that_is_gone(
    arena: PinnedArena, pins: Pins, counters: Counters
) -> None:
    arena.follow("one")
    arena.follow("lost")
    assert pins.pinned == [b"one"], "nothing came in its place"
    arena.follow("two")
    arena.follow("one")  # of a load that was ordered before
    assert pins.pinned == [b"two"]
    assert counters.totals() == {}


def test_an_arena_that_is_mapped_elsewhere_is_pinned_there(arena: PinnedArena, pins: Pins) -> None:
    arena.follow("again")
    former, ARENAS["again"] = ARENAS["again"], bytearray(b"again")
    arena.follow("again")
    arena.follow("again")
    assert (pins.tried, pins.pinned) == ([b"again", b"again"], [b"again"])
    del former


def test_a_refusal_is_counted_once_for_a_start(
    arena: PinnedArena, pins: Pins, counters: Counters
) -> None:
    pins.refuses = True
    for boot in ("one", "one", "two"):
        arena.follow(boot)
    assert counters.totals() == {"arena_not_pinned": 2}
    arena.release()
