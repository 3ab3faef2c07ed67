"""FrameWriter: every frame is written once and in order, on any thread."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lookup_buffer.pipes.io import FrameWriter, Outgoing
from lookup_buffer.protocol.stream import FramedSocket

if TYPE_CHECKING:
    from lookup_buffer.errors import LookupBufferError

SECONDS = 5.0
BULK = bytes(1 << 20)


class Written:
    """A writer and its thread, and the headers that the other end has received, without beats."""

    def __init__(self) -> None:
        self.link, self._other = (FramedSocket(stream) for stream in socket.socketpair())
        self.lock = threading.RLock()
        self.failures: list[LookupBufferError] = []
        self.received: list[Any] = []
        self.writer = FrameWriter(
            self.link, self.lock, lambda: None, lambda *_: None, self.failures.append, SECONDS
        )
        self.threads = [threading.Thread(target=one) for one in (self.writer.run, self._receive)]
        for thread in self.threads:
            thread.start()

    def _receive(self) -> None:
        while (frame := self._other.recv_header(SECONDS)).header != ["bye"]:
            if frame.payload_nbytes:
                self._other.recv_into(memoryview(bytearray(frame.payload_nbytes)), timeout=SECONDS)
            if frame.header != ["beat"]:
                self.received.append(frame.header)

    def end(self) -> None:
        with self.lock:
            self.writer.enqueue_for_thread(["bye"])
        for thread in self.threads:
            thread.join(SECONDS)
        self.link.close()
        self._other.close()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def written() -> Iterator[Written]:
    written = Written()
    yield written
    written.end()


def test_concurrent_writers_keep_their_own_order(hasty: None, written: Written) -> None:
    failures: list[BaseException] = []

    def write(sender: int) -> None:
        try:
            for number in range(300):
                with written.lock:
                    if sender == 0:  # as the reader thread does, which must not wait
                        out = Outgoing(None, memoryview(BULK), 0) if number % 20 == 0 else None
                        written.writer.enqueue_for_thread(
                            ["data" if out else "gone", sender, number], out
                        )
                    else:
                        written.writer.enqueue(["received", sender, number])
                if sender:
                    written.writer.write()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + SECONDS
    while len(written.received) < 4 * 300 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not failures
    assert not written.failures
    for sender in range(4):
        assert [n for _, of, n in written.received if of == sender] == list(range(300))


class Turns:
    """A lock that calls `turn` before it is acquired for the `nth` time."""

    def __init__(self, nth: int, turn: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self._left = nth
        self._turn = turn
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._is_owned = self._lock._is_owned  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        self._left -= 1
        if not self._left:
            self._turn()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_writer_that_finds_another_frame_queued_writes_it(nth: int) -> None:
    ours, theirs = (FramedSocket(stream) for stream in socket.socketpair())
    lock: Any = Turns(nth, lambda: writer.enqueue(["received", 1]))
    writer = FrameWriter(ours, lock, lambda: None, lambda *_: None, lambda _: None, SECONDS)
    writer.write()
    if nth < 3:
        assert theirs.recv_header(SECONDS).header == ["received", 1]
    for link in (ours, theirs):
        link.close()


def test_writers_do_not_wait_for_an_end_that_does_not_read(written: Written) -> None:
    """The writer thread writes what the socket does not accept at once."""
    ours, theirs = socket.socketpair()
    link = FramedSocket(ours)
    lock = threading.RLock()
    failures: list[LookupBufferError] = []
    writer = FrameWriter(link, lock, lambda: None, lambda *_: None, failures.append, 60.0)
    started = time.monotonic()
    for number in range(100):
        with lock:
            writer.enqueue(["offer", number], Outgoing(None, memoryview(BULK)[: 64 << 10], 0))
        writer.write()
    assert time.monotonic() - started < 30.0
    assert not failures
    theirs.close()
    link.abort()
