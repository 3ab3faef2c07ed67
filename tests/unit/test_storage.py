"""The node is stopped while the embedded server is being started, by the order of `Node._close`."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lookup_buffer.config import BufferConfig
from lookup_buffer.node import storage as storage_module
from lookup_buffer.node.storage import Storage
from store import EmbeddedServerError, StoreUnavailable

START_SECONDS = 0.5


class Server:
    made: "list[Server]"

    def __init__(self) -> None:
        self.url, self.running = "unix:///nowhere/s.sock", True
        self.made.append(self)

    @classmethod
    def start(cls, directory: Path, *, timeout_seconds: float) -> "Server":
        time.sleep(START_SECONDS)
        return cls()

    def close(self) -> None:
        self.running = False


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Storage:
    Server.made = []
    monkeypatch.setattr(storage_module, "EmbeddedServer", Server)
    return Storage(BufferConfig.of({"store_url": "embedded", "directory": str(tmp_path)}), "us")


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Returns at once: the loop is not blocked while the server starts."""
    began = time.monotonic()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < START_SECONDS / 2


def test_at_its_start(storage: Storage) -> None:
    async def stop() -> None:
        opening, waiting = (asyncio.create_task(storage.store()) for _ in range(2))
        await asyncio.sleep(START_SECONDS / 5)
        await cancelled(opening)
        closing = asyncio.create_task(storage.close())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="shutting down"):
            await storage.store()
        await closing
        with suppress(StoreUnavailable):
            await waiting

    asyncio.run(stop())
    assert [server.running for server in Server.made] == [False], "one started, and it is closed"


def test_at_its_restart(storage: Storage) -> None:
    async def stop() -> None:
        await storage.store()
        Server.made[0].running = False  # it was killed
        reviving = asyncio.create_task(storage.store())
        await asyncio.sleep(START_SECONDS / 5)
        await cancelled(reviving)
        await storage.close()

    asyncio.run(stop())
    assert [server.running for server in Server.made] == [False, False]


def test_a_restart_that_failed_is_tried_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise EmbeddedServerError("no such program")

    async def restart() -> None:
        await storage.store()
        Server.made[0].running = False
        with monkeypatch.context() as patch:
            patch.setattr(Server, "start", fail)
            with pytest.raises(StoreUnavailable, match="no such program"):
                await storage.store()
        await storage.store()
        await storage.close()

    asyncio.run(restart())
    assert [server.running for server in Server.made] == [False, False]
