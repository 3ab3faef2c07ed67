"""Costs that grow with the records: a look-up, Redis' memory, a full scan; and costs per node.

For each server found (Valkey from the wheel; Redis, where it is installed) and each number of
records, at 1 to 4 locations a record:

- `locate` of 32 random keys, compared with a second server of 1,000 records, in turns, so a slow
  moment of the machine affects both;
- `bytes_a_record`: the growth of Redis' used memory over the number of records.

At the largest number of records, also: all of them read by `scan` in another process, with a PING
each millisecond. And the inputs for the costs of a large fleet (docs/scale.md): the server's
processor time for a publication, for a renewal and for one read of all heartbeats, and the memory
of its tracking table.

    python -m benchmarks.store_scale [--records 1000 10000 100000 1000000] [--rounds 1000]
"""

import argparse
import asyncio
import multiprocessing
import random
import time
from itertools import islice
from typing import Any

import redis

from benchmarks.gauge import (
    BOOT,
    NAMESPACE,
    BareConnection,
    emit,
    key_of,
    machine,
    main_thread_seconds,
    microseconds,
    paired_ratio,
    product_of,
    programs,
    publishing_of,
    running,
    sampled_keys,
    seconds_of,
)
from lookup_buffer.node.membership import Directory
from store import (
    LOCATIONS_MAX,
    BlockingStore,
    EmbeddedServer,
    NodeInfo,
    Publication,
    layout,
    open_async_store,
    open_store,
)
from store.tracking import TRACK

RECORDS = (1_000, 10_000, 100_000, 1_000_000)
KEYS = 32
SMALL = 1_000
PAGE = 500
BATCH = 64
"""Most records that a node publishes in one round trip."""
CALL_SECONDS = 30.0
NODES = (1, 64, 1_000)
TRACKERS = (1, 2, 4, 8)
RENEWED_MAX = 20_000


class FilledServer:
    """A server with records, and its clients."""

    def __init__(self, server: EmbeddedServer, records: int) -> None:
        self.pid = server.pid
        self.url = server.url
        self.records = records
        self.store: BlockingStore = open_store(server.url, call_timeout_seconds=CALL_SECONDS)
        self.client = redis.Redis.from_url(server.url)
        self._raw = BareConnection(server.url)
        # Scripts and connections are set up first, whatever the number of records.
        self.store.publish_many([publishing_of("first", node_name(0), 1, 1)])
        self.store.withdraw(NAMESPACE, "first", node_name(0), reason="measured")
        self.client.ping()
        self._empty_bytes = self.used_bytes()

    def used_bytes(self) -> int:
        return self.store.server_info().used_memory_bytes

    def bytes_a_record(self) -> float:
        return round((self.used_bytes() - self._empty_bytes) / self.records, 1)

    def publish_all(self) -> dict[str, float]:
        """Publish each record with a first location, as nodes do, but in larger batches."""
        begun, begun_cpu = time.perf_counter(), main_thread_seconds(self.pid)
        for start in range(0, self.records, PAGE):
            numbers = range(start, min(start + PAGE, self.records))
            answers = self.store.publish_many(
                [publishing_of(key_of(n), node_name(0), n + 1, 2**63 + n) for n in numbers]
            )
            assert set(answers) == {Publication.ADDED}
        return self._cost(begun, begun_cpu, self.records)

    def add_location(self, index: int) -> None:
        """Add a location to each record: writes the field of a publication without its script.

        The scripts of a million publications would take a minute.
        """
        for start in range(0, self.records, PAGE):
            commands = []
            for n in range(start, min(start + PAGE, self.records)):
                location = publishing_of(key_of(n), node_name(index), n + 1, 2**63 + n).location
                name = layout.record(NAMESPACE, key_of(n))
                commands.append(("HSET", name, f"at:{location.node}", location.text))
            self._raw.exchange(commands)
        found = self.store.locate(NAMESPACE, [key_of(0), key_of(self.records - 1)])
        assert all(record and len(record.locations) == index + 1 for record in found)

    def renew(self) -> dict[str, float]:
        """Publish records that exist already, as a walk of the inventory does."""
        count = min(self.records, RENEWED_MAX)
        begun, begun_cpu = time.perf_counter(), main_thread_seconds(self.pid)
        for start in range(0, count, BATCH):
            numbers = range(start, min(start + BATCH, count))
            answers = self.store.publish_many(
                [publishing_of(key_of(n), node_name(0), n + 1, 2**63 + n) for n in numbers]
            )
            assert set(answers) == {Publication.PRESENT}
        return self._cost(begun, begun_cpu, count)

    def close(self) -> None:
        self._raw.close()
        self.client.close()
        self.store.close()

    def _cost(self, begun: float, begun_cpu: float, count: int) -> dict[str, float]:
        busy = main_thread_seconds(self.pid) - begun_cpu
        return {
            "per_second": round(count / (time.perf_counter() - begun)),
            "server_us_each": round(busy / count * 1e6, 2),
        }


def node_name(index: int) -> str:
    """As long as the name of a host with a random suffix."""
    return f"gpu-host-{index:04}-ab12"


def measure_locate(small: FilledServer, large: FilledServer, rounds: int) -> dict[str, Any]:
    generator = random.Random(1)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + rounds // 10):
        for filled, taken in zip((small, large), times, strict=True):
            keys = sampled_keys(filled.records, KEYS, generator)
            seconds = seconds_of(lambda: filled.store.locate(NAMESPACE, keys))  # noqa: B023
            if turn >= rounds // 10:
                taken.append(seconds)
    few, many = times
    return {
        "records": large.records,
        "p50_us": microseconds(many)["p50_us"],
        "p99_us": microseconds(many)["p99_us"],
        "p50_us_at_1000": microseconds(few)["p50_us"],
        "p99_us_at_1000": microseconds(few)["p99_us"],
        "ratio_to_1000": paired_ratio(many, few),
    }


def measure_records(program: str | None, records: int, rounds: int, largest: bool) -> Any:
    """One number of records at 1 to 4 locations."""
    report: dict[str, Any] = {"records": records, "locations": []}
    with running(program) as first, running(program) as second:
        small, large = FilledServer(first, SMALL), FilledServer(second, records)
        small.publish_all()
        report["publish"] = large.publish_all()
        for locations in range(1, LOCATIONS_MAX + 1):
            if locations > 1:
                small.add_location(locations - 1)
                large.add_location(locations - 1)
            time.sleep(0.5)  # until the server has resized its table
            entry = {"locations": locations, "bytes_a_record": large.bytes_a_record()}
            report["locations"].append(entry | {"locate": measure_locate(small, large, rounds)})
        report["renew"] = large.renew()
        if largest:
            report["scan"] = measure_scan(large)
            report["beats"] = [measure_beats(large, nodes) for nodes in NODES]
        small.close()
        large.close()
    return report


def scan_all(url: str, answer: Any) -> None:
    """The other process: reads every record once."""
    with open_store(url, call_timeout_seconds=CALL_SECONDS) as store:
        answer.send("begin")
        start = time.perf_counter()
        found = sum(1 for _ in store.scan(NAMESPACE))
        answer.send((found, time.perf_counter() - start))


def measure_scan(filled: FilledServer) -> dict[str, Any]:
    filled.client.ping()
    alone = [ping(filled) for _ in range(1000)]
    here, there = multiprocessing.get_context("spawn").Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=scan_all, args=(filled.url, there), daemon=True)
    process.start()
    assert here.recv() == "begin"
    begun_cpu = main_thread_seconds(filled.pid)
    beside = []
    while not here.poll():
        beside.append(ping(filled))
    found, seconds = here.recv()
    busy = main_thread_seconds(filled.pid) - begun_cpu
    process.join(timeout=10.0)
    return {
        "found": found,
        "seconds": round(seconds, 1),
        "server_busy": round(busy / seconds, 3),
        "ping_alone": microseconds(alone),
        "ping_beside": microseconds(beside),
    }


def ping(filled: FilledServer) -> float:
    time.sleep(0.001)
    return seconds_of(filled.client.ping)


async def _time_refreshes(filled: FilledServer, calls: int) -> tuple[list[float], float, float]:
    """The seconds of each call; the processor time of this process and of the server."""
    directory = Directory(node_name(0))
    async with open_async_store(filled.url, call_timeout_seconds=5.0) as store:
        await directory.refresh(store)  # the first one reads all descriptions
        begun_cpu, own_cpu = main_thread_seconds(filled.pid), time.process_time()
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            await directory.refresh(store)
            times.append(time.perf_counter() - began)
        own = time.process_time() - own_cpu
        return times, own, main_thread_seconds(filled.pid) - begun_cpu


def measure_beats(filled: FilledServer, nodes: int, calls: int = 1000) -> dict[str, Any]:
    """One read of all heartbeats and its evaluation, as every node does each second."""
    for index in range(nodes):
        name = node_name(index)
        filled.store.beat(name, BOOT, 1000)
        filled.store.describe_node(NodeInfo(name, BOOT, "tcp://10.0.0.1:7000", name, "0", 1, 1, 1))
    times, own, busy = asyncio.run(_time_refreshes(filled, calls))
    name, beat = node_name(0), f"{BOOT}:1000"
    return {
        "nodes": nodes,
        "server_us": round(busy / calls * 1e6, 1),
        "node_us": round(own / calls * 1e6, 1),
        "p50_us": microseconds(times)["p50_us"],
        "reply_bytes": nodes * sum(len(f"${len(part)}\r\n{part}\r\n") for part in (name, beat)),
    }


def measure_tracking(program: str | None, records: int) -> dict[str, Any]:
    """Memory of the tracking table, for connections that have all read all records."""
    results = []
    with running(program) as server:
        filled = FilledServer(server, records)
        filled.publish_all()
        unconnected = filled.used_bytes()
        # A reader's own connection costs memory that is not part of the table.
        trackers = [BareConnection(server.url) for _ in range(TRACKERS[-1])]
        for tracker in trackers:
            read_all(tracker, 1000)
        before = filled.used_bytes()
        connections = before - unconnected
        tracking = 0
        for count in TRACKERS:
            for tracker in islice(trackers, tracking, count):
                tracker.exchange([TRACK])
                read_all(tracker, records)
            tracking = count
            grown = filled.used_bytes() - before
            results.append({"trackers": count, "bytes_a_key": round(grown / records, 1)})
        for tracker in trackers:
            tracker.close()
        filled.close()
    return {
        "keys": records,
        "bytes_a_connection": round(connections / len(trackers)),
        "bytes_a_key": results,
    }


def read_all(connection: BareConnection, records: int) -> None:
    """EXISTS is the shortest command that counts as reading a key."""
    for start in range(0, records, PAGE):
        numbers = range(start, min(start + PAGE, records))
        connection.exchange([("EXISTS", layout.record(NAMESPACE, key_of(n))) for n in numbers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=RECORDS)
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    records = sorted(arguments.records)
    report: dict[str, Any] = {
        "benchmark": "store_scale",
        "machine": machine(),
        "options": vars(arguments),
        "servers": [],
    }
    for program in programs().values():
        with running(program) as server:
            product = product_of(server.url)
        sizes = [
            measure_records(program, count, arguments.rounds, count == records[-1])
            for count in records
        ]
        tracking = measure_tracking(program, min(records[-1], 100_000))
        report["servers"].append({"server": product, "sizes": sizes, "tracking": tracking})
    emit(report)


if __name__ == "__main__":
    main()
