"""A lane between the pools of two processes, over Gloo, compared with the transfer between hosts.

Two nodes on one machine treat each other as two hosts; the producer is its own process. For each
size, in interleaved rounds, the median time from `prefetch` of a key that only the other host has
until the reader has the tensor, as vLLM's worker gets it:

- `lane`: received from the producer's pool into the reader's, which returns its own tensor;
- `hosts`: from arena to arena over TCP, then copied into a new tensor, as without a lane;
- `view`: the same, but used in place in the arena.

All verify the checksum. On a CPU the lane saves nothing, since no copy to a device is avoided: this
measures its cost, not its benefit.

    python -m benchmarks.device_lane [--rounds 15]
"""

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from benchmarks.gauge import emit, machine, paired_ratio
from benchmarks.node import CAPACITY_BYTES, bytes_tensor, wait_until_gone
from lookup_buffer import BufferConfig, LookupBuffer, PrefetchState, TensorKey
from lookup_buffer.codec import torch_version
from lookup_buffer.device.buffer import DeviceBuffer
from lookup_buffer.device.lane import DeviceLane
from store import EmbeddedServer, open_store

SIZES: Final = (128 << 10, 1 << 20, 8 << 20, 32 << 20)
POOL_BYTES: Final = 512 << 20
WAYS: Final = ("lane", "hosts", "view")


def config_of(directory: Path, node: str, store_url: str) -> BufferConfig:
    return BufferConfig(
        directory=directory / node,
        node_id=node,
        capacity_bytes=CAPACITY_BYTES,
        store_url=store_url,
        idle_exit_seconds=2.0,
    )


def produce(directory: Path, store_url: str, orders: Connection) -> None:
    """The producer process: inserts the tensors that it is ordered to."""
    torch.set_num_threads(1)
    lane = DeviceLane("gloo", pool_bytes=POOL_BYTES)
    with DeviceBuffer(lane, config_of(directory, "a", store_url)) as buffer:
        orders.send("ready")
        while (order := orders.recv()) is not None:
            name, nbytes = order
            buffer.insert(TensorKey(name), bytes_tensor(nbytes, len(name)))
            orders.send("stored")


class Reader:
    """Clients of node b, with a pool and without, and the producer."""

    def __init__(self, directory: Path, store_url: str, orders: Connection) -> None:
        self.lane = DeviceLane("gloo", pool_bytes=POOL_BYTES)
        self.with_lane = DeviceBuffer(self.lane, config_of(directory, "b", store_url))
        self.without = LookupBuffer(config_of(directory, "b", store_url))
        self._orders = orders
        self._store = open_store(store_url, call_timeout_seconds=5.0)
        self._number = 0

    def offered(self, nbytes: int) -> TensorKey:
        """A key that only the other host has, and whose record names a device."""
        self._number += 1
        key = TensorKey(f"key-{self._number}")
        self._orders.send((key.text, nbytes))
        self._orders.recv()
        while not any(r.devices for r in self._store.scan() if r.key == key.text):
            time.sleep(0.002)
        return key

    def read(self, way: str, nbytes: int) -> float:
        key = self.offered(nbytes)
        buffer = self.with_lane.host if way == "lane" else self.without
        start = time.perf_counter()
        (handle,) = buffer.prefetch([key], timeout=30.0)
        assert handle.state is PrefetchState.RESIDENT, handle
        assert handle.order is not None
        if way == "view":
            with buffer.view(key):
                seconds = time.perf_counter() - start
        else:
            buffer.load(handle.order)
            seconds = time.perf_counter() - start
        assert bool(handle.order.lane) == (way == "lane"), "it came by the other transfer"
        buffer.release(handle)
        return seconds

    def warm(self) -> None:
        for _ in range(100):
            key = self.offered(SIZES[0])
            (handle,) = self.with_lane.host.prefetch([key], timeout=10.0)
            came_by_lane = handle.order is not None and bool(handle.order.lane)
            self.with_lane.host.release(handle)
            if came_by_lane:
                return
            time.sleep(0.1)
        raise SystemExit("no lane was opened")

    def close(self) -> None:
        self.with_lane.close()
        self.without.close()
        self._store.close()


def measure(reader: Reader, nbytes: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        reader.read(way, nbytes)
    for number in range(rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            seconds[way].append(reader.read(way, nbytes))
    return {
        "payload_bytes": nbytes,
        **{f"{way}_ms": round(statistics.median(seconds[way]) * 1e3, 3) for way in WAYS},
        "lane_time_over_hosts": paired_ratio(seconds["lane"], seconds["hosts"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="lb-") as name:
        directory = Path(name)
        with EmbeddedServer.start(directory / "valkey", timeout_seconds=10.0) as server:
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            producer = multiprocessing.get_context("spawn").Process(
                target=produce, args=(directory, server.url, theirs)
            )
            producer.start()
            ours.recv()
            reader = Reader(directory, server.url, ours)
            time.sleep(2.0)  # until the arenas are faulted in
            reader.warm()
            figures = [measure(reader, nbytes, rounds) for nbytes in SIZES]
            ours.send(None)
            producer.join()
            reader.close()
            wait_until_gone(directory)
    emit(
        {
            "benchmark": "device_lane",
            "rounds": rounds,
            "torch": torch_version(),
            **machine(),
            "figures": figures,
        }
    )


if __name__ == "__main__":
    main()
