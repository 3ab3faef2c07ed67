"""One process of the mirror's soak: changes records at random, and keeps a mirror of them.

Run as `python mirror_soaker.py URL NAMESPACE SEED`; reads commands, a line each, and answers
each with a line of JSON. `work N` does N random operations, while its mirror is asked all the time;
`look` asks it for everything; `compare` says how it differs from the store.
"""

import asyncio
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from patience import scaled
from store import Location, Publishing, Record, StoreError, Withdrawing, open_store
from store.base import Found
from store.redis_store import RedisStore

if TYPE_CHECKING:
    from store.mirror import Mirror

KEYS = [f"{n:064x}" for n in range(2000)]
BOOT = "b" * 16
BATCH = 10
AGREE_SECONDS = scaled(5.0)
"""A push may still be on its way, and what has expired is removed by the server in its own time."""


class Soaker:
    def __init__(self, url: str, namespace: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._node = f"node-{seed}"
        self._namespace = namespace
        self._generation = 0
        store = open_store(url, call_timeout_seconds=2.0)
        assert isinstance(store, RedisStore)
        self._store = store
        self._mirror: Mirror | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._mirror = self._store.mirror(loop, ThreadPoolExecutor(1))
        self._mirror._age_seconds_max = 1e9  # only pushes may correct what is wrong
        self._mirror._entries.absent_seconds_max = 1e9

    def change(self) -> int:
        """One batch of random operations; how many were carried out, as far as is known."""
        keys = self._random.sample(KEYS, BATCH)
        if self._random.random() < 0.7:
            return self._publish(keys)
        return self._withdraw(keys)

    def _publish(self, keys: list[str]) -> int:
        publishings = []
        for key in keys:
            self._generation += 1
            record = Record(self._namespace, key, "float32", (3,), 12, "tensor", 1.0)
            location = Location(self._node, BOOT, self._generation, self._random.getrandbits(64))
            # Some end within the soak, by themselves.
            ttl_seconds = self._random.choice([0.02, 0.1, 0.3, 60.0, 60.0, 60.0])
            publishings.append(Publishing(record, location, ttl_seconds))
        self._store.publish_many(publishings)
        return len(keys)

    def _withdraw(self, keys: list[str]) -> int:
        of = (self._namespace, self._node)
        self._store.withdraw_many([Withdrawing(of[0], key, of[1], "evicted") for key in keys])
        return len(keys)

    async def work(self, operations: int) -> dict[str, object]:
        """Change records on a thread, and meanwhile ask the mirror on the loop."""
        done = threading.Event()
        failed = 0

        def run() -> None:
            nonlocal failed
            carried_out = 0
            while carried_out < operations:
                try:
                    carried_out += self.change()
                except StoreError:
                    failed += 1
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        asked = 0
        while not done.is_set():
            await self._ask(self._random.sample(KEYS, 50))
            asked += 50
            await asyncio.sleep(0.002)
        thread.join()
        return {"operations": operations, "failed": failed, "asked": asked}

    async def look(self) -> dict[str, object]:
        """Ask for all keys until all are known."""
        for _ in range(50):
            if not any(isinstance(found, StoreError) for found in await self._ask(KEYS)):
                break
            await asyncio.sleep(0.1)
        return {"size": len(self._mirror.entries(self._namespace)) if self._mirror else 0}

    async def _ask(self, keys: list[str]) -> list[Found]:
        assert self._mirror is not None
        answered: asyncio.Future[list[Found]] = asyncio.get_running_loop().create_future()
        self._mirror.ask(self._namespace, keys, answered.set_result)
        return await answered

    async def compare(self) -> dict[str, object]:
        """How many entries the mirror has, and which differ from the store for good."""
        assert self._mirror is not None
        give_up = time.monotonic() + AGREE_SECONDS
        while True:
            truth = dict(zip(KEYS, self._store.locate(self._namespace, KEYS), strict=True))
            await asyncio.sleep(0.05)  # what reading has just expired is pushed
            entries = dict(self._mirror.entries(self._namespace))
            differ = [key for key, entry in entries.items() if entry.record != truth[key]]
            if not differ or time.monotonic() > give_up:
                break
        absent = sum(entry.record is None for entry in entries.values())
        pushes = self._mirror.pushes
        return {"size": len(entries), "absent": absent, "differ": differ, "pushes": pushes}


async def main() -> None:
    url, namespace, seed = sys.argv[1:]
    soaker = Soaker(url, namespace, int(seed))
    await soaker.open()
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        commands = {"look": soaker.look, "compare": soaker.compare}
        answer = await (soaker.work(int(line[1])) if line[0] == "work" else commands[line[0]]())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
