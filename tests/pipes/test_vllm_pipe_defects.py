"""Each defect found in vLLM's first pipe and its process group, and the test that covers it.

PyNcclPipe
1. a failed send keeps its budget and is not reported
   test_a_failed_send_returns_its_budget_and_raises
2. a failed send leaves the stream out of step
   test_a_failed_send_keeps_the_stream_in_step
3. the budget is released when a send is enqueued
   test_the_budget_counts_unreceived_messages
4. tensors with strides are permuted
   test_strides_do_not_permute
5. a waiting receive blocks sends, and the reverse
   test_a_waiting_receive_does_not_block_sends,
   test_a_send_waiting_for_room_does_not_block_receives
6. 0.05 GB/s over the CPU, and every payload stays in the store for an hour
   test_large_tensors_pass_through_host_memory, test_no_payload_stays_in_the_database
7. an idle receiver dies after the store's timeout
   test_an_idle_receiver_outlives_the_bound_on_silence
8. all ends must exist at the start; no reconnect, no detection of a death, no abort
   test_remote_ends_come_and_go_and_their_death_is_detected
9. pickle is loaded from an open port
   test_a_pickle_is_not_loaded

StatelessProcessGroup and PyNcclCommunicator
10. the objects of two senders are mixed up
   test_messages_of_two_senders_are_kept_apart
11. without another end, sent tensors vanish
   test_without_a_remote_end_a_send_fails
12. no bool, int16, complex, float8
   test_a_failed_send_keeps_the_stream_in_step
13. the tensor must stay unchanged after a send
   test_after_a_send_the_caller_may_change_the_tensor
"""

import socket
import threading
import time
from contextlib import ExitStack, suppress

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
    closing,
    ends,
    make_ends,
    same,
    threads,
)
from lookup_buffer.codec import header_of
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    LookupTimeout,
    PipeBroken,
    PipeClosed,
    PipeError,
    TensorTooLarge,
)
from lookup_buffer.pipes import KVPipe, PipeLimits, open_pipe
from lookup_buffer.pipes.io import FrameWriter
from lookup_buffer.pipes.outbox import Outbox
from lookup_buffer.pipes.redis_dial import dial
from lookup_buffer.pipes.resp import Resp3Connection
from lookup_buffer.protocol.stream import FramedSocket
from payloads import block
from raw_ends import RawEnd, hostile
from store import EmbeddedServer

__all__ = ["closing", "ends", "make_ends", "threads"]
SILENCE_SECONDS = 2.0


class _Failing:
    """Bytes that cannot be copied, as without memory for a copy."""

    def view(self) -> memoryview:
        raise MemoryError

    copy = view


def _nothing(*_: object) -> None:
    pass


def _frame_writer(closing: ExitStack) -> FrameWriter:
    links = [closing.enter_context(FramedSocket(stream)) for stream in socket.socketpair()]
    return FrameWriter(links[0], threading.RLock(), _nothing, _nothing, _nothing, SOON_SECONDS)


def test_a_failed_send_returns_its_budget_and_raises(ends: Ends, closing: ExitStack) -> None:
    limits = PipeLimits(buffer_bytes=LARGE)
    outbox = Outbox(threading.Condition(), _frame_writer(closing), _nothing, limits)
    for _ in range(3):
        with pytest.raises(MemoryError):
            outbox.send(None, header_of(block(LARGE)), _Failing(), 0.0)
        assert outbox.used_bytes == 0
    a, b = ends
    for wrong in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(CodecError):
            a.send_tensor(wrong)
    assert a.used_bytes == 0
    a.send_tensor(block(LARGE))
    assert same(b.recv_tensor(timeout=SOON_SECONDS), block(LARGE))


def test_a_failed_send_keeps_the_stream_in_step(ends: Ends) -> None:
    a, b = ends
    dtypes = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.bfloat16)
    sent = [torch.ones(SMALL).to(dtype) for dtype in dtypes]
    for tensor in sent:
        with pytest.raises(CodecError):
            a.send_tensor(tensor.to("meta"))
        a.send_tensor(tensor)
    assert all(same(b.recv_tensor(timeout=SOON_SECONDS), tensor) for tensor in sent)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_the_budget_counts_unreceived_messages(make_ends: MakeEnds, nbytes: int) -> None:
    a, b = make_ends(PipeLimits(buffer_bytes=nbytes))
    a.send_tensor(block(nbytes))
    time.sleep(2 * SHORT_SECONDS)  # long after it was written to the socket
    assert a.used_bytes == nbytes
    with pytest.raises(BufferFull):
        a.send_tensor(block(nbytes), timeout=SHORT_SECONDS)
    b.recv_tensor(timeout=SOON_SECONDS)
    a.send_tensor(block(nbytes), timeout=SOON_SECONDS)


def test_strides_do_not_permute(ends: Ends) -> None:
    a, b = ends
    tensor = torch.arange(12.0).view(3, 4).t().clone(memory_format=torch.preserve_format)
    assert tensor.stride() == (1, 4), "a clone keeps its strides"
    a.send_tensor(tensor)
    received = b.recv_tensor(timeout=SOON_SECONDS)
    assert received is not None
    assert received.tolist() == tensor.tolist()


def test_a_waiting_receive_does_not_block_sends(ends: Ends, threads: Threads) -> None:
    a, b = ends
    waiting = [threads.call(a.recv_tensor, key, timeout=SOON_SECONDS) for key in (None, "k")]
    for tensor in (block(SMALL), block(LARGE)):
        a.send_tensor(tensor, timeout=SOON_SECONDS)
        assert same(b.recv_tensor(timeout=SOON_SECONDS), tensor)
    assert not any(one.done() for one in waiting)
    b.send_tensor(None)
    b.send_tensor(None, "k")
    assert [one.result(SOON_SECONDS) for one in waiting] == [None, None]


def test_a_send_waiting_for_room_does_not_block_receives(
    make_ends: MakeEnds, threads: Threads
) -> None:
    a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
    a.send_tensor(block(LARGE))
    waiting = threads.call(a.send_tensor, block(LARGE, 1), timeout=SOON_SECONDS)
    b.send_tensor(block(LARGE, 2), timeout=SOON_SECONDS)
    assert same(a.recv_tensor(timeout=SOON_SECONDS), block(LARGE, 2))
    assert not waiting.done()
    b.recv_tensor(timeout=SOON_SECONDS)
    waiting.result(SOON_SECONDS)


def test_large_tensors_pass_through_host_memory(ends: Ends) -> None:
    """64 MiB took vLLM's first pipe 1.3 s; `lookup-buffer bench` measures these."""
    a, b = ends
    sent, out = block(64 * LARGE), torch.zeros(64 * LARGE, dtype=torch.uint8)
    a.send_tensor(sent)
    assert b.recv_tensor(timeout=SOON_SECONDS, out=out) is out
    assert same(out, sent)


def test_no_payload_stays_in_the_database(valkey_server: EmbeddedServer) -> None:
    uri = f"{valkey_server.url}?pipe=nothing-stays"
    with open_pipe(uri, listen=True) as a, open_pipe(uri) as b:
        for tensor in (block(SMALL), block(9 * LARGE)):
            a.send_tensor(tensor)
            b.recv_tensor(timeout=SOON_SECONDS)
        connection = Resp3Connection(dial(valkey_server.url, SOON_SECONDS))
        until = time.monotonic() + SOON_SECONDS
        kept = sum(
            connection.request((b"MEMORY", b"USAGE", name), until) or 0
            for name in connection.request((b"KEYS", b"lb:pipe:nothing-stays:*"), until)
        )
        connection.close()
    assert kept < SMALL


def test_an_idle_receiver_outlives_the_bound_on_silence(closing: ExitStack) -> None:
    limits = PipeLimits(silence_seconds=SILENCE_SECONDS)
    a = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits))
    b = closing.enter_context(open_pipe(a.uri, limits=limits))
    later = threading.Timer(1.5 * SILENCE_SECONDS, a.send_tensor, [block(SMALL)])
    later.start()
    assert same(b.recv_tensor(timeout=60.0), block(SMALL))
    later.join()


def wait_until_met(pipe: KVPipe) -> None:
    """Until then a listening end raises the error of its last remote end."""
    deadline = time.monotonic() + SOON_SECONDS
    while time.monotonic() < deadline:
        try:
            pipe.recv_tensor("nothing", timeout=0)
        except LookupTimeout:
            return
        except PipeError:
            time.sleep(0.01)


def test_remote_ends_come_and_go_and_their_death_is_detected(closing: ExitStack) -> None:
    a = open_pipe("tcp://127.0.0.1:0", listen=True)
    closing.callback(a.abort)
    with pytest.raises(LookupTimeout):
        a.recv_tensor(timeout=SHORT_SECONDS)
    for number, (end, error) in enumerate([("abort", PipeBroken), ("close", PipeClosed)] * 2):
        b = open_pipe(a.uri)
        wait_until_met(a)
        b.send_tensor(block(SMALL, number))
        assert same(a.recv_tensor(timeout=SOON_SECONDS), block(SMALL, number))
        getattr(b, end)()
        with pytest.raises(error):
            a.recv_tensor(timeout=SOON_SECONDS)


@pytest.mark.parametrize("name", ["frames/pickle", "frames/frame-of-a-pickle"])
def test_a_pickle_is_not_loaded(closing: ExitStack, name: str) -> None:
    """Loading it would end this process."""
    a = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True))
    b = closing.enter_context(open_pipe(a.uri))
    for _ in range(2):  # at first to know that `a` has met `b`: its last end would end its calls
        b.send_tensor(block(SMALL))
        assert same(a.recv_tensor(timeout=SOON_SECONDS), block(SMALL))
        with RawEnd(a) as raw, suppress(ConnectionError):
            raw.send_bytes(hostile("frames")[name])
            assert raw.hung_up()


def test_messages_of_two_senders_are_kept_apart(closing: ExitStack, threads: Threads) -> None:
    a = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True))
    senders = [closing.enter_context(open_pipe(a.uri)) for _ in range(3)]
    for number, sender in enumerate(senders):
        for n in range(3):
            threads.call(sender.send_tensor, block(LARGE, 10 * number + n), f"from {number}")
    for number in (2, 0, 1):
        for n in range(3):
            received = a.recv_tensor(f"from {number}", timeout=SOON_SECONDS)
            assert same(received, block(LARGE, 10 * number + n))


def test_without_a_remote_end_a_send_fails(closing: ExitStack) -> None:
    a = open_pipe("tcp://127.0.0.1:0", listen=True, limits=PipeLimits(buffer_bytes=LARGE))
    closing.callback(a.abort)
    with pytest.raises(LookupTimeout, match="no other end connected"):
        a.send_tensor(block(SMALL), timeout=SHORT_SECONDS)
    with pytest.raises(TensorTooLarge):
        a.send_tensor(block(LARGE + 1), timeout=60.0)


def test_after_a_send_the_caller_may_change_the_tensor(
    make_ends: MakeEnds, threads: Threads
) -> None:
    """Also if it was sent from its own memory, because there was no room for a copy."""
    a, b = make_ends(PipeLimits(buffer_bytes=LARGE))
    tensors = [block(LARGE, seed) for seed in range(2)]

    def send(seed: int) -> None:
        a.send_tensor(tensors[seed], f"k{seed}")
        tensors[seed].zero_()

    send(0)
    waiting = threads.call(send, 1)
    for seed in (1, 0):
        assert same(b.recv_tensor(f"k{seed}", timeout=SOON_SECONDS), block(LARGE, seed))
    waiting.result(SOON_SECONDS)
