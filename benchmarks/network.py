"""Transfers between hosts on a simulated network, beside a bare socket between the same hosts.

Two nodes on hosts of `tests/support/network.py`, joined by a switch in user space with a delay, a
rate and losses; needs root, /dev/net/tun and a C compiler. In interleaved rounds, medians of

- `ours`: `select_many(…, out=…)` of keys that only the other host has, into memory that was used
  before: requests, transfer, checksums, events and the copy out of the arena;
- `bare`: one kept connection; all requests are sent ahead, `sendall` answers, `recv_into` receives.

Both have been used before the first round, and rest between rounds for as long as the other one is
measured. Without `--matrix`: 400 items of 256 KiB and one of 64 MiB, at a round trip of 10 ms, in
about a minute. With it: 64 items of 256 KiB and one of 16 MiB, by round trip, rate and loss, in
about 20 minutes; `benchmarks.draw` draws that.

    python -m benchmarks.network [--rounds 7] [--round-trip 10] [--matrix]
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from lookup_buffer import LookupBuffer
from network import Host, Network, why_not

CAPACITY_BYTES = 1 << 30
PORT = 7000
REQUEST = struct.Struct(">Q")
KIB, MIB = 1 << 10, 1 << 20


class Way(NamedTuple):
    """The network between the two hosts, the same in both directions."""

    round_trip_ms: float = 10.0
    megabits: float = 0.0
    """A second; 0: as fast as the switch forwards."""
    loss_percent: float = 0.0


class Load(NamedTuple):
    items: int
    nbytes: int


QUICK = (Load(400, 256 * KIB), Load(1, 64 * MIB))
MATRIX_LOADS = (Load(64, 256 * KIB), Load(1, 16 * MIB))
MATRIX_WAYS = tuple(
    Way(round_trip, megabits, loss)
    for megabits, loss in ((0.0, 0.0), (1000.0, 0.0), (1000.0, 0.1), (1000.0, 0.5))
    for round_trip in (1.0, 10.0, 40.0)
)


# -- the bare socket


def move_to(host: Host) -> None:
    """Move this process to the network of `host`."""
    namespace = os.open(f"/proc/{host.pid}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


def serve_bare(host: Host, ready: Connection) -> None:
    move_to(host)
    payload = memoryview(bytearray(b"\xa5" * max(load.nbytes for load in QUICK)))
    listener = socket.create_server((host.address, PORT))
    ready.send(None)
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := stream.recv(REQUEST.size, socket.MSG_WAITALL):
        stream.sendall(payload[: REQUEST.unpack(request)[0]])


def read_bare(host: Host, server: str, loads: Connection) -> None:
    """Answers each `Load` with the seconds of its transfer."""
    move_to(host)
    target = memoryview(bytearray(b"\x01" * max(load.nbytes for load in QUICK)))
    stream = socket.create_connection((server, PORT))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (load := loads.recv()) is not None:
        start = time.perf_counter()
        stream.sendall(load.items * REQUEST.pack(load.nbytes))
        for _ in range(load.items):
            done = 0
            while done < load.nbytes:
                done += stream.recv_into(target[done : load.nbytes])
        loads.send(time.perf_counter() - start)


@contextmanager
def bare_reader(network: Network) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ready, there = context.Pipe()
    loads, theirs = context.Pipe()
    a, b = network.hosts["a"], network.hosts["b"]
    server = context.Process(target=serve_bare, args=(a, there), daemon=True)
    server.start()
    ready.recv()
    reader = context.Process(target=read_bare, args=(b, a.address, theirs), daemon=True)
    reader.start()
    try:
        yield loads
    finally:
        loads.send(None)
        reader.join(10.0)
        server.join(10.0)


# -- ours


def read_ours(
    network: Network, holder: LookupBuffer, reader: LookupBuffer, load: Load, outs: list[Any]
) -> float:
    """The seconds in which the reader gets items that only the holder has."""
    items = network.put(holder, load.items, load.nbytes)
    keys = [key for key, _ in items]
    network.wait_for(reader, keys)
    start = time.perf_counter()
    found = reader.select_many(keys, timeout=60.0, out=outs)
    took = time.perf_counter() - start
    for (_, tensor), one in zip(items, found, strict=True):
        assert isinstance(one, torch.Tensor), one
        assert torch.equal(one, tensor)
    return took


def measure(
    network: Network,
    clients: tuple[LookupBuffer, LookupBuffer],
    bare: Connection,
    load: Load,
    rounds: int,
) -> dict[str, Any]:
    outs = [torch.ones(load.nbytes, dtype=torch.uint8) for _ in range(load.items)]
    ours, theirs = [], []
    for number in range(rounds + 1):
        took = read_ours(network, *clients, load, outs)
        bare.send(load)
        took_bare = bare.recv()
        if number:  # the first one connects
            ours.append(took)
            theirs.append(took_bare)
    pairs = list(zip(ours, theirs, strict=True))
    return {
        **load._asdict(),
        "ours_ms": round(statistics.median(ours) * 1e3, 1),
        "bare_ms": round(statistics.median(theirs) * 1e3, 1),
        "times_bare": round(statistics.median(own / other for own, other in pairs), 2),
        "speed_over_bare": round(statistics.median(other / own for own, other in pairs), 2),
        "all_ms": [[round(own * 1e3, 1), round(other * 1e3, 1)] for own, other in pairs],
    }


def measure_way(way: Way, loads: Sequence[Load], rounds: int) -> Iterator[dict[str, Any]]:
    """On hosts and nodes of its own: nodes remember for a while how far another one is."""
    network = Network(["a", "b"])
    try:
        network.set_both(
            "a", "b", delay=way.round_trip_ms / 2, rate=way.megabits, loss=way.loss_percent
        )
        a = network.node("a", capacity_bytes=CAPACITY_BYTES)
        b = network.node("b", capacity_bytes=CAPACITY_BYTES)
        with a.client() as holder, b.client() as reader, bare_reader(network) as bare:
            for load in loads:
                yield {**way._asdict(), **measure(network, (holder, reader), bare, load, rounds)}
    finally:
        network.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-trip", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--matrix", action="store_true", help="round trip x rate x loss x size")
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no simulated network: {reason}")
    ways = MATRIX_WAYS if arguments.matrix else (Way(arguments.round_trip),)
    loads = MATRIX_LOADS if arguments.matrix else QUICK
    results = []
    for way in ways:
        for result in measure_way(way, loads, arguments.rounds):
            results.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
    json.dump({"benchmark": "network", "results": results}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
