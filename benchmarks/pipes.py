"""Pipes compared with a memcpy and a bare socket of the same kind, between two processes.

For each scheme and size, in interleaved rounds, the medians of

- `memcpy`: one copy of bytes that no CPU cache holds into memory that was touched before;
- `memcpy_new`: the same into a new tensor;
- `bare`: one message is the request, `sendall` answers, `recv_into` of the full remainder receives;
- `receive`: `recv_tensor` by key, of messages sent before, last key first, into touched memory;
- `receive_new`: the same into a new tensor;
- `ask`, `ask_new`: a request through the pipe; its answer is sent then, and received by key;

and the ratios of their speeds (medians of per-round ratios, so a slow moment of the machine affects
both sides). `targets` has the target and the result of each ratio. For comparison it also measures
the method of vLLM's first pipe over the CPU: one process sets a value in torch's TCPStore, and the
other gets it (without pickling).

    python -m benchmarks.pipes [--rounds 15] [SCHEME ...]
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.gauge import emit, machine, paired_ratio, target
from lookup_buffer.cli.speeds import TIMEOUT_SECONDS, TransferTimer, serve
from lookup_buffer.codec import torch_version
from lookup_buffer.pipes import open_pipe

_dist: Any = dist  # its type stubs lack most of what is used here
SIZES_BYTES: Final = (16 << 10, 64 << 10, 1 << 20, 2 << 20, 8 << 20, 64 << 20)
ROUND_BYTES: Final = 128 << 20
FIRST_PIPE_BYTES: Final = (1 << 20, 8 << 20, 64 << 20)
FIRST_PIPE_MESSAGES: Final = 5
DIRECTORY: Final = tempfile.gettempdir()
LISTENING: Final = {
    "shm": f"shm://{DIRECTORY}/lb-bench-{os.getpid()}",
    "tcp": "tcp://127.0.0.1:0",
}
NAMES: Final = ("memcpy", "memcpy_new", "bare", "receive", "receive_new", "ask", "ask_new")
RATIOS: Final = (
    ("receive", "memcpy"), ("receive_new", "memcpy_new"), ("receive", "bare"),
    ("ask", "memcpy"), ("ask", "bare"), ("ask_new", "bare"),
)  # fmt: skip


def bare_listener(scheme: str) -> socket.socket:
    if scheme == "shm":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{DIRECTORY}/lb-bench-bare-{os.getpid()}")
        listener.listen()
        return listener
    return socket.create_server(("127.0.0.1", 0))


def measure(timer: TransferTimer, nbytes: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds + 1):
        for name in NAMES:
            spent = getattr(timer, name)()
            if number:  # the first round is a warm-up
                seconds[name].append(spent)
    result: dict[str, Any] = {"payload_bytes": nbytes}
    for name, values in seconds.items():
        result[f"{name}_us"] = round(statistics.median(values) * 1e6, 1)
    for ours, theirs in RATIOS:
        result[f"{ours}_speed_over_{theirs}"] = paired_ratio(seconds[theirs], seconds[ours])
    twice = [2 * one for one in seconds["memcpy"]]
    result["ask_speed_over_two_memcpy"] = paired_ratio(twice, seconds["ask"])
    return result


def measured(scheme: str, rounds: int) -> list[dict[str, Any]]:
    listener = bare_listener(scheme)
    bare_address = listener.getsockname()
    try:
        with listener, open_pipe(LISTENING[scheme], listen=True) as pipe:
            process = multiprocessing.get_context("spawn").Process(
                target=serve, args=(pipe.uri, bare_address, max(SIZES_BYTES)), daemon=True
            )
            process.start()
            listener.settimeout(TIMEOUT_SECONDS)
            bare, _ = listener.accept()
            with bare:
                if not isinstance(bare_address, str):
                    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                results = [
                    measure(TransferTimer(pipe, bare, n, ROUND_BYTES), n, rounds)
                    for n in SIZES_BYTES
                ]
            pipe.send_tensor(None)
        process.join(TIMEOUT_SECONDS)
    finally:
        if isinstance(bare_address, str):
            Path(bare_address).unlink()
    return results


def targets_of(scheme: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each figure with its target.

    `receive` loads messages that were sent before. `ask` loads one that is sent on request: in
    shared memory these are two copies, in and out.
    """
    found = []
    for result in results:
        nbytes = result["payload_bytes"]
        over = partial(target, payload_bytes=nbytes)
        large = nbytes >= 8 << 20
        if scheme == "shm":
            if nbytes >= 2 << 20:
                ratio = result["receive_speed_over_memcpy"]
                found.append(over("receive: speed over memcpy", ratio, at_least=0.9))
            if large:
                ratio = result["ask_speed_over_two_memcpy"]
                found.append(over("ask: speed over two memcpy", ratio, at_least=0.8))
            else:
                more = round(result["ask_us"] - 2 * result["memcpy_us"], 1)
                found.append(over("ask: us more than two memcpy", more, at_most=100.0))
        else:
            for way in ("receive", "ask"):
                ratio = result[f"{way}_speed_over_bare"]
                name, least = f"{way}: speed over a bare socket", 0.9 if large else 0.5
                found.append(over(name, ratio, at_least=least))
    return found


def get_from_store(port: int) -> None:
    store = _dist.TCPStore("127.0.0.1", port, use_libuv=False)
    for nbytes in FIRST_PIPE_BYTES:
        for number in range(FIRST_PIPE_MESSAGES):
            store.wait([f"{nbytes}/{number}"])
            torch.frombuffer(bytearray(store.get(f"{nbytes}/{number}")), dtype=torch.uint8)
            store.set(f"{nbytes}/{number}/got", b"")
            store.delete_key(f"{nbytes}/{number}")


def first_pipe() -> list[dict[str, Any]]:
    store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    process = multiprocessing.get_context("spawn").Process(
        target=get_from_store, args=(store.port,), daemon=True
    )
    process.start()
    results = []
    for nbytes in FIRST_PIPE_BYTES:
        value = bytes(nbytes)
        spent = []
        for number in range(FIRST_PIPE_MESSAGES):
            start = time.perf_counter()
            store.set(f"{nbytes}/{number}", value)
            store.wait([f"{nbytes}/{number}/got"])
            spent.append(time.perf_counter() - start)
        microseconds = round(statistics.median(spent[1:]) * 1e6, 1)
        results.append({"payload_bytes": nbytes, "store_us": microseconds})
    process.join(TIMEOUT_SECONDS)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("schemes", nargs="*", default=list(LISTENING), metavar="SCHEME")
    arguments = parser.parse_args()
    results = {scheme: measured(scheme, arguments.rounds) for scheme in arguments.schemes}
    targets = {scheme: targets_of(scheme, found) for scheme, found in results.items()}
    about = {"rounds": arguments.rounds, "torch": torch_version(), **machine()}
    emit(
        {
            "benchmark": "pipes",
            **about,
            "targets": targets,
            "results": results,
            "first_pipe": first_pipe(),
        }
    )


if __name__ == "__main__":
    main()
