"""Who works in which turn of the loop, in virtual time."""

from typing import Any

import pytest

from lookup_buffer.node.turns import Steps, Turns
from lookup_buffer.times import TURN_SECONDS
from virtual_loop import VirtualLoop


class Loop(VirtualLoop):
    """It counts its turns."""

    turn = 0

    def select(self, timeout: float | None) -> list[Any]:
        self.turn += 1
        return super().select(timeout)


class Bench:
    """It notes who makes a step, and in which turn of the loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.turns = Turns(self.loop)
        self.steps: list[tuple[int, str]] = []

    def names(self) -> str:
        return "".join(name for _, name in self.steps)

    def in_one_turn(self) -> int:
        """The most steps of one turn."""
        turns = [turn for turn, _ in self.steps]
        return max(map(turns.count, turns))


class Working:
    """It has so many steps to make, each of so many seconds."""

    def __init__(self, bench: Bench, name: str, steps: int, seconds: float) -> None:
        self.bench, self.name, self.left, self.seconds = bench, name, steps, seconds

    def step(self) -> bool:
        self.bench.steps.append((self.bench.loop.turn, self.name))
        self.bench.loop.now += self.seconds
        self.left -= 1
        return self.left > 0


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_takes_little_is_done_at_once(bench: Bench) -> None:
    assert not bench.turns.work(Working(bench, "a", 5, 0.1 * TURN_SECONDS))
    assert bench.names() == "aaaaa"


def test_what_takes_longer_goes_on_in_later_turns(bench: Bench) -> None:
    assert bench.turns.work(Working(bench, "a", 100, 0.26 * TURN_SECONDS))
    assert bench.names() == "aaaa"
    bench.loop.run(1e6)
    assert bench.names() == "a" * 100
    assert bench.in_one_turn() == 4


def test_those_who_wait_make_one_step_each_in_turn(bench: Bench) -> None:
    for name in "abc":
        assert bench.turns.work(Working(bench, name, 6, 0.51 * TURN_SECONDS))
    bench.loop.run(1e6)
    assert bench.names() == "aa" + "abc" * 4 + "bcbc"
    assert bench.in_one_turn() == 2


def test_one_who_comes_later_is_not_before_those_who_wait(bench: Bench) -> None:
    bench.turns.work(Working(bench, "a", 3, 1.01 * TURN_SECONDS))
    bench.turns.work(Working(bench, "b", 3, 1.01 * TURN_SECONDS))
    bench.loop.call_soon(bench.turns.work, Working(bench, "c", 3, 1.01 * TURN_SECONDS))
    bench.loop.run(1e6)
    assert bench.names() == "aabacbcbc"
    assert bench.in_one_turn() == 1


def test_what_many_do_in_one_turn_is_bounded_together(bench: Bench) -> None:
    workers = [Working(bench, name, 1, 0.34 * TURN_SECONDS) for name in "abcdefghijkl"]
    waiting = [bench.turns.work(worker) for worker in workers]
    assert waiting == [False] * 3 + [True] * 9
    bench.loop.run(1e6)
    assert bench.names() == "abcdefghijkl"
    assert bench.in_one_turn() == 3


def test_after_a_pause_one_is_served_at_once_again(bench: Bench) -> None:
    """However the time of the turns before was used up."""
    for n in range(100):
        assert not bench.turns.work(Working(bench, "a", 1, 0.3 * TURN_SECONDS))
        assert len(bench.steps) == n + 1
        bench.loop.run(1.0)


def test_kinds_that_have_their_own_turns_do_not_delay_each_other(bench: Bench) -> None:
    assert bench.turns.work(Working(bench, "a", 10, 1.01 * TURN_SECONDS))
    assert not Turns(bench.loop).work(Working(bench, "b", 1, 1.01 * TURN_SECONDS))
    assert bench.names() == "ab"


def test_what_is_added_makes_no_step_at_once(bench: Bench) -> None:
    """Who adds it may be in the middle of its own work."""
    bench.turns.add(Working(bench, "a", 2, 0.0))
    assert not bench.steps
    bench.loop.run(1.0)
    assert bench.names() == "aa"


def test_a_step_that_raises_stops_no_other(bench: Bench) -> None:
    def fail() -> bool:
        raise ValueError("a bug")

    bench.turns.add(Steps(fail))
    bench.turns.add(Working(bench, "b", 2, 0.0))
    with pytest.raises(ValueError, match="a bug"):
        bench.loop.run(1.0)
    bench.loop.run(1.0)
    assert bench.names() == "bb"
