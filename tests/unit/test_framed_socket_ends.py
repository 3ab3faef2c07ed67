"""Framed sockets that end: the remote end closes, stops or trickles, or this end closes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lookup_buffer.errors import PipeBroken, PipeClosed, PipeTimeout
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.stream import PROGRESS_BYTES, FramedSocket
from patience import scaled
from raw_ends import MIB, TIMEOUT, pattern

# --- the peer goes ---


def test_a_peer_that_closes_between_frames(links: tuple[FramedSocket, FramedSocket]) -> None:
    one, other = links
    one.send([1], timeout=TIMEOUT)
    one.close()
    assert other.recv_header(TIMEOUT) == ([1], 0)
    with pytest.raises(PipeClosed):
        other.recv_header(TIMEOUT)
    assert other.closed


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 20])
def test_an_end_within_a_frame_is_a_break(
    raw: tuple[FramedSocket, socket.socket], kept: int
) -> None:
    link, peer = raw
    peer.sendall(encode_frame(["some text"])[:kept])
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(PipeBroken):
        link.recv_header(TIMEOUT)


def test_an_end_within_a_payload_is_a_break(raw: tuple[FramedSocket, socket.socket]) -> None:
    link, peer = raw
    peer.sendall(encode_frame([], 100) + b"x" * 99)
    peer.close()
    link.recv_header(TIMEOUT)
    with pytest.raises(PipeBroken):
        link.recv_into(memoryview(bytearray(100)), timeout=TIMEOUT)


def test_abort_is_a_break_for_the_peer(raw: tuple[FramedSocket, socket.socket]) -> None:
    link, peer = raw
    FramedSocket(peer).abort()
    with pytest.raises(PipeBroken):
        link.recv_header(TIMEOUT)
    assert link.closed


def test_sending_to_a_closed_peer_is_a_break(raw: tuple[FramedSocket, socket.socket]) -> None:
    link, peer = raw
    peer.close()
    with pytest.raises(PipeBroken) as caught:
        for _ in range(10):
            link.send([], pattern(MIB), timeout=TIMEOUT)
    assert isinstance(caught.value.__cause__, OSError)


PEER = """
import socket, sys, time
from lookup_buffer.protocol.framing import encode_frame
stream = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stream.sendall(encode_frame(["ready"]))
if sys.argv[2] == "half":
    stream.sendall(encode_frame([], 64 << 20) + bytes(32 << 20))
time.sleep(60)
"""


@contextlib.contextmanager
def peer_process(mode: str) -> Iterator[tuple[FramedSocket, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)
        port = str(listener.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", PEER, port, mode])
        try:
            link = FramedSocket(listener.accept()[0])
            with link:
                assert link.recv_header(TIMEOUT) == (["ready"], 0)
                yield link, process
        finally:
            process.kill()
            process.wait(TIMEOUT)


@pytest.mark.processes
def test_a_killed_peer_in_the_middle_of_a_payload() -> None:
    with peer_process("half") as (link, process):
        link.recv_header(TIMEOUT)
        link.recv_into(memoryview(bytearray(32 << 20)), timeout=TIMEOUT)
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        with pytest.raises(PipeBroken):
            link.recv_into(memoryview(bytearray(32 << 20)), timeout=TIMEOUT)
        killer.join()
        with pytest.raises(PipeClosed):
            link.recv_header(TIMEOUT)


@pytest.mark.processes
def test_a_stopped_peer_costs_a_receiver_its_deadline() -> None:
    with peer_process("half") as (link, process):
        link.recv_header(TIMEOUT)
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PipeTimeout):
            link.recv_into(memoryview(bytearray(64 << 20)), timeout=0.3)
        assert time.monotonic() - started < scaled(0.3)
        assert link.closed


@pytest.mark.processes
def test_a_stopped_peer_costs_a_sender_its_deadline() -> None:
    with peer_process("idle") as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        payload = memoryview(bytearray(64 << 20))
        started = time.monotonic()
        with pytest.raises(PipeTimeout):
            link.send([], payload, timeout=0.3)
        assert time.monotonic() - started < scaled(0.3)
        assert link.closed


def test_a_slow_peer_makes_progress_while_a_large_send_buffer_takes_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    link = FramedSocket(sender)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MIB)
    peer.settimeout(TIMEOUT)
    payload = pattern(MIB // 8)
    frame = encode_frame([], payload.nbytes) + payload

    def receive() -> bytes:
        received = bytearray()
        slow_until = time.monotonic() + 5.0
        while len(received) < 64 * len(frame):
            received += peer.recv(PROGRESS_BYTES)
            if time.monotonic() < slow_until:
                time.sleep(0.2)
        return bytes(received)

    with link, peer, ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        for _ in range(64):
            link.send([], payload, timeout=1.0)
        assert receiving.result(TIMEOUT) == 64 * frame


def test_a_trickling_peer_cannot_stretch_the_deadline(
    raw: tuple[FramedSocket, socket.socket],
) -> None:
    link, peer = raw
    stop = threading.Event()

    def trickle() -> None:
        peer.sendall(encode_frame([], 1000))
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                peer.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    link.recv_header(TIMEOUT)
    started = time.monotonic()
    with pytest.raises(PipeTimeout):
        link.recv_into(memoryview(bytearray(1000)), timeout=0.3)
    assert 0.25 < time.monotonic() - started < scaled(0.3)
    stop.set()
    thread.join(TIMEOUT)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_no_time_at_all_is_a_timeout(
    links: tuple[FramedSocket, FramedSocket], timeout: float
) -> None:
    with pytest.raises(PipeTimeout):
        links[0].recv_header(timeout)
    with pytest.raises(PipeTimeout):
        links[1].send([], timeout=timeout)


def test_each_part_of_a_payload_has_the_time(raw: tuple[FramedSocket, socket.socket]) -> None:
    link, peer = raw
    parts, seconds = 12, 2.5

    def send_slowly() -> None:
        for _ in range(parts):
            time.sleep(seconds / 10)  # together they take longer
            peer.sendall(bytes(PROGRESS_BYTES))

    peer.sendall(encode_frame([], parts * PROGRESS_BYTES))
    link.recv_header(TIMEOUT)
    thread = threading.Thread(target=send_slowly)
    thread.start()
    link.recv_into(memoryview(bytearray(parts * PROGRESS_BYTES)), timeout=seconds)
    thread.join(TIMEOUT)


# --- this end goes ---


@pytest.mark.parametrize("end", ["close", "abort"])
def test_closing_ends_the_calls_of_other_threads(
    raw: tuple[FramedSocket, socket.socket], pool: ThreadPoolExecutor, end: str
) -> None:
    link, _ = raw
    receiving = pool.submit(link.recv_header, TIMEOUT)
    sending = pool.submit(link.send, [], memoryview(bytearray(256 * MIB)), timeout=TIMEOUT)
    time.sleep(0.2)
    assert not receiving.done()
    assert not sending.done()
    started = time.monotonic()
    getattr(link, end)()
    for waiting in (receiving, sending):
        with pytest.raises(PipeClosed):
            waiting.result(TIMEOUT)
    assert time.monotonic() - started < scaled(0.3)
    assert link._socket.fileno() == -1


def test_the_descriptor_outlives_the_operations_on_it(
    raw: tuple[FramedSocket, socket.socket],
) -> None:
    link, _ = raw
    with contextlib.suppress(PipeClosed), link._guard:
        link.close()
        assert link.closed
        assert link._socket.fileno() >= 0, "a thread inside could hit a reused number"
    assert link._socket.fileno() == -1


def test_close_is_idempotent_and_final(links: tuple[FramedSocket, FramedSocket]) -> None:
    one, _ = links
    for end in (one.close, one.close, one.abort):
        end()
    assert repr(one) == "<FramedSocket closed>"
    for use in (
        lambda: one.send([], timeout=TIMEOUT),
        lambda: one.recv_header(TIMEOUT),
        lambda: one.wait_readable(0),
    ):
        with pytest.raises(PipeClosed):
            use()
