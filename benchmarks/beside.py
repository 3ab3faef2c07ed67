"""Figures of this tree beside those of an earlier commit, in one run.

Each tree has a Valkey and two nodes of its own, which treat each other as two hosts, and a process
that calls them. The two take turns: each operation runs in both trees, in an order that alternates,
so a slow moment of the machine affects both. Both trees are started several times, since the luck
of one start (memory, cores) can move a ratio by a fifth. For each operation: the median of each
side, and the median of the pairs' ratios (over 1: this tree is faster) with 95 % confidence
(bootstrap over the starts). The table goes to stderr, JSON to stdout.

    python -m benchmarks.beside [HEAD~1] [--starts 6] [--pairs 5] [--operations select-8MiB ...]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import torch

from lookup_buffer import (
    BufferConfig,
    LookupBuffer,
    MissingTensor,
    Namespace,
    PrefetchHandle,
    PrefetchState,
    TensorKey,
)
from store import EmbeddedServer

ROOT: Final = Path(__file__).resolve().parents[1]
CAPACITY_BYTES: Final = 1 << 30
RESAMPLES: Final = 2000
KIB, MIB = 1 << 10, 1 << 20
BACK_TO_BACK: Final = 60
"""Small operations in one sample."""
MANY: Final = 1000
SERVE: Final = "serve"


# -- one tree


class Tree:
    """Two clients of two nodes, and the operations on them. Each returns its seconds."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        server = stack.enter_context(EmbeddedServer.start(directory / "kv", timeout_seconds=10.0))
        self._stack = stack
        self._configs = [
            BufferConfig(
                directory=directory / node,
                node_id=node,
                capacity_bytes=CAPACITY_BYTES,
                store_url=server.url,
                idle_exit_seconds=2.0,
            )
            for node in ("a", "b")
        ]
        self._here, self._there = (self._client(config) for config in self._configs)
        self._eight = [self._client(self._configs[0]) for _ in range(8)]
        self._number = 0
        self.operations: dict[str, Callable[[], float]] = {
            "insert-1KiB": lambda: self._insert(KIB, BACK_TO_BACK),
            "insert-8MiB": lambda: self._insert(8 * MIB, 3),
            "insert-1000-of-256KiB": self._insert_many,
            "select-8MiB": lambda: self._select(8 * MIB),
            "remote-select-1KiB": lambda: self._remote_select(KIB, 10),
            "remote-select-8MiB": lambda: self._remote_select(8 * MIB, 2),
            "remote-select-64MiB": lambda: self._remote_select(64 * MIB, 1),
            "remote-prefetch-1000-of-256KiB": self._remote_prefetch,
            "hand-off-here": lambda: self._hand_off(self._here),
            "hand-off-there": lambda: self._hand_off(self._there),
            "has-caches-32-warm": self._has_caches,
            "miss-with-claim": self._miss_with_claim,
            "publication-to-waiter": self._publication,
            "eight-clients": self._eight_at_once,
        }

    def _client(self, config: BufferConfig) -> LookupBuffer:
        return self._stack.enter_context(LookupBuffer(config, Namespace.named("beside")))

    def _keys(self, count: int) -> list[TensorKey]:
        self._number += 1
        return [TensorKey(f"{self._number:x}-{one:060x}") for one in range(count)]

    def _insert(self, nbytes: int, count: int) -> float:
        tensor, keys = torch.ones(nbytes, dtype=torch.uint8), self._keys(count)

        def insert() -> None:
            for key in keys:
                self._here.insert(key, tensor)

        return _seconds(insert) / count

    def _put_many(self, keys: Sequence[TensorKey], nbytes: int) -> None:
        tensor = torch.ones(nbytes, dtype=torch.uint8)
        if hasattr(self._here, "insert_many"):
            self._here.insert_many([(key, tensor) for key in keys])
        else:
            for key in keys:
                self._here.insert(key, tensor)

    def _insert_many(self) -> float:
        keys = self._keys(MANY)
        return _seconds(lambda: self._put_many(keys, 256 * KIB))

    def _select(self, nbytes: int) -> float:
        (key,), out = self._keys(1), torch.empty(nbytes, dtype=torch.uint8)
        self._here.insert(key, torch.ones(nbytes, dtype=torch.uint8))
        return _seconds(lambda: self._here.select(key, out=out))

    def _remote_select(self, nbytes: int, count: int) -> float:
        keys = self._keys(count)
        self._put_many(keys, nbytes)
        self._await_there(keys)

        def select() -> None:
            for key in keys:
                self._there.select(key, timeout=5.0)

        return _seconds(select) / count

    def _await_there(self, keys: Sequence[TensorKey]) -> None:
        deadline = time.monotonic() + 20.0
        while not all(self._there.has_caches(keys, timeout=1.0)):
            if time.monotonic() > deadline:
                raise TimeoutError("the other node does not find what was inserted")

    def _remote_prefetch(self) -> float:
        keys = self._keys(MANY)
        self._put_many(keys, 256 * KIB)
        self._await_there(keys)
        handles: list[PrefetchHandle] = []

        def prefetch() -> None:
            handles.extend(self._there.prefetch(keys, timeout=20.0))

        taken = _seconds(prefetch)
        if any(handle.state is not PrefetchState.RESIDENT for handle in handles):
            raise RuntimeError("not all that was requested has come")
        for handle in handles:
            self._there.release(handle)
        return taken

    def _hand_off(self, taker: LookupBuffer) -> float:
        self._number += 1
        keys = [TensorKey("m", request_id=f"{self._number}-{one}") for one in range(10)]
        tensor = torch.ones(KIB, dtype=torch.uint8)

        def hand_off() -> None:
            for key in keys:
                self._here.insert(key, tensor)
                taker.drop_select(key, timeout=5.0)

        return _seconds(hand_off) / len(keys)

    def _has_caches(self) -> float:
        keys = self._keys(32)
        self._put_many(keys, KIB)
        self._await_there(keys)
        self._there.has_caches(keys)  # the node lists what it is asked for a second time

        def ask() -> None:
            for _ in range(30):
                self._there.has_caches(keys)

        return _seconds(ask) / 30

    def _miss_with_claim(self) -> float:
        keys = self._keys(20)

        def miss() -> None:
            for key in keys:
                self._here.claim(key, lease_seconds=5.0)

        taken = _seconds(miss) / len(keys)
        for key in keys:
            self._here.release_claim(key)
        return taken

    def _publication(self) -> float:
        """From the insert on one node until a reader who waits on the other has the tensor."""
        (key,) = self._keys(1)
        ended = 0.0

        def wait() -> None:
            nonlocal ended
            self._there.select(key, timeout=10.0)
            ended = time.perf_counter()

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(random.uniform(0.01, 0.02))
        started = time.perf_counter()
        self._here.insert(key, torch.ones(KIB, dtype=torch.uint8))
        waiter.join()
        return ended - started

    def _eight_at_once(self) -> float:
        keys = self._keys(8 * 10)
        tensor = torch.ones(KIB, dtype=torch.uint8)

        def use(client: LookupBuffer, own: Sequence[TensorKey]) -> None:
            for key in own:
                client.insert(key, tensor)
                client.select(key)
                try:
                    client.select(TensorKey("nobody-has-it", part=str(key.mm_hash)))
                except MissingTensor:
                    pass

        def all_at_once() -> None:
            threads = [
                threading.Thread(target=use, args=(client, keys[index::8]))
                for index, client in enumerate(self._eight)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return _seconds(all_at_once)


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def serve() -> None:
    """Run operations by name, one a line, until the input ends."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lb-") as name, ExitStack() as stack:
        tree = Tree(Path(name), stack)
        time.sleep(2.0)  # until the arenas are faulted in
        print(json.dumps(list(tree.operations)), flush=True)
        for line in sys.stdin:
            print(json.dumps(tree.operations[line.strip()]()), flush=True)


# -- both trees


class Side:
    """The process of one tree."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), SERVE],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.operations: list[str] = self._answer()

    def seconds(self, operation: str) -> float:
        assert self._process.stdin is not None
        print(operation, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a tree ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60.0)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lb-tree-") as name:
        tree = Path(name) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


Pairs = list[tuple[float, float]]
"""Seconds of an operation in the earlier tree and in this one."""


def pairs_of(earlier: Side, now: Side, operation: str, count: int) -> Pairs:
    for side in (earlier, now):
        side.seconds(operation)  # not counted: connections, caches
    found: Pairs = []
    for number in range(count):
        if number % 2:
            before = earlier.seconds(operation)
            found.append((before, now.seconds(operation)))
        else:
            after = now.seconds(operation)
            found.append((earlier.seconds(operation), after))
    return found


def compared(operation: str, starts: Sequence[Pairs]) -> dict[str, Any]:
    medians = sorted(_ratio(random.choices(starts, k=len(starts))) for _ in range(RESAMPLES))
    before, now = zip(*chain.from_iterable(starts), strict=True)
    return {
        "operation": operation,
        "before_ms": round(statistics.median(before) * 1e3, 3),
        "now_ms": round(statistics.median(now) * 1e3, 3),
        "ratio": round(_ratio(starts), 3),
        "confidence": [round(medians[int(at * (RESAMPLES - 1))], 3) for at in (0.025, 0.975)],
    }


def _ratio(starts: Sequence[Pairs]) -> float:
    return statistics.median(before / now for before, now in chain.from_iterable(starts))


def main() -> None:
    from benchmarks.gauge import emit, machine  # of this tree; the earlier one needs neither

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD~1")
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--operations", nargs="+")
    options = parser.parse_args()
    found: dict[str, list[Pairs]] = defaultdict(list)
    with worktree(options.commit) as tree:
        for number in range(options.starts):
            print(f"start {number + 1} of {options.starts}", file=sys.stderr, flush=True)
            with Side(tree) as earlier, Side(ROOT) as now:
                for operation in options.operations or now.operations:
                    found[operation].append(pairs_of(earlier, now, operation, options.pairs))
    results = [compared(operation, starts) for operation, starts in found.items()]
    for one in results:
        print(
            f"{one['operation']:32}{one['before_ms']:10.3f}{one['now_ms']:10.3f} ms "
            f"{one['ratio']:6.2f} {one['confidence']}",
            file=sys.stderr,
        )
    about = {"before": options.commit, "starts": options.starts, "pairs": options.pairs}
    emit({"machine": machine(), **about, "found": results})


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        serve()
    else:
        main()
