"""The handshake: two ends that have just met agree on a version, and prove that they know a token.

Over anything that carries frames (`introduce`, `admit`), and how a link comes to be by it. Each
proves by HMAC-SHA256 over both ends' nonces and its own role; the token never travels.
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
from lookup_buffer.protocol.stream import Frames, Link, LinkLimits

PROTOCOL_VERSION: Final = 2
HELLO_BYTES: Final = 256
"""No header of a handshake is larger."""
_NONCE_BYTES: Final = 32
_REFUSED: Final = "refused: one end has no token, or another one"


_HANDSHAKE_LIMITS: Final = LinkLimits(max_header_bytes=HELLO_BYTES, max_payload_bytes=0)


def connect(
    host: str, port: int, *, token: str | None, timeout: float, limits: LinkLimits | None = None
) -> Link:
    """A link to a listening peer, after the handshake; both within `timeout` (but for the time
    that the system takes to resolve a host name).

    With a token each end proves that it knows it, by HMAC-SHA256 over both ends' nonces and its
    own role; the token never travels. This authenticates the ends as they meet. It does not
    encrypt, nor protect the bytes that follow from somebody on the path.

    Raises:
        NodeRefused: the peer is of another version, or one end has no token or another one.
        PipeError: not reachable, too slow, or gone meanwhile.
        ProtocolError: the peer does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    stream = connected_socket(host, port, deadline)
    left = deadline - time.monotonic()
    return request_handshake(stream, token=token, timeout=left, limits=limits)


def request_handshake(
    stream: socket.socket, *, token: str | None, timeout: float, limits: LinkLimits | None = None
) -> Link:
    """See `connect`; for a socket just connected, which it owns from the call on."""
    deadline = time.monotonic() + timeout
    link = Link(stream, _HANDSHAKE_LIMITS)
    with _aborting(link):
        introduce(link, token, deadline)
    link.set_limits(limits or LinkLimits())
    return link


def accept_handshake(
    stream: socket.socket, *, token: str | None, timeout: float, limits: LinkLimits | None = None
) -> Link:
    """The other side of `connect`, for a socket just accepted. Owns the socket from the call on.

    The client proves itself first, so a stranger learns nothing but that a token is wanted.

    Raises:
        NodeRefused: the client is of another version, or has no token or another one.
        PipeError: the client said too little in time, or left.
        ProtocolError: the client does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    link = Link(stream, _HANDSHAKE_LIMITS)
    with _aborting(link):
        admit(link, token, deadline)
    link.set_limits(limits or LinkLimits())
    return link


@contextmanager
def _aborting(link: Link) -> Iterator[None]:
    """Leave no half-open link behind. A refusal already sent still arrives."""
    try:
        yield
    except NodeRefused:
        link.close()
        raise
    except BaseException:
        link.abort()
        raise


def introduce(link: Frames, token: str | None, deadline: float) -> None:
    """As the one who connects. For the errors see `connect`."""
    mine = os.urandom(_NONCE_BYTES)
    _say(link, deadline, ["hello", PROTOCOL_VERSION, mine, token is not None])
    version, theirs, has_token = _hello(_hear(link, deadline))
    if version != PROTOCOL_VERSION:
        raise _other_version(version)
    if has_token != (token is not None):
        raise NodeRefused(_REFUSED)
    if token is not None:
        _say(link, deadline, ["proof", _proof(token, b"client", mine, theirs)])
        _check_proof(_hear(link, deadline), _proof(token, b"server", mine, theirs))


def admit(link: Frames, token: str | None, deadline: float) -> None:
    """As the one who listens: a stranger learns nothing but the version, and whether a token is
    wanted."""
    version, theirs, has_token = _hello(_hear(link, deadline))
    if version != PROTOCOL_VERSION:
        _say(link, deadline, ["refused", PROTOCOL_VERSION])
        raise _other_version(version)
    if has_token != (token is not None):
        _refuse(link, deadline)
    mine = os.urandom(_NONCE_BYTES)
    _say(link, deadline, ["hello", PROTOCOL_VERSION, mine, token is not None])
    if token is not None:
        try:
            _check_proof(_hear(link, deadline), _proof(token, b"client", theirs, mine))
        except NodeRefused:
            _refuse(link, deadline)
        _say(link, deadline, ["proof", _proof(token, b"server", theirs, mine)])


def _say(link: Frames, deadline: float, message: list[Any]) -> None:
    link.send(message, timeout=deadline - time.monotonic())


def _hear(link: Frames, deadline: float) -> list[Any]:
    header = link.recv_header(deadline - time.monotonic()).header
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
        f"refused: the other end speaks protocol version {theirs}, this one {PROTOCOL_VERSION}"
    )


def _refuse(link: Frames, deadline: float) -> NoReturn:
    _say(link, deadline, ["refused"])
    raise NodeRefused(_REFUSED)


def _hello(message: list[Any]) -> tuple[int, bytes, bool]:
    match message:
        case ["hello", int(version), bytes(nonce), bool(has_token)] if len(nonce) == _NONCE_BYTES:
            return version, nonce, has_token
    raise ProtocolError("not a hello")


def _proof(token: str, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    # The role keeps a proof from being sent back as the other end's.
    said = b"lookup-buffer link %d %s " % (PROTOCOL_VERSION, role) + client_nonce + server_nonce
    return hmac.digest(token.encode("utf-8", "surrogatepass"), said, "sha256")


def _check_proof(message: list[Any], expected: bytes) -> None:
    match message:
        case ["proof", bytes(proof)]:
            if not hmac.compare_digest(proof, expected):
                raise NodeRefused(_REFUSED)
            return
    raise ProtocolError("not a proof")
