"""The registrar, in virtual time, on a store that is far away."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from awaited import awaited
from lookup_buffer.node.counters import HITS_KEYS_MAX
from lookup_buffer.node.dirty_set import BATCH
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.times import BEAT_SECONDS
from store import BlockingStore
from test_registrar import NAMESPACE, Beating, comes_true, held, insert, registrar_on

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


def test_what_is_inserted_is_published_between_the_beats() -> None:
    store, count = Beating(), 10 * BATCH
    with registrar_on(store) as (registrar, arena):
        move_away(registrar, store)
        assert comes_true(registrar, lambda: registrar.heartbeat.established, 3.0)
        loop: Any = registrar.loop
        loop.run(3.0)
        for n in range(count):
            insert(arena, f"k{n}")
        keys = [f"k{n}" for n in range(count)]
        assert comes_true(registrar, lambda: all(held(store, *keys)), 6.0), "two batches a beat"
    assert max(pauses(store)[2:]) < 1.5 * BEAT_SECONDS


def test_the_tasks_of_a_beat_end_before_the_node_leaves() -> None:
    store = Beating()
    with registrar_on(store) as (registrar, _):
        move_away(registrar, store)
        assert comes_true(registrar, lambda: store.node_infos(["us"]), 3.0)
        assert comes_true(registrar, lambda: len(store.beaten_at) >= 4, 5.0)
        loop: Any = registrar.loop
        loop.run(2.5 * ROUND_TRIP_SECONDS)
    loop.run(10.0)
    assert store.node_infos(["us"]) == {}, "no description was written after it"
