"""Commands of the command line against a server with a million records.

For each command: seconds to its first line and to its end; processor seconds; how long its Redis
commands held the server (the server's slow log, from 0.1 ms); and how long the PINGs of another
connection waited meanwhile, compared with an idle server. `longest_hold_ms` is the minimum over the
runs of each run's longest hold: necessary work recurs in each run, interruptions do not.

    python -m benchmarks.commands [--records 1000000] [--repeats 5]
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.gauge import BareConnection, emit, machine, percentile, product_of, running
from store import NodeInfo, layout, open_store
from store.replies import Command, pack

SPACES: Final = tuple(letter * 64 for letter in "abcd")
NODE, BOOT = "node-a", "b" * 16
HIT_KEYS: Final = 10_000
PAGE: Final = 2000
LOGGED_MICROSECONDS: Final = 100
PROGRAM: Final = str(Path(sys.executable).with_name("lookup-buffer"))
COMMANDS: Final[Sequence[tuple[str, ...]]] = (
    ("ls",),
    ("ls", "--json"),
    ("ls", "--limit", "0"),
    ("ls", "--namespace", "a"),
    ("ls", "--namespace", SPACES[0]),
    ("ls", "--node", "nobody"),
    ("ls", "--older-than", "23h"),
    ("ls", "--larger-than", "1TiB"),
    ("ls", "--min-hits", "1"),
    ("show", f"{0:064x}"),
    ("show", "nobody has it"),
    ("why", f"{0:064x}"),
    ("why", "nobody has it"),
    ("stats",),
    ("top",),
    ("nodes",),
    ("doctor",),
    ("invalidate", SPACES[3]),
)


class FilledServer:
    """A server with records."""

    def __init__(self, url: str, records: int) -> None:
        self.url = url
        self._connection = BareConnection(url)
        for space in SPACES:
            self.execute(("HSET", layout.namespace(space), "model", space[:4]))
        for start in range(0, records, PAGE):
            self.execute(*map(_record, range(start, min(start + PAGE, records))))
        for space in SPACES:
            for start in range(0, HIT_KEYS, PAGE):
                scores = [part for n in range(start, start + PAGE) for part in (n, _key(n))]
                self.execute(("ZADD", layout.hits(space), *scores))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def execute(self, *commands: Command) -> list[Any]:
        return self._connection.exchange(commands)

    def holds(self) -> dict[str, list[float]]:
        """Milliseconds for which commands held the server since the last call, by their names."""
        logged = self.execute(("SLOWLOG", "GET", -1), ("SLOWLOG", "RESET"))[0]
        found: dict[str, list[float]] = {}
        for _, _, microseconds, arguments, *_ in logged:
            if (name := arguments[0].decode()) not in ("SLOWLOG", "CONFIG"):
                found.setdefault(name, []).append(microseconds / 1000)
        return found


def _key(number: int) -> str:
    return f"{number:064x}"


def _record(number: int) -> Command:
    created = time.time() - number % 86_400
    return (
        "HSET", layout.record(SPACES[number % len(SPACES)], _key(number)),
        "v", 1, "dtype", "bfloat16", "shape", "[729,1152]", "nbytes", 1_679_616,
        "kind", "tensor", "created", f"{created:.3f}",
        f"at:{NODE}", f"{BOOT}:{number + 1}:000000000000feed",
    )  # fmt: skip


@contextmanager
def beating(url: str) -> Iterator[None]:
    """Send the heartbeats of the node, as if it were alive."""
    over = threading.Event()

    def beat() -> None:
        with open_store(url, call_timeout_seconds=5.0) as store:
            sequence = 1
            while not over.wait(0.5):
                sequence += 1
                store.beat(NODE, BOOT, sequence)
                store.describe_node(NodeInfo(NODE, BOOT, "tcp://h:1", "h", "0", 1, 1, 1))
                store.add_stats(NODE, {"hits_local": 1})

    thread = threading.Thread(target=beat)
    thread.start()
    time.sleep(1.5)
    try:
        yield
    finally:
        over.set()
        thread.join()


class Prober:
    """PINGs of another connection, one a millisecond."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._probe, args=(BareConnection(url),))
        self._thread.start()

    def _probe(self, connection: BareConnection) -> None:
        ping = pack([("PING",)])
        while not self._over.wait(0.001):
            begun = time.perf_counter()
            connection.send(ping)
            connection.receive(1)
            self.seconds.append(time.perf_counter() - begun)
        connection.close()

    def finish(self) -> dict[str, float]:
        self._over.set()
        self._thread.join()
        return {
            f"ping_{name}_ms": round(1000 * percentile(self.seconds, share), 2)
            for name, share in (("p50", 0.5), ("p99_9", 0.999), ("max", 1.0))
        }


def run(arguments: Sequence[str], url: str) -> tuple[float, float, float]:
    """Seconds to the first line and to the end, and processor seconds."""
    environment = {**os.environ, "LOOKUP_BUFFER_STORE_URL": url}
    before, begun = os.times(), time.perf_counter()
    with subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=environment) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - begun
        for _ in process.stdout:
            pass
    after = os.times()
    spent = after.children_user + after.children_system
    return first, time.perf_counter() - begun, spent - before.children_user - before.children_system


def _spread(milliseconds: list[float]) -> dict[str, float]:
    shares = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    found = {name: round(percentile(milliseconds, share), 2) for name, share in shares}
    return {"count": len(milliseconds), **found}


def measured(filled: FilledServer, arguments: Sequence[str], repeats: int) -> dict[str, Any]:
    prober, found, longest = Prober(filled.url), [], []
    filled.holds()
    held: dict[str, list[float]] = {}
    for _ in range(repeats):
        found.append(run(arguments, filled.url))
        of_run = filled.holds()
        longest.append(max((max(each) for each in of_run.values()), default=0.0))
        for name, milliseconds in of_run.items():
            held.setdefault(name, []).extend(milliseconds)
        if found[-1][1] > 10.0:  # a command that reads or shows all records
            break
    first, whole, processor = map(statistics.median, zip(*found, strict=True))
    return {
        "command": " ".join(part[:16] for part in arguments),
        "first_line_s": round(first, 3), "whole_s": round(whole, 3),
        "processor_s": round(processor, 3),
        "longest_hold_ms": round(min(longest), 2),
        "holds_ms": {name: _spread(each) for name, each in held.items()},
        **prober.finish(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with running() as server, FilledServer(server.url, arguments.records) as filled:
        filled.execute(
            ("CONFIG", "SET", "slowlog-log-slower-than", LOGGED_MICROSECONDS),
            ("CONFIG", "SET", "slowlog-max-len", 1_000_000),
        )
        with beating(server.url):
            idle = Prober(server.url)
            time.sleep(3.0)
            quiet = idle.finish()
            results = []
            for command in COMMANDS:
                repeats = 1 if command[0] == "invalidate" else arguments.repeats
                results.append(measured(filled, command, repeats))
                print(results[-1], file=sys.stderr)
        emit(
            {
                "benchmark": "commands",
                "records": arguments.records,
                **machine(),
                "server": product_of(server.url),
                "idle": quiet,
                "results": results,
            }
        )


if __name__ == "__main__":
    main()
