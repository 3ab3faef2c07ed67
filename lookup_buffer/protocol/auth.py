"""The handshake: the two ends of a new connection check versions and prove that they know a token.

`client_handshake` and `server_handshake` run it over any `FrameStream`; `connect` and
`accept_handshake` make a `FramedSocket` with it. Each end proves its knowledge by HMAC-SHA256 over
both ends' nonces and its own role; the token itself is never sent. Runs on the threads of its
callers.
"""

import hmac
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from lookup_buffer.errors import NodeRefused, ProtocolError
from lookup_buffer.protocol.sockets import connected_socket
from lookup_buffer.protocol.stream import FramedSocket, FramedSocketLimits, FrameStream

PROTOCOL_VERSION: Final = 3
HELLO_BYTES: Final = 256
"""No header of a handshake is larger."""
_NONCE_BYTES: Final = 32
_REFUSED: Final = "refused: one end has no token, or another one"


_HANDSHAKE_LIMITS: Final = FramedSocketLimits(max_header_bytes=HELLO_BYTES, max_payload_bytes=0)


def connect(
    host: str,
    port: int,
    *,
    token: str | None,
    timeout: float,
    limits: FramedSocketLimits | None = None,
) -> FramedSocket:
    """A connection to a listening remote end, after the handshake. `timeout` in seconds bounds
    both, except the time that the system takes to resolve a host name.

    With a token, each end proves that it knows it: HMAC-SHA256 over both ends' nonces and its own
    role; the token itself is never sent. This authenticates the ends at connection time only. It
    does not encrypt, and does not protect the later bytes against an attacker on the path.

    Raises:
        NodeRefused: the remote end has another version, or one end has no token or another one.
        PipeError: not reachable, too slow, or disconnected during the handshake.
        ProtocolError: the remote end does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    stream = connected_socket(host, port, deadline)
    left = deadline - time.monotonic()
    return request_handshake(stream, token=token, timeout=left, limits=limits)


def request_handshake(
    stream: socket.socket,
    *,
    token: str | None,
    timeout: float,
    limits: FramedSocketLimits | None = None,
) -> FramedSocket:
    """See `connect`; for a newly connected socket, which the function owns from the call on."""
    deadline = time.monotonic() + timeout
    connection = FramedSocket(stream, _HANDSHAKE_LIMITS)
    with _aborting(connection):
        client_handshake(connection, token, deadline)
    connection.set_limits(limits or FramedSocketLimits())
    return connection


def accept_handshake(
    stream: socket.socket,
    *,
    token: str | None,
    timeout: float,
    limits: FramedSocketLimits | None = None,
) -> FramedSocket:
    """The accepting side of `connect`, for a newly accepted socket. Owns the socket from the call
    on.

    The client sends its proof first, so an unauthenticated client gets only that a token is
    required.

    Raises:
        NodeRefused: the client has another version, or has no token or another one.
        PipeError: the client did not send enough in time, or disconnected.
        ProtocolError: the client does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    connection = FramedSocket(stream, _HANDSHAKE_LIMITS)
    with _aborting(connection):
        server_handshake(connection, token, deadline)
    connection.set_limits(limits or FramedSocketLimits())
    return connection


@contextmanager
def _aborting(connection: FramedSocket) -> Iterator[None]:
    """Close the connection on any error. A refusal that was sent before still arrives."""
    try:
        yield
    except NodeRefused:
        connection.close()
        raise
    except BaseException:
        connection.abort()
        raise


def client_handshake(connection: FrameStream, token: str | None, deadline: float) -> None:
    """Run the connecting side. For the errors see `connect`."""
    mine = os.urandom(_NONCE_BYTES)
    _send(connection, deadline, ["hello", PROTOCOL_VERSION, mine, token is not None])
    version, theirs, has_token = _hello(_receive(connection, deadline))
    if version != PROTOCOL_VERSION:
        raise _other_version(version)
    if has_token != (token is not None):
        raise NodeRefused(_REFUSED)
    if token is not None:
        _send(connection, deadline, ["proof", _proof(token, b"client", mine, theirs)])
        _check_proof(_receive(connection, deadline), _proof(token, b"server", mine, theirs))


def server_handshake(connection: FrameStream, token: str | None, deadline: float) -> None:
    """Run the listening side. An unauthenticated client gets only the version and whether a
    token is required."""
    version, theirs, has_token = _hello(_receive(connection, deadline))
    if version != PROTOCOL_VERSION:
        _send(connection, deadline, ["refused", PROTOCOL_VERSION])
        raise _other_version(version)
    if has_token != (token is not None):
        _refuse(connection, deadline)
    mine = os.urandom(_NONCE_BYTES)
    _send(connection, deadline, ["hello", PROTOCOL_VERSION, mine, token is not None])
    if token is not None:
        try:
            _check_proof(_receive(connection, deadline), _proof(token, b"client", theirs, mine))
        except NodeRefused:
            _refuse(connection, deadline)
        _send(connection, deadline, ["proof", _proof(token, b"server", theirs, mine)])


def _send(connection: FrameStream, deadline: float, message: list[Any]) -> None:
    connection.send(message, timeout=deadline - time.monotonic())


def _receive(connection: FrameStream, deadline: float) -> list[Any]:
    header = connection.recv_header(deadline - time.monotonic()).header
    if not isinstance(header, list) or not header:
        raise ProtocolError("not a handshake message")
    match header:
        case ["refused"]:
            raise NodeRefused(_REFUSED)
        case ["refused", int(version)]:
            raise _other_version(version)
    return header


def _other_version(theirs: int) -> NodeRefused:
    return NodeRefused(
        f"refused: the remote end has protocol version {theirs}, this one {PROTOCOL_VERSION}; run "
        "the same version on both"
    )


def _refuse(connection: FrameStream, deadline: float) -> NoReturn:
    _send(connection, deadline, ["refused"])
    raise NodeRefused(_REFUSED)


def _hello(message: list[Any]) -> tuple[int, bytes, bool]:
    match message:
        case ["hello", int(version), bytes(nonce), bool(has_token)] if len(nonce) == _NONCE_BYTES:
            return version, nonce, has_token
    raise ProtocolError("not a hello")


def _proof(token: str, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    # With the role, a proof cannot be reflected as the proof of the other end.
    message = b"lookup-buffer link %d %s " % (PROTOCOL_VERSION, role) + client_nonce + server_nonce
    return hmac.digest(token.encode("utf-8", "surrogatepass"), message, "sha256")


def _check_proof(message: list[Any], expected: bytes) -> None:
    match message:
        case ["proof", bytes(proof)]:
            if not hmac.compare_digest(proof, expected):
                raise NodeRefused(_REFUSED)
            return
    raise ProtocolError("not a proof")
