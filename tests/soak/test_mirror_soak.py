"""The mirror under fire: eight processes change records, expire and evict them, and are cut off.

After each round there is quiet; then what every mirror has must equal what Redis holds.

As a program (`python test_mirror_soak.py URL NAMESPACE SEED`) this file is one of the processes: it
changes records at random and keeps a mirror of them. It reads commands, one a line, and answers
each with a line of JSON. `work N` does N random operations while its mirror is read all the time;
`look` reads everything from the mirror; `compare` lists how the mirror differs from the store.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import scaled
from servers import StartServer, command
from store import (
    EmbeddedServer,
    Location,
    Publishing,
    Record,
    StoreError,
    Withdrawing,
    open_store,
)
from store.base import Found
from store.mirror import RedisMirror
from store.topology import open_topology
from store.url import parse

pytestmark = pytest.mark.part(name="soaks")

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
        self._url = url
        self._store = open_store(url, call_timeout_seconds=2.0)
        self._mirror: RedisMirror | None = None

    async def open(self) -> None:
        topology = open_topology(
            parse(self._url), call_timeout_seconds=2.0, connect_timeout_seconds=0.25, name="mirror"
        )
        # Only pushes may correct what is wrong.
        self._mirror = RedisMirror(topology, age_seconds_max=1e9)
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
        """Change records on a thread, and meanwhile query the mirror on the loop."""
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
        """Query all keys until all are known."""
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
        """How many entries the mirror has, and which differ from the store permanently."""
        assert self._mirror is not None
        give_up = time.monotonic() + AGREE_SECONDS
        while True:
            found = await asyncio.to_thread(self._store.locate, self._namespace, KEYS)
            truth = dict(zip(KEYS, found, strict=True))
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


TESTS = Path(__file__).resolve().parents[1]
PROCESSES = 8
ROUNDS = 5
OPERATIONS = 100_000
LAST_OPERATIONS = 30
CUTS_A_ROUND = 12


@pytest.fixture(params=["volatile-lru", "allkeys-lru"])
def server(start_server: StartServer, request: pytest.FixtureRequest) -> EmbeddedServer:
    # Room for about half of the records: the rest is evicted all the time.
    return start_server(maxmemory_bytes=_empty_bytes(start_server) + 600_000, policy=request.param)


def _empty_bytes(start_server: StartServer) -> int:
    """What a server with as many clients takes without any record."""
    server = start_server()
    info = command(server.url, "INFO", "memory").decode()
    server.close()
    used = next(line for line in info.splitlines() if line.startswith("used_memory:"))
    return int(used.partition(":")[2]) + PROCESSES * 3 * 40_000


@pytest.fixture
def soakers(server: EmbeddedServer, namespace: str) -> Iterator[list["subprocess.Popen[str]"]]:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                server.url,
                namespace,
                str(seed),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS.parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for seed in range(PROCESSES)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _send(soakers: list["subprocess.Popen[str]"], text: str) -> None:
    for process in soakers:
        assert process.stdin is not None
        process.stdin.write(text + "\n")
        process.stdin.flush()


def _receive(soakers: list["subprocess.Popen[str]"]) -> list[dict[str, object]]:
    answers = []
    for process in soakers:
        assert process.stdout is not None
        answers.append(json.loads(process.stdout.readline()))
    return answers


def _cut(server: EmbeddedServer, chance: random.Random) -> None:
    """End some client's connection, as a network that fails does."""
    clients = command(server.url, "CLIENT", "LIST").decode().splitlines()
    ids = [line.split()[0].removeprefix("id=") for line in clients]
    command(server.url, "CLIENT", "KILL", "ID", chance.choice(ids))


def test_after_each_quiet_moment_every_mirror_equals_redis(
    server: EmbeddedServer, soakers: list["subprocess.Popen[str]"]
) -> None:
    chance = random.Random(7)
    pushes = 0
    for _ in range(ROUNDS):
        _send(soakers, f"work {OPERATIONS // PROCESSES // ROUNDS}")
        for _ in range(CUTS_A_ROUND):
            time.sleep(0.1)
            _cut(server, chance)
        worked = _receive(soakers)
        assert all(answer["asked"] for answer in worked)
        # Mirrors that know something, and then a few changes more.
        _send(soakers, "look")
        _receive(soakers)
        _send(soakers, f"work {LAST_OPERATIONS}")
        _cut(server, chance)
        _receive(soakers)
        _send(soakers, "compare")
        compared = _receive(soakers)
        assert [answer["differ"] for answer in compared] == [[]] * PROCESSES, compared
        sizes = sorted(int(str(answer["size"])) for answer in compared)
        assert sizes[2] > 100, "most mirrors know something"  # one may just have been cut off
        pushes = sum(int(str(answer["pushes"])) for answer in compared)
    assert pushes > 1000, "mirrors that are never corrected prove nothing"
    stats = command(server.url, "INFO", "stats").decode()
    counts = dict(line.split(":") for line in stats.splitlines() if ":" in line)
    assert int(counts["evicted_keys"]) > 100, "nothing was evicted"
    assert int(counts["expired_keys"]) > 100, "nothing expired"


if __name__ == "__main__":
    asyncio.run(main())
