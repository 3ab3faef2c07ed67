"""Reads through a node compared with their lower bounds: a memcpy, a bare socket, a Redis MGET.

Starts a Valkey and two nodes that treat each other as two hosts. In interleaved rounds, medians:

- `select`: a cold `select(out=…)` on one host against one warm single-thread memmove of the size;
- `transfer`: node to node, from the fetcher's request until the bytes are verified in the arena,
  against a bare socket with `sendall` and `recv_into` into warm memory;
- `fetch`: the same for a client: `prefetch` of a key that only the other node holds, until it is
  pinned here (locate, transfer, checksum, event), against the same bare socket;
- `has_caches`: 32 keys that this node holds, and 32 that only the store has, against one redis-py
  MGET of 32.

    python -m benchmarks.node [--rounds 15]
"""

import argparse
import asyncio
import ctypes
import functools
import json
import multiprocessing
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lookup_buffer import BufferConfig, LookupBuffer, Namespace, PrefetchState, TensorKey
from lookup_buffer.access import user_token
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.items import Pin
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import Located
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher, Wanted
from store import EmbeddedServer, open_store

SIZES_BYTES = (4 << 10, 1 << 20, 8 << 20, 64 << 20)
CAPACITY_BYTES = 1 << 30
SIZE = struct.Struct(">Q")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bytes_tensor(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@contextmanager
def two_clients() -> Iterator[tuple[LookupBuffer, LookupBuffer, str]]:
    """Clients of two nodes over one Valkey, and the store's URL."""
    with tempfile.TemporaryDirectory(prefix="lb-") as name:
        directory = Path(name)
        with EmbeddedServer.start(directory / "valkey", timeout_seconds=10.0) as server:
            clients = [
                LookupBuffer(
                    BufferConfig(
                        directory=directory / node,
                        node_id=node,
                        capacity_bytes=CAPACITY_BYTES,
                        store_url=server.url,
                        idle_exit_seconds=2.0,
                    )
                )
                for node in ("a", "b")
            ]
            try:
                time.sleep(2.0)  # until both arenas are faulted in, here and in the nodes
                yield clients[0], clients[1], server.url
            finally:
                for client in clients:
                    client.close()
                wait_until_gone(directory)


def wait_until_gone(directory: Path) -> None:
    """Wait for the nodes, which end soon after their last client."""
    deadline = time.monotonic() + 10.0
    while any(directory.glob("*/node.sock")) and time.monotonic() < deadline:
        time.sleep(0.1)


def measure_select(buffer: LookupBuffer, nbytes: int, rounds: int) -> dict[str, Any]:
    key, source, out = TensorKey(f"select-{nbytes}"), bytes_tensor(nbytes), bytes_tensor(nbytes, 1)
    buffer.insert(key, source)
    selects, copies = [], []
    for _ in range(rounds):
        copies.append(seconds(lambda: ctypes.memmove(out.data_ptr(), source.data_ptr(), nbytes)))
        selects.append(seconds(lambda: buffer.select(key, out=out)))
    return compared(selects, copies, "memcpy", nbytes)


def measure_fetch(
    holder: LookupBuffer, reader: LookupBuffer, bare: socket.socket, nbytes: int, rounds: int
) -> dict[str, Any]:
    source, target = bytes_tensor(nbytes), memoryview(bytearray(nbytes))
    target[:] = bytes(nbytes)
    fetches, transfers = [], []
    for number in range(rounds):
        key = TensorKey(f"fetch-{nbytes}-{number}")
        holder.insert(key, source)
        while not reader.has_caches([key])[0]:
            time.sleep(0.002)
        transfers.append(seconds(lambda: receive_bare(bare, target)))
        fetches.append(seconds(functools.partial(fetch, reader, key)))
    return compared(fetches, transfers, "bare_socket", nbytes)


def fetch(reader: LookupBuffer, key: TensorKey) -> None:
    (handle,) = reader.prefetch([key], timeout=30.0)
    assert handle.state is PrefetchState.RESIDENT, handle
    reader.release(handle)


def measure_transfer(
    holder: LookupBuffer, url: str, bare: socket.socket, nbytes: int, rounds: int
) -> dict[str, Any]:
    """The fetcher of a node, here in this process, against the other node's process."""
    source, target = bytes_tensor(nbytes), memoryview(bytearray(nbytes))
    target[:] = bytes(nbytes)
    key = TensorKey(f"transfer-{nbytes}")
    holder.insert(key, source)
    arena = Arena(2 * nbytes + (1 << 20), lambda address, reason: None)
    arena.memory.populate(0, arena.memory.nbytes)
    loop = asyncio.new_event_loop()
    fetcher = Fetcher(loop, arena, Counters(), Credentials(user_token()))
    address = (Namespace.named("default").fingerprint, key.text)
    transfers, bares = [], []
    with open_store(url) as store:
        while (record := store.locate(address[0], [key.text])[0]) is None:
            time.sleep(0.002)
        (location,) = record.locations
        endpoint = store.node_infos([location.node])[location.node].endpoint
    located = Located(record, ((location, endpoint),))
    for _ in range(rounds + 1):
        bares.append(seconds(functools.partial(receive_bare, bare, target)))
        held: list[Pin] = []
        move = functools.partial(transfer, loop, fetcher, address, located, held)
        transfers.append(seconds(move))
        arena.release([held[0].ticket], FETCH_OWNER)
        arena.remove(held[0].item, "measured")
    fetcher.close()
    loop.close()
    arena.close()
    return compared(transfers[1:], bares[1:], "bare_socket", nbytes)  # the first one connects


def transfer(
    loop: asyncio.AbstractEventLoop,
    fetcher: Fetcher,
    address: Any,
    located: Located,
    held: list[Pin],
) -> None:
    """One fetch, until the bytes are verified and visible in the arena."""
    came: asyncio.Future[Fetched] = loop.create_future()
    loop.call_soon(fetcher.fetch, [Wanted(address, located, came.set_result)])
    fetched = loop.run_until_complete(came)
    assert fetched.held is not None, fetched.reason
    held.append(fetched.held)


def receive_bare(stream: socket.socket, target: memoryview) -> None:
    stream.sendall(SIZE.pack(len(target)))
    done = 0
    while done < len(target):
        done += stream.recv_into(target[done:])


def serve_bare(port: Any) -> None:
    """The other process of the bare socket."""
    payload = memoryview(bytearray(b"\xa5" * max(SIZES_BYTES)))
    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname()[1])
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := stream.recv(SIZE.size, socket.MSG_WAITALL):
        stream.sendall(payload[: SIZE.unpack(request)[0]])


def measure_has_caches(
    holder: LookupBuffer, reader: LookupBuffer, url: str, rounds: int
) -> dict[str, Any]:
    import redis

    keys = [TensorKey(f"known-{number}") for number in range(32)]
    for key in keys:
        holder.insert(key, torch.zeros(8))
    while not all(reader.has_caches(keys, timeout=1.0)):
        time.sleep(0.01)
    client = redis.Redis.from_url(url)
    names = [f"plain-{number}" for number in range(32)]
    client.mset(dict.fromkeys(names, b"x" * 96))
    here, elsewhere, gets = [], [], []
    for _ in range(20 * rounds):
        gets.append(seconds(lambda: client.mget(names)))
        here.append(seconds(lambda: holder.has_caches(keys)))
        elsewhere.append(seconds(lambda: reader.has_caches(keys)))
    client.close()
    return {
        "in_this_node": compared(here, gets, "mget_32", 0),
        "in_the_store": compared(elsewhere, gets, "mget_32", 0),
    }


def compared(ours: list[float], theirs: list[float], name: str, nbytes: int) -> dict[str, Any]:
    """Medians, and the median of per-round speed ratios (theirs/ours; above 1: ours is faster)."""
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    result: dict[str, Any] = {
        "ours_us": round(statistics.median(ours) * 1e6, 1),
        f"{name}_us": round(statistics.median(theirs) * 1e6, 1),
        "ratio": round(statistics.median(ratios), 3),
    }
    return {"nbytes": nbytes, **result} if nbytes else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    port, sender = context.Pipe()
    process = context.Process(target=serve_bare, args=(sender,), daemon=True)
    process.start()
    with (
        two_clients() as (holder, reader, url),
        socket.create_connection(("127.0.0.1", port.recv())) as bare,
    ):
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        report = {
            "select": [measure_select(holder, nbytes, 4 * rounds) for nbytes in SIZES_BYTES],
            "transfer": [
                measure_transfer(holder, url, bare, nbytes, rounds) for nbytes in SIZES_BYTES
            ],
            "fetch": [
                measure_fetch(holder, reader, bare, nbytes, rounds) for nbytes in SIZES_BYTES
            ],
            "has_caches": measure_has_caches(holder, reader, url, rounds),
        }
    process.terminate()
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
