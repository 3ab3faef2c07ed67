"""Periodic tasks of a beat: one at a time, in turn, each ended by the next beat."""

from collections.abc import Awaitable, Callable

import pytest

from awaited import at_once
from lookup_buffer.errors import ConfigError
from lookup_buffer.node.registrar import REST_SECONDS_MAX, Errands, Troubles
from store import StoreFull, StoreUnavailable


class Beats:
    """Errands by name, on a clock that they move, and which were done."""

    def __init__(self) -> None:
        self.now = 100.0
        self.done: list[str] = []
        self.errands = Errands(Troubles(lambda: self.now), lambda: self.now)

    def errand(
        self, name: str, error: Exception | None = None, seconds: float = 0.0
    ) -> tuple[str, Callable[[], Awaitable[object]]]:
        async def do() -> None:
            self.done.append(name)
            self.now += seconds
            if error is not None:
                raise error

        return name, do

    def told(self) -> list[str]:
        done, self.done = self.done, []
        return done


def test_a_failed_task_pauses_and_the_others_continue() -> None:
    beats = Beats()
    errands = [beats.errand("a"), beats.errand("b", StoreUnavailable("gone")), beats.errand("c")]
    at_once(beats.errands.run_until(beats.now + 1.0, errands))
    assert beats.told() == ["a", "b", "c"]
    beats.now += 1.0
    at_once(beats.errands.run_until(beats.now + 1.0, errands))
    assert beats.told() == ["a", "c"]
    beats.now += REST_SECONDS_MAX
    at_once(beats.errands.run_until(beats.now + 1.0, errands))
    assert beats.told() == ["a", "b", "c"]


def test_after_a_long_task_the_others_run_in_the_next_beat() -> None:
    beats = Beats()
    errands = [beats.errand("a"), beats.errand("b", StoreUnavailable("gone"), 2.0)]
    errands += [beats.errand("c", StoreUnavailable("gone"), 2.0), beats.errand("d")]
    for expected in (["a", "b"], ["c"], ["d", "a"]):
        due = beats.now + 1.0
        at_once(beats.errands.run_until(due, errands))
        assert beats.told()[: len(expected)] == expected


@pytest.mark.parametrize("error", [StoreFull("full"), ValueError("a bug")])
def test_an_error_in_one_task_does_not_end_the_others(error: Exception) -> None:
    beats = Beats()
    at_once(beats.errands.run_until(beats.now + 1.0, [beats.errand("a", error), beats.errand("b")]))
    assert beats.told() == ["a", "b"]


def test_an_error_that_must_end_the_node_is_raised() -> None:
    beats = Beats()
    with pytest.raises(ConfigError):
        at_once(beats.errands.run(*beats.errand("a", ConfigError("another has the name"))))


def test_a_new_store_makes_all_tasks_due() -> None:
    beats = Beats()
    failing = beats.errand("a", StoreUnavailable("gone"))
    for _ in range(2):
        at_once(beats.errands.run(*failing))
        beats.errands.wake()
    assert beats.told() == ["a", "a"]
