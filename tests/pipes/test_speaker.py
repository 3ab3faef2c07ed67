"""The speaker: everything goes out once and in order, whoever writes it."""

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


class Spoken:
    """A speaker and its thread, and what the other end has heard but for beats."""

    def __init__(self) -> None:
        self.link, self._other = (FramedSocket(stream) for stream in socket.socketpair())
        self.lock = threading.RLock()
        self.failures: list[LookupBufferError] = []
        self.heard: list[Any] = []
        self.speaker = FrameWriter(
            self.link, self.lock, lambda: None, lambda *_: None, self.failures.append, SECONDS
        )
        self.threads = [threading.Thread(target=one) for one in (self.speaker.run, self._hear)]
        for thread in self.threads:
            thread.start()

    def _hear(self) -> None:
        while (frame := self._other.recv_header(SECONDS)).header != ["bye"]:
            if frame.payload_nbytes:
                self._other.recv_into(memoryview(bytearray(frame.payload_nbytes)), timeout=SECONDS)
            if frame.header != ["beat"]:
                self.heard.append(frame.header)

    def end(self) -> None:
        with self.lock:
            self.speaker.say(["bye"])
        for thread in self.threads:
            thread.join(SECONDS)
        self.link.close()
        self._other.close()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def spoken() -> Iterator[Spoken]:
    spoken = Spoken()
    yield spoken
    spoken.end()


def test_many_who_say_something_at_once_are_all_heard_in_their_order(
    hasty: None, spoken: Spoken
) -> None:
    failures: list[BaseException] = []

    def talk(who: int) -> None:
        try:
            for number in range(300):
                with spoken.lock:
                    if who == 0:  # as the reading thread does, that must not wait
                        out = Outgoing(None, memoryview(BULK), 0) if number % 20 == 0 else None
                        spoken.speaker.say(["data" if out else "gone", who, number], out)
                    else:
                        spoken.speaker.put(["received", who, number])
                if who:
                    spoken.speaker.write()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + SECONDS
    while len(spoken.heard) < 4 * 300 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not failures
    assert not spoken.failures
    for who in range(4):
        assert [n for _, of, n in spoken.heard if of == who] == list(range(300))


class Turns:
    """A lock at which somebody else has his turn before it is taken for the `nth` time."""

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
def test_who_finds_his_frame_written_and_another_there_writes_that(nth: int) -> None:
    ours, theirs = (FramedSocket(stream) for stream in socket.socketpair())
    lock: Any = Turns(nth, lambda: speaker.put(["received", 1]))
    speaker = FrameWriter(ours, lock, lambda: None, lambda *_: None, lambda _: None, SECONDS)
    speaker.write()
    if nth < 3:
        assert theirs.recv_header(SECONDS).header == ["received", 1]
    for link in (ours, theirs):
        link.close()


def test_nobody_waits_for_an_end_that_does_not_read(spoken: Spoken) -> None:
    """What it does not take at once is the thread's."""
    ours, theirs = socket.socketpair()
    link = FramedSocket(ours)
    lock = threading.RLock()
    failures: list[LookupBufferError] = []
    speaker = FrameWriter(link, lock, lambda: None, lambda *_: None, failures.append, SECONDS)
    started = time.monotonic()
    for number in range(100):
        with lock:
            speaker.put(["offer", number], Outgoing(None, memoryview(BULK)[: 64 << 10], 0))
        speaker.write()
    assert time.monotonic() - started < SECONDS / 2
    assert not failures
    theirs.close()
    link.abort()
