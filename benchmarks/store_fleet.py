"""A fleet of simulated nodes over one Redis: the lag of mirrors, and the cost.

Each node is one light process that uses Redis as a node does, and moves no bytes. Each second it
sends its heartbeat and reads all heartbeats. It publishes its share of the keys, and looks up
random keys in a mirror. 200 keys of each mirror are watched, like keys that requests wait for. A
record carries the time of its publication, so each notification of a watcher gives the lag: from
the beginning of the publication until the record was read again in the other process (at 1 node: in
the same process).

Points: 1 to 64 nodes at 1,000 publications a second in total, and 16 nodes at other rates.

    python -m benchmarks.store_fleet [--seconds 15] [--nodes 1 4 16 64]
"""

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import redis

from benchmarks.gauge import (
    emit,
    machine,
    machine_busy_seconds,
    percentile,
    processor_seconds,
    product_of,
    running,
)
from benchmarks.simulated_node import KEYS, Plan, run_node

NODES = (1, 4, 16, 64)
PUBLISHES = 1_000.0
OTHER_PUBLISHES = (250.0, 4_000.0)
OTHER_NODES = 16
SETTLE_SECONDS = 3.0
READY_SECONDS = 120.0


def measure(nodes: int, publishes: float, seconds: float) -> dict[str, Any]:
    """One point of the curve."""
    context = multiprocessing.get_context("forkserver")
    # The imports are shared by all nodes: without that a node would cost a second and 40 MB.
    context.set_forkserver_preload(["benchmarks.simulated_node"])
    with running() as server, redis.Redis.from_url(server.url) as client:
        processes, ends = [], []
        for index in range(nodes):
            end, theirs = context.Pipe()
            plan = Plan(server.url, index, nodes, publishes / nodes)
            process = context.Process(target=run_node, args=(plan, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(end)
        for end in ends:
            assert end.poll(READY_SECONDS), "a node did not start"
            end.recv()
        begin = time.monotonic() + SETTLE_SECONDS
        for end in ends:
            end.send((begin, begin + seconds))
        time.sleep(max(0.0, begin - time.monotonic()))
        pids = [process.pid or 0 for process in processes]
        before = processor_times(server.pid, pids)
        time.sleep(begin + seconds - time.monotonic())
        after = processor_times(server.pid, pids)
        info = client.info()
        results = [end.recv() for end in ends]
        for end in ends:
            end.send("end")
        for process in processes:
            process.join(timeout=20.0)
    spent = [(b - a) / seconds for a, b in zip(before, after, strict=True)]
    return report_of(nodes, seconds, spent, results, info)


def processor_times(server_pid: int, pids: list[int]) -> list[float]:
    """Processor seconds of the machine, of the server, and of each node."""
    return [machine_busy_seconds(), *(processor_seconds(pid) for pid in (server_pid, *pids))]


def report_of(
    nodes: int, seconds: float, spent: list[float], results: list[Any], info: Any
) -> dict[str, Any]:
    lags = [lag for result in results for lag in result[0]]
    pushes, published, asked, failed = (
        sum(result[position] for result in results) for position in (1, 2, 3, 4)
    )
    machine_busy, server_busy, *node_busy = spent
    return {
        "nodes": nodes,
        "seconds": seconds,
        "published_per_second": round(published / seconds, 1),
        "asked_keys_per_second": round(asked / seconds, 1),
        "failed": failed,
        "lag_ms": {
            "count": len(lags),
            **{
                name: round(percentile(lags, share) * 1e3, 3)
                for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
        },
        "pushes_per_second": round(pushes / seconds, 1),
        "redis_processor": round(server_busy, 4),
        "node_processor_mean": round(statistics.mean(node_busy), 4),
        "node_processor_max": round(max(node_busy), 4),
        "machine_processor": round(machine_busy, 3),
        "redis": {
            "connections": info["connected_clients"],
            "memory_bytes": info["used_memory"],
            "tracked_keys": info["tracking_total_keys"],
            "tracked_items": info["tracking_total_items"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each point")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--publishes", type=float, nargs="*", default=OTHER_PUBLISHES)
    arguments = parser.parse_args()
    with running() as server:
        product = product_of(server.url)
    by_nodes = [measure(nodes, PUBLISHES, arguments.seconds) for nodes in arguments.nodes]
    others = [measure(OTHER_NODES, rate, arguments.seconds) for rate in arguments.publishes]
    emit(
        {
            "benchmark": "store_fleet",
            "machine": machine(),
            "options": vars(arguments),
            "server": product,
            "keys": KEYS,
            "by_nodes": by_nodes,
            "by_publishes": others,
        }
    )


if __name__ == "__main__":
    main()
