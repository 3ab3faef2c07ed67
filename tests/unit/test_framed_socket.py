"""Framed sockets: a frame arrives whole, or the socket ends with the right error in time."""

import contextlib
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from lookup_buffer.errors import ProtocolError
from lookup_buffer.protocol.framing import MAGIC, encode_frame
from lookup_buffer.protocol.stream import FramedSocket, FramedSocketLimits
from raw_ends import MIB, TIMEOUT, pattern, tcp_pair


@pytest.mark.parametrize("nbytes", [0, 1, 4000, 4096, 5000, 70_000, 9 * MIB + 1])
def test_a_frame_with_its_payload(
    links: tuple[FramedSocket, FramedSocket], pool: ThreadPoolExecutor, nbytes: int
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
    links: tuple[FramedSocket, FramedSocket], pool: ThreadPoolExecutor, size: int
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


def test_a_payload_in_parts(links: tuple[FramedSocket, FramedSocket]) -> None:
    one, other = links
    one.send([], pattern(10_000), timeout=TIMEOUT)
    assert other.recv_header(TIMEOUT).payload_nbytes == 10_000
    target = bytearray(10_000)
    for start, end in ((0, 1), (1, 1), (1, 6000), (6000, 10_000)):
        other.recv_into(memoryview(target)[start:end], timeout=TIMEOUT)
    assert target == pattern(10_000)
    with pytest.raises(ValueError, match="0 of the payload are left"):
        other.recv_into(memoryview(target)[:1], timeout=TIMEOUT)


def test_the_next_header_waits_for_the_payload_before_it(
    links: tuple[FramedSocket, FramedSocket],
) -> None:
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
    with FramedSocket(one) as link, other:
        link.send({"a": 1}, pattern(1000), timeout=TIMEOUT)
        assert other.recv(1 << 16) == encode_frame({"a": 1}, 1000) + pattern(1000)


def test_no_delay_is_set_on_tcp() -> None:
    one, other = tcp_pair()
    with FramedSocket(one), other:
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_both_directions_at_once_keep_their_own_deadlines(
    links: tuple[FramedSocket, FramedSocket], pool: ThreadPoolExecutor
) -> None:
    one, other = links
    waiting = pool.submit(one.recv_header, TIMEOUT)
    for _ in range(50):  # short timeouts here must not shorten the wait of the other thread
        one.send([0], timeout=0.2)
        other.recv_header(TIMEOUT)
    time.sleep(0.4)
    other.send(["late"], timeout=TIMEOUT)
    assert waiting.result(TIMEOUT) == (["late"], 0)


def test_wait_readable_leaves_the_connection_usable(
    links: tuple[FramedSocket, FramedSocket],
) -> None:
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


# --- the remote end sends invalid bytes ---


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
def test_invalid_frames_end_the_connection(said: bytes) -> None:
    one, other = tcp_pair()
    link = FramedSocket(one, FramedSocketLimits(max_header_bytes=100, max_payload_bytes=1000))
    with other:
        other.sendall(said)
        with pytest.raises(ProtocolError):
            link.recv_header(TIMEOUT)
        assert link.closed
        other.settimeout(TIMEOUT)
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""


@pytest.mark.parametrize("header", ["text", {"a": object()}, ["x" * (2 * MIB)]])
def test_a_message_that_cannot_be_encoded_leaves_the_connection_usable(
    links: tuple[FramedSocket, FramedSocket], header: Any
) -> None:
    one, other = links
    with pytest.raises(ProtocolError):
        one.send(header, timeout=TIMEOUT)
    one.send(["fine"], timeout=TIMEOUT)
    assert other.recv_header(TIMEOUT) == (["fine"], 0)
