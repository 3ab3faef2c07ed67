"""The mirror compared with one redis-py MGET of 32 values; wake-ups by publications; a hung Redis.

- `questions`: 32 keys, in interleaved rounds: the node's locator from memory, the mirror warm (read
  before) and cold (never read), the store without a mirror, and the MGET;
- `parts`: the parts of a look-up in the store, and the time of each;
- `has_caches`: the same for a client, of keys that another node holds: two real nodes;
- `wakes`: from the publication in another process until a watcher here was notified, and until a
  client's waiting `claim` or `select` on another node has returned;
- `hung`: `has_caches` while Redis is stopped, against its budget.

    python -m benchmarks.store_mirror [--rounds 1000] [--wakes 300] [--awake]
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import redis
import torch

from benchmarks.gauge import (
    BOOT,
    NAMESPACE,
    BareConnection,
    emit,
    key_of,
    machine,
    microseconds,
    mirror_of,
    paired_ratio,
    product_of,
    publishing_of,
    running,
    seconds_of,
)
from benchmarks.wakes import (
    cores_awake,
    measure_claim_wakes,
    measure_select_wakes,
    measure_watch_wakes,
    two_nodes,
)
from lookup_buffer import LookupBuffer, TensorKey
from lookup_buffer.config import BufferConfig
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.storage import Storage
from lookup_buffer.shm.index import RemoteIndex
from store import MetadataStore, NodeInfo, layout, open_async_store, open_store, record_fields
from store.client import fields_of
from store.replies import pack

if TYPE_CHECKING:
    from store.base import Mirror

KEYS = 32
VALUE = b"x" * 96
HOLDER = "gpu-host-0001-ab12"
BUDGET_SECONDS = 0.05
"""The default timeout of `has_caches`."""
HUNG_SECONDS = 8.0
"""Long enough that the nodes' heartbeats have expired, after 5 s."""


class LookupBenchmark:
    """The locator of a node, without the node, and the look-ups that it is compared with."""

    def __init__(self, url: str, rounds: int) -> None:
        self.rounds = rounds
        self._url = url
        self._store = open_store(url, call_timeout_seconds=5.0)
        self._client = redis.Redis.from_url(url)
        self._names = [f"plain-{number}" for number in range(KEYS)]
        self._client.mset(dict.fromkeys(self._names, VALUE))
        self._directory = Directory("gpu-host-0002-ab12")
        self._sequence = 0
        info = NodeInfo(HOLDER, BOOT, "tcp://127.0.0.1:1", "gpu-host-0001", "0", 1, 1, 1)
        self._store.describe_node(info)

    def publish(self) -> None:
        """32 keys that every round looks up, and 32 new keys for each round."""
        keys = [key_of(number) for number in range((self.rounds + 1) * KEYS)]
        for start in range(0, len(keys), 500):
            self._store.publish_many(
                [publishing_of(key, HOLDER, 1, 2**63) for key in keys[start : start + 500]]
            )

    def close(self) -> None:
        self._client.close()
        self._store.close()

    async def measure(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        storage = Storage(BufferConfig(store_url=self._url), "reader")
        locator = Locator(loop, storage, self._directory, RemoteIndex(), mirrored=True)
        locator.start()
        try:
            async with open_async_store(self._url, call_timeout_seconds=5.0) as store:
                return await self._compare(locator, store)
        finally:
            locator.close()
            await storage.close()

    async def _compare(self, locator: Locator, store: MetadataStore) -> dict[str, Any]:
        mirror = mirror_of(store)
        warm = [key_of(number) for number in range(KEYS)]
        await self._beat(store)
        await ask_mirror(mirror, warm)
        await locator.locate([(NAMESPACE, key) for key in warm])
        assert locator.known(NAMESPACE, warm) == [True] * KEYS
        times: dict[str, list[float]] = {
            name: [] for name in ("mget", "known", "mirror_warm", "mirror_cold", "store")
        }
        for number in range(1, self.rounds + 1):
            cold = [key_of(number * KEYS + index) for index in range(KEYS)]
            if number % 500 == 0:
                await self._beat(store)
            times["mget"].append(seconds_of(lambda: self._client.mget(self._names)))
            times["known"].append(seconds_of(lambda: locator.known(NAMESPACE, warm)))
            times["mirror_warm"].append(await ask_mirror(mirror, warm))
            times["mirror_cold"].append(await ask_mirror(mirror, cold))
            times["store"].append(await seconds_until(store.locate(NAMESPACE, warm)))
        renewal_pushes = await self._renew(mirror, store, warm)
        mirror.close()
        return {
            name: microseconds(taken) | {"times_mget": paired_ratio(taken, times["mget"])}
            for name, taken in times.items()
        } | {"pushes_by_renewing_32": renewal_pushes}

    async def _renew(self, mirror: "Mirror", store: MetadataStore, keys: Sequence[str]) -> int:
        """Invalidations by a holder that renews its records, as each walk of the inventory does."""
        await ask_mirror(mirror, keys)
        before = mirror.pushes
        await store.publish_many([publishing_of(key, HOLDER, 1, 2**63) for key in keys])
        await asyncio.sleep(0.5)
        return mirror.pushes - before

    async def _beat(self, store: MetadataStore) -> None:
        """Send the holder's heartbeat, and have the directory read it."""
        self._sequence += 1
        await store.beat(HOLDER, BOOT, self._sequence)
        await self._directory.refresh(store)


def measure_parts(url: str, rounds: int) -> dict[str, Any]:
    """The parts of a look-up of 32 keys, on a bare connection; and the server's time for it."""
    keys = [key_of(number) for number in range(KEYS)]
    plain = [f"plain-{number}" for number in range(KEYS)]
    times: dict[str, list[float]] = {
        part: [] for part in ("mget", "name_and_pack", "round_trip", "fields", "record")
    }
    connection = BareConnection(url)
    with redis.Redis.from_url(url) as client:
        client.config_resetstat()
        for _ in range(rounds):
            times["mget"].append(seconds_of(lambda: client.mget(plain)))
            begun = time.perf_counter()
            packed = pack([("HGETALL", layout.record(NAMESPACE, key)) for key in keys])
            times["name_and_pack"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            connection.send(packed)
            replies = connection.receive(KEYS)
            times["round_trip"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            hashes = [fields_of(reply) for reply in replies]
            times["fields"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            records = [
                record_fields.read_record(NAMESPACE, key, fields)
                for key, fields in zip(keys, hashes, strict=True)
            ]
            times["record"].append(time.perf_counter() - begun)
        assert all(records)
        spent = client.info("commandstats")
    connection.close()
    server = {
        "server_mget": spent["cmdstat_mget"]["usec_per_call"],
        "server_32_hgetall": round(KEYS * spent["cmdstat_hgetall"]["usec_per_call"], 1),
    }
    return {part: microseconds(taken)["p50_us"] for part, taken in times.items()} | server


async def seconds_until(answer: Awaitable[object]) -> float:
    start = time.perf_counter()
    await answer
    return time.perf_counter() - start


async def ask_mirror(mirror: "Mirror", keys: Sequence[str]) -> float:
    done = asyncio.get_running_loop().create_future()
    start = time.perf_counter()
    mirror.ask(NAMESPACE, keys, lambda _: done.set_result(time.perf_counter() - start))
    return float(await done)


def measure_has_caches(
    holder: LookupBuffer, reader: LookupBuffer, url: str, rounds: int
) -> dict[str, Any]:
    """`has_caches` of 32 keys that only the other node holds: read before, and never read."""
    keys = [TensorKey(f"held-{number}") for number in range((rounds + 1) * KEYS)]
    hold(holder, reader, keys)
    warm = keys[:KEYS]
    names = [f"plain-{number}" for number in range(KEYS)]
    times: dict[str, list[float]] = {"mget": [], "warm": [], "cold": []}
    with redis.Redis.from_url(url) as client:
        client.mset(dict.fromkeys(names, VALUE))
        for number in range(1, rounds + 1):
            cold = keys[number * KEYS : (number + 1) * KEYS]
            times["mget"].append(seconds_of(lambda: client.mget(names)))
            times["warm"].append(seconds_of(lambda: reader.has_caches(warm)))
            times["cold"].append(seconds_of(lambda: reader.has_caches(cold)))  # noqa: B023
    assert all(reader.has_caches(keys[-KEYS:])), "the cold keys were not found"
    return {
        name: microseconds(taken) | {"times_mget": paired_ratio(taken, times["mget"])}
        for name, taken in times.items()
    }


def hold(holder: LookupBuffer, reader: LookupBuffer, keys: Sequence[TensorKey]) -> None:
    """Insert and publish all of `keys` on the holder's node; the reader looks up the first 32."""
    tensor = torch.zeros(8)
    for key in keys:
        holder.insert(key, tensor)
    while holder.stats()["unpublished"]:
        time.sleep(0.01)
    while not all(reader.has_caches(keys[:KEYS], timeout=1.0)):
        time.sleep(0.01)


def measure_hung(
    holder: LookupBuffer, reader: LookupBuffer, server_pid: int, seconds: float
) -> dict[str, Any]:
    """While Redis is stopped: 32 new keys in each round, and 32 keys that were read before."""
    known = [TensorKey(f"hung-{number}") for number in range(KEYS)]
    hold(holder, reader, known)
    unknown: list[float] = []
    still_known: list[float] = []
    os.kill(server_pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            keys = [TensorKey(f"nowhere-{len(unknown)}-{index}") for index in range(KEYS)]
            unknown.append(seconds_of(lambda: reader.has_caches(keys)))  # noqa: B023
            still_known.append(seconds_of(lambda: reader.has_caches(known)))
            time.sleep(0.005)
    finally:
        os.kill(server_pid, signal.SIGCONT)
    resumed = time.monotonic()
    while not all(reader.has_caches(known)) and time.monotonic() - resumed < 30.0:
        time.sleep(0.001)
    return {
        "budget_us": BUDGET_SECONDS * 1e6,
        "stopped_seconds": seconds,
        "never_asked_for": microseconds(unknown),
        "asked_for_before": microseconds(still_known),
        "true_again_after_seconds": round(time.monotonic() - resumed, 3),
    }


def measure(rounds: int, count: int) -> dict[str, Any]:
    with running() as server:
        report: dict[str, Any] = {"server": product_of(server.url)}
        lookups = LookupBenchmark(server.url, rounds)
        lookups.publish()
        report["questions"] = asyncio.run(lookups.measure())
        lookups.close()
        report["parts"] = measure_parts(server.url, rounds)
        wakes = {"watcher_told": asyncio.run(measure_watch_wakes(server.url, count))}
        with two_nodes(server.url) as nodes:
            holder, reader = nodes.holder, nodes.reader
            report["has_caches"] = measure_has_caches(holder, reader, server.url, rounds)
            wakes["claim"] = measure_claim_wakes(nodes, count)
            for name, nbytes in (("select_none", None), ("select_4_kib", 4096)):
                wakes[name] = measure_select_wakes(nodes, nbytes, count)
            report["wakes"] = wakes
            report["hung"] = measure_hung(holder, reader, server.pid, HUNG_SECONDS)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--wakes", type=int, default=300)
    parser.add_argument("--awake", action="store_true", help="keep all cores awake meanwhile")
    arguments = parser.parse_args()
    random.seed(1)
    with cores_awake() if arguments.awake else nullcontext():
        report = measure(arguments.rounds, arguments.wakes)
    emit(
        {
            "benchmark": "store_mirror",
            "machine": machine(),
            "options": vars(arguments),
            **report,
        }
    )


if __name__ == "__main__":
    main()
