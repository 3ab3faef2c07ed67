"""Links over real sockets, for the tests of links."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lookup_buffer.protocol.stream import Link

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
