"""Links: frames arrive whole or the link ends with the right error, within its time."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from lookup_buffer.errors import PipeBroken, PipeClosed, PipeTimeout, ProtocolError
from lookup_buffer.link import Link, LinkLimits
from lookup_buffer.wire import MAGIC, encode_frame

MIB = 1 << 20
TIMEOUT = 20.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), timeout=TIMEOUT)
        other, _ = listener.accept()
    return one, other


PAIRS: dict[str, Callable[[], tuple[socket.socket, socket.socket]]] = {
    "tcp": tcp_pair,
    "unix": socket.socketpair,
}


@pytest.fixture(params=sorted(PAIRS))
def links(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Link]]:
    one, other = map(Link, PAIRS[request.param]())
    yield one, other
    one.abort()
    other.abort()


@pytest.fixture
def raw() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the other end as a bare socket that can misbehave."""
    one, other = tcp_pair()
    link = Link(one)
    yield link, other
    link.abort()
    other.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def pattern(nbytes: int) -> memoryview:
    return memoryview((b"0123456789abcde" * (nbytes // 15 + 1))[:nbytes])


@pytest.mark.parametrize("nbytes", [0, 1, 4000, 4096, 5000, 70_000, 9 * MIB + 1])
def test_a_frame_with_its_payload(
    links: tuple[Link, Link], pool: ThreadPoolExecutor, nbytes: int
) -> None:
    one, other = links
    payload = pattern(nbytes)
    for turn in range(3):
        sent = pool.submit(one.send, {"turn": turn}, payload, timeout=TIMEOUT)
        assert other.recv_header(TIMEOUT) == ({"turn": turn}, nbytes)
        target, hasher = bytearray(nbytes), xxhash.xxh3_64()
        other.recv_into(memoryview(target), timeout=TIMEOUT, hasher=hasher)
        sent.result(TIMEOUT)
        assert target == payload
        assert hasher.intdigest() == xxhash.xxh3_64_intdigest(payload)


@pytest.mark.parametrize("size", [1, 4060, 4070, 4075, 4076, 4077, 4078, 4080, 4090, 5000, 900_000])
def test_headers_around_every_internal_boundary(
    links: tuple[Link, Link], pool: ThreadPoolExecutor, size: int
) -> None:
    one, other = links

    def send_all() -> None:
        for i in range(5):
            one.send(["x" * size, i], pattern(i), timeout=TIMEOUT)

    sending = pool.submit(send_all)
    for i in range(5):
        assert other.recv_header(TIMEOUT) == (["x" * size, i], i)
        target = bytearray(i)
        other.recv_into(memoryview(target), timeout=TIMEOUT)
        assert target == pattern(i)
    sending.result(TIMEOUT)


def test_a_payload_in_parts(links: tuple[Link, Link]) -> None:
    one, other = links
    one.send([], pattern(10_000), timeout=TIMEOUT)
    assert other.recv_header(TIMEOUT).payload_nbytes == 10_000
    target = bytearray(10_000)
    for start, end in ((0, 1), (1, 1), (1, 6000), (6000, 10_000)):
        other.recv_into(memoryview(target)[start:end], timeout=TIMEOUT)
    assert target == pattern(10_000)
    with pytest.raises(ValueError, match="0 are to come"):
        other.recv_into(memoryview(target)[:1], timeout=TIMEOUT)


def test_the_next_header_waits_for_the_payload_before_it(links: tuple[Link, Link]) -> None:
    one, other = links
    one.send([1], pattern(10), timeout=TIMEOUT)
    one.send([2], timeout=TIMEOUT)
    other.recv_header(TIMEOUT)
    with pytest.raises(RuntimeError):
        other.recv_header(TIMEOUT)
    other.recv_into(memoryview(bytearray(10)), timeout=TIMEOUT)
    assert other.recv_header(TIMEOUT) == ([2], 0)


def test_a_small_frame_leaves_in_one_piece() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Link(one) as link, other:
        link.send({"a": 1}, pattern(1000), timeout=TIMEOUT)
        assert other.recv(1 << 16) == encode_frame({"a": 1}, 1000) + pattern(1000)


def test_no_delay_is_set_on_tcp() -> None:
    one, other = tcp_pair()
    with Link(one), other:
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_both_directions_at_once_keep_their_own_deadlines(
    links: tuple[Link, Link], pool: ThreadPoolExecutor
) -> None:
    one, other = links
    waiting = pool.submit(one.recv_header, TIMEOUT)
    for _ in range(50):  # short timeouts here must not shorten the wait of the other thread
        one.send([0], timeout=0.2)
        other.recv_header(TIMEOUT)
    time.sleep(0.4)
    other.send(["late"], timeout=TIMEOUT)
    assert waiting.result(TIMEOUT) == (["late"], 0)


def test_wait_readable_leaves_the_link_usable(links: tuple[Link, Link]) -> None:
    one, other = links
    assert not other.wait_readable(0.01)
    one.send([1], timeout=TIMEOUT)
    one.send([2], timeout=TIMEOUT)
    assert other.wait_readable(TIMEOUT)
    assert other.recv_header(TIMEOUT) == ([1], 0)
    assert other.wait_readable(TIMEOUT)  # the second frame may be in the link, not the socket
    assert other.recv_header(TIMEOUT) == ([2], 0)
    one.close()
    assert other.wait_readable(TIMEOUT)


# --- the peer goes ---


def test_a_peer_that_closes_between_frames(links: tuple[Link, Link]) -> None:
    one, other = links
    one.send([1], timeout=TIMEOUT)
    one.close()
    assert other.recv_header(TIMEOUT) == ([1], 0)
    with pytest.raises(PipeClosed):
        other.recv_header(TIMEOUT)
    assert other.closed


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 20])
def test_an_end_within_a_frame_is_a_break(raw: tuple[Link, socket.socket], kept: int) -> None:
    link, peer = raw
    peer.sendall(encode_frame(["some text"])[:kept])
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(PipeBroken):
        link.recv_header(TIMEOUT)


def test_an_end_within_a_payload_is_a_break(raw: tuple[Link, socket.socket]) -> None:
    link, peer = raw
    peer.sendall(encode_frame([], 100) + b"x" * 99)
    peer.close()
    link.recv_header(TIMEOUT)
    with pytest.raises(PipeBroken):
        link.recv_into(memoryview(bytearray(100)), timeout=TIMEOUT)


def test_abort_is_a_break_for_the_peer(raw: tuple[Link, socket.socket]) -> None:
    link, peer = raw
    Link(peer).abort()
    with pytest.raises(PipeBroken):
        link.recv_header(TIMEOUT)
    assert link.closed


def test_sending_to_a_closed_peer_is_a_break(raw: tuple[Link, socket.socket]) -> None:
    link, peer = raw
    peer.close()
    with pytest.raises(PipeBroken) as caught:
        for _ in range(10):
            link.send([], pattern(MIB), timeout=TIMEOUT)
    assert isinstance(caught.value.__cause__, OSError)


PEER = """
import socket, sys, time
from lookup_buffer.wire import encode_frame
stream = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
stream.sendall(encode_frame(["ready"]))
if sys.argv[2] == "half":
    stream.sendall(encode_frame([], 64 << 20) + bytes(32 << 20))
time.sleep(60)
"""


@contextlib.contextmanager
def peer_process(mode: str) -> Iterator[tuple[Link, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)
        port = str(listener.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", PEER, port, mode])
        try:
            link = Link(listener.accept()[0], LinkLimits(minimum_bytes_per_second=1e9))
            with link:
                assert link.recv_header(TIMEOUT) == (["ready"], 0)
                yield link, process
        finally:
            process.kill()
            process.wait(TIMEOUT)


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


def test_a_stopped_peer_costs_a_receiver_its_deadline() -> None:
    with peer_process("half") as (link, process):
        link.recv_header(TIMEOUT)
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PipeTimeout):
            link.recv_into(memoryview(bytearray(64 << 20)), timeout=0.3)
        assert time.monotonic() - started < 3
        assert link.closed


def test_a_stopped_peer_costs_a_sender_its_deadline() -> None:
    with peer_process("idle") as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        payload = memoryview(bytearray(64 << 20))
        started = time.monotonic()
        with pytest.raises(PipeTimeout):
            link.send([], payload, timeout=0.3)
        assert time.monotonic() - started < 3
        assert link.closed


def test_a_trickling_peer_cannot_stretch_the_deadline(raw: tuple[Link, socket.socket]) -> None:
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
    assert 0.25 < time.monotonic() - started < 3
    stop.set()
    thread.join(TIMEOUT)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_no_time_at_all_is_a_timeout(links: tuple[Link, Link], timeout: float) -> None:
    with pytest.raises(PipeTimeout):
        links[0].recv_header(timeout)
    with pytest.raises(PipeTimeout):
        links[1].send([], timeout=timeout)


def test_the_deadline_grows_with_the_payload(raw: tuple[Link, socket.socket]) -> None:
    _, peer = raw
    link = Link(raw[0]._socket.dup(), LinkLimits(minimum_bytes_per_second=10_000))
    peer.sendall(encode_frame([], 10_000))
    link.recv_header(TIMEOUT)
    threading.Timer(0.5, peer.sendall, [bytes(10_000)]).start()
    link.recv_into(memoryview(bytearray(10_000)), timeout=0.01)
    link.abort()


# --- this end goes ---


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_wakes_the_threads_inside(
    raw: tuple[Link, socket.socket], pool: ThreadPoolExecutor, end: str
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
    assert time.monotonic() - started < 3
    assert link._socket.fileno() == -1


def test_the_descriptor_outlives_the_operations_on_it(raw: tuple[Link, socket.socket]) -> None:
    link, _ = raw
    with contextlib.suppress(PipeClosed), link._guard:
        link.close()
        assert link.closed
        assert link._socket.fileno() >= 0, "a thread inside could hit a reused number"
    assert link._socket.fileno() == -1


def test_close_is_idempotent_and_final(links: tuple[Link, Link]) -> None:
    one, _ = links
    for end in (one.close, one.close, one.abort):
        end()
    assert repr(one) == "<Link closed>"
    for use in (
        lambda: one.send([], timeout=TIMEOUT),
        lambda: one.recv_header(TIMEOUT),
        lambda: one.wait_readable(0),
    ):
        with pytest.raises(PipeClosed):
            use()


# --- the peer says what it should not ---


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(64),
        MAGIC + struct.pack(">IQ", 0, 0),
        MAGIC + struct.pack(">IQ", 101, 0),
        MAGIC + struct.pack(">IQ", 2**32 - 1, 0),
        MAGIC + struct.pack(">IQ", 1, 1001) + b"\x90",
        MAGIC + struct.pack(">IQ", 1, 2**64 - 1) + b"\x90",
        MAGIC + struct.pack(">IQ", 1, 0) + b"\xc0",
        MAGIC + struct.pack(">IQ", 5, 0) + b"\xdd\xff\xff\xff\xff",
    ],
    ids=repr,
)
def test_what_is_no_frame_ends_the_link(said: bytes) -> None:
    one, other = tcp_pair()
    link = Link(one, LinkLimits(max_header_bytes=100, max_payload_bytes=1000))
    with other:
        other.sendall(said)
        with pytest.raises(ProtocolError):
            link.recv_header(TIMEOUT)
        assert link.closed
        other.settimeout(TIMEOUT)
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""


@pytest.mark.parametrize("header", ["text", {"a": object()}, ["x" * (2 * MIB)]])
def test_what_cannot_be_encoded_leaves_the_link_in_step(
    links: tuple[Link, Link], header: Any
) -> None:
    one, other = links
    with pytest.raises(ProtocolError):
        one.send(header, timeout=TIMEOUT)
    one.send(["fine"], timeout=TIMEOUT)
    assert other.recv_header(TIMEOUT) == (["fine"], 0)
