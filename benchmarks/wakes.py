"""The latency from a publication to its waiters, in another process and on another node.

All times are of CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gauge import NAMESPACE, key_of, microseconds, mirror_of, publishing_of
from lookup_buffer import BufferConfig, ClaimOutcome, LookupBuffer, TensorKey
from lookup_buffer.runtime import to_json
from store import open_async_store, open_store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

CAPACITY_BYTES = 128 << 20
PUBLISHER = "gpu-host-0003-ab12"
Rest = tuple[float, float]

REST_SECONDS: Rest = (0.01, 0.03)
"""Pause between the order to publish and the publication: by then the waiter waits."""
WAIT_SECONDS = 10.0


def spin() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep all cores awake: each runs a spinning process of the lowest priority."""
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.terminate()
            process.join(timeout=10.0)


# -- a watcher of a mirror


def publish_on_order(url: str, rest: Rest, orders: "Connection[Any, Any]") -> None:
    """The other process: publishes each ordered key, and reports when it began.

    It also times one PING after the same rest: processes and cores that slept answer later.
    """
    with open_store(url, call_timeout_seconds=5.0) as store:
        orders.send("ready")
        while (key := orders.recv()) is not None:
            time.sleep(random.uniform(*rest))
            publishing = publishing_of(key, PUBLISHER, 1, 2**63)
            begun = time.monotonic_ns()
            store.publish_many([publishing])
            time.sleep(random.uniform(*rest))
            orders.send((begun, store.ping()))


async def measure_watch_wakes(url: str, count: int, rest: Rest = REST_SECONDS) -> dict[str, Any]:
    """Until `Mirror.watch` notifies: the record is read again by then."""
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=publish_on_order, args=(url, rest, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is detected
    assert orders.recv() == "ready"
    store = open_async_store(url, call_timeout_seconds=5.0)
    mirror = mirror_of(store)
    seconds, pings = [], []
    for number in range(count):
        key = key_of(int(rest[0] * 1e6) << 40 | number)
        notified: asyncio.Queue[int] = asyncio.Queue()
        cancel = mirror.watch(NAMESPACE, key, lambda: notified.put_nowait(time.monotonic_ns()))  # noqa: B023
        await notified.get()  # from here on no change is missed
        orders.send(key)
        woken = await notified.get()
        cancel()
        begun, ping = orders.recv()
        seconds.append((woken - begun) / 1e9)
        pings.append(ping)
    orders.send(None)
    process.join(timeout=10.0)
    mirror.close()
    await store.close()
    return {"since_publication": microseconds(seconds), "ping_after_rest": microseconds(pings)}


# -- a client that waits


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two nodes that treat each other as two hosts, and a client of each."""

    holder: LookupBuffer
    reader: LookupBuffer
    holder_config: BufferConfig
    log: Path
    """The times at which the holder's node began to publish each key."""


@contextmanager
def two_nodes(url: str) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="lb-") as name:
        directory = Path(name)
        configs = [
            BufferConfig(
                directory=directory / node,
                node_id=node,
                capacity_bytes=CAPACITY_BYTES,
                store_url=url,
                idle_exit_seconds=5.0,
            )
            for node in ("holder", "reader")
        ]
        log = directory / "published"
        program = "from benchmarks.stamping_node import main; main()"
        node = subprocess.Popen([sys.executable, "-c", program, str(log)], stdin=subprocess.PIPE)
        assert node.stdin is not None
        node.stdin.write(to_json(configs[0]).encode())
        node.stdin.close()
        while not configs[0].socket_path().exists():
            assert node.poll() is None, "the node did not start"
            time.sleep(0.01)
        clients = [LookupBuffer(config) for config in configs]
        try:
            time.sleep(1.0)  # until both arenas are faulted in, here and in the nodes
            yield Nodes(clients[0], clients[1], configs[0], log)
        finally:
            for client in clients:
                client.close()
            node.terminate()
            node.wait(timeout=10.0)
            wait_until_gone(directory)


def wait_until_gone(directory: Path) -> None:
    """Wait for the other node, which ends soon after its last client."""
    deadline = time.monotonic() + 15.0
    while any(directory.glob("*/node.sock")) and time.monotonic() < deadline:
        time.sleep(0.1)


def insert_on_order(
    config: BufferConfig, nbytes: int | None, rest: Rest, orders: "Connection[Any, Any]"
) -> None:
    """The other process: a client of the holder's node."""
    tensor = None if nbytes is None else torch.ones(nbytes, dtype=torch.uint8)
    with LookupBuffer(config) as buffer:
        orders.send("ready")
        while (order := orders.recv()) is not None:
            key, claimed = order
            if claimed:
                assert buffer.claim(TensorKey(key), lease_seconds=WAIT_SECONDS).granted
                orders.send("claimed")
            time.sleep(random.uniform(*rest))
            begun = time.monotonic_ns()
            buffer.insert(TensorKey(key), tensor)
            orders.send(begun)


@contextmanager
def inserter(
    nodes: Nodes, nbytes: int | None, rest: Rest = REST_SECONDS
) -> Iterator["Connection[Any, Any]"]:
    """Takes (key, whether to claim it first); reports when it inserted. `nbytes` None: a None."""
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    arguments = (nodes.holder_config, nbytes, rest, theirs)
    process = context.Process(target=insert_on_order, args=arguments, daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is detected
    assert orders.recv() == "ready"
    yield orders
    orders.send(None)
    process.join(timeout=10.0)


def measure_claim_wakes(nodes: Nodes, count: int, rest: Rest = REST_SECONDS) -> dict[str, Any]:
    """Until a waiting `claim` has returned that another node's client stored the key."""
    inserted, woken = {}, {}
    with inserter(nodes, 4096, rest) as orders:
        for number in range(count):
            key = f"claimed-{rest[0]}-{number}"
            orders.send((key, True))
            assert orders.recv() == "claimed"
            answer = nodes.reader.claim(
                TensorKey(key), lease_seconds=WAIT_SECONDS, timeout=WAIT_SECONDS
            )
            woken[key] = time.monotonic_ns()
            assert answer.outcome is ClaimOutcome.STORED, answer
            inserted[key] = orders.recv()
    return since(nodes, inserted, woken)


def measure_select_wakes(nodes: Nodes, nbytes: int | None, count: int) -> dict[str, Any]:
    """Until a waiting `select` on the other node has returned the inserted tensor.

    It also times a `select` that need not wait: the key is known here, and only fetched.
    """
    out = None if nbytes is None else torch.zeros(nbytes, dtype=torch.uint8)
    inserted, woken, fetched = {}, {}, []
    with inserter(nodes, nbytes) as orders:
        for number in range(count):
            key = f"wake-{nbytes}-{number}"
            orders.send((key, False))
            nodes.reader.select(TensorKey(key), timeout=WAIT_SECONDS, out=out)
            woken[key] = time.monotonic_ns()
            inserted[key] = orders.recv()
        for number in range(count):
            key = f"known-{nbytes}-{number}"
            orders.send((key, False))
            orders.recv()
            while not nodes.reader.has_caches([TensorKey(key)])[0]:
                time.sleep(0.002)
            time.sleep(REST_SECONDS[0])
            begun = time.monotonic_ns()
            nodes.reader.select(TensorKey(key), out=out)
            fetched.append((time.monotonic_ns() - begun) / 1e9)
    known = {"select_of_what_is_known": microseconds(fetched)}
    return since(nodes, inserted, woken) | known


def since(nodes: Nodes, inserted: dict[str, int], woken: dict[str, int]) -> dict[str, Any]:
    """Times since the holder's node began to publish, and since the call of `insert` before it."""
    time.sleep(0.1)  # until the last line is written
    published: dict[str, int] = {}
    for line in nodes.log.read_text().splitlines():
        key, _, at = line.partition(" ")
        published.setdefault(key, int(at))
    return {
        "since_publication": microseconds([(woken[k] - published[k]) / 1e9 for k in woken]),
        "since_insert": microseconds([(woken[k] - inserted[k]) / 1e9 for k in woken]),
    }
