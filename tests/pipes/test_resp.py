"""RespLane against servers that answer something else than they should."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contract_pipe import SHORT_SECONDS, SOON_SECONDS, Threads, threads
from lookup_buffer.errors import PipeBroken, PipeClosed, PipeTimeout, ProtocolError
from lookup_buffer.pipes.resp import Resp3Connection

__all__ = ["threads"]
PING = (b"PING",)


@contextmanager
def lane_that_hears(answer: bytes) -> Iterator[tuple[Resp3Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    lane = Resp3Connection(ours)
    with theirs:
        theirs.sendall(answer)
        yield lane, theirs
        lane.close()


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
    with lane_that_hears(answer) as (lane, theirs):
        assert lane.ask(PING, soon()) == reply
        assert theirs.recv(100) == b"*1\r\n$4\r\nPING\r\n"
        theirs.sendall(b":1\r\n")
        assert lane.ask(PING, soon()) == 1


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
def test_what_is_no_reply_ends_the_lane(answer: bytes) -> None:
    with lane_that_hears(answer) as (lane, _):
        with pytest.raises(ProtocolError):
            lane.ask(PING, soon())
        with pytest.raises(PipeClosed):
            lane.ask(PING, soon())


def test_a_value_goes_where_it_is_to_lie() -> None:
    place = memoryview(bytearray(9000))
    with lane_that_hears(b"_\r\n$9000\r\n" + b"x" * 9000 + b"\r\n") as (lane, _):
        assert lane.fetch([b"a", b"b"], [memoryview(bytearray(1)), place], soon()) == [False, True]
    assert place == b"x" * 9000


@pytest.mark.parametrize("answer", [b"$2\r\nxx\r\n", b"$99999999999\r\n", b":1\r\n", b"*-1\r\n"])
def test_a_value_of_another_length_goes_nowhere(answer: bytes) -> None:
    place = memoryview(bytearray(1))
    with lane_that_hears(answer) as (lane, _), pytest.raises(ProtocolError):
        lane.fetch([b"a"], [place], soon())
    assert bytes(place) == b"\0"


def test_a_refusal_that_comes_later_is_heard() -> None:
    with lane_that_hears(b"+OK\r\n-OOM no room\r\n:1\r\n") as (lane, _):
        lane.say([PING, PING], soon())
        with pytest.raises(PipeBroken, match="OOM no room"):
            lane.ask(PING, soon())


def test_every_wait_has_an_end(threads: Threads) -> None:
    with lane_that_hears(b"$100\r\nx") as (lane, _), pytest.raises(PipeTimeout):
        lane.ask(PING, time.monotonic() + SHORT_SECONDS)
    with lane_that_hears(b"") as (lane, theirs):
        waiting = threads.call(lane.ask, PING, soon())
        theirs.close()
        with pytest.raises(PipeBroken):
            waiting.result(SOON_SECONDS)
    with lane_that_hears(b"") as (lane, _):
        waiting = threads.call(lane.ask, PING, soon())
        lane.close()
        with pytest.raises(PipeClosed):
            waiting.result(SOON_SECONDS)
