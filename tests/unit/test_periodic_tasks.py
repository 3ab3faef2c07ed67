"""Periodic tasks of a beat: one at a time, in turn, each ended by the next beat."""

from typing import Any

import pytest

from awaited import at_once
from lookup_buffer.errors import ConfigError
from lookup_buffer.node.storage import REST_SECONDS, FailureLog, PeriodicTasks, Task
from store import MetadataStore, StoreFull, StoreUnavailable

STORE: Any = None
"""The tasks of these tests do not call it."""


class Beats:
    """Tasks by name, on a clock that they move, and which were done."""

    def __init__(self) -> None:
        self.now = 100.0
        self.done: list[str] = []
        self.tasks = PeriodicTasks(FailureLog(lambda: self.now), lambda: self.now, [])

    def task(
        self, name: str, error: Exception | None = None, seconds: float = 0.0
    ) -> tuple[str, Task]:
        async def do(_: MetadataStore) -> None:
            self.done.append(name)
            self.now += seconds
            if error is not None:
                raise error

        return name, do

    def run(self, *tasks: tuple[str, Task]) -> list[str]:
        """The names of those that ran until the next beat."""
        self.done = []
        self.tasks.tasks = self.tasks.tasks or [*tasks]
        at_once(self.tasks.run_until(self.now + 1.0, STORE))
        return self.done


def test_a_failed_task_pauses_and_the_others_continue() -> None:
    beats = Beats()
    tasks = [beats.task("a"), beats.task("b", StoreUnavailable("gone")), beats.task("c")]
    assert beats.run(*tasks) == ["a", "b", "c"]
    beats.now += 1.0
    assert beats.run(*tasks) == ["a", "c"]
    beats.now += REST_SECONDS
    assert beats.run(*tasks) == ["a", "b", "c"]


def test_after_a_long_task_the_others_run_in_the_next_beat() -> None:
    beats = Beats()
    tasks = [beats.task("a"), beats.task("b", StoreUnavailable("gone"), 2.0)]
    tasks += [beats.task("c", StoreUnavailable("gone"), 2.0), beats.task("d")]
    for expected in (["a", "b"], ["c"], ["d", "a"]):
        assert beats.run(*tasks)[: len(expected)] == expected


@pytest.mark.parametrize("error", [StoreFull("full"), ValueError("a bug")])
def test_an_error_in_one_task_does_not_end_the_others(error: Exception) -> None:
    beats = Beats()
    assert beats.run(beats.task("a", error), beats.task("b")) == ["a", "b"]


def test_a_task_whose_server_answers_does_not_pause() -> None:
    beats = Beats()
    for _ in range(2):
        assert beats.run(beats.task("a", StoreFull("full"))) == ["a"]


def test_an_error_that_must_end_the_node_is_raised() -> None:
    beats = Beats()
    with pytest.raises(ConfigError):
        beats.run(beats.task("a", ConfigError("another has the name")))


def test_a_new_store_makes_all_tasks_due() -> None:
    beats = Beats()
    failing = beats.task("a", StoreUnavailable("gone"))
    for _ in range(2):
        assert beats.run(failing) == ["a"]
        beats.tasks.resume()
