"""The registrar, in virtual time, on a store that is far away."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from awaited import awaited
from lookup_buffer.node.counters import HITS_KEYS_MAX
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.times import BEAT_SECONDS
from store import BlockingStore
from test_registrar import NAMESPACE, Beating, comes_true, registrar_on

ROUND_TRIP_SECONDS = 0.2
PAGE = 1000
"""Hits of so many keys are one round trip, as in RedisStore."""


class _Far:
    def __init__(self, store: BlockingStore) -> None:
        self._store = awaited(store)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("place_of", "failovers", "has_mirror"):
            return method

        async def call(*arguments: Any, **keywords: Any) -> Any:
            pages = math.ceil(len(arguments[1]) / PAGE) if name == "add_hits" else 1
            await asyncio.sleep(pages * ROUND_TRIP_SECONDS)
            return await method(*arguments, **keywords)

        return call


def move_away(registrar: Registrar, store: Beating) -> None:
    """From now on each call takes a round trip."""
    far: Any = _Far(store)
    storage: Any = registrar.storage
    storage._store = far
    store.clock = registrar.loop.time


def pauses(store: Beating) -> list[float]:
    """Between beats."""
    return [after - before for before, after in pairwise(store.beaten_at)]


class Noting(Beating):
    """It notes which hits it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()

    def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        self.written.update(hits)


def test_hits_of_many_keys_delay_no_beat() -> None:
    store, count = Noting(), HITS_KEYS_MAX // 5
    with registrar_on(store) as (registrar, _):
        move_away(registrar, store)
        assert comes_true(registrar, lambda: registrar.heartbeat.established, 3.0)
        for n in range(count):
            registrar.counters._count_hits((NAMESPACE, f"k{n}"), 1)
        assert comes_true(registrar, lambda: store.written.total() == count, 60.0)
    assert {*store.written.values()} == {1}
    assert max(pauses(store)) < 2 * BEAT_SECONDS
