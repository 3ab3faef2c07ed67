"""Resp3Connection against valid and invalid replies."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contract_pipe import SHORT_SECONDS, SOON_SECONDS, Threads, threads
from lookup_buffer.errors import PipeBroken, PipeClosed, PipeTimeout, ProtocolError
from lookup_buffer.pipes import resp
from lookup_buffer.pipes.resp import Resp3Connection

__all__ = ["threads"]
PING = (b"PING",)


@contextmanager
def connection_that_reads(answer: bytes) -> Iterator[tuple[Resp3Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Resp3Connection(ours)
    with theirs:
        theirs.sendall(answer)
        yield connection, theirs
        connection.close()


def soon() -> float:
    return time.monotonic() + SOON_SECONDS


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-7\r\n", -7),
        (b"$3\r\na\r\n\r\n", b"a\r\n"),
        (b"$0\r\n\r\n", b""),
        (b"_\r\n", None),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", [b"a", [1]]),
        (b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nhi\r\n+OK\r\n", b"OK"),
        (b"$9000\r\n" + b"x" * 9000 + b"\r\n", b"x" * 9000),
    ],
)
def test_replies(answer: bytes, reply: object) -> None:
    with connection_that_reads(answer) as (connection, theirs):
        assert connection.request(PING, soon()) == reply
        assert theirs.recv(100) == b"*1\r\n$4\r\nPING\r\n"
        theirs.sendall(b":1\r\n")
        assert connection.request(PING, soon()) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"$99999999999\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"*100000\r\n",
        b"*-5\r\n",
        b"*1\r\n" * 5000,
        b">1\r\n" * 5000,
        b"?\r\n",
        b"\r\n",
        b"x" * 5000,
        b"$1\r\nabc\r\n",
        b"%1\r\n+a\r\n+b\r\n",
    ],
)
def test_an_invalid_reply_ends_the_connection(answer: bytes) -> None:
    with connection_that_reads(answer) as (connection, _):
        with pytest.raises(ProtocolError):
            connection.request(PING, soon())
        with pytest.raises(PipeClosed):
            connection.request(PING, soon())


@pytest.mark.parametrize(
    ("answer", "is_read"),
    [
        (b"*2\r\n" + 2 * (b"$400\r\n" + bytes(400) + b"\r\n"), True),
        (b"*2\r\n" + 2 * (b"$600\r\n" + bytes(600) + b"\r\n"), False),
        (b"*1\r\n*1\r\n*10\r\n" + 10 * b":1\r\n", True),
        (b"*1\r\n*1\r\n*20\r\n" + 20 * b":1\r\n", False),
        (2 * (b">1\r\n$600\r\n" + bytes(600) + b"\r\n") + b"+OK\r\n", True),
    ],
)
def test_the_parts_of_a_reply_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, *, is_read: bool
) -> None:
    monkeypatch.setattr(resp, "LONGEST_REPLY_BYTES", 1000)
    with connection_that_reads(answer) as (connection, _):
        if is_read:
            connection.request(PING, soon())
        else:
            with pytest.raises(ProtocolError):
                connection.request(PING, soon())


def test_a_value_is_received_in_place() -> None:
    buffer = memoryview(bytearray(9000))
    with connection_that_reads(b"_\r\n$9000\r\n" + b"x" * 9000 + b"\r\n") as (connection, _):
        assert connection.fetch([b"a", b"b"], [memoryview(bytearray(1)), buffer], soon()) == [
            False,
            True,
        ]
    assert buffer == b"x" * 9000


@pytest.mark.parametrize("answer", [b"$2\r\nxx\r\n", b"$99999999999\r\n", b":1\r\n", b"*-1\r\n"])
def test_a_value_of_another_length_is_not_received(answer: bytes) -> None:
    buffer = memoryview(bytearray(1))
    with connection_that_reads(answer) as (connection, _), pytest.raises(ProtocolError):
        connection.fetch([b"a"], [buffer], soon())
    assert bytes(buffer) == b"\0"


def test_a_later_error_reply_is_raised() -> None:
    with connection_that_reads(b"+OK\r\n-OOM no room\r\n:1\r\n") as (connection, _):
        connection.send([PING, PING], soon())
        with pytest.raises(PipeBroken, match="OOM no room"):
            connection.request(PING, soon())


def test_every_wait_is_bounded(threads: Threads) -> None:
    with connection_that_reads(b"$100\r\nx") as (connection, _), pytest.raises(PipeTimeout):
        connection.request(PING, time.monotonic() + SHORT_SECONDS)
    with connection_that_reads(b"") as (connection, theirs):
        waiting = threads.call(connection.request, PING, soon())
        theirs.close()
        with pytest.raises(PipeBroken):
            waiting.result(SOON_SECONDS)
    with connection_that_reads(b"") as (connection, _):
        waiting = threads.call(connection.request, PING, soon())
        connection.close()
        with pytest.raises(PipeClosed):
            waiting.result(SOON_SECONDS)
