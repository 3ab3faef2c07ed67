"""Real nodes, 64 of them on this machine, over one Valkey: what they cost it, and their faults.

Each node is a process with a small arena, and holds some items. Clients of a few nodes, the
observers, look all items up: everything is visible when each observer finds the items of each
living node and none of a dead one.

    start           all nodes at once, until everything is visible
    idle            Redis' commands and processor time, and the nodes', while nothing is read
    half killed     by SIGKILL, until no observer finds their items; then started again, and filled
    store emptied   the server is killed and started without data, until everything is visible
    rolling         one node after the other is stopped, started and filled, while clients read

After the idle phase clients read random items all the while, and compare every byte. JSON to
stdout.

    python -m benchmarks.fleet [--nodes 64] [--items 16] [--idle 20] [--rolling 64]
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis
import torch

from benchmarks.gauge import emit, machine, percentile, processor_seconds, product_of
from lookup_buffer import BufferConfig, LookupBuffer, LookupBufferError, Namespace, TensorKey
from lookup_buffer.errors import MissingTensor
from lookup_buffer.runtime import to_json
from store import EmbeddedServer

NAMESPACE: Final = Namespace.named("fleet")
CAPACITY_BYTES: Final = 8 << 20
"""Holds a node's own items, and copies of what its clients read; the oldest copies are evicted."""
ITEM_BYTES: Final = 4096
OBSERVERS: Final = 6
READERS: Final = 4
READS_PER_SECOND: Final = 25.0
"""Of each reader."""
VISIBLE_SECONDS: Final = 180.0
ACCEPTS_SECONDS: Final = 180.0
POLL_SECONDS: Final = 0.1
END_SECONDS: Final = 30.0


class FleetNode:
    """One node's process, started any number of times, and its items."""

    def __init__(self, number: int, directory: Path, url: str, items: int) -> None:
        self.config = BufferConfig(
            directory=directory / f"n{number}",
            node_id=f"n{number}",
            node_socket=directory / f"n{number}.sock",
            capacity_bytes=CAPACITY_BYTES,
            store_url=url,
        )
        self.keys = [TensorKey(f"{number}-{item}") for item in range(items)]
        self.read_keys, self.watched_keys = self.keys[::2], self.keys[1::2]
        """Readers make copies on other nodes, which outlive this one; of the watched keys nobody
        does."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """As `lookup-buffer serve` starts one; it does not import torch."""
        with Path(f"{self.config.node_socket}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lookup_buffer.node.main"],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(to_json(self.config).encode())
        self._process.stdin.close()

    def accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.config.socket_path())) == 0

    def fill(self) -> None:
        with LookupBuffer(self.config, NAMESPACE) as buffer:
            buffer.insert_many([(key, tensor_of(key)) for key in self.keys])

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait(END_SECONDS)

    def kill(self) -> None:
        """Without a wait; nothing, if it has ended."""
        if self._process is not None:
            self._process.kill()


def tensor_of(key: TensorKey) -> torch.Tensor:
    seed = int.from_bytes(key.mm_hash.encode(), "big") % (1 << 63)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (ITEM_BYTES,), dtype=torch.uint8, generator=generator)


class Readers:
    """Threads that read random items through clients of some nodes, and compare each."""

    def __init__(self, nodes: Sequence[FleetNode]) -> None:
        self._keys = [key for node in nodes for key in node.read_keys]
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._times: list[float] = []
        self._threads = [
            threading.Thread(target=self._run, args=(node, seed))
            for seed, node in enumerate(nodes[-READERS:])
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, node: FleetNode, seed: int) -> None:
        chance = random.Random(seed)
        with LookupBuffer(node.config, NAMESPACE, required=False) as buffer:
            while not self._ended.wait(chance.expovariate(READS_PER_SECOND)):
                began = time.monotonic()
                outcome = self._read(buffer, chance.choice(self._keys))
                with self._lock:
                    self._counts[outcome] += 1
                    self._times.append(time.monotonic() - began)

    def _read(self, buffer: LookupBuffer, key: TensorKey) -> str:
        try:
            tensor = buffer.select(key)
        except MissingTensor as error:
            return "miss: " + str(error).rpartition(": ")[2].rstrip(")")
        except LookupBufferError as error:
            return type(error).__name__
        return "equal" if tensor is not None and torch.equal(tensor, tensor_of(key)) else "WRONG"

    def since_last(self) -> dict[str, Any]:
        with self._lock:
            counts, self._counts = self._counts, Counter()
            times, self._times = self._times, []
        return {
            "reads": dict(counts),
            "p50_ms": round(1e3 * percentile(times, 0.5), 2),
            "p99_ms": round(1e3 * percentile(times, 0.99), 2),
            "max_ms": round(1e3 * max(times, default=0.0), 1),
        }

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


class Fleet:
    """The nodes, their server and what was measured."""

    def __init__(self, count: int, items: int, directory: Path, closing: ExitStack) -> None:
        self._directory = directory
        self.server = EmbeddedServer.start(directory / "kv", timeout_seconds=10.0)
        closing.callback(lambda: self.server.close())
        self.nodes = [FleetNode(n, directory, self.server.url, items) for n in range(count)]
        closing.callback(self._end_nodes)
        self.readers: Readers | None = None
        self.phases: dict[str, Any] = {}
        self._observers: list[LookupBuffer] = []
        self._closing = closing

    def _end_nodes(self) -> None:
        for node in self.nodes:
            node.kill()
        for node in self.nodes:
            node.wait()

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """What Redis did meanwhile, and what the readers got, beside what the phase adds."""
        found: dict[str, Any] = {}
        before, began, pid = self._redis_work(), time.monotonic(), self.server.pid
        yield found
        seconds, after = time.monotonic() - began, self._redis_work()
        if self.server.pid != pid:
            before = dict.fromkeys(before, 0.0)  # it counts from its start
        found["seconds"] = round(seconds, 2)
        for work in before:
            found[f"redis_{work}_per_second"] = round((after[work] - before[work]) / seconds, 4)
        if self.readers is not None:
            found |= self.readers.since_last()
        self.phases[name] = found
        print(name, found, file=sys.stderr)

    def _redis_work(self) -> dict[str, float]:
        with redis.Redis.from_url(self.server.url) as client:
            info: Any = client.info()
        return {
            "commands": info["total_commands_processed"],
            "processor_seconds": processor_seconds(self.server.pid),
            "sent_bytes": info["total_net_output_bytes"],
        }

    def start(self) -> None:
        with self.phase("start") as found:
            began = time.monotonic()
            for node in self.nodes:
                node.start()
            until(lambda: all(node.accepts() for node in self.nodes), ACCEPTS_SECONDS)
            found["all_accept_seconds"] = round(time.monotonic() - began, 2)
            for node in self.nodes:
                node.fill()
            self._observers = [
                self._closing.enter_context(LookupBuffer(node.config, NAMESPACE, required=False))
                for node in self.nodes[:OBSERVERS]
            ]
            until(self.all_visible, VISIBLE_SECONDS)

    def read(self) -> None:
        self.readers = Readers(self.nodes)
        self._closing.callback(self.readers.end)

    def idle(self, seconds: float) -> None:
        with self.phase("idle") as found, redis.Redis.from_url(self.server.url) as client:
            before = [processor_seconds(node.pid) for node in self.nodes]
            calls_before = _calls(client)
            time.sleep(seconds)
            after = [processor_seconds(node.pid) for node in self.nodes]
            calls = _calls(client)
            spent = (sum(after) - sum(before)) / seconds
            found["node_processor_mean"] = round(spent / len(self.nodes), 5)
            found["calls_per_node_and_second"] = {
                name: round((calls[name] - calls_before[name]) / seconds / len(self.nodes), 3)
                for name in sorted(calls)
                if calls[name] > calls_before[name]
            }
            info: Any = client.info()
            found["connections"] = info["connected_clients"]
            found["redis_memory_bytes"] = info["used_memory"]
            found["lb_nodes_bytes"] = client.execute_command("MEMORY", "USAGE", "lb:nodes")

    def kill_half(self) -> None:
        # Not the observers, which come first, nor the nodes of the readers, which come last.
        middle = self.nodes[OBSERVERS : len(self.nodes) - READERS]
        dead = middle[: len(self.nodes) // 2]
        with self.phase("half killed") as found:
            found["killed"] = len(dead)
            for node in dead:
                node.kill()
            for node in dead:
                node.wait()
            until(partial(self.all_visible, dead), VISIBLE_SECONDS)
        with self.phase("half started again"):
            for node in dead:
                node.start()
            until(lambda: all(node.accepts() for node in dead), ACCEPTS_SECONDS)
            for node in dead:
                node.fill()
            until(self.all_visible, VISIBLE_SECONDS)

    def empty_store(self) -> None:
        with self.phase("store emptied"):
            os.kill(self.server.pid, signal.SIGKILL)
            self.server.close()
            self.server = EmbeddedServer.start(self._directory / "kv", timeout_seconds=10.0)
            until(self.all_recorded, VISIBLE_SECONDS)
            until(self.all_visible, VISIBLE_SECONDS)

    def roll(self, count: int) -> None:
        with self.phase("rolling") as found:
            for node in self.nodes[:count]:
                os.kill(node.pid, signal.SIGTERM)
                node.wait()
                node.start()
                until(node.accepts, ACCEPTS_SECONDS)
                node.fill()
            found["restarted"] = len(self.nodes[:count])
        with self.phase("after rolling"):
            until(self.all_visible, VISIBLE_SECONDS)

    def all_visible(self, dead: Sequence[FleetNode] = ()) -> bool:
        """Whether each observer finds what the living nodes hold, and nothing else."""
        wanted = [(key, node not in dead) for node in self.nodes for key in node.watched_keys]
        keys = [key for key, _ in wanted]
        try:
            return all(
                observer.has_caches(keys, timeout=5.0) == [there for _, there in wanted]
                for observer in self._observers
            )
        except LookupBufferError:
            return False

    def all_recorded(self) -> bool:
        """Whether the store has a record of each item."""
        wanted = sum(len(node.keys) for node in self.nodes)
        with redis.Redis.from_url(self.server.url) as client:
            return int(client.dbsize()) >= wanted


def _calls(client: "redis.Redis") -> Counter[str]:
    """How often each command was called, those of scripts included."""
    stats: Any = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()})


def until(holds: Callable[[], bool], seconds: float) -> None:
    """Raises TimeoutError if it does not within so many."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(POLL_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--items", type=int, default=16, help="of each node")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds")
    parser.add_argument("--rolling", type=int, default=64, help="so many nodes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lb-") as name, ExitStack() as closing:
        fleet = Fleet(arguments.nodes, arguments.items, Path(name), closing)
        product = product_of(fleet.server.url)
        fleet.start()
        fleet.idle(arguments.idle)
        fleet.read()
        fleet.kill_half()
        fleet.empty_store()
        fleet.roll(arguments.rolling)
        logs = [Path(f"{node.config.node_socket}.log") for node in fleet.nodes]
        tracebacks = sum(log.read_text().count("Traceback") for log in logs)
        emit(
            {
                "benchmark": "fleet",
                "machine": machine(),
                "options": vars(arguments),
                "server": product,
                "phases": fleet.phases,
                "tracebacks": tracebacks,
            }
        )


if __name__ == "__main__":
    main()
