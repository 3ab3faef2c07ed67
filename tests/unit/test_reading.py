"""How many keys a node reads from its store at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lookup_buffer.node import locate
from lookup_buffer.node.locate import Locator, Reading
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.storage import Storage
from lookup_buffer.shm.index import RemoteIndex
from store.base import OnFound


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "READING_MAX", 10)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await test()

    asyncio.run(bounded())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def begin(reading: Reading, *counts: int) -> "list[asyncio.Task[None]]":
    return [asyncio.ensure_future(reading.begin(count)) for count in counts]


def test_others_wait_in_the_order_of_their_requests() -> None:
    async def test() -> None:
        reading = Reading()
        tasks = begin(reading, 6, 3, 5, 1)
        await turns()
        assert [task.done() for task in tasks] == [True, True, False, False], "1 would fit"
        reading.end(6)
        await turns()
        assert all(task.done() for task in tasks)

    run(test)


def test_one_request_for_more_is_read_alone() -> None:
    async def test() -> None:
        reading = Reading()
        tasks = begin(reading, 1, 100, 1)
        await turns()
        assert [task.done() for task in tasks] == [True, False, False]
        reading.end(1)
        await turns()
        assert [task.done() for task in tasks] == [True, True, False]
        reading.end(100)
        await turns()
        assert tasks[2].done()

    run(test)


@pytest.mark.parametrize("is_granted", [False, True], ids=["waiting", "in the turn of its grant"])
def test_who_leaves_keeps_no_place(*, is_granted: bool) -> None:
    async def test() -> None:
        reading = Reading()
        tasks = begin(reading, 10, 10, 10)
        await turns()
        if is_granted:
            reading.end(10)
        tasks[1].cancel()
        if not is_granted:
            reading.end(10)
        await turns()
        assert tasks[1].cancelled()
        assert tasks[2].done()
        reading.end(10)
        (last,) = begin(reading, 10)
        await turns()
        assert last.done()
        assert not reading._queue

    run(test)


class Mirror:
    """It answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[OnFound] = []
        self.keys: list[int] = []

    def ask(self, _: str, keys: list[str], on_found: OnFound) -> None:
        self.keys.append(len(keys))
        self.asked.append(on_found)

    def answer(self) -> None:
        self.asked.pop(0)([None] * self.keys.pop(0))

    def close(self) -> None:
        pass


class Opened(Storage):
    def __init__(self) -> None:
        """It has no configuration, and is not asked."""


def locator_with(mirror: Any) -> Locator:
    loop = asyncio.get_running_loop()
    locator = Locator(loop, Opened(), Directory("us"), RemoteIndex(), mirrored=True)
    locator._store, locator._mirror = object(), mirror  # type: ignore[assignment]
    return locator


def test_what_clients_ask_for_is_read_from_the_store_in_turns() -> None:
    """Also if they have left: what was sent is answered in any case."""

    async def test() -> None:
        mirror = Mirror()
        locator = locator_with(mirror)
        keys = [("ns", f"k{n}") for n in range(4)]
        looks = [asyncio.ensure_future(locator.locate(keys)) for _ in range(6)]
        await turns()
        assert mirror.keys == [4, 4]
        looks[0].cancel()
        looks[2].cancel()
        await turns()
        assert mirror.keys == [4, 4], "it may still be answered"
        for _ in range(5):
            mirror.answer()
            await turns()
            assert len(mirror.keys) <= 2
        found = await asyncio.gather(*looks, return_exceptions=True)
        assert sum(isinstance(one, list) for one in found) == 4
        assert not mirror.asked

    run(test)


def test_one_call_of_the_store_reads_no_more() -> None:
    """Without a mirror the requests of many are one call."""

    async def test() -> None:
        calls: list[int] = []

        async def call(items: list[int]) -> None:
            calls.append(len(items))
            await asyncio.sleep(0)

        batched = locate._Batched(call)
        await asyncio.wait([batched.request([1] * 4) for _ in range(10)])
        assert sum(calls) == 40
        assert max(calls) <= 10

    run(test)


def test_what_nobody_waits_for_is_left_out_of_a_call_that_has_not_begun() -> None:
    async def test() -> None:
        calls: list[list[int]] = []

        async def call(items: list[int]) -> None:
            calls.append(items)
            await asyncio.sleep(0)

        batched = locate._Batched(call)
        requests = [[number] * 4 for number in range(4)]
        tasks = [batched.request(each) for each in requests]
        first = tasks[0]
        await asyncio.sleep(0)
        assert calls == [[0] * 4 + [1] * 4]
        for task, each in zip(tasks[:3], requests[:3], strict=True):
            batched.withdraw(task, each)  # the first ones have begun
        await asyncio.wait({first, *tasks})
        assert calls == [[0] * 4 + [1] * 4, [3] * 4]
        assert not batched._waiting

    run(test)
