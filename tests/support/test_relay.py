"""The relay of tests/support/proxies.py between a client and a real server."""

import time
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from proxies import Relay
from resp import RespConnection
from store import EmbeddedServer

VALUE = b"v" * 50_000


@pytest.fixture
def relay(valkey_server: EmbeddedServer) -> Iterator[Relay]:
    path = unquote(valkey_server.url.removeprefix("unix://"))
    with RespConnection(path) as connection:
        connection("SET", "relayed", VALUE)
    relay = Relay()
    relay.connect_to(path)
    yield relay
    relay.close()


def test_it_passes_on(relay: Relay) -> None:
    with RespConnection(relay.port) as connection:
        assert connection("GET", "relayed") == VALUE


@pytest.mark.parametrize("nbytes", [0, 5, 40_000])
def test_it_cuts_once_in_the_middle_of_a_reply(relay: Relay, nbytes: int) -> None:
    relay.cut_after(nbytes)
    with RespConnection(relay.port) as connection, pytest.raises(ConnectionError):
        connection("GET", "relayed")
    with RespConnection(relay.port) as connection:
        assert connection("GET", "relayed") == VALUE


@pytest.mark.parametrize("nbytes", [0, 40_000])
def test_it_swallows_until_it_lets_go(relay: Relay, nbytes: int) -> None:
    relay.hold_after(nbytes)
    with RespConnection(relay.port, timeout_seconds=0.1) as connection:
        with pytest.raises(TimeoutError):
            connection("GET", "relayed")
        relay.let_go()
        assert connection.read() == VALUE


def test_it_delays(relay: Relay) -> None:
    relay.delay(0.2)
    with RespConnection(relay.port) as connection:
        started = time.monotonic()
        assert connection("PING") == b"PONG"
        assert time.monotonic() - started >= 0.2


def test_it_closes_what_it_holds(relay: Relay) -> None:
    relay.hold_after(0)
    with RespConnection(relay.port) as connection:
        relay.close()
        with pytest.raises(ConnectionError):
            connection("GET", "relayed")
