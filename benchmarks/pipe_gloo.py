"""A `gloo` pipe beside bare Gloo, a `tcp` pipe and a memcpy, between two processes.

For each size, in interleaved rounds, the median of one message and its answer of that size:

- `memcpy`: one copy of as many bytes into memory that was touched before;
- `bare`: one byte asks through a bare Gloo group, `send` answers, `recv` receives in place;
- `gloo`, `tcp`: a small message asks through the pipe, the answer is received by key;

and the ratios of their speeds, medians of per-round ratios, so that a slow moment of the machine
falls on both sides.

    python -m benchmarks.pipe_gloo [--rounds 15]
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lookup_buffer.pipes import KVPipe, open_pipe

SIZES_BYTES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
WAYS = ("memcpy", "bare", "gloo", "tcp")
_dist: Any = dist


def bare_group(path: str, rank: int) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return _dist.ProcessGroupGloo(_dist.FileStore(path, 2), rank, 2, options)


def serve(path: str, uris: list[str]) -> None:
    """The other process."""
    payload = torch.ones(max(SIZES_BYTES), dtype=torch.uint8)

    def answer(uri: str) -> None:
        with open_pipe(uri) as pipe:
            while (asked := pipe.recv_tensor()) is not None:
                pipe.send_tensor(payload[: int(asked)], "answer")

    for uri in uris:
        threading.Thread(target=answer, args=(uri,)).start()
    group = bare_group(path, 1)
    asked = torch.zeros(1, dtype=torch.int64)
    while True:
        group.recv([asked], 0, 0).wait()
        if not int(asked):
            return
        group.send([payload[: int(asked)]], 0, 0).wait()


def fetch_bare(group: Any, target: torch.Tensor) -> None:
    group.send([torch.tensor([target.nbytes])], 1, 0).wait()
    group.recv([target], 1, 0).wait()


def fetch(pipe: KVPipe, nbytes: int) -> None:
    pipe.send_tensor(torch.tensor(nbytes))
    pipe.recv_tensor("answer", timeout=60.0)


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


def measure(actions: dict[str, Callable[[], object]], nbytes: int, rounds: int) -> dict[str, Any]:
    repeats = max(1, min(50, (16 << 20) // nbytes))
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            seconds = seconds_of(actions[way], repeats)
            if number:  # the first is to warm up
                spent[way].append(seconds)
    result: dict[str, Any] = {"payload_bytes": nbytes}
    for way, values in spent.items():
        result[f"{way}_us"] = round(statistics.median(values) * 1e6, 1)
    for other in ("bare", "tcp", "memcpy"):
        ratios = [a / b for a, b in zip(spent[other], spent["gloo"], strict=True)]
        result[f"gloo_speed_over_{other}"] = round(statistics.median(ratios), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        pipes = {way: open_pipe(f"{way}://127.0.0.1:0", listen=True) for way in ("gloo", "tcp")}
        other = multiprocessing.get_context("spawn").Process(
            target=serve, args=(path, [pipe.uri for pipe in pipes.values()])
        )
        other.start()
        group = bare_group(path, 0)
        results = []
        for nbytes in SIZES_BYTES:
            source, target = torch.ones((2, nbytes), dtype=torch.uint8)
            actions: dict[str, Callable[[], object]] = {
                "memcpy": lambda a=source, b=target: b.copy_(a),  # type: ignore[misc]
                "bare": lambda b=target: fetch_bare(group, b),  # type: ignore[misc]
                "gloo": lambda n=nbytes: fetch(pipes["gloo"], n),  # type: ignore[misc]
                "tcp": lambda n=nbytes: fetch(pipes["tcp"], n),  # type: ignore[misc]
            }
            results.append(measure(actions, nbytes, rounds))
        group.send([torch.tensor([0])], 1, 0).wait()
        for pipe in pipes.values():
            pipe.send_tensor(None)
            pipe.close()
        other.join()
    print(json.dumps({"benchmark": "pipe_gloo", "rounds": rounds, "results": results}, indent=2))


if __name__ == "__main__":
    main()
