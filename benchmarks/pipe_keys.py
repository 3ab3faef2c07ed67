"""The cost of keys: messages of 1 KiB with and without one, and many received in any order.

For each scheme, between two processes, in interleaved rounds, the medians of

- `unkeyed`, `keyed`: a small message requests, the reply comes without a key, or under one;
- `in_order`, `reversed`, `shuffled`: 1,000 replies under as many keys have arrived; each is
  received.

    python -m benchmarks.pipe_keys [--rounds 15] [SCHEME ...]
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gauge import emit, machine, paired_ratio, running, seconds_of, target
from lookup_buffer.codec import torch_version
from lookup_buffer.pipes import KVPipe, open_pipe

PAYLOAD_BYTES: Final = 1 << 10
KEYS: Final = 1000
EXCHANGES: Final = 100
TIMEOUT_SECONDS: Final = 60.0
SCHEMES: Final = ("shm", "tcp", "redis", "gloo")
UNKEYED, KEYED, MANY = range(3)


def serve(uri: str) -> None:
    """The other process: replies until it receives None."""
    payload = torch.ones(PAYLOAD_BYTES, dtype=torch.uint8)
    with open_pipe(uri) as pipe:
        while (asked := pipe.recv_tensor(timeout=TIMEOUT_SECONDS)) is not None:
            if int(asked) == MANY:
                for number in range(KEYS):
                    pipe.send_tensor(payload, f"answer-{number}")
                pipe.send_tensor(None, "all sent")
            else:
                pipe.send_tensor(payload, "answer" if int(asked) == KEYED else None)


class Ways:
    """Each gives seconds per message."""

    def __init__(self, pipe: KVPipe) -> None:
        self._pipe = pipe
        self._out = torch.ones(PAYLOAD_BYTES, dtype=torch.uint8)

    def unkeyed(self) -> float:
        return self._exchanged(UNKEYED, None)

    def keyed(self) -> float:
        return self._exchanged(KEYED, "answer")

    def in_order(self) -> float:
        return self._received(list(range(KEYS)))

    def reversed(self) -> float:
        return self._received(list(range(KEYS))[::-1])

    def shuffled(self) -> float:
        return self._received(random.Random(0).sample(range(KEYS), KEYS))

    def _exchanged(self, kind: int, key: str | None) -> float:
        def exchange() -> None:
            for _ in range(EXCHANGES):
                self._pipe.send_tensor(torch.tensor(kind))
                self._pipe.recv_tensor(key, timeout=TIMEOUT_SECONDS, out=self._out)

        return seconds_of(exchange) / EXCHANGES

    def _received(self, order: list[int]) -> float:
        self._pipe.send_tensor(torch.tensor(MANY))
        self._pipe.recv_tensor("all sent", timeout=TIMEOUT_SECONDS)

        def receive() -> None:
            for number in order:
                self._pipe.recv_tensor(f"answer-{number}", timeout=TIMEOUT_SECONDS, out=self._out)

        return seconds_of(receive) / KEYS


TARGETS: Final = (
    ("keyed", "unkeyed", 1.3),
    ("reversed", "in_order", 1.2),
    ("shuffled", "in_order", 1.2),
)
NAMES: Final = ("unkeyed", "keyed", "in_order", "reversed", "shuffled")


def measured(uri: str, rounds: int) -> dict[str, Any]:
    with open_pipe(uri, listen=True) as pipe:
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(pipe.uri,), daemon=True
        )
        process.start()
        ways = Ways(pipe)
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for number in range(rounds + 1):
            for name in NAMES:
                spent = getattr(ways, name)()
                if number:  # the first is to warm up
                    seconds[name].append(spent)
        pipe.send_tensor(None)
    process.join(TIMEOUT_SECONDS)
    result: dict[str, Any] = {
        f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in seconds.items()
    }
    result["targets"] = [
        target(f"{ours} over {theirs}", paired_ratio(seconds[ours], seconds[theirs]), at_most=most)
        for ours, theirs, most in TARGETS
    ]
    return result


def addresses(schemes: list[str], stack: ExitStack) -> Iterator[tuple[str, str]]:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lb-"))
    for scheme in schemes:
        if scheme == "redis":
            yield scheme, f"{stack.enter_context(running()).url}?pipe=bench-{os.getpid()}"
        else:
            yield (
                scheme,
                f"shm://{directory}/pipe" if scheme == "shm" else f"{scheme}://127.0.0.1:0",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("schemes", nargs="*", default=list(SCHEMES), metavar="SCHEME")
    arguments = parser.parse_args()
    measure = partial(measured, rounds=arguments.rounds)
    with ExitStack() as stack:
        results = {scheme: measure(uri) for scheme, uri in addresses(arguments.schemes, stack)}
    about = {"rounds": arguments.rounds, "torch": torch_version(), **machine()}
    emit({"benchmark": "pipe_keys", "payload_bytes": PAYLOAD_BYTES, **about, "results": results})


if __name__ == "__main__":
    main()
