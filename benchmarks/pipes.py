"""Pipes beside a memcpy and a bare socket of the same kind, between two processes.

For each scheme and size, in interleaved rounds, the medians of

- `memcpy`: one copy of bytes that no cache holds into memory that was touched before;
- `memcpy_new`: the same into a new tensor, which is what `recv_tensor` returns;
- `bare`: one message asks, `sendall` answers, `recv_into` of the full remainder receives;
- `ask`: the same through the pipe, the answer by key, into a new tensor;
- `receive`: `recv_tensor` by key alone, of what was sent before, last key first;

and the ratios of their speeds (medians of per-round ratios, so that a slow moment of the machine
falls on both sides): `receive` to a memcpy, `ask` to the bare socket and to a memcpy in
and one out.

    python -m benchmarks.pipes [--rounds 15] [SCHEME ...]
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.gauge import emit, machine, paired_ratio, seconds_of
from lookup_buffer.arena import copy_bytes
from lookup_buffer.codec import writable_bytes
from lookup_buffer.pipes import KVPipe, open_pipe

SIZES_BYTES: Final = (16 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
ROUND_BYTES: Final = 128 << 20
MESSAGES_MAX: Final = 100
TIMEOUT_SECONDS: Final = 60.0
SIZE: Final = struct.Struct(">Q")
DIRECTORY: Final = tempfile.gettempdir()
LISTENING: Final = {
    "shm": f"shm://{DIRECTORY}/lb-bench-{os.getpid()}",
    "tcp": "tcp://127.0.0.1:0",
}


def bare_listener(scheme: str) -> socket.socket:
    if scheme == "shm":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{DIRECTORY}/lb-bench-bare-{os.getpid()}")
        listener.listen()
        return listener
    return socket.create_server(("127.0.0.1", 0))


def serve(uri: str, bare: str | tuple[str, int]) -> None:
    """The other process: answers over the pipe and over the bare socket until they end."""
    payload = torch.zeros(max(SIZES_BYTES), dtype=torch.uint8)
    stream = socket.socket(socket.AF_UNIX if isinstance(bare, str) else socket.AF_INET)
    stream.connect(bare)
    if not isinstance(bare, str):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer_bare() -> None:
        raw = writable_bytes(payload)
        while request := stream.recv(SIZE.size, socket.MSG_WAITALL):
            stream.sendall(raw[: SIZE.unpack(request)[0]])

    threading.Thread(target=answer_bare, daemon=True).start()
    with open_pipe(uri) as pipe:
        while (asked := pipe.recv_tensor()) is not None:
            nbytes, count = asked.tolist()
            for number in range(count):
                pipe.send_tensor(payload[:nbytes], f"answer-{number}")
            if count > 1:
                pipe.send_tensor(None, "all sent")


class Ways:
    """What is measured with messages of one size; each gives seconds per message."""

    def __init__(self, pipe: KVPipe, bare: socket.socket, nbytes: int) -> None:
        self._pipe = pipe
        self._bare = bare
        self._nbytes = nbytes
        self._messages = max(2, min(MESSAGES_MAX, ROUND_BYTES // nbytes))
        self._sources = torch.ones((self._messages, nbytes), dtype=torch.uint8)
        self._target = torch.ones(nbytes, dtype=torch.uint8)

    def memcpy(self) -> float:
        return seconds_of(lambda: self._copy(lambda: self._target)) / self._messages

    def memcpy_new(self) -> float:
        new = partial(torch.empty, self._nbytes, dtype=torch.uint8)
        return seconds_of(lambda: self._copy(new)) / self._messages

    def bare(self) -> float:
        return self._repeated(self._fetch_bare)

    def ask(self) -> float:
        return self._repeated(self._fetch)

    def receive(self) -> float:
        self._pipe.send_tensor(torch.tensor([self._nbytes, self._messages]))
        self._pipe.recv_tensor("all sent")
        keys = [f"answer-{number}" for number in reversed(range(self._messages))]
        return seconds_of(lambda: self._receive(keys)) / len(keys)

    def _copy(self, targets: Callable[[], torch.Tensor]) -> None:
        for source in self._sources:
            target = targets()
            copy_bytes(target.data_ptr(), source.data_ptr(), self._nbytes)
            del target  # before the next one is made: the allocator may use its memory again

    def _receive(self, keys: list[str]) -> None:
        for key in keys:
            self._pipe.recv_tensor(key, timeout=TIMEOUT_SECONDS)

    def _fetch_bare(self) -> None:
        buffer = writable_bytes(self._target)
        self._bare.sendall(SIZE.pack(self._nbytes))
        got = 0
        while got < self._nbytes:
            got += self._bare.recv_into(buffer[got:])

    def _fetch(self) -> None:
        self._pipe.send_tensor(torch.tensor([self._nbytes, 1]))
        self._pipe.recv_tensor("answer-0", timeout=TIMEOUT_SECONDS)

    def _repeated(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(self._messages):
            action()
        return (time.perf_counter() - start) / self._messages


NAMES: Final = ("memcpy", "memcpy_new", "bare", "ask", "receive")


def measure(ways: Ways, nbytes: int, rounds: int) -> dict[str, object]:
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds + 1):
        for name in NAMES:
            spent = getattr(ways, name)()
            if number:  # the first is to warm up
                seconds[name].append(spent)
    result: dict[str, object] = {"payload_bytes": nbytes}
    for name, values in seconds.items():
        result[f"{name}_us"] = round(statistics.median(values) * 1e6, 1)
    copies = [a + b for a, b in zip(seconds["memcpy"], seconds["memcpy_new"], strict=True)]
    result["receive_speed_over_memcpy"] = paired_ratio(seconds["memcpy"], seconds["receive"])
    result["receive_speed_over_memcpy_new"] = paired_ratio(
        seconds["memcpy_new"], seconds["receive"]
    )
    result["ask_speed_over_two_memcpy"] = paired_ratio(copies, seconds["ask"])
    result["ask_speed_over_bare"] = paired_ratio(seconds["bare"], seconds["ask"])
    return result


def measured(scheme: str, rounds: int) -> list[dict[str, object]]:
    listener = bare_listener(scheme)
    bare_address = listener.getsockname()
    with listener, open_pipe(LISTENING[scheme], listen=True) as pipe:
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(pipe.uri, bare_address), daemon=True
        )
        process.start()
        bare, _ = listener.accept()
        with bare:
            if not isinstance(bare_address, str):
                bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            results = [measure(Ways(pipe, bare, nbytes), nbytes, rounds) for nbytes in SIZES_BYTES]
        pipe.send_tensor(None)
    process.join(TIMEOUT_SECONDS)
    if isinstance(bare_address, str):
        Path(bare_address).unlink()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("schemes", nargs="*", default=list(LISTENING), metavar="SCHEME")
    arguments = parser.parse_args()
    results = {scheme: measured(scheme, arguments.rounds) for scheme in arguments.schemes}
    emit({"benchmark": "pipes", "rounds": arguments.rounds, **machine(), "results": results})


if __name__ == "__main__":
    main()
