"""The mirroring locator while its store cannot be opened."""

import asyncio
import time

from lookup_buffer.config import BufferConfig
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.locator import NOT_REACHED, Located
from lookup_buffer.node.mirroring import MirrorLocator
from lookup_buffer.node.storage import Storage
from store import MetadataStore, StoreUnavailable


class Unopened(Storage):
    def __init__(self) -> None:
        super().__init__(BufferConfig.of({}))
        self.tried = 0

    def store(self) -> MetadataStore:
        self.tried += 1
        raise StoreUnavailable("it does not start")


def nothing() -> None: ...


def test_who_gave_up_waiting_is_forgotten() -> None:
    asyncio.run(_who_gave_up_waiting_is_forgotten())


async def _who_gave_up_waiting_is_forgotten() -> None:
    storage = Unopened()
    locator = MirrorLocator(asyncio.get_running_loop(), storage, Directory("us"))
    locator.start()
    kept = locator.watch(("ns", "kept"), nothing)
    for n in range(100):
        locator.watch(("ns", f"k{n}"), nothing)()
    answers: list[list[Located]] = []
    locator.ask([("ns", "k")], answers.append)
    until = time.monotonic() + 3.0
    while not answers and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert answers == [[NOT_REACHED]]
    assert len(locator._waiting) == 1, "only who still waits"
    kept()
    locator.close()
