"""The contract of all pipes, what holds them up: budgets, deadlines, and how they end."""

import os
import threading
import time
from collections.abc import Callable

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
    same,
)
from lookup_buffer.errors import (
    BufferFull,
    Closed,
    CodecError,
    LookupTimeout,
    PipeBroken,
    PipeClosed,
    TensorTooLarge,
)
from lookup_buffer.pipes import PipeLimits
from payloads import block


class PipeLimitsContract:
    """Inherit it beside `PipeContract`."""

    @pytest.fixture
    def ends(self, make_ends: MakeEnds) -> Ends:
        return make_ends()

    # -- the budget

    def test_a_full_pipe_is_a_wait_with_a_deadline(
        self, make_ends: MakeEnds, threads: Threads
    ) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=2 * LARGE))
        a.send_tensor(block(LARGE, 1))
        a.send_tensor(block(LARGE, 2))
        with pytest.raises(BufferFull):
            a.send_tensor(block(LARGE, 3), timeout=SHORT_SECONDS)
        waiting = threads.call(a.send_tensor, block(LARGE, 4), timeout=SOON_SECONDS)
        assert not waiting.done()
        assert same(b.recv_tensor(), block(LARGE, 1))
        waiting.result(SOON_SECONDS)
        assert same(b.recv_tensor(), block(LARGE, 2))
        assert same(b.recv_tensor(), block(LARGE, 4)), "the third was not sent"

    def test_a_refused_send_is_never_received(self, make_ends: MakeEnds) -> None:
        """Nor is the next message mistaken for it in a receive with `out`."""
        a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
        tensor, out = block(SMALL, 3), torch.zeros_like(block(SMALL, 3))
        a.send_tensor(tensor, "another")
        for _ in range(100):
            with pytest.raises(BufferFull):
                a.send_tensor(block(LARGE, 2), "key", timeout=0.0)
            a.send_tensor(tensor, "key", timeout=SOON_SECONDS)
            assert b.recv_tensor("key", timeout=SOON_SECONDS, out=out) is out
            assert same(out, tensor)

    def test_messages_without_bytes_are_bounded_too(self, make_ends: MakeEnds) -> None:
        a, _ = make_ends(PipeLimits(buffer_bytes=4096))
        with pytest.raises(BufferFull):
            for _ in range(100):
                a.send_tensor(None, timeout=SHORT_SECONDS)

    @pytest.mark.parametrize("nbytes", [SMALL, LARGE])
    def test_a_waiting_receive_gets_a_message_without_room(
        self, make_ends: MakeEnds, threads: Threads, nbytes: int
    ) -> None:
        """The seeds' deadlock: full of one key while the consumer wants another."""
        a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
        a.send_tensor(block(LARGE, 1), "unwanted")
        tensor = block(nbytes, 2)
        waiting = threads.call(a.send_tensor, tensor, "wanted", timeout=SOON_SECONDS)
        assert not waiting.done()
        out = torch.zeros_like(tensor)
        assert b.recv_tensor("wanted", timeout=SOON_SECONDS, out=out) is out
        assert same(out, tensor)
        waiting.result(SOON_SECONDS)
        assert same(b.recv_tensor("unwanted", timeout=SOON_SECONDS), block(LARGE, 1))

    def test_the_gauge_goes_back_to_zero(self, make_ends: MakeEnds, threads: Threads) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=2 * LARGE))
        a.send_tensor(block(LARGE))
        a.send_tensor(None, "k")
        assert a.used_bytes >= LARGE
        with pytest.raises(CodecError):
            a.send_tensor(torch.empty(3, device="meta"))
        with pytest.raises(BufferFull):
            a.send_tensor(block(LARGE), timeout=0)
        wanted = threads.call(a.send_tensor, block(LARGE + 1), "wanted", timeout=SOON_SECONDS)
        for key in ("wanted", "k", None):
            b.recv_tensor(key, timeout=SOON_SECONDS)
        wanted.result(SOON_SECONDS)
        assert _settled(lambda: a.used_bytes == 0)

    def test_a_message_larger_than_the_budget_is_refused_at_once(self, make_ends: MakeEnds) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
        started = time.monotonic()
        with pytest.raises(TensorTooLarge):
            a.send_tensor(block(LARGE + 1), timeout=60.0)
        assert time.monotonic() - started < SOON_SECONDS
        for seed in range(3):
            a.send_tensor(block(LARGE, seed), timeout=SOON_SECONDS)
            assert same(b.recv_tensor(timeout=SOON_SECONDS), block(LARGE, seed))

    def test_a_message_larger_than_message_bytes_is_dropped_with_an_error(
        self, make_ends: MakeEnds, threads: Threads
    ) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=4 * LARGE, message_bytes=LARGE))
        for nbytes, key in ((LARGE + 1, "k"), (3 * LARGE, None)):
            a.send_tensor(block(nbytes), key)
            a.send_tensor(block(LARGE), key)
            with pytest.raises(TensorTooLarge, match="message_bytes"):
                b.recv_tensor(key, timeout=SOON_SECONDS)
            assert same(b.recv_tensor(key, timeout=SOON_SECONDS), block(LARGE))
        assert _settled(lambda: a.used_bytes == 0)

    def test_many_sends_waiting_for_room_are_no_flood(
        self, make_ends: MakeEnds, threads: Threads
    ) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=4096))
        sends = [threads.call(a.send_tensor, block(16, n), f"k{n}") for n in range(40)]
        for n in range(40):
            assert same(b.recv_tensor(f"k{n}", timeout=SOON_SECONDS), block(16, n))
        for send in sends:
            send.result(SOON_SECONDS)

    def test_more_than_the_budget_in_all_passes_in_any_order(
        self, make_ends: MakeEnds, threads: Threads
    ) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=3 * LARGE))
        keys = [f"k{n}" for n in range(12)]
        sends = [threads.call(a.send_tensor, block(LARGE, n), k) for n, k in enumerate(keys)]
        for n, key in reversed(list(enumerate(keys))):
            assert same(b.recv_tensor(key, timeout=SOON_SECONDS), block(LARGE, n))
        for send in sends:
            send.result(SOON_SECONDS)

    # -- waiting

    def test_a_wait_ends_with_its_time_and_the_message_is_not_lost(self, ends: Ends) -> None:
        a, b = ends
        started = time.monotonic()
        with pytest.raises(LookupTimeout):
            b.recv_tensor("k", timeout=0.2)
        assert 0.15 < time.monotonic() - started < SOON_SECONDS
        with pytest.raises(LookupTimeout):
            b.recv_tensor("k", timeout=0)
        a.send_tensor(block(LARGE), "k")
        assert same(b.recv_tensor("k", timeout=SOON_SECONDS), block(LARGE))

    def test_each_of_many_waiting_receives_gets_one_message(
        self, ends: Ends, threads: Threads
    ) -> None:
        a, b = ends
        waiting = [threads.call(b.recv_tensor, "k", timeout=SOON_SECONDS) for _ in range(8)]
        for number in range(8):
            a.send_tensor(torch.tensor(number), "k")
        assert sorted(int(one.result(SOON_SECONDS)) for one in waiting) == list(range(8))

    # -- the end

    def test_messages_sent_before_a_close_are_received(self, ends: Ends, threads: Threads) -> None:
        a, b = ends
        for n in range(3):
            a.send_tensor(block(SMALL, n))
            a.send_tensor(block(LARGE, n), "k")
        closing = threads.call(a.close)
        for n in range(3):
            assert same(b.recv_tensor(timeout=SOON_SECONDS), block(SMALL, n))
            assert same(b.recv_tensor("k", timeout=SOON_SECONDS), block(LARGE, n))
        closing.result(SOON_SECONDS)
        for operation in (b.recv_tensor, lambda: b.send_tensor(block(1))):
            with pytest.raises(PipeClosed):
                operation()

    @pytest.mark.parametrize("way", ["close", "abort"])
    def test_closing_an_end_ends_its_own_waits(
        self, make_ends: MakeEnds, threads: Threads, way: str
    ) -> None:
        a, _ = make_ends(PipeLimits(buffer_bytes=LARGE, linger_seconds=0.1))
        a.send_tensor(block(LARGE))
        waiting = [
            threads.call(a.recv_tensor, "k"),
            threads.call(a.recv_tensor),
            threads.call(a.send_tensor, block(LARGE)),
        ]
        started = time.monotonic()
        getattr(a, way)()
        for one in waiting:
            with pytest.raises(Closed if way == "close" else PipeBroken):
                one.result(SOON_SECONDS)
        getattr(a, way)()
        assert time.monotonic() - started < SOON_SECONDS
        with pytest.raises(Closed if way == "close" else PipeBroken):
            a.send_tensor(None)

    @pytest.mark.parametrize("way", ["close", "abort"])
    def test_closing_an_end_ends_the_waits_of_the_remote_end(
        self, make_ends: MakeEnds, threads: Threads, way: str
    ) -> None:
        a, b = make_ends(PipeLimits(buffer_bytes=LARGE, linger_seconds=0.1))
        b.send_tensor(block(LARGE))
        waiting = [
            threads.call(b.recv_tensor, "k"),
            threads.call(b.send_tensor, block(LARGE)),
        ]
        getattr(a, way)()
        for one in waiting:
            with pytest.raises(PipeClosed if way == "close" else PipeBroken):
                one.result(SOON_SECONDS)

    def test_an_exception_in_the_with_block_aborts_the_pipe(self, ends: Ends) -> None:
        a, b = ends

        def produce() -> None:
            with a:
                a.send_tensor(block(LARGE))
                raise KeyError("the producer failed")

        with pytest.raises(KeyError):
            produce()
        with pytest.raises(PipeBroken):
            b.recv_tensor(timeout=SOON_SECONDS)
            b.recv_tensor(timeout=SOON_SECONDS)

    def test_ends_leave_no_thread_and_no_descriptor(self, make_ends: MakeEnds) -> None:
        def count() -> tuple[int, int]:
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        a, b = make_ends()
        a.close()
        b.close()
        _settled(lambda: True)
        before = count()
        for _ in range(5):
            a, b = make_ends()
            a.send_tensor(block(LARGE))
            b.recv_tensor()
            a.close()
            b.close()
        assert _settled(lambda: count()[0] <= before[0] and count()[1] <= before[1])


def _settled(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
