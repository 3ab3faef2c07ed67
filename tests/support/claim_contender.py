"""One process of the claims' soak: eight contenders that want the same keys as all the others.

Run as `python claim_contender.py URL NAMESPACE SEED`. Each contender goes through the keys,
block by block, and for each claims, "encodes" and publishes, or waits for whoever does. Some
holders give up, some fall silent and publish too late, some publish another shape. What happened
is printed as JSON lines; times are seconds of CLOCK_MONOTONIC:

    held     key, token, from, until      the claim was surely ours
    publish  key, node, shape, outcome
    woken    key, seconds                 from the publication by its record to our noticing it
    asleep   key                          a watch was not armed, or did not tell of a publication
    done
"""

import asyncio
import json
import random
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from store import ClaimAnswer, ClaimState, Location, Publication, Record, StoreError, open_store
from store.redis_store import RedisStore

CONTENDERS = 8
KEYS = 10_000
BLOCK = 40
VISITED = 0.15
"""The part of each block that a contender goes for; 64 of them want each key nine times or so."""
INTENT_SECONDS, ENCODING_SECONDS = 0.3, 0.4
ASLEEP_SECONDS = 3.0
"""A waiter looks by itself after so long; by then it should have been woken."""


Answer = TypeVar("Answer")


class Contender:
    def __init__(self, process: "Process", number: int) -> None:
        self._process = process
        self._chance = random.Random(process.seed * 100 + number)
        self._node = f"node-{process.seed}-{number}"

    async def run(self) -> None:
        for start in range(0, KEYS, BLOCK):
            block = list(range(start, min(start + BLOCK, KEYS)))
            for n in self._chance.sample(block, int(len(block) * VISITED)):
                await self._have(f"{n:064x}")

    async def _have(self, key: str) -> None:
        """Until somebody has published the key."""
        process = self._process
        while not await process.published(key):
            token = secrets.token_hex(8)
            asked_at = time.monotonic()
            answer = await self._claim(key, token, ClaimState.INTENT, INTENT_SECONDS)
            if answer is None:
                continue
            if not answer.granted:
                await self._wait(key, answer)
            elif answer.record is not None:
                await process.release(key, token)
            else:
                process.held(key, token, asked_at + INTENT_SECONDS)
                await self._produce(key, token)

    async def _claim(
        self, key: str, token: str, state: ClaimState, lease_seconds: float
    ) -> ClaimAnswer | None:
        process = self._process

        def claim() -> ClaimAnswer:
            return process.store.claim(
                process.namespace, key,
                holder=f"{self._node}:b", token=token, state=state, lease_seconds=lease_seconds,
            )  # fmt: skip

        return await process.call(claim)

    async def _produce(self, key: str, token: str) -> None:
        process = self._process
        asked_at = time.monotonic()
        answer = await self._claim(key, token, ClaimState.ENCODING, ENCODING_SECONDS)
        if answer is None or not answer.granted:
            process.lets_go(token)
            return
        process.held(key, token, asked_at + ENCODING_SECONDS)
        await asyncio.sleep(self._chance.random() * 0.004)
        fate = self._chance.random()
        if fate < 0.03:  # falls silent: the lease has to end it, and the publication comes late
            await asyncio.sleep(ENCODING_SECONDS + 0.2)
        process.lets_go(token)
        if 0.03 <= fate < 0.10:
            await process.release(key, token)
            return
        await self._publish(key, token)

    async def _publish(self, key: str, token: str) -> None:
        process = self._process
        shape = (3,) if self._chance.random() < 0.9 else (4,)
        record = Record(
            process.namespace, key, "uint8", shape, shape[0], "tensor", time.monotonic()
        )

        def publish() -> Publication:
            return process.store.publish(record, Location(self._node, "b", 1, 0), claim_token=token)

        outcome = await process.call(publish)
        if outcome is not None:
            process.say("publish", key, self._node, shape[0], outcome.value)

    async def _wait(self, key: str, answer: ClaimAnswer) -> None:
        """For the publication, the release, or the end of the lease."""
        process = self._process
        changed = asyncio.Event()
        cancel = process.mirror.watch(process.namespace, key, changed.set)
        try:
            await self._sleep(key, changed, answer.remaining_seconds)
        except TimeoutError:
            process.say("asleep", key)
        finally:
            cancel()

    async def _sleep(self, key: str, changed: asyncio.Event, lease_seconds: float) -> None:
        process = self._process
        try:
            await asyncio.wait_for(changed.wait(), lease_seconds + 0.05)
        except TimeoutError:  # the holder fell silent, or renewed; or we were not woken
            found = await process.call(lambda: process.store.locate(process.namespace, [key]))
            if found and found[0] is not None:
                await asyncio.wait_for(changed.wait(), ASLEEP_SECONDS)
        record = await process.record(key)
        if record is not None:
            # `created` is the publisher's monotonic clock in this test.
            process.say("woken", key, round(time.monotonic() - record.created, 6))


class Process:
    def __init__(self, url: str, namespace: str, seed: int) -> None:
        self.seed = seed
        self.namespace = namespace
        store = open_store(url, call_timeout_seconds=2.0)
        assert isinstance(store, RedisStore)
        self.store = store
        self._threads = ThreadPoolExecutor(CONTENDERS)
        self._loop = asyncio.get_running_loop()
        self.mirror = store.mirror(self._loop, ThreadPoolExecutor(1))
        self._holding: dict[str, tuple[str, float, float]] = {}

    async def call(self, function: Callable[[], Answer]) -> Answer | None:
        """On a thread; None where the store failed."""
        try:
            return await self._loop.run_in_executor(self._threads, function)
        except StoreError:
            return None

    async def release(self, key: str, token: str) -> None:
        await self.call(lambda: self.store.release_claim(self.namespace, key, token=token))

    async def record(self, key: str) -> Record | None:
        answered = self._loop.create_future()
        self.mirror.ask(self.namespace, [key], answered.set_result)
        (found,) = await answered
        return found if isinstance(found, Record) else None

    async def published(self, key: str) -> bool:
        return await self.record(key) is not None

    def held(self, key: str, token: str, until: float) -> None:
        """The claim is surely ours from now, when we were told, until its lease may have ended."""
        self.lets_go(token)
        self._holding[token] = (key, time.monotonic(), until)

    def lets_go(self, token: str) -> None:
        """From now on it may be another's."""
        if token in self._holding:
            key, since, until = self._holding.pop(token)
            self.say("held", key, token, since, min(until, time.monotonic()))

    def say(self, *what: object) -> None:
        print(json.dumps(what), flush=False)


async def main() -> None:
    url, namespace, seed = sys.argv[1:]
    process = Process(url, namespace, int(seed))
    await asyncio.gather(*(Contender(process, n).run() for n in range(CONTENDERS)))
    print(json.dumps(["done"]), flush=True)
    process.mirror.close()


if __name__ == "__main__":
    asyncio.run(main())
