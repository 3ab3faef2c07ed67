"""The longest times for which a node's loop is blocked, in a storm of all kinds of requests.

Two nodes that treat each other as two hosts, on one Valkey. For a while clients of both insert one
by one and by hundreds, read from the other node, hand off, ask for hundreds of keys, and claim. The
arenas fill up, so inserts evict. The nodes run at the log level debug, and log each time above
20 ms. The longest goes to stderr; JSON to stdout, with the places where the loop was.

    python -m benchmarks.blocked [--seconds 30]
"""

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from lookup_buffer import BufferConfig, LookupBuffer, LookupBufferError, Namespace, TensorKey
from store import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CAPACITY_BYTES: Final = 256 << 20
KEYS: Final = 2000
"""So many names are in use: most look-ups find something."""
TOGETHER: Final = 300
_BLOCKED: Final = re.compile(r"the loop was blocked for ([0-9.]+) s")
_PLACE: Final = re.compile(r"[^ ]*/(\w+/\w+\.py):\d+ (\w+)")


class Storm:
    """One client, and what it does; each action is chosen by chance."""

    def __init__(self, config: BufferConfig, seed: int) -> None:
        self._buffer = LookupBuffer(config, Namespace.named("storm"))
        self._chance = random.Random(seed)
        self._seed = seed
        self._handed = 0
        self.actions = 0

    def run(self, until: float) -> None:
        actions: Sequence[Callable[[], object]] = (
            self._insert, self._insert_many, self._select, self._select_many, self._has_caches,
            self._hand_off, self._claim,
        )  # fmt: skip
        with self._buffer:
            while time.monotonic() < until:
                with suppress(LookupBufferError):  # misses, and inserts without room
                    self._chance.choice(actions)()
                self.actions += 1

    def _keys(self, count: int) -> list[TensorKey]:
        return [TensorKey(f"{number:064x}") for number in self._chance.sample(range(KEYS), count)]

    def _tensor(self) -> torch.Tensor:
        nbytes = self._chance.choice([1 << 10, 64 << 10, 512 << 10, 4 << 20])
        return torch.full((nbytes,), self._seed, dtype=torch.uint8)

    def _insert(self) -> None:
        self._buffer.insert(self._keys(1)[0], self._tensor())

    def _insert_many(self) -> None:
        tensor = torch.full((64 << 10,), self._seed, dtype=torch.uint8)
        self._buffer.insert_many([(key, tensor) for key in self._keys(TOGETHER)])

    def _select(self) -> None:
        self._buffer.select(self._keys(1)[0])

    def _select_many(self) -> None:
        self._buffer.select_many(self._keys(TOGETHER))

    def _has_caches(self) -> None:
        self._buffer.has_caches(self._keys(TOGETHER))

    def _hand_off(self) -> None:
        self._handed += 1
        key = TensorKey("m", request_id=f"{self._seed}-{self._handed}")
        self._buffer.insert(key, self._tensor())
        self._buffer.drop_select(key, timeout=2.0)

    def _claim(self) -> None:
        (key,) = self._keys(1)
        self._buffer.claim(key, lease_seconds=1.0)
        self._buffer.release_claim(key)


def measure(seconds: float) -> dict[str, object]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lb-") as name, ExitStack() as stack:
        directory = Path(name)
        server = stack.enter_context(EmbeddedServer.start(directory / "kv", timeout_seconds=10.0))
        configs = [
            BufferConfig(
                directory=directory / node,
                node_id=node,
                capacity_bytes=CAPACITY_BYTES,
                store_url=server.url,
                idle_exit_seconds=1.0,
                log_level="debug",
            )
            for node in ("a", "b")
        ]
        storms = [Storm(config, seed) for seed, config in enumerate(2 * configs)]
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=storm.run, args=(until,)) for storm in storms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        logs = [(config.runtime_directory() / "node.log").read_text() for config in configs]
    times = sorted((float(found) for log in logs for found in _BLOCKED.findall(log)), reverse=True)
    places = [place for log in logs for place in _places(log)]
    return {
        "seconds": seconds,
        "actions": sum(storm.actions for storm in storms),
        "blocked": len(times),
        "longest_ms": round(1e3 * times[0], 1) if times else None,
        "median_ms": round(1e3 * statistics.median(times), 1) if times else None,
        "places": places,
    }


def _places(log: str) -> list[str]:
    """Where the loop was, innermost function first, for each logged stack."""
    found = []
    for line in log.splitlines():
        frames = _PLACE.findall(line.partition("the loop is blocked in ")[2])
        if not frames:
            continue
        ours = [frame for frame in frames if frame[0].startswith(("node/", "shm/", "store/"))]
        found.append(" < ".join(f"{file}:{name}" for file, name in ours[:3]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    found = measure(parser.parse_args().seconds)
    print(
        f"{found['actions']} actions, {found['blocked']} times above 20 ms, "
        f"longest {found['longest_ms']} ms",
        file=sys.stderr,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
