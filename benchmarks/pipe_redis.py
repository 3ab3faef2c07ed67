"""The `redis` pipe beside redis-py, a memcpy and a bare socket, on each server that is installed.

For each size, in interleaved rounds, the medians of

- `memcpy`: one copy into memory that was touched before;
- `bare`: over a unix socket between two processes: one message requests, `recv_into` receives;
- `redis_py_set`, `redis_py_get`: one value of that size;
- `redis_py_set_chunks`, `redis_py_get_chunks`: the same in the pipe's chunks, one command each;
  reading also removes them;
- `lane_set`, `lane_get`: the same chunks by `Resp3Connection`;
- `ask`: through the pipe between two processes, the reply by key, into such memory;

and the ratios of their speeds, medians of per-round ratios. All over unix sockets. `targets` has
the aims for those at 64 MiB, and the measured values.

    python -m benchmarks.pipe_redis [--rounds 9]
"""

import argparse
import multiprocessing
import socket
import statistics
import struct
import tempfile
import threading
import time
from typing import Any, Final
from urllib.parse import unquote

import redis
import torch

from benchmarks.gauge import (
    emit,
    machine,
    paired_ratio,
    product_of,
    programs,
    running,
    seconds_of,
    target,
)
from lookup_buffer.pipes import KVPipe, open_pipe
from lookup_buffer.pipes.redis_dial import dial
from lookup_buffer.pipes.redis_link import BATCH_CHUNKS, CHUNK_BYTES
from lookup_buffer.pipes.resp import Resp3Connection
from lookup_buffer.shm.memory import copy_bytes

SIZES_BYTES: Final = (16 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
ROUND_BYTES: Final = 64 << 20
REPEATS_MAX: Final = 50
TIMEOUT_SECONDS: Final = 60.0
SIZE: Final = struct.Struct(">Q")
NAMES: Final = (
    "memcpy", "bare", "redis_py_set", "redis_py_get",
    "redis_py_set_chunks", "redis_py_get_chunks", "lane_set", "lane_get", "ask",
)  # fmt: skip


def serve(uri: str, bare_path: str) -> None:
    """The other process: replies over the pipe and over the bare socket until they end."""
    payload = torch.zeros(max(SIZES_BYTES), dtype=torch.uint8)
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(bare_path)

    def answer_bare() -> None:
        raw = memoryview(payload.numpy().data)
        while request := stream.recv(SIZE.size, socket.MSG_WAITALL):
            stream.sendall(raw[: SIZE.unpack(request)[0]])

    threading.Thread(target=answer_bare, daemon=True).start()
    with open_pipe(uri) as pipe:
        while (asked := pipe.recv_tensor()) is not None:
            pipe.send_tensor(payload[: int(asked)], "answer")


class Ways:
    """What is measured with messages of one size."""

    def __init__(
        self, client: "redis.Redis", connection: Resp3Connection, pipe: KVPipe, bare: socket.socket
    ) -> None:
        self._client, self._connection, self._pipe, self._bare = client, connection, pipe, bare
        self._source = torch.ones(max(SIZES_BYTES), dtype=torch.uint8)
        self._target = torch.ones(max(SIZES_BYTES), dtype=torch.uint8)
        self.resize(SIZES_BYTES[0])

    def resize(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._value = bytes(self._source[:nbytes].numpy().data)
        self._place = memoryview(self._target.numpy().data)[:nbytes]
        starts = range(0, nbytes, CHUNK_BYTES)
        self._chunks = [(b"lb:pipe:bench:%d" % at, at) for at in starts]

    def memcpy(self) -> None:
        copy_bytes(self._target.data_ptr(), self._source.data_ptr(), self._nbytes)

    def bare(self) -> None:
        self._bare.sendall(SIZE.pack(self._nbytes))
        got = 0
        while got < self._nbytes:
            got += self._bare.recv_into(self._place[got:])

    def redis_py_set(self) -> None:
        self._client.set("bench", self._value, px=60_000)

    def redis_py_get(self) -> None:
        assert self._client.get("bench") is not None

    def redis_py_set_chunks(self) -> None:
        value = memoryview(self._value)
        for name, at in self._chunks:
            self._client.set(name, value[at : at + CHUNK_BYTES], px=60_000)

    def redis_py_get_chunks(self) -> None:
        for name, _ in self._chunks:
            assert self._client.getdel(name) is not None

    def lane_set(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        value = memoryview(self._value)
        for name, at in self._chunks:
            chunk = value[at : at + CHUNK_BYTES]
            self._connection.send([(b"SET", name, chunk, b"PX", b"60000")], deadline)
        self._connection.read_replies(deadline)

    def lane_get(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for first in range(0, len(self._chunks), BATCH_CHUNKS):
            batch = self._chunks[first : first + BATCH_CHUNKS]
            places = [self._place[at : at + CHUNK_BYTES] for _, at in batch]
            assert all(self._connection.fetch([name for name, _ in batch], places, deadline))

    def ask(self) -> None:
        self._pipe.send_tensor(torch.tensor(self._nbytes))
        out = self._target[: self._nbytes]
        self._pipe.recv_tensor("answer", timeout=TIMEOUT_SECONDS, out=out)


def measure(ways: Ways, nbytes: int, rounds: int) -> dict[str, Any]:
    ways.resize(nbytes)
    repeats = max(1, min(REPEATS_MAX, ROUND_BYTES // nbytes))
    seconds: dict[str, list[float]] = {name: [0.0] * (rounds + 1) for name in NAMES}
    for number in range(rounds + 1):
        for _ in range(repeats):
            for name in NAMES:
                seconds[name][number] += seconds_of(getattr(ways, name)) / repeats
    seconds = {name: values[1:] for name, values in seconds.items()}  # the first is to warm up
    result: dict[str, Any] = {"payload_bytes": nbytes}
    for name, values in seconds.items():
        result[f"{name}_us"] = round(statistics.median(values) * 1e6, 1)
    for ours, theirs in (
        ("lane_set", "redis_py_set"), ("lane_get", "redis_py_get"),
        ("lane_set", "redis_py_set_chunks"), ("lane_get", "redis_py_get_chunks"),
        ("lane_get", "memcpy"), ("ask", "memcpy"), ("ask", "bare"),
    ):  # fmt: skip
        result[f"{ours}_speed_over_{theirs}"] = paired_ratio(seconds[theirs], seconds[ours])
    return result


def measured(executable: str | None, rounds: int) -> dict[str, object]:
    with (
        running(executable) as server,
        tempfile.TemporaryDirectory(prefix="lb-") as directory,
        socket.socket(socket.AF_UNIX) as listener,
        open_pipe(f"{server.url}?pipe=bench", listen=True) as pipe,
        redis.Redis(unix_socket_path=unquote(server.url.removeprefix("unix://"))) as client,
    ):
        listener.bind(f"{directory}/bare")
        listener.listen()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(pipe.uri, f"{directory}/bare"), daemon=True
        )
        process.start()
        bare, _ = listener.accept()
        connection = Resp3Connection(dial(server.url, TIMEOUT_SECONDS))
        with bare:
            ways = Ways(client, connection, pipe, bare)
            results = [measure(ways, nbytes, rounds) for nbytes in SIZES_BYTES]
        connection.close()
        pipe.send_tensor(None)
        process.join(TIMEOUT_SECONDS)
        server_name = product_of(server.url)
        return {
            "server": server_name,
            "targets": targets_of(results[-1]),
            "results": results,
        }


def targets_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Beside the same chunks: what one value of that size costs the server is not the pipe's."""
    ratios = {way: result[f"lane_{way}_speed_over_redis_py_{way}_chunks"] for way in ("get", "set")}
    return [
        target(
            f"{way}: speed over redis-py with equal chunks",
            ratio,
            payload_bytes=result["payload_bytes"],
            at_least=1.0,
        )
        for way, ratio in ratios.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    servers = {name: measured(path, rounds) for name, path in programs().items()}
    emit({"benchmark": "pipe_redis", "rounds": rounds, **machine(), "servers": servers})


if __name__ == "__main__":
    main()
