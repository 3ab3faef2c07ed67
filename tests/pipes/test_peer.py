"""Peers: whose memory is written to when, and what cannot be received."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from contract_pipe import LARGE, SOON_SECONDS, Threads, block, closing, same, threads
from lookup_buffer.errors import CodecError, LookupTimeout, PipeBroken, PipeError
from lookup_buffer.pipes import KVPipe, PipeLimits, open_pipe
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
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


def test_bytes_that_come_too_late_are_kept_and_not_put_into_the_callers_tensor(
    pipe: KVPipe, raw: RawEnd, threads: Threads
) -> None:
    raw.say(offer(1, b"k", LARGE))
    out = torch.zeros(LARGE, dtype=torch.uint8)
    receiving = threads.call(pipe.recv_tensor, "k", out=out)
    assert raw.heard() == ["pull", 1]
    with pytest.raises(LookupTimeout):
        receiving.result(2 * SILENCE_SECONDS + SOON_SECONDS)
    raw.say(["data", 1], bytes(block(LARGE).numpy()))
    again = torch.zeros(LARGE, dtype=torch.uint8)
    assert pipe.recv_tensor("k", timeout=SOON_SECONDS, out=again) is again
    assert same(again, block(LARGE))
    assert not out.any(), "it was the caller's again"


def test_who_is_told_of_the_end_has_his_tensor_for_himself(
    pipe: KVPipe, raw: RawEnd, threads: Threads
) -> None:
    """In the middle of its bytes: the reading thread has left it when the error comes."""
    raw.say(offer(1, b"k", 64 * LARGE))
    out = torch.zeros(64 * LARGE, dtype=torch.uint8)
    receiving = threads.call(pipe.recv_tensor, "k", out=out)
    assert raw.heard() == ["pull", 1]
    raw.say_bytes(encode_frame(["data", 1], 64 * LARGE) + b"x" * 32 * LARGE)
    while not out[16 * LARGE]:
        time.sleep(0.001)
    pipe.abort()
    with pytest.raises(PipeBroken):
        receiving.result(SOON_SECONDS)
    out.zero_()
    assert not out.any()


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20)])
def test_what_there_is_no_memory_for_is_said_so_and_costs_its_sender_nothing(
    closing: ExitStack, shape: tuple[int, ...]
) -> None:
    """Where this end would receive it; see `PipeLimits.message_bytes`."""
    limits = PipeLimits(message_bytes=1 << 40)
    pipe = closing.enter_context(open_pipe("tcp://127.0.0.1:0", listen=True, limits=limits))
    raw = closing.enter_context(RawEnd(pipe))
    raw.say(["offer", 1, b"k", TensorHeader.for_tensor("uint8", shape).to_fields()])
    with pytest.raises(CodecError, match="no memory for a tensor of 1099511627776 bytes"):
        pipe.recv_tensor("k", timeout=SOON_SECONDS)
    assert raw.heard() == ["received", 1], "and so its budget is free"
    raw.say(offer(2, b"k", 3), b"abc")
    assert same(pipe.recv_tensor("k", timeout=SOON_SECONDS), torch.tensor(list(b"abc")).byte())


@pytest.mark.parametrize("end", ["close", "abort"])
def test_who_is_met_too_late_hears_how_it_ended(end: str) -> None:
    pipe = StreamPipe("tcp://ended", PipeLimits())
    getattr(pipe, end)()
    ours, theirs = (FramedSocket(stream) for stream in socket.socketpair())
    with theirs:
        pipe.meet(ours)
        if end == "close":
            assert theirs.recv_header(SOON_SECONDS).header == ["bye"]
        else:
            with pytest.raises(PipeError):
                theirs.recv_header(SOON_SECONDS)
