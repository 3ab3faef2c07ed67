"""FrameReader: a waiting caller reads itself, and messages for others delay no caller."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from contract_pipe import LARGE, SHORT_SECONDS, SMALL, SOON_SECONDS, Threads, same, threads
from lookup_buffer.codec import writable_bytes
from lookup_buffer.errors import LookupTimeout, PipeBroken
from lookup_buffer.pipes import KVPipe, PipeLimits, open_pipe
from lookup_buffer.pipes.io import FLUSH_SECONDS, FrameReader
from lookup_buffer.protocol.framing import encode_frame
from payloads import block
from raw_ends import RawEnd, offer

__all__ = ["threads"]
SILENCE_SECONDS = 60.0
"""So long that only a caller's own deadline can end its wait."""


@pytest.fixture
def pipe() -> Iterator[KVPipe]:
    limits = PipeLimits(silence_seconds=SILENCE_SECONDS)
    pipe = open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits)
    yield pipe
    pipe.abort()


@pytest.fixture
def raw(pipe: KVPipe) -> Iterator[RawEnd]:
    with RawEnd(pipe) as raw:
        raw.send(["offer", 1, b"met", offer(1, b"", 3)[3]], b"abc")
        pipe.recv_tensor("met", timeout=SOON_SECONDS)
        yield raw


class Interrupted(Exception):
    pass


def interrupt(_: int, __: FrameType | None) -> None:
    raise Interrupted


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


WHOLE = encode_frame(offer(2, b"k", SMALL), SMALL) + bytes(block(SMALL).numpy())


@pytest.mark.parametrize("cut", [1, 20, 60, len(WHOLE) - SMALL, len(WHOLE) - 1])
def test_an_incomplete_frame_does_not_delay_a_timeout(
    pipe: KVPipe, raw: RawEnd, threads: Threads, cut: int
) -> None:
    waiting = threads.call(pipe.recv_tensor, "k", timeout=10 * SHORT_SECONDS)
    raw.send_bytes(WHOLE[:cut])
    with pytest.raises(LookupTimeout):
        waiting.result(SOON_SECONDS)
    raw.send_bytes(WHOLE[cut:])
    assert same(pipe.recv_tensor("k", timeout=SOON_SECONDS), block(SMALL))


def test_the_bytes_of_another_message_do_not_delay_a_timeout(
    pipe: KVPipe, raw: RawEnd, threads: Threads
) -> None:
    raw.send(offer(2, b"large", 64 * LARGE))
    short = threads.call(pipe.recv_tensor, "k", timeout=20 * SHORT_SECONDS)
    large = threads.call(pipe.recv_tensor, "large")
    assert raw.receive()[0] == "received", "for the message of the fixture"
    assert raw.receive() == ["pull", 2]
    raw.send_bytes(encode_frame(["data", 2], 64 * LARGE) + b"x" * 32 * LARGE)
    with pytest.raises(LookupTimeout):
        short.result(SOON_SECONDS)
    raw.send_bytes(b"x" * 32 * LARGE)
    assert large.result(SOON_SECONDS)[-1] == ord("x")


def test_a_caller_with_its_message_leaves_later_frames_to_others(
    pipe: KVPipe, raw: RawEnd, threads: Threads
) -> None:
    """Also frames that arrived in one piece with it."""
    first = threads.call(pipe.recv_tensor, "first", timeout=SOON_SECONDS)
    second = threads.call(pipe.recv_tensor, "second", timeout=SOON_SECONDS)
    whole = b""
    for number, key in enumerate((b"first", b"second", b"third"), 2):
        whole += encode_frame(offer(number, key, SMALL), SMALL) + bytes(SMALL)
    raw.send_bytes(whole)
    for one in (first, second):
        assert not one.result(SOON_SECONDS).any()
    assert pipe.recv_tensor("third", timeout=SOON_SECONDS) is not None


def test_an_interrupted_wait_leaves_the_pipe_usable(
    pipe: KVPipe, raw: RawEnd, interruptible: None
) -> None:
    with pytest.raises(Interrupted):
        signal.setitimer(signal.ITIMER_REAL, 4 * SHORT_SECONDS)
        pipe.recv_tensor("k")
    raw.send(["offer", 2, b"k", offer(2, b"k", SMALL)[3]], bytes(block(SMALL).numpy()))
    assert same(pipe.recv_tensor("k", timeout=SOON_SECONDS), block(SMALL))


def test_an_interrupt_within_a_payload_ends_the_pipe_unless_the_thread_reads_it(
    pipe: KVPipe, raw: RawEnd, threads: Threads, interruptible: None
) -> None:
    """If the caller read, the position in the stream is unknown: PipeBroken, without a wait."""
    out = torch.zeros(LARGE, dtype=torch.uint8)

    def answer() -> None:
        while raw.receive() != ["pull", 2]:
            pass
        raw.send_bytes(encode_frame(["data", 2], LARGE) + b"x" * (LARGE // 2))
        while not out[LARGE // 4]:
            time.sleep(SHORT_SECONDS)
        os.kill(os.getpid(), signal.SIGALRM)

    raw.send(offer(2, b"k", LARGE))
    answering = threads.call(answer)
    with pytest.raises(Interrupted):
        pipe.recv_tensor("k", out=out)
    answering.result(SOON_SECONDS)
    try:
        pipe.recv_tensor("other", timeout=SHORT_SECONDS)
    except PipeBroken:
        return
    except LookupTimeout:
        raw.send_bytes(b"x" * (LARGE // 2))
        raw.send(["offer", 3, b"other", offer(3, b"other", SMALL)[3]], bytes(SMALL))
        received = pipe.recv_tensor("other", timeout=SOON_SECONDS)
        assert received is not None
        assert received.numel() == SMALL


@pytest.mark.parametrize("waits", [False, True])
def test_a_receipt_is_sent_without_another_frame(
    pipe: KVPipe, raw: RawEnd, threads: Threads, waits: bool
) -> None:
    raw.send(["offer", 2, b"k", offer(2, b"k", SMALL)[3]], bytes(SMALL))
    pipe.recv_tensor("k", timeout=SOON_SECONDS)
    if waits:
        threads.call(pipe.recv_tensor, "later", timeout=2 * SHORT_SECONDS)
    told: list[int] = []
    while 2 not in told:
        word, *numbers = raw.receive()
        assert word == "received"
        told += numbers


def offered(raw: RawEnd) -> int:
    """The number of the message that is offered next."""
    while (header := raw.receive())[0] != "offer":
        pass
    number: int = header[1]
    return number


def pull(raw: RawEnd, number: int, tensor: torch.Tensor) -> None:
    """The other end takes this tensor, for which this one has to read."""
    raw.send(["pull", number])
    while (frame := raw.link.recv_header(SOON_SECONDS)).header[0] != "data":
        pass
    received = torch.empty(tensor.numel(), dtype=torch.uint8)
    raw.link.recv_into(writable_bytes(received), timeout=SOON_SECONDS)
    assert frame.header == ["data", number]
    assert same(received, tensor)


def test_frames_are_read_while_no_caller_waits(pipe: KVPipe, raw: RawEnd) -> None:
    """Right after a caller has read, when it may soon read again, and later."""
    for number, seconds in enumerate((0.0, SHORT_SECONDS, 4 * SHORT_SECONDS)):
        pipe.send_tensor(block(LARGE, number))
        time.sleep(seconds)
        pull(raw, offered(raw), block(LARGE, number))


def test_frames_are_read_after_a_caller_that_stood_still(
    pipe: KVPipe, raw: RawEnd, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its last statements, while the time came at which the thread reads again."""
    usual = FrameReader.schedule_flush

    def slowly(reader: FrameReader) -> bool:
        scheduled = usual(reader)
        if not threading.current_thread().name.startswith("lb-pipe"):
            time.sleep(20 * FLUSH_SECONDS)
        return scheduled

    monkeypatch.setattr(FrameReader, "schedule_flush", slowly)
    pipe.send_tensor(block(LARGE))
    number = offered(raw)
    waiting = threads.call(pipe.recv_tensor, "k", timeout=SOON_SECONDS)
    time.sleep(SHORT_SECONDS)
    raw.send(offer(2, b"k", LARGE))
    assert raw.receive() == ["pull", 2]
    time.sleep(SHORT_SECONDS)
    raw.send(["data", 2], bytes(LARGE))
    waiting.result(SOON_SECONDS)
    time.sleep(SHORT_SECONDS)
    pull(raw, number, block(LARGE))


def test_a_waiting_receive_gets_a_message_of_a_second_end(threads: Threads) -> None:
    with (
        open_pipe("tcp://127.0.0.1:0", listen=True) as pipe,
        open_pipe(pipe.uri) as first,
    ):
        first.send_tensor(None)
        assert pipe.recv_tensor(timeout=SOON_SECONDS) is None
        waiting = threads.call(pipe.recv_tensor, "k", timeout=SOON_SECONDS)
        with open_pipe(pipe.uri) as second:
            second.send_tensor(block(SMALL), "k")
            assert same(waiting.result(SOON_SECONDS), block(SMALL))


def test_many_concurrent_receives_each_get_their_message(threads: Threads) -> None:
    """A caller passes on the read lock in time."""
    with (
        open_pipe("tcp://127.0.0.1:0", listen=True) as pipe,
        open_pipe(pipe.uri) as other,
    ):
        sizes = (0, SMALL, LARGE)

        def receive(who: int) -> bool:
            return all(
                same(pipe.recv_tensor(f"{who}-{n}", timeout=60.0), block(sizes[n % 3], n))
                for n in range(30)
            )

        receiving = [threads.call(receive, who) for who in range(6)]
        sent = threading.Barrier(3)

        def send(part: int) -> None:
            sent.wait()
            for n in range(30):
                for who in range(part, 6, 3):
                    other.send_tensor(block(sizes[n % 3], n), f"{who}-{n}")

        sending = [threads.call(send, part) for part in range(3)]
        for one in (*sending, *receiving):
            assert one.result(60.0) is not False
