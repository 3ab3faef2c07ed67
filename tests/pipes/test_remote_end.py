"""RemoteEnd: when the caller's memory is written to, and messages that cannot be received."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from contract_pipe import LARGE, SOON_SECONDS, Threads, closing, same, threads
from lookup_buffer.errors import CodecError, LookupTimeout, PipeBroken, PipeError
from lookup_buffer.pipes import KVPipe, PipeLimits, open_pipe
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
from payloads import block
from raw_ends import RawEnd, offer

__all__ = ["closing", "threads"]
SILENCE_SECONDS = 2.0


@pytest.fixture
def pipe() -> Iterator[KVPipe]:
    pipe = open_pipe(
        "tcp://127.0.0.1:0", listen=True, limits=PipeLimits(silence_seconds=SILENCE_SECONDS)
    )
    yield pipe
    pipe.abort()


@pytest.fixture
def raw(pipe: KVPipe) -> Iterator[RawEnd]:
    with RawEnd(pipe) as raw:
        yield raw


def test_late_bytes_are_kept_and_not_written_to_the_callers_tensor(
    pipe: KVPipe, raw: RawEnd, threads: Threads
) -> None:
    raw.send(offer(1, b"k", LARGE))
    out = torch.zeros(LARGE, dtype=torch.uint8)
    receiving = threads.call(pipe.recv_tensor, "k", out=out)
    assert raw.receive() == ["pull", 1]
    with pytest.raises(LookupTimeout):
        receiving.result(2 * SILENCE_SECONDS + SOON_SECONDS)
    raw.send(["data", 1], bytes(block(LARGE).numpy()))
    again = torch.zeros(LARGE, dtype=torch.uint8)
    assert pipe.recv_tensor("k", timeout=SOON_SECONDS, out=again) is again
    assert same(again, block(LARGE))
    assert not out.any(), "written after the call had returned"


def test_after_an_error_nothing_writes_to_the_callers_tensor(
    pipe: KVPipe, raw: RawEnd, threads: Threads
) -> None:
    """In the middle of its bytes: the reader thread writes no more when the error is raised."""
    raw.send(offer(1, b"k", 64 * LARGE))
    out = torch.zeros(64 * LARGE, dtype=torch.uint8)
    receiving = threads.call(pipe.recv_tensor, "k", out=out)
    assert raw.receive() == ["pull", 1]
    raw.send_bytes(encode_frame(["data", 1], 64 * LARGE) + b"x" * 32 * LARGE)
    while not out[16 * LARGE]:
        time.sleep(0.001)
    pipe.abort()
    with pytest.raises(PipeBroken):
        receiving.result(SOON_SECONDS)
    out.zero_()
    assert not out.any()


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20)])
def test_a_message_without_memory_for_it_raises_and_frees_its_budget(
    closing: ExitStack, shape: tuple[int, ...]
) -> None:
    """A message within `PipeLimits.message_bytes`, but larger than the memory."""
    limits = PipeLimits(message_bytes=1 << 40)
    pipe = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits))
    raw = closing.enter_context(RawEnd(pipe))
    raw.send(["offer", 1, b"k", TensorHeader.for_tensor("uint8", shape).to_fields()])
    with pytest.raises(CodecError, match="no memory for a tensor of 1099511627776 bytes"):
        pipe.recv_tensor("k", timeout=SOON_SECONDS)
    assert raw.receive() == ["received", 1], "so its budget is free"
    raw.send(offer(2, b"k", 3), b"abc")
    assert same(pipe.recv_tensor("k", timeout=SOON_SECONDS), torch.tensor(list(b"abc")).byte())


@pytest.mark.parametrize("end", ["close", "abort"])
def test_an_end_that_connects_too_late_gets_the_reason(end: str) -> None:
    pipe = StreamPipe("tcp://ended", PipeLimits())
    getattr(pipe, end)()
    ours, theirs = (FramedSocket(stream) for stream in socket.socketpair())
    with theirs:
        pipe.add_remote_end(ours)
        if end == "close":
            assert theirs.recv_header(SOON_SECONDS).header == ["bye"]
        else:
            with pytest.raises(PipeError):
                theirs.recv_header(SOON_SECONDS)
