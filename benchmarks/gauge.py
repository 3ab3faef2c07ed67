"""Shared code of the benchmarks: percentiles, processor time, servers, the machine."""

import json
import math
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.connection import AbstractConnection, Connection, parse_url

from store import EmbeddedServer, Location, MetadataStore, Publishing, Record, open_store
from store.replies import Command, pack

if TYPE_CHECKING:
    from store.base import Mirror

NAMESPACE = "f" * 64
"""As long as a real one: a SHA-256 in hex."""
BOOT = "b" * 16
SERVER_BYTES = 4 << 30
LIFE_SECONDS = 1800.0
REPLY_SECONDS = 60.0
"""How long a bare connection waits for bytes."""


def key_of(number: int) -> str:
    """64 hex digits, like vLLM's hash of an image."""
    return f"{number:064x}"


def record_of(key: str) -> Record:
    return Record(NAMESPACE, key, "bfloat16", (729, 1152), 1_679_616, "tensor", 1e9)


def publishing_of(key: str, node: str, generation: int, checksum: int) -> Publishing:
    return Publishing(
        record_of(key), Location(node, BOOT, generation, checksum), ttl_seconds=LIFE_SECONDS
    )


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share) - 1)]


def microseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "p50_us": round(percentile(seconds, 0.5) * 1e6, 1),
        "p99_us": round(percentile(seconds, 0.99) * 1e6, 1),
        "max_us": round(max(seconds) * 1e6, 1),
    }


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the per-round ratios of time: a slow moment of the machine affects both sides."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def target(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    **of: Any,
) -> dict[str, Any]:
    """A figure with its target; it asserts nothing."""
    if at_least is not None:
        return {"figure": name, **of, "at_least": at_least, "was": value, "met": value >= at_least}
    met = at_most is not None and value <= at_most
    return {"figure": name, **of, "at_most": at_most, "was": value, "met": met}


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far, all its threads, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main_thread_seconds(pid: int) -> float:
    """Processor time of a process's first thread, to the nanosecond: Redis serves on that one."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def machine_busy_seconds() -> float:
    """Busy processor time of the whole machine."""
    fields = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def programs() -> dict[str, str | None]:
    """Servers to measure: Valkey from the wheel, and Redis where it is installed."""
    found: dict[str, str | None] = {"valkey": None}
    if shutil.which("redis-server"):
        found["redis"] = "redis-server"
    return found


@contextmanager
def running(executable: str | None = None) -> Iterator[EmbeddedServer]:
    with (
        tempfile.TemporaryDirectory(prefix="lb-") as directory,
        EmbeddedServer.start(
            Path(directory) / "server",
            executable=executable,
            timeout_seconds=10.0,
            maxmemory_bytes=SERVER_BYTES,
        ) as server,
    ):
        yield server


class BareConnection:
    """One connection of redis-py with RESP3, without a store. An error reply is raised."""

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = parse_url(url)
        kind: type[AbstractConnection] = options.pop("connection_class", Connection)
        self._connection = kind(**options, protocol=3, socket_timeout=REPLY_SECONDS)
        self._connection.connect()

    def send(self, packed: bytes) -> None:
        """Send what `store.server.pack` returned."""
        self._connection.send_packed_command([packed])

    def receive(self, count: int) -> list[Any]:
        """The next `count` replies; pushes among them are skipped."""
        return [self._connection.read_response() for _ in range(count)]

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        self.send(pack(commands))
        return self.receive(len(commands))

    def close(self) -> None:
        self._connection.disconnect()


def mirror_of(store: MetadataStore) -> "Mirror":
    """A mirror of `store` on the running loop."""
    opened = store.mirror(lambda _: None)
    assert opened is not None
    return opened[0]


def product_of(url: str) -> str:
    with open_store(url, call_timeout_seconds=5.0) as store:
        info = store.server_info()
    return f"{info.product} {info.version}"


def machine() -> dict[str, str | int]:
    return {
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "redis-py": version("redis"),
        "hiredis": version("hiredis"),
        "measured": time.strftime("%Y-%m-%d"),
    }


def sampled_keys(population: int, count: int, generator: random.Random) -> list[str]:
    return [key_of(number) for number in generator.sample(range(population), count)]


def emit(report: dict[str, Any]) -> None:
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")
