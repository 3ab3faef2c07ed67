"""A `gloo` pipe beside bare Gloo, a `tcp` pipe and a memcpy, between two processes.

For each size, in interleaved rounds, the median of one message of that size:

- `memcpy`: one copy into memory that was touched before;
- `bare`: a small message requests through a bare Gloo group, `send` replies, `recv` receives in
  place;
- `bare_new`: the same into a new tensor, which is what `recv_tensor` returns;
- `gloo`, `tcp`: a small message requests through the pipe; the reply, which its sender copies, is
  received by key, into such memory;
- `gloo_receive`: `recv_tensor` by key alone, of what was sent before, into such memory;
- `gloo_receive_new`: the same into a new tensor;

and the ratios of their speeds, medians of per-round ratios, so that a slow moment of the machine
falls on both sides. `targets` has the aims and the measured values.

    python -m benchmarks.pipe_gloo [--rounds 15]
"""

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gauge import emit, machine, paired_ratio, target
from lookup_buffer.codec import copy_into, torch_version
from lookup_buffer.pipes import KVPipe, open_pipe

SIZES_BYTES = (16 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
WAYS = ("memcpy", "bare", "bare_new", "gloo", "gloo_receive", "gloo_receive_new", "tcp")
MESSAGES_MAX = 50
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
                nbytes, count = asked.tolist()
                for number in range(count):
                    pipe.send_tensor(payload[:nbytes], f"answer-{number}")
                if count > 1:
                    pipe.send_tensor(None, "all sent")

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


class Ways:
    """What is measured with messages of one size; each gives seconds per message."""

    def __init__(self, group: Any, pipes: dict[str, KVPipe], nbytes: int) -> None:
        self._group = group
        self._pipes = pipes
        self._nbytes = nbytes
        self._messages = max(2, min(MESSAGES_MAX, (32 << 20) // nbytes))
        self._source, self._target = torch.ones((2, nbytes), dtype=torch.uint8)

    def memcpy(self) -> float:
        return self._repeated(
            lambda: copy_into(self._target, self._source.data_ptr(), self._nbytes)
        )

    def bare(self) -> float:
        return self._repeated(lambda: fetch_bare(self._group, self._target))

    def bare_new(self) -> float:
        new = partial(torch.empty, self._nbytes, dtype=torch.uint8)
        return self._repeated(lambda: fetch_bare(self._group, new()))

    def gloo(self) -> float:
        return self._repeated(lambda: self._fetch(self._pipes["gloo"]))

    def tcp(self) -> float:
        return self._repeated(lambda: self._fetch(self._pipes["tcp"]))

    def gloo_receive(self) -> float:
        return self._received(self._target)

    def gloo_receive_new(self) -> float:
        return self._received(None)

    def _received(self, out: torch.Tensor | None) -> float:
        pipe = self._pipes["gloo"]
        pipe.send_tensor(torch.tensor([self._nbytes, self._messages]))
        pipe.recv_tensor("all sent")
        keys = iter([f"answer-{number}" for number in reversed(range(self._messages))])
        return self._repeated(lambda: pipe.recv_tensor(next(keys), timeout=60.0, out=out))

    def _fetch(self, pipe: KVPipe) -> None:
        pipe.send_tensor(torch.tensor([self._nbytes, 1]))
        pipe.recv_tensor("answer-0", timeout=60.0, out=self._target)

    def _repeated(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(self._messages):
            action()
        return (time.perf_counter() - start) / self._messages


def measure(ways: Ways, nbytes: int, rounds: int) -> dict[str, Any]:
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            seconds = getattr(ways, way)()
            if number:  # the first is to warm up
                spent[way].append(seconds)
    result: dict[str, Any] = {"payload_bytes": nbytes}
    for way, values in spent.items():
        result[f"{way}_us"] = round(statistics.median(values) * 1e6, 1)
    for ours in ("gloo", "gloo_receive", "gloo_receive_new"):
        for other in ("bare", "bare_new", "tcp", "memcpy"):
            result[f"{ours}_speed_over_{other}"] = paired_ratio(spent[other], spent[ours])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        pipes = {way: open_pipe(f"{way}://127.0.0.1:0", listen=True) for way in ("gloo", "tcp")}
        other = multiprocessing.get_context("spawn").Process(
            target=serve, args=(path, [pipe.uri for pipe in pipes.values()]), daemon=True
        )
        other.start()
        group = bare_group(path, 0)
        results = [measure(Ways(group, pipes, n), n, rounds) for n in SIZES_BYTES]
        group.send([torch.tensor([0])], 1, 0).wait()
        for pipe in pipes.values():
            pipe.send_tensor(None)
            pipe.close()
        other.join(60.0)
    targets = [
        target(
            "receive: speed over bare Gloo",
            result["gloo_receive_speed_over_bare"],
            payload_bytes=result["payload_bytes"],
            at_least=0.9,
        )
        for result in results
        if result["payload_bytes"] >= 1 << 20
    ]
    about = {"rounds": rounds, "torch": torch_version(), **machine()}
    emit({"benchmark": "pipe_gloo", **about, "targets": {"gloo": targets}, "results": results})


if __name__ == "__main__":
    main()
