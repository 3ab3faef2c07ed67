"""The TLS server of tests/support/servers.py: which clients it accepts, and with which rights."""

import socket
import ssl

import pytest

from resp import RespConnection, RespError
from servers import PASSWORD, USER, TlsServer


@pytest.fixture
def user(tls_server: TlsServer) -> RespConnection:
    connection = tls_server.process.connect()
    connection("AUTH", USER, PASSWORD)
    return connection


def test_only_tls_with_a_certificate(tls_server: TlsServer) -> None:
    with RespConnection(tls_server.process.port) as plain, pytest.raises(OSError):
        plain("PING")
    without = ssl.create_default_context(cafile=tls_server.files.authority)
    with (
        pytest.raises(OSError),
        socket.create_connection(("127.0.0.1", tls_server.process.port), 5.0) as connection,
        without.wrap_socket(connection, server_hostname="127.0.0.1") as wrapped,
    ):
        wrapped.sendall(b"PING\r\n")
        assert wrapped.recv(10) == b"", "the server answered"
        raise ConnectionError  # it may just close


def test_the_user_has_our_keys_only(user: RespConnection) -> None:
    assert user("HSET", "lb:nodes", "n", "b:1") == 1
    for command in (("GET", "other"), ("SET", "other", "v"), ("CONFIG", "GET", "*"), ("FLUSHALL",)):
        with pytest.raises(RespError, match="NOPERM"):
            user(*command)
    user.close()


def test_scripts_have_no_more_rights(user: RespConnection) -> None:
    read = "return redis.call('GET', KEYS[1])"
    assert user("EVAL", read, 1, "lb:x") is None
    with pytest.raises(RespError, match="permission"):
        user("EVAL", read, 1, "other")
    user.close()
