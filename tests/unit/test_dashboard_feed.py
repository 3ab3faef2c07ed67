"""The feed of the dashboard's page on its loop: what is under way ends with it."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from lookup_buffer.dashboard.feed import QUESTIONS_MAX, Feed
from lookup_buffer.dashboard.main import run
from memory_store import InMemoryStore
from patience import scaled
from store import Beat


class SlowStore(InMemoryStore):
    """Its scans, and its beats if `hangs`, do not end before they are cancelled."""

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__()
        self.hangs = hangs
        self.ended: list[str] = []
        self.scanning = asyncio.Event()
        self.asked = asyncio.Event()

    async def namespaces(self) -> dict[str, dict[str, str]]:
        self.scanning.set()
        await self._never("scan")
        return {}

    async def beats(self) -> dict[str, Beat]:
        if self.hangs:
            self.asked.set()
            await self._never("beats")
        return await super().beats()

    async def close(self) -> None:
        self.ended.append("store")
        await super().close()

    async def _never(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a connection is closed meanwhile
            self.ended.append(name)


class ServerUntil:
    """Instead of uvicorn's: it serves nobody, until it is told to exit."""

    def __init__(self) -> None:
        self.exit = asyncio.Event()

    async def serve(self, sockets: list[socket.socket]) -> None:
        await self.exit.wait()


async def within(coroutine: Coroutine[Any, Any, None]) -> None:
    """In this task: `all_tasks` has no other."""
    async with asyncio.timeout(scaled(10.0)):
        await coroutine


@pytest.mark.parametrize("hangs", [False, True])
def test_at_the_end_all_calls_end_before_the_store(hangs: bool) -> None:
    async def go() -> None:
        store = SlowStore(hangs=hangs)
        feed, server, listener = Feed("node", lambda: store), ServerUntil(), socket.socket()
        serving = asyncio.create_task(run(server, feed, listener))  # type: ignore[arg-type]
        feed.watch("somebody")
        await (store.asked if hangs else store.scanning).wait()
        await store.scanning.wait()
        server.exit.set()
        await serving
        listener.close()
        assert store.ended == [*(["beats"] if hangs else []), "scan", "store"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(within(go()))


def test_a_question_that_is_cancelled_ends_and_makes_room() -> None:
    """Of more questions than may be asked at once, none is refused."""

    async def go() -> None:
        store = SlowStore(hangs=True)
        feed = Feed("node", lambda: store)
        for _ in range(5 * QUESTIONS_MAX):
            store.asked.clear()
            question = asyncio.create_task(feed.explain("key", ""))
            await store.asked.wait()
            question.cancel()
            await asyncio.wait([question])
            assert question.cancelled()
        assert store.ended == ["beats"] * 5 * QUESTIONS_MAX
        await feed.close()

    asyncio.run(within(go()))
