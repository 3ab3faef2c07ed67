"""The latency of wake-ups by a publication, by the idle time before it.

Processes that slept for 10 ms take longer for the same steps than those that slept for 1 ms, and so
does a PING of Redis. So the time from a publication until other nodes have it depends on the pause
before it.

    python -m benchmarks.store_rest [--wakes 300]
"""

import argparse
import asyncio
import random
from typing import Any

from benchmarks.gauge import emit, machine, product_of, running
from benchmarks.wakes import measure_claim_wakes, measure_watch_wakes, two_nodes

WATCHER_RESTS = ((0.0002, 0.0004), (0.001, 0.002), (0.01, 0.03))
CLAIM_RESTS = ((0.003, 0.005), (0.01, 0.03))
"""Not shorter: by then the client must be waiting in its claim."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wakes", type=int, default=300)
    arguments = parser.parse_args()
    random.seed(1)
    watchers: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    with running() as server:
        product = product_of(server.url)
        for rest in WATCHER_RESTS:
            found = asyncio.run(measure_watch_wakes(server.url, arguments.wakes, rest))
            watchers.append({"rest_seconds": rest, **found})
        with two_nodes(server.url) as nodes:
            for rest in CLAIM_RESTS:
                found = measure_claim_wakes(nodes, arguments.wakes, rest)
                claims.append({"rest_seconds": rest, **found})
    emit(
        {
            "benchmark": "store_rest",
            "machine": machine(),
            "options": vars(arguments),
            "server": product,
            "watcher_told": watchers,
            "claim": claims,
        }
    )


if __name__ == "__main__":
    main()
