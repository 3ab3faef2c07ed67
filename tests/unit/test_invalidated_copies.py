"""Copies that are on their way while their namespace is invalidated: none is kept."""

import asyncio

import pytest

from awaited import at_once, awaited
from lookup_buffer.errors import MissReason
from lookup_buffer.node import invalidations as invalidations_module
from lookup_buffer.node.invalidations import Invalidations
from memory_store import MemoryStore
from store.testing.samples import a_mark
from test_transfer import NAMESPACE, Fetching


def test_what_comes_long_after_the_mark_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is requested later is kept: its holder has read the mark, too."""
    monkeypatch.setattr(invalidations_module, "LATE_SECONDS", 0.0)

    async def test() -> None:
        def fate(key: str) -> str:
            if key == "k5" and not store.invalidations():
                store.mark_invalid(NAMESPACE, a_mark())
                apply()
            return "ok"

        store, fetching = MemoryStore(), Fetching(monkeypatch, fate)
        loop, arena = asyncio.get_running_loop(), fetching.arena
        invalidations = Invalidations(loop, arena, lambda: 0.0)

        def apply() -> None:
            at_once(invalidations.apply(awaited(store)))

        apply()
        keys = [f"k{n}" for n in range(10)]
        assert await fetching.fetch(dict.fromkeys(keys, 1)) == keys[5:]
        assert {fetching.settled[key].reason for key in keys[5:]} == {MissReason.STALE}
        apply()
        await asyncio.sleep(0)
        assert arena.addresses() == []
        assert await fetching.fetch(dict.fromkeys(keys, 1)) == []
        apply()
        await asyncio.sleep(0)
        assert len(arena.addresses()) == len(keys)
        fetching.fetcher.close()

    asyncio.run(test())
