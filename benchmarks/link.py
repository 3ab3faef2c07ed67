"""A framed socket compared with a bare socket: the same payload over loopback TCP, two processes.

For each size, in interleaved rounds, prints the median of

- `bare`: a request of 8 bytes; `sendall` answers; `recv_into` of the full remainder receives;
- `link`: frames with headers and deadlines, and an xxh3 of the payload as its bytes arrive;
- `link_unverified`: the same without the hash;

each into memory that was touched before, and the ratios of their speeds. These are medians of
per-round ratios, so a slow moment of the machine affects both sides.

    python -m benchmarks.link [--rounds 15] [--token TEXT]
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import xxhash

from lookup_buffer.errors import PipeClosed
from lookup_buffer.protocol.auth import accept_handshake, connect
from lookup_buffer.protocol.stream import FramedSocket

SIZES_BYTES = (1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
TIMEOUT_SECONDS = 60.0
SIZE = struct.Struct(">Q")


def serve(ports: Connection, token: str | None) -> None:
    """The other process: answers one bare and one framed connection until they end."""
    payload = memoryview(bytearray(b"\xa5" * max(SIZES_BYTES)))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports.send([listener.getsockname()[1] for listener in listeners])

    def bare() -> None:
        stream, _ = listeners[0].accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := stream.recv(SIZE.size, socket.MSG_WAITALL):
            stream.sendall(payload[: SIZE.unpack(request)[0]])

    def framed() -> None:
        stream, _ = listeners[1].accept()
        link = accept_handshake(stream, token=token, timeout=TIMEOUT_SECONDS)
        try:
            while True:
                request, _ = link.recv_header(TIMEOUT_SECONDS)
                answer = {"status": "ok", "nbytes": request["nbytes"]}
                link.send(answer, payload[: request["nbytes"]], timeout=TIMEOUT_SECONDS)
        except PipeClosed:
            return

    threads = [threading.Thread(target=target) for target in (bare, framed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fetch_bare(stream: socket.socket, buffer: memoryview) -> None:
    stream.sendall(SIZE.pack(buffer.nbytes))
    got = 0
    while got < buffer.nbytes:
        got += stream.recv_into(buffer[got:])


def fetch_link(link: FramedSocket, buffer: memoryview, *, verified: bool) -> None:
    link.send({"op": "get", "key": "k" * 64, "nbytes": buffer.nbytes}, timeout=TIMEOUT_SECONDS)
    link.recv_header(TIMEOUT_SECONDS)
    hasher = xxhash.xxh3_64() if verified else None
    link.recv_into(buffer, timeout=TIMEOUT_SECONDS, hasher=hasher)
    if hasher is not None:
        hasher.intdigest()


def seconds_of(action: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


def measure(ways: dict[str, Callable[[], None]], nbytes: int, rounds: int) -> dict[str, object]:
    repeats = max(1, min(200, (32 << 20) // nbytes))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for action in ways.values():
        seconds_of(action, 2)
    for _ in range(rounds):
        for name, action in ways.items():
            seconds[name].append(seconds_of(action, repeats))
    result: dict[str, object] = {"payload_bytes": nbytes}
    for name, values in seconds.items():
        median = statistics.median(values)
        result[f"{name}_microseconds"] = round(median * 1e6, 1)
        result[f"{name}_gigabytes_per_second"] = round(nbytes / median / 1e9, 3)
    for name in ways:
        if name != "bare":
            pairs = zip(seconds["bare"], seconds[name], strict=True)
            ratio = statistics.median(bare / other for bare, other in pairs)
            result[f"{name}_speed_over_bare"] = round(ratio, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--token", default=None, help="also do the handshake with this token")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, arguments.token), daemon=True)
    process.start()
    if not here.poll(TIMEOUT_SECONDS):
        sys.exit("the serving process did not start")
    bare_port, link_port = here.recv()
    bare = socket.create_connection(("127.0.0.1", bare_port), timeout=TIMEOUT_SECONDS)
    bare.settimeout(None)
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = connect("127.0.0.1", link_port, token=arguments.token, timeout=TIMEOUT_SECONDS)
    destination = memoryview(bytearray(b"\x01" * max(SIZES_BYTES)))

    results = []
    for nbytes in SIZES_BYTES:
        buffer = destination[:nbytes]
        ways: dict[str, Callable[[], None]] = {
            "bare": lambda buffer=buffer: fetch_bare(bare, buffer),  # type: ignore[misc]
            "link": lambda buffer=buffer: fetch_link(link, buffer, verified=True),  # type: ignore[misc]
            "link_unverified": lambda buffer=buffer: fetch_link(link, buffer, verified=False),  # type: ignore[misc]
        }
        results.append(measure(ways, nbytes, arguments.rounds))
    print(
        json.dumps({"benchmark": "link", "rounds": arguments.rounds, "results": results}, indent=1)
    )
    bare.close()
    link.close()
    process.join(TIMEOUT_SECONDS)


if __name__ == "__main__":
    main()
