"""Locating 32 records against one redis-py MGET of 32, side by side on one embedded server.

Prints one JSON object: microseconds, least and median, and ratios of the least. Not a test.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis

from store import EmbeddedServer, Location, Record, open_store

KEYS = 32
ROUNDS = 2000


def microseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Times of each call, taken in turns, so that noise of the machine meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    keys = [f"{n:064x}" for n in range(KEYS)]
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer.start(Path(directory) / "server") as server,
        open_store(server.url, call_timeout_seconds=5) as store,
        redis.Redis.from_url(server.url) as client,
    ):
        product = store.server_info()
        client.mset({f"value:{key}": b"x" * 96 for key in keys})
        record = Record("f" * 64, "", "bfloat16", (729, 1152), 1_679_616, "tensor", time.time())
        location = Location("host-name-ab12", "b" * 16, 12, 2**63)
        for key in keys:
            store.publish(
                Record(record.namespace, key, record.dtype, record.shape, record.nbytes,
                       record.kind, record.created),
                location,
            )  # fmt: skip
        names = [f"lb:rec:{record.namespace}:{{{key}}}" for key in keys]

        def pipeline() -> object:
            with client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(name)
                return pipe.execute()

        calls: dict[str, Callable[[], object]] = {
            "redis-py MGET 32": lambda: client.mget([f"value:{key}" for key in keys]),
            "redis-py pipeline of 32 HGETALL": pipeline,
            "locate 32": lambda: store.locate(record.namespace, keys),
            "locate 32, none there": lambda: store.locate("other", keys),
            "redis-py EXISTS": lambda: client.exists(names[0]),
            "locate 1": lambda: store.locate(record.namespace, keys[:1]),
            "publish, again": lambda: store.publish(
                Record(record.namespace, keys[0], "bfloat16", (729, 1152), 1_679_616, "tensor", 1),
                location,
            ),
            "beat": lambda: store.beat("host-name-ab12", "b" * 16, 1),
        }
        microseconds(calls, rounds // 10 + 1)
        times = microseconds(calls, rounds)
    least = {name: min(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                "server": f"{product.product} {product.version}",
                "microseconds": {
                    name: [round(least[name], 1), round(statistics.median(values), 1)]
                    for name, values in times.items()
                },
                "locate 32 / MGET 32": round(least["locate 32"] / least["redis-py MGET 32"], 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
