"""One simulated node of a fleet: it uses Redis as a node does, and moves no bytes.

The benchmark `store_fleet` runs each in its own process.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gauge import BOOT, NAMESPACE, key_of, mirror_of, publishing_of, sampled_keys
from lookup_buffer.node.main import SWITCH_SECONDS
from lookup_buffer.node.membership import Directory
from lookup_buffer.times import BEAT_SECONDS
from store import MetadataStore, NodeInfo, StoreError, open_async_store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from store.base import Found, Mirror

KEYS = 10_000
"""Each belongs to one node, which publishes it again with a newer generation."""
WATCHED = 200
QUESTION_KEYS = 32
QUESTIONS_PER_SECOND = 2.0
"""64 keys a second: an engine with so many images."""
BATCH = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one node of the fleet."""

    url: str
    index: int
    nodes: int
    publishes_per_second: float

    @property
    def name(self) -> str:
        return f"gpu-host-{self.index:04}-ab12"


@dataclass(slots=True)
class SimulatedNode:
    """Reads on the loop; sends heartbeats and publishes on its own threads, as a node does."""

    plan: Plan
    lags: list[float] = field(default_factory=list)
    published: int = 0
    asked: int = 0
    failed: int = 0
    _counting: bool = False

    async def run(self, orders: "Connection[Any, Any]") -> None:
        loop = asyncio.get_running_loop()
        store = open_async_store(self.plan.url, call_timeout_seconds=5.0)
        mirror = mirror_of(store)
        generator = random.Random(self.plan.index)
        for key in sampled_keys(KEYS, WATCHED, generator):
            mirror.watch(NAMESPACE, key, self._on_change(mirror, key))
        work = [
            asyncio.ensure_future(task)
            for task in (self._beat(store), self._publish(store), self._ask(mirror, generator))
        ]
        orders.send("ready")
        begin, end = await loop.run_in_executor(None, orders.recv)
        await asyncio.sleep(begin - time.monotonic())
        self._counting = True
        before = (mirror.pushes, self.published, self.asked)
        await asyncio.sleep(end - time.monotonic())
        after = (mirror.pushes, self.published, self.asked)
        self._counting = False
        orders.send((self.lags, *(b - a for a, b in zip(before, after, strict=True)), self.failed))
        orders.recv()  # the processor time of all nodes is read before one ends
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        mirror.close()
        await store.close()

    def _on_change(self, mirror: "Mirror", key: str) -> Callable[[], None]:
        """A watcher's callback: the record is in the mirror again, with its publication time."""

        def changed() -> None:
            entry = mirror.entries(NAMESPACE).get(key)
            if self._counting and entry is not None and entry.record is not None:
                begun = max(location.checksum for location in entry.record.locations)
                self.lags.append((time.monotonic_ns() - begun) / 1e9)

        return changed

    async def _ask(self, mirror: "Mirror", generator: random.Random) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(generator.random() / QUESTIONS_PER_SECOND)
        for turn in itertools.count(1):
            answered: asyncio.Future[list[Found]] = loop.create_future()
            keys = sampled_keys(KEYS, QUESTION_KEYS, generator)
            mirror.ask(NAMESPACE, keys, partial(_set, answered))
            self.failed += any(isinstance(found, StoreError) for found in await answered)
            self.asked += QUESTION_KEYS
            if turn == 1:
                begun = loop.time()
            await asyncio.sleep(begun + turn / QUESTIONS_PER_SECOND - loop.time())

    async def _beat(self, store: MetadataStore) -> None:
        """The metadata writer's work of each second."""
        directory = Directory(self.plan.name)
        info = NodeInfo(self.plan.name, BOOT, "tcp://127.0.0.1:1", "gpu-host", "0", 1, 1, 1)
        await asyncio.sleep(random.random() * BEAT_SECONDS)
        for sequence in itertools.count(1):
            try:
                await store.beat(self.plan.name, BOOT, sequence)
                await store.describe_node(info)
                await directory.refresh(store)
            except StoreError:
                self.failed += 1
            await asyncio.sleep(BEAT_SECONDS)

    async def _publish(self, store: MetadataStore) -> None:
        """Publish all that is due in one round trip; publications are due at random moments."""
        own = range(self.plan.index, KEYS, self.plan.nodes)
        generator = random.Random(1000 + self.plan.index)
        due = time.monotonic()
        generations = itertools.count(1)
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            count = 0
            while due <= time.monotonic() and count < BATCH:
                due += generator.expovariate(self.plan.publishes_per_second)
                count += 1
            keys = {key_of(generator.choice(own)) for _ in range(count)}
            begun = time.monotonic_ns()
            try:
                await store.publish_many(
                    [publishing_of(key, self.plan.name, next(generations), begun) for key in keys]
                )
                self.published += len(keys)
            except StoreError:
                self.failed += 1


def run_node(plan: Plan, orders: "Connection[Any, Any]") -> None:
    sys.setswitchinterval(SWITCH_SECONDS)  # as a node does
    asyncio.run(SimulatedNode(plan).run(orders))


def _set(answered: "asyncio.Future[list[Found]]", found: "list[Found]") -> None:
    if not answered.done():  # else the run is over
        answered.set_result(found)
