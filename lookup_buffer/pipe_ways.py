"""Ways to bring bytes from another process, to be timed side by side: pipes, a bare socket, memcpy.

`lookup-buffer bench` and `benchmarks/pipes.py` measure by them. The other process is `serve`, which
`python -m lookup_buffer.pipe_ways URI BARE` runs.
"""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from lookup_buffer.codec import writable_bytes
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.pipes import KVPipe, open_pipe
from lookup_buffer.shm.memory import copy_bytes

TIMEOUT_SECONDS: Final = 60.0
MESSAGES_MAX: Final = 100
SIZE: Final = struct.Struct(">Q")
BareAddress = str | tuple[str, int]
"""Of a unix socket, or of a TCP one."""


def bare_connection(address: BareAddress) -> socket.socket:
    if isinstance(address, str):
        end = socket.socket(socket.AF_UNIX)
        end.connect(address)
        return end
    end = socket.create_connection(address)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def serve(uri: str, bare: BareAddress, nbytes_max: int) -> None:
    """The other process: answers over the pipe and over the bare socket until they end."""
    payload = torch.zeros(nbytes_max, dtype=torch.uint8)
    stream = bare_connection(bare)

    def answer_bare() -> None:
        raw = writable_bytes(payload)
        while request := stream.recv(SIZE.size, socket.MSG_WAITALL):
            stream.sendall(raw[: SIZE.unpack(request)[0]])

    threading.Thread(target=answer_bare, daemon=True).start()
    with open_pipe(uri) as pipe:
        answer(pipe, payload)


def answer(pipe: KVPipe, payload: torch.Tensor) -> None:
    """Send what is asked for through the pipe, until a None comes."""
    while (asked := pipe.recv_tensor()) is not None:
        nbytes, count = asked.tolist()
        for number in range(count):
            pipe.send_tensor(payload[:nbytes], f"answer-{number}")
        if count > 1:
            pipe.send_tensor(None, "all sent")


class Ways:
    """What is measured with messages of one size; each gives seconds per message.

    Without a bare socket there is no `bare`. `round_bytes` is what one call brings altogether, and
    what is kept in memory to copy from.
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
        """One copy of bytes that no cache holds into memory that was touched before."""
        return self._once(lambda: self._copy(lambda: self._target)) / self._messages

    def memcpy_new(self) -> float:
        """The same into a new tensor."""
        new = partial(torch.empty, self._nbytes, dtype=torch.uint8)
        return self._once(lambda: self._copy(new)) / self._messages

    def bare(self) -> float:
        """One message asks, `sendall` answers, `recv_into` of the full remainder receives."""
        return self._once(self._repeated(self._fetch_bare)) / self._messages

    def ask(self) -> float:
        """A message asks through the pipe; the answer is sent then, and received by key."""
        return self._once(self._repeated(lambda: self._fetch(self._target))) / self._messages

    def ask_new(self) -> float:
        """The same into a new tensor."""
        return self._once(self._repeated(lambda: self._fetch(None))) / self._messages

    def receive(self) -> float:
        """What was sent before, by key, the last one first."""
        return self._received(self._target)

    def receive_new(self) -> float:
        """The same into a new tensor."""
        return self._received(None)

    def _copy(self, targets: Callable[[], torch.Tensor]) -> None:
        for source in self._sources:
            target = targets()
            copy_bytes(target.data_ptr(), source.data_ptr(), self._nbytes)
            del target  # before the next one is made: the allocator may use its memory again

    def _received(self, out: torch.Tensor | None) -> float:
        self._pipe.send_tensor(torch.tensor([self._nbytes, self._messages]))
        self._pipe.recv_tensor("all sent", timeout=TIMEOUT_SECONDS)
        keys = [f"answer-{number}" for number in reversed(range(self._messages))]
        return self._once(lambda: self._receive(keys, out)) / len(keys)

    def _receive(self, keys: list[str], out: torch.Tensor | None) -> None:
        for key in keys:
            self._pipe.recv_tensor(key, timeout=TIMEOUT_SECONDS, out=out)

    def _fetch_bare(self) -> None:
        assert self._bare is not None
        buffer = writable_bytes(self._target)
        self._bare.sendall(SIZE.pack(self._nbytes))
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

    def _once(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start


def main() -> None:
    uri, bare, nbytes_max = sys.argv[1:]
    host, _, port = bare.rpartition(":")
    try:
        serve(uri, (host, int(port)) if host else bare, int(nbytes_max))
    except (LookupBufferError, OSError):
        sys.exit(1)  # who asked has ended, or says why


if __name__ == "__main__":
    main()
