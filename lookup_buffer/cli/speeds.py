"""Measure how fast bytes come from another process: by pipes, by a bare socket, by memcpy.

`lookup-buffer bench` and `benchmarks/pipes.py` measure with this module; it needs torch. The
methods are timed in turns, round by round. The other process runs `serve`, by
`python -m lookup_buffer.cli.speeds URI BARE NBYTES_MAX`. It ends when its connections end.
"""

import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Self
from urllib.parse import urlsplit

import torch

from lookup_buffer.codec import writable_bytes
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.inspection.access import CommandError, ExitCode
from lookup_buffer.pipes import KVPipe, open_pipe
from lookup_buffer.shm.memory import copy_bytes

TIMEOUT_SECONDS: Final = 60.0
START_SECONDS: Final = 60.0
"""Limit for the start of the other process, which imports torch."""
MESSAGES_MAX: Final = 100
ROUND_BYTES: Final = 16 << 20
ROUNDS_MIN: Final = 3
LATENCY_SECONDS: Final = 100e-6
"""Allowance beyond the copies: for messages and for waking threads."""
TOLERANCE: Final = 1.5
"""A pipe is called slow above this multiple of the expected time: hosts and their load differ."""
REQUEST: Final = struct.Struct(">Q")
"""A request on the bare socket: the size of the answer in bytes."""
BareAddress = str | tuple[str, int]
"""The address of the bare socket: the path of a unix socket, or (host, port) for TCP."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The result for one pipe and one message size. Seconds are medians, ratios are of speeds."""

    pipe: str
    nbytes: int
    seconds: float
    memcpy_seconds: float
    bare_seconds: float | None
    over_memcpy: float
    over_bare: float | None
    rounds: int

    @property
    def expected_seconds(self) -> float | None:
        """Most seconds that a message should take; None if there is no expectation.

        Derived from measurements on the machine where the pipes were developed: in memory two
        copies, in and out, at 0.8 of memcpy's speed; over TCP 0.9 of a bare socket's speed.
        """
        if self.pipe in ("inproc", "shm"):
            return 2 * self.memcpy_seconds / 0.8 + LATENCY_SECONDS
        if self.pipe == "tcp" and self.bare_seconds is not None:
            return self.bare_seconds / 0.9 + LATENCY_SECONDS
        return None

    @property
    def verdict(self) -> str:
        expected = self.expected_seconds
        if expected is None:
            return ""
        return "ok" if self.seconds <= TOLERANCE * expected else "slow"

    def as_json(self) -> dict[str, Any]:
        facts = {**asdict(self), "expected_seconds": self.expected_seconds}
        return {**facts, "slow": self.verdict == "slow"}


class PipeOpener:
    """Opens the pipes to measure, one after the other, with a thread or process that answers."""

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._directory = tempfile.TemporaryDirectory(prefix="lb-bench-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()

    @contextmanager
    def opened(self, pipe: str) -> Iterator["PipeBenchmark"]:
        """`pipe`: inproc, shm, tcp, or the URL of a server for the pipe `redis`.

        Raises:
            CommandError: the other process does not start.
            LookupBufferError, StoreError: see `open_pipe`.
        """
        unique = f"lb-bench-{os.getpid()}"
        if pipe == "inproc":
            with self._threads(f"inproc://{unique}") as benchmark:
                yield benchmark
            return
        path = f"{self._directory.name}/bare"
        uri, listener, bare = {
            "shm": (f"shm://{self._directory.name}/pipe", socket.AF_UNIX, path),
            "tcp": ("tcp://127.0.0.1:0", socket.AF_INET, ("127.0.0.1", 0)),
        }.get(pipe, (_with_name(pipe, unique), socket.AF_INET, ("127.0.0.1", 0)))
        name = pipe if pipe in ("shm", "tcp") else "redis"
        with self._processes(name, uri, listener, bare) as benchmark:
            yield benchmark

    @contextmanager
    def _threads(self, uri: str) -> Iterator["PipeBenchmark"]:
        payload = torch.zeros(self._nbytes_max, dtype=torch.uint8)
        with open_pipe(uri, listen=True) as here, open_pipe(uri) as there:
            thread = threading.Thread(target=answer_requests, args=(there, payload), daemon=True)
            thread.start()
            yield PipeBenchmark("inproc", here, None)
            here.send_tensor(None)
            thread.join(START_SECONDS)

    @contextmanager
    def _processes(
        self, name: str, uri: str, family: int, bare_address: Any
    ) -> Iterator["PipeBenchmark"]:
        with ExitStack() as opened:
            pipe = opened.enter_context(open_pipe(uri, listen=True))
            listener = opened.enter_context(socket.socket(family))
            listener.bind(bare_address)
            listener.listen()
            listener.settimeout(0.2)
            address = listener.getsockname()
            shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
            process = opened.enter_context(self._answering_process(pipe.uri, shown))
            bare = opened.enter_context(_accepted(listener, process))
            if family == socket.AF_INET:
                bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield PipeBenchmark(name, pipe, bare)
            pipe.send_tensor(None)

    @contextmanager
    def _answering_process(self, uri: str, bare: str) -> Iterator["subprocess.Popen[bytes]"]:
        process = subprocess.Popen(
            # -P: a folder named `store` in the working directory must not shadow our package.
            [sys.executable, "-P", "-m", "lookup_buffer.cli.speeds", uri, bare,
             str(self._nbytes_max)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends that one
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


class PipeBenchmark:
    """One open pipe. A thread or process at its remote end answers requests."""

    def __init__(self, name: str, pipe: KVPipe, bare: socket.socket | None) -> None:
        self.name = name
        self._pipe = pipe
        self._bare = bare

    def measure(self, nbytes: int, seconds: float) -> Speed:
        """Measure for `seconds`, and for ROUNDS_MIN rounds at least.

        Each round times every method once, so that a slow moment affects all of them alike.
        """
        timer = TransferTimer(self._pipe, self._bare, nbytes, ROUND_BYTES)
        timed: dict[str, Callable[[], float]] = {"memcpy": timer.memcpy, "ask": timer.ask}
        if self._bare is not None:
            timed["bare"] = timer.bare
        spent: dict[str, list[float]] = {name: [] for name in timed}
        for method in timed.values():
            method()  # warm-up
        ends_at = time.monotonic() + seconds
        while len(spent["ask"]) < ROUNDS_MIN or time.monotonic() < ends_at:
            for name, method in timed.items():
                spent[name].append(method())
        bare = spent.get("bare")
        return Speed(
            self.name, nbytes,
            statistics.median(spent["ask"]),
            statistics.median(spent["memcpy"]),
            statistics.median(bare) if bare else None,
            _ratio(spent["memcpy"], spent["ask"]),
            _ratio(bare, spent["ask"]) if bare else None,
            len(spent["ask"]),
        )  # fmt: skip


class TransferTimer:
    """Times messages of `nbytes` by each method of transfer; returns seconds per message.

    `bare` needs the bare socket. One call moves `round_bytes` in all, in 2 to MESSAGES_MAX
    messages. As many bytes are kept in memory as the source of copies.
    """

    def __init__(
        self, pipe: KVPipe, bare: socket.socket | None, nbytes: int, round_bytes: int
    ) -> None:
        self._pipe = pipe
        self._bare = bare
        self._nbytes = nbytes
        self._messages = max(2, min(MESSAGES_MAX, round_bytes // nbytes))
        self._sources = torch.ones((self._messages, nbytes), dtype=torch.uint8)
        self._target = torch.ones(nbytes, dtype=torch.uint8)

    def memcpy(self) -> float:
        """One copy of bytes that no CPU cache holds, into memory that was touched before."""
        return self._elapsed(lambda: self._copy(lambda: self._target)) / self._messages

    def memcpy_new(self) -> float:
        """As `memcpy`, into a new tensor."""
        new = partial(torch.empty, self._nbytes, dtype=torch.uint8)
        return self._elapsed(lambda: self._copy(new)) / self._messages

    def bare(self) -> float:
        """A request; the answer by `sendall`, received by `recv_into` of the full remainder."""
        return self._elapsed(self._repeated(self._fetch_bare)) / self._messages

    def ask(self) -> float:
        """A request through the pipe; its answer is sent then, and received by key."""
        return self._elapsed(self._repeated(lambda: self._fetch(self._target))) / self._messages

    def ask_new(self) -> float:
        """As `ask`, into a new tensor."""
        return self._elapsed(self._repeated(lambda: self._fetch(None))) / self._messages

    def receive(self) -> float:
        """Receive messages that were sent before: by key, last key first."""
        return self._received(self._target)

    def receive_new(self) -> float:
        """As `receive`, into a new tensor."""
        return self._received(None)

    def _copy(self, targets: Callable[[], torch.Tensor]) -> None:
        for source in self._sources:
            target = targets()
            copy_bytes(target.data_ptr(), source.data_ptr(), self._nbytes)
            del target  # before the next allocation, which may then reuse the memory

    def _received(self, out: torch.Tensor | None) -> float:
        self._pipe.send_tensor(torch.tensor([self._nbytes, self._messages]))
        self._pipe.recv_tensor("all sent", timeout=TIMEOUT_SECONDS)
        keys = [f"answer-{number}" for number in reversed(range(self._messages))]
        return self._elapsed(lambda: self._receive(keys, out)) / len(keys)

    def _receive(self, keys: list[str], out: torch.Tensor | None) -> None:
        for key in keys:
            self._pipe.recv_tensor(key, timeout=TIMEOUT_SECONDS, out=out)

    def _fetch_bare(self) -> None:
        assert self._bare is not None
        buffer = writable_bytes(self._target)
        self._bare.sendall(REQUEST.pack(self._nbytes))
        got = 0
        while got < self._nbytes:
            count = self._bare.recv_into(buffer[got:])
            if not count:
                raise ConnectionResetError("the other process ended")
            got += count

    def _fetch(self, out: torch.Tensor | None) -> None:
        self._pipe.send_tensor(torch.tensor([self._nbytes, 1]))
        self._pipe.recv_tensor("answer-0", timeout=TIMEOUT_SECONDS, out=out)

    def _repeated(self, action: Callable[[], object]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(self._messages):
                action()

        return repeat

    def _elapsed(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start


def _ratio(theirs: list[float], ours: list[float]) -> float:
    """Three significant digits: a small message on a busy machine takes thousands of copies."""
    return float(f"{statistics.median(a / b for a, b in zip(theirs, ours, strict=True)):.3g}")


def _accepted(listener: socket.socket, process: "subprocess.Popen[bytes]") -> socket.socket:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return listener.accept()[0]
        except TimeoutError:
            continue
    raise CommandError(
        "the process that answers the benchmark did not start; run the command again",
        ExitCode.UNREACHABLE,
    )


def _with_name(url: str, name: str) -> str:
    """The URL of the pipe called `name` by the server at `url`."""
    return f"{url}{'&' if urlsplit(url).query else '?'}pipe={name}"


def serve(uri: str, bare: BareAddress, nbytes_max: int) -> None:
    """Answer requests on the pipe and on the bare socket, in the other process, until they end."""
    payload = torch.zeros(nbytes_max, dtype=torch.uint8)
    stream = bare_connection(bare)

    def answer_bare() -> None:
        raw = writable_bytes(payload)
        while request := stream.recv(REQUEST.size, socket.MSG_WAITALL):
            stream.sendall(raw[: REQUEST.unpack(request)[0]])

    threading.Thread(target=answer_bare, daemon=True).start()
    with open_pipe(uri) as pipe:
        answer_requests(pipe, payload)


def bare_connection(address: BareAddress) -> socket.socket:
    if isinstance(address, str):
        end = socket.socket(socket.AF_UNIX)
        end.connect(address)
        return end
    end = socket.create_connection(address)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def answer_requests(pipe: KVPipe, payload: torch.Tensor) -> None:
    """Send the requested messages through the pipe until a None is received.

    A request is a tensor [size in bytes, number of messages]; their keys are `answer-0`, ….
    """
    while (request := pipe.recv_tensor()) is not None:
        nbytes, count = request.tolist()
        for number in range(count):
            pipe.send_tensor(payload[:nbytes], f"answer-{number}")
        if count > 1:
            pipe.send_tensor(None, "all sent")


def main() -> None:
    uri, bare, nbytes_max = sys.argv[1:]
    host, _, port = bare.rpartition(":")
    try:
        serve(uri, (host, int(port)) if host else bare, int(nbytes_max))
    except (LookupBufferError, OSError):
        sys.exit(1)  # the measuring process has ended, or reports the error


if __name__ == "__main__":
    main()
