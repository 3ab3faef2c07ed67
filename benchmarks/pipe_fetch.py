"""The cost of a node's fetch over a link, as it is, and through a pipe.

Between two processes over loopback, in interleaved rounds, medians. The bytes are received into
warm memory of the requesting process, and hashed there:

- `link`: a request, and a reply with the bytes, sent from their own memory; hashed as they arrive.
  As `node.fetcher` and `node.peers` do it.
- `pipe`: the same by a `tcp` pipe: the request is a message, the reply another one under a key,
  which is offered, requested and sent; hashed when it has arrived.

    python -m benchmarks.pipe_fetch [--rounds 15]
"""

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from benchmarks.gauge import emit, machine, paired_ratio
from lookup_buffer.codec import torch_version, writable_bytes
from lookup_buffer.pipes import open_pipe
from lookup_buffer.protocol.auth import accept_handshake, connect

SIZES: Final = (1 << 10, 16 << 10, 1 << 20, 8 << 20, 64 << 20)
TIMEOUT_SECONDS: Final = 60.0


def serve(ports: Connection) -> None:
    """The other process: replies with the bytes until it receives None."""
    stored = torch.ones(max(SIZES), dtype=torch.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener, open_pipe(
        "tcp://127.0.0.1:0", listen=True
    ) as pipe:  # fmt: skip
        ports.send((listener.getsockname()[1], pipe.uri))
        answering = threading.Thread(target=_answer, args=(listener, stored), daemon=True)
        answering.start()
        while (asked := pipe.recv_tensor(timeout=TIMEOUT_SECONDS)) is not None:
            pipe.send_tensor(stored[: int(asked)], f"answer-{int(asked)}")
        answering.join()


def _answer(listener: socket.socket, stored: torch.Tensor) -> None:
    stream, _ = listener.accept()
    with accept_handshake(stream, token=None, timeout=TIMEOUT_SECONDS) as link:
        while nbytes := link.recv_header(TIMEOUT_SECONDS).header["nbytes"]:
            answer = {"status": "ok", "nbytes": nbytes}
            link.send(answer, writable_bytes(stored)[:nbytes], timeout=TIMEOUT_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    port, uri = ours.recv()
    results = {}
    with (
        open_pipe(uri) as pipe,
        connect("127.0.0.1", port, token=None, timeout=TIMEOUT_SECONDS) as link,
    ):

        def by_link(place: torch.Tensor) -> int:
            link.send({"op": "get", "nbytes": place.nbytes}, timeout=TIMEOUT_SECONDS)
            link.recv_header(TIMEOUT_SECONDS)
            hasher = xxh3_64()
            link.recv_into(writable_bytes(place), timeout=TIMEOUT_SECONDS, hasher=hasher)
            return hasher.intdigest()

        def by_pipe(place: torch.Tensor) -> int:
            pipe.send_tensor(torch.tensor(place.nbytes))
            pipe.recv_tensor(f"answer-{place.nbytes}", timeout=TIMEOUT_SECONDS, out=place)
            return xxh3_64_intdigest(writable_bytes(place))

        for nbytes in SIZES:
            place = torch.zeros(nbytes, dtype=torch.uint8)
            seconds: dict[str, list[float]] = {"link": [], "pipe": []}
            for number in range(rounds + 1):
                for name, fetch in (("link", by_link), ("pipe", by_pipe)):
                    began = time.perf_counter()
                    checksum = fetch(place)
                    spent = time.perf_counter() - began
                    assert checksum == xxh3_64_intdigest(bytes(b"\1" * nbytes)), "other bytes"
                    if number:  # the first is to warm up
                        seconds[name].append(spent)
            results[nbytes] = {
                **{f"{n}_us": round(statistics.median(s) * 1e6, 1) for n, s in seconds.items()},
                "pipe_over_link": paired_ratio(seconds["pipe"], seconds["link"]),
            }
        pipe.send_tensor(None)
        link.send({"op": "get", "nbytes": 0}, timeout=TIMEOUT_SECONDS)
    process.join(TIMEOUT_SECONDS)
    about: dict[str, Any] = {"rounds": rounds, "torch": torch_version(), **machine()}
    emit({"benchmark": "pipe_fetch", **about, "results": results})


if __name__ == "__main__":
    main()
