"""P2pNcclEngine: each defect that was found, and that ours has it not.

 1. a key that does not match is a hang: test_a_key_that_nobody_sends_costs_its_timeout
 2. addresses are read out of keys: test_nothing_is_read_out_of_a_key
 3. one peer that stops wedges all: test_a_peer_that_stops_in_the_middle_holds_up_no_other
 4. an exhausted pool ends the listener: test_no_room_ends_nothing
 5. waiters miss their wake-up: test_each_of_many_waiters_is_woken_by_his_own
 6. the gauge goes down with each read, and leaks: test_the_gauge_counts_each_message_once
 7. two that connect at once race: test_both_ends_make_their_communicator_at_once
 8. "sent" is an empty queue: test_an_end_waits_for_what_was_received_not_for_what_went_out
 9. close joins threads that never end: test_close_is_bounded_whatever_the_peer_does
10. a send to a peer that dies hangs: test_a_send_to_a_peer_that_dies_in_the_middle_ends
11. what is too large becomes a None: test_what_is_too_large_is_nothing_to_its_receiver
12. what is missing is a None: test_rivals, 8
13. gigabytes are pinned at the start: test_carrier,
    test_a_large_memory_is_not_taken_at_once

Not a pipe's: request ids that differ between engines (the connector shares by content), one tensor
parallel size on both sides (it has none). A deadlock that was seen on one kind of GPU is not tried.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from contract_pipe import (
    LARGE,
    SHORT_SECONDS,
    SMALL,
    SOON_SECONDS,
    Ends,
    MakeEnds,
    Threads,
    block,
    closing,
    ends,
    make_ends,
    same,
    threads,
)
from lookup_buffer.codec import Value
from lookup_buffer.errors import BufferFull, LookupTimeout, PipeBroken, TensorTooLarge
from lookup_buffer.pipes import KVPipe, PipeLimits, open_pipe
from raw_ends import RawEnd, offer

__all__ = ["closing", "ends", "make_ends", "threads"]


def test_a_key_that_nobody_sends_costs_its_timeout(ends: Ends) -> None:
    a, b = ends
    a.send_tensor(block(SMALL), "request-1a2b3c4d#layer")
    started = time.monotonic()
    with pytest.raises(LookupTimeout):
        b.recv_tensor("request-5e6f7a8b#layer", timeout=0.2)
    assert 0.2 <= time.monotonic() - started < SOON_SECONDS
    assert same(b.recv_tensor("request-1a2b3c4d#layer", timeout=SOON_SECONDS), block(SMALL))


def test_nothing_is_read_out_of_a_key(ends: Ends) -> None:
    a, b = ends
    for key in ("___prefill_addr_h:1___decode_addr_h:2_x#l", "chatcmpl-1", "#", "::", "0.0.0.0:x"):
        a.send_tensor(block(SMALL), key)
        assert same(b.recv_tensor(key, timeout=SOON_SECONDS), block(SMALL))


def test_a_peer_that_stops_in_the_middle_holds_up_no_other(
    closing: ExitStack, threads: Threads
) -> None:
    pipe = open_pipe("tcp://127.0.0.1:0", listen=True)
    closing.callback(pipe.abort)
    other = closing.enter_context(open_pipe(pipe.uri))
    with RawEnd(pipe) as stopped:
        stopped.say(offer(1, b"stopped", 64 * LARGE))
        waiting = threads.call(pipe.recv_tensor, "stopped")
        assert stopped.heard() == ["pull", 1]
        for number in range(5):
            other.send_tensor(block(LARGE, number), "k")
            assert same(pipe.recv_tensor("k", timeout=SOON_SECONDS), block(LARGE, number))
        assert not waiting.done()
        pipe.abort()
        with pytest.raises(PipeBroken):
            waiting.result(SOON_SECONDS)


def test_no_room_ends_nothing(make_ends: MakeEnds) -> None:
    a, b = make_ends(PipeLimits(buffer_bytes=4 * LARGE))
    for _ in range(2):
        for number in range(4):
            a.send_tensor(block(LARGE, number), str(number))
        with pytest.raises(BufferFull):
            a.send_tensor(None, timeout=SHORT_SECONDS)
        with pytest.raises(TensorTooLarge):
            a.send_tensor(block(4 * LARGE + 1))
        for number in (1, 3):
            assert same(b.recv_tensor(str(number), timeout=SOON_SECONDS), block(LARGE, number))
        a.send_tensor(block(2 * LARGE, 9), "9", timeout=SOON_SECONDS)  # room in pieces
        for key, tensor in (
            ("9", block(2 * LARGE, 9)),
            ("0", block(LARGE)),
            ("2", block(LARGE, 2)),
        ):
            assert same(b.recv_tensor(key, timeout=SOON_SECONDS), tensor)


def test_each_of_many_waiters_is_woken_by_his_own(ends: Ends, threads: Threads) -> None:
    a, b = ends
    waiting = [threads.call(b.recv_tensor, f"k{n}", timeout=SOON_SECONDS) for n in range(12)]
    for n in reversed(range(12)):
        a.send_tensor(torch.tensor(n), f"k{n}")
    assert [int(one.result(SOON_SECONDS)) for one in waiting] == list(range(12))


def test_the_gauge_counts_each_message_once(make_ends: MakeEnds) -> None:
    a, b = make_ends(PipeLimits(buffer_bytes=3 * LARGE))
    a.send_tensor(block(LARGE), "read twice")
    a.send_tensor(block(LARGE), "never read")
    b.recv_tensor("read twice", timeout=SOON_SECONDS)
    with pytest.raises(LookupTimeout):
        b.recv_tensor("read twice", timeout=SHORT_SECONDS)
    assert _soon(lambda: a.used_bytes == LARGE)
    with pytest.raises(BufferFull):
        a.send_tensor(block(3 * LARGE), "given up", timeout=SHORT_SECONDS)
    assert a.used_bytes == LARGE
    a.abort()
    assert a.used_bytes == 0


def test_both_ends_make_their_communicator_at_once(closing: ExitStack, threads: Threads) -> None:
    for _ in range(5):
        a = closing.enter_context(open_pipe("gloo://127.0.0.1:0", listen=True))
        b = closing.enter_context(open_pipe(a.uri))
        together = threading.Barrier(2)

        def receive(end: KVPipe, together: threading.Barrier = together) -> Value:
            together.wait(SOON_SECONDS)
            return end.recv_tensor(timeout=SOON_SECONDS)

        a.send_tensor(block(LARGE, 1))
        b.send_tensor(block(LARGE, 2))
        calls = [threads.call(receive, end) for end in (a, b)]
        assert same(calls[0].result(SOON_SECONDS), block(LARGE, 2))
        assert same(calls[1].result(SOON_SECONDS), block(LARGE, 1))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_an_end_waits_for_what_was_received_not_for_what_went_out(
    closing: ExitStack, threads: Threads, nbytes: int
) -> None:
    a = open_pipe("tcp://127.0.0.1:0", listen=True)
    b = closing.enter_context(open_pipe(a.uri))
    b.send_tensor(None)
    a.recv_tensor(timeout=SOON_SECONDS)
    a.send_tensor(block(nbytes))
    ending = threads.call(a.close)
    time.sleep(2 * SHORT_SECONDS)  # long after it has gone out
    assert not ending.done()
    assert same(b.recv_tensor(timeout=SOON_SECONDS), block(nbytes))
    ending.result(SOON_SECONDS)


def test_close_is_bounded_whatever_the_peer_does() -> None:
    a = open_pipe("tcp://127.0.0.1:0", listen=True, limits=PipeLimits(linger_seconds=0.1))
    with RawEnd(a) as raw:
        raw.say(offer(1, None, 4), b"abcd")
        a.recv_tensor(timeout=SOON_SECONDS)
        a.send_tensor(block(64 * LARGE))  # which nobody asks for
        started = time.monotonic()
        a.close()
        assert time.monotonic() - started < SOON_SECONDS


def test_a_send_to_a_peer_that_dies_in_the_middle_ends(
    closing: ExitStack, threads: Threads
) -> None:
    a = open_pipe("tcp://127.0.0.1:0", listen=True, limits=PipeLimits(64 * LARGE))
    closing.callback(a.abort)
    with RawEnd(a) as raw:
        a.send_tensor(block(LARGE))
        sending = threads.call(a.send_tensor, block(64 * LARGE), "k")
        assert [raw.heard()[:2] for _ in range(2)] == [["offer", 1], ["offer", 2]]
        raw.say(["pull", 2])
        time.sleep(2 * SHORT_SECONDS)  # it is on its way, out of the sender's own memory
        assert not sending.done()
    with pytest.raises(PipeBroken):
        sending.result(SOON_SECONDS)


def test_what_is_too_large_is_nothing_to_its_receiver(make_ends: MakeEnds) -> None:
    a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
    with pytest.raises(TensorTooLarge):
        a.send_tensor(block(LARGE + 1), "k")
    with pytest.raises(LookupTimeout):
        b.recv_tensor("k", timeout=SHORT_SECONDS)


def _soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
