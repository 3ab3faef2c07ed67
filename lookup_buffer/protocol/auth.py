"""The handshake: the two ends of a new connection check versions and prove that they know a token.

Each end proves its knowledge by HMAC-SHA256 over its role and both ends' hellos: so a proof counts
for these nonces, these versions and this `Purpose` only. The token itself is never sent. With a
token, the two ends also have keys for the headers of all later frames (see `framing.Mac`). This
authenticates ends and headers; it encrypts nothing, and payload is not covered.

`client_dialogue` and `server_dialogue` are the two sides without I/O. `client_handshake` and
`server_handshake` run them over a `FrameStream` on the caller's thread, `node.links` on a loop;
`connect` and `accept_handshake` make a `FramedSocket`.

A hello offers a range of versions, and the ends use the newest that both have: so a fleet is
upgraded node by node, if each version still speaks the one before.
"""

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, NamedTuple

from lookup_buffer.errors import NodeRefused, PipeBroken, ProtocolError
from lookup_buffer.protocol.framing import Mac, Macs, pack
from lookup_buffer.protocol.sockets import connected_socket
from lookup_buffer.protocol.stream import FramedSocket, FramedSocketLimits, FrameStream

PROTOCOL_VERSION: Final = 7
OLDEST_VERSION: Final = 4
"""Version 4 has no connections of the role "reachability"; 3 is not spoken: its proofs counted for
any address."""
_NAMED_VERSION: Final = 6
"""Since then a hello may name the client."""
VERSION_OF_PARTS: Final = 7
"""Since then a part of an item can be requested."""
HELLO_BYTES: Final = 1024
"""No header of a handshake is larger."""
_NONCE_BYTES: Final = 32
_REASON_CHARACTERS: Final = 200
_TOKENS: Final = "one end has no token, or another one"


class Purpose(NamedTuple):
    """What a connection is for, and whom the client expects. Both proofs cover it, so a listener
    that passes a handshake on to another one is found out."""

    role: str = "pipe"
    """"pipe"; "lane"; between nodes "tensors", "handoffs" or "reachability"."""
    endpoint: str = ""
    """The address that the client dialled, as the other node advertises it; of a lane, the one that
    both sockets have."""
    node: str = ""
    """The id of the node that it expects there."""
    boot: str = ""
    """The boot of that node; empty if each request names one."""
    client: str = ""
    """The id of the client's node, over TLS only: its certificate has that name."""


PIPE: Final = Purpose()
LANE: Final = Purpose("lane")
"""Its endpoint is that of the connection: see `only_lanes`."""


class Agreement(NamedTuple):
    """The result of a handshake. Without a token `macs` is None: headers are not authenticated."""

    version: int
    purpose: Purpose
    macs: Macs | None
    last: list[Any] | None = None
    """The message that ends the dialogue, if this side sends it."""


class Refusal(NodeRefused):
    """This end refuses the other one, and tells it `message`."""

    def __init__(self, text: str, message: list[Any]) -> None:
        super().__init__(f"refused: {text}")
        self.message = message


Accepts = Callable[[Purpose], str]
"""Returns why a purpose is refused; empty if it is accepted."""
Dialogue = Generator[list[Any] | None, list[Any], Agreement]
"""Yields what to send before the next message is received; gets that message."""


def only_pipes(purpose: Purpose) -> str:
    return "" if purpose == PIPE else "a pipe listens here"


def only_lanes(stream: socket.socket) -> Accepts:
    """For an accepted connection. The client has dialled the address where it was accepted: so
    nobody can pass on the proof of who dials an address of his, from a record in the store. That
    holds for an address of one host, not for 127.0.0.1: see `is_everywhere`."""
    here = _lane_at(stream.getsockname())
    return lambda purpose: "" if purpose == here else f"a lane listens here, at {here.endpoint}"


def _dialled(purpose: Purpose, stream: socket.socket) -> Purpose:
    """`purpose` with the address of a lane."""
    if purpose != LANE:
        return purpose
    try:
        return _lane_at(stream.getpeername())
    except OSError as error:
        raise PipeBroken("the remote end has left") from error


def is_everywhere(listener: socket.socket) -> bool:
    """Whether it listens at all addresses of its host, also at those that other hosts have too."""
    return _host_in(listener.getsockname()).is_unspecified


def _lane_at(address: tuple[Any, ...]) -> Purpose:
    return LANE._replace(endpoint=f"{_host_in(address)} {address[1]}")


def _host_in(address: tuple[Any, ...]) -> IPv4Address | IPv6Address:
    host = ip_address(str(address[0]).partition("%")[0])
    return getattr(host, "ipv4_mapped", None) or host


# -- over a socket


def connect(
    host: str,
    port: int,
    *,
    token: str | None,
    timeout: float,
    limits: FramedSocketLimits | None = None,
    purpose: Purpose = PIPE,
) -> FramedSocket:
    """A connection to a listening remote end, after the handshake. `timeout` in seconds bounds
    both, except the time that the system takes to resolve a host name.

    Raises:
        NodeRefused: the remote end has another version, one end has no token or another one, or
            the remote end is not what `purpose` expects.
        PipeError: not reachable, too slow, or disconnected during the handshake.
        ProtocolError: the remote end does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    stream = connected_socket(host, port, deadline)
    left = deadline - time.monotonic()
    return request_handshake(stream, token=token, timeout=left, limits=limits, purpose=purpose)


def request_handshake(
    stream: socket.socket,
    *,
    token: str | None,
    timeout: float,
    limits: FramedSocketLimits | None = None,
    purpose: Purpose = PIPE,
) -> FramedSocket:
    """See `connect`; for a newly connected socket, which the function owns from the call on."""
    deadline = time.monotonic() + timeout
    connection = FramedSocket(stream, HANDSHAKE_LIMITS)
    with _aborting(connection):
        agreement = client_handshake(connection, token, deadline, _dialled(purpose, stream))
    return _agreed(connection, agreement, limits)


def accept_handshake(
    stream: socket.socket,
    *,
    token: str | None,
    timeout: float,
    limits: FramedSocketLimits | None = None,
    accepts: Accepts = only_pipes,
) -> FramedSocket:
    """The accepting side of `connect`, for a newly accepted socket. Owns the socket from the call
    on.

    The client sends its proof first, so an unauthenticated client gets only the versions and that a
    token is required.

    Raises:
        NodeRefused: the client has another version, no token or another one, or is for another end.
        PipeError: the client did not send enough in time, or disconnected.
        ProtocolError: the client does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    connection = FramedSocket(stream, HANDSHAKE_LIMITS)
    with _aborting(connection):
        agreement = server_handshake(connection, token, deadline, accepts)
    return _agreed(connection, agreement, limits)


HANDSHAKE_LIMITS: Final = FramedSocketLimits(max_header_bytes=HELLO_BYTES, max_payload_bytes=0)


def _agreed(
    connection: FramedSocket, agreement: Agreement, limits: FramedSocketLimits | None
) -> FramedSocket:
    """Between nodes headers have a MAC. A pipe has none: its two ends are of one program. Nor has
    a lane, which is one."""
    connection.set_limits(limits or FramedSocketLimits())
    if agreement.purpose.role not in (PIPE.role, LANE.role):
        connection.macs = agreement.macs
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


def client_handshake(
    connection: FrameStream, token: str | None, deadline: float, purpose: Purpose = PIPE
) -> Agreement:
    """Run the connecting side. For the errors see `connect`."""
    return _run(connection, client_dialogue(token, purpose), deadline)


def server_handshake(
    connection: FrameStream, token: str | None, deadline: float, accepts: Accepts = only_pipes
) -> Agreement:
    """Run the listening side. For the errors see `accept_handshake`."""
    return _run(connection, server_dialogue(token, accepts), deadline)


def _run(connection: FrameStream, dialogue: Dialogue, deadline: float) -> Agreement:
    def send(message: list[Any] | None) -> None:
        if message is not None:
            connection.send(message, timeout=deadline - time.monotonic())

    try:
        send(next(dialogue))
        while True:
            send(dialogue.send(connection.recv_header(deadline - time.monotonic()).header))
    except StopIteration as end:
        agreement: Agreement = end.value
        send(agreement.last)
        return agreement
    except Refusal as refusal:
        send(refusal.message)
        raise


# -- the two sides


def client_dialogue(token: str | None, purpose: Purpose) -> Dialogue:
    oldest = _NAMED_VERSION if purpose.client else OLDEST_VERSION
    fields = list(purpose if purpose.client else purpose[:-1])
    nonce = os.urandom(_NONCE_BYTES)
    ours = ["hello", [oldest, PROTOCOL_VERSION], nonce, token is not None, fields]
    theirs = _heard((yield ours))
    match theirs:
        case ["hello", int(version), bytes(nonce), bool(has_token)] if len(nonce) == _NONCE_BYTES:
            pass
        case _:
            raise ProtocolError("not a hello")
    if not OLDEST_VERSION <= version <= PROTOCOL_VERSION:
        raise NodeRefused(f"refused: {_other_version(version, version)}")
    if has_token != (token is not None):
        raise NodeRefused(f"refused: {_TOKENS}")
    if token is None:
        return Agreement(version, purpose, None)
    secret = _Secret(token, ours, theirs)
    answer = _heard((yield ["proof", secret.derive(b"client proof")]))
    _check_proof(answer, secret.derive(b"server proof"))
    return Agreement(version, purpose, secret.macs(b"client", b"server"))


def server_dialogue(token: str | None, accepts: Accepts) -> Dialogue:
    """An unauthenticated client gets only the versions and whether a token is required."""
    theirs = _heard((yield None))
    version = _common_version(theirs)
    match theirs:
        case ["hello", _, bytes(nonce), bool(has_token), list(fields)] if (
            len(nonce) == _NONCE_BYTES
            and len(fields) in (len(Purpose._fields) - 1, len(Purpose._fields))
            and all(isinstance(one, str) for one in fields)
        ):
            purpose = Purpose(*fields)
        case _:
            raise ProtocolError("not a hello")
    if has_token != (token is not None):
        raise Refusal(_TOKENS, ["refused"])
    ours = ["hello", version, os.urandom(_NONCE_BYTES), token is not None]
    if token is None:
        _check_purpose(purpose, accepts)
        return Agreement(version, purpose, None, ours)
    secret = _Secret(token, theirs, ours)
    try:
        _check_proof(_heard((yield ours)), secret.derive(b"client proof"))
    except NodeRefused:
        raise Refusal(_TOKENS, ["refused"]) from None
    _check_purpose(purpose, accepts)
    proof = ["proof", secret.derive(b"server proof")]
    return Agreement(version, purpose, secret.macs(b"server", b"client"), proof)


class _Secret:
    """What only ends with the token can derive from the two hellos."""

    def __init__(self, token: str, client_hello: list[Any], server_hello: list[Any]) -> None:
        self._token = token.encode("utf-8", "surrogatepass")
        self._hellos = hashlib.sha256(pack([client_hello, server_hello])).digest()

    def derive(self, what: bytes) -> bytes:
        # Each use has a name: a proof cannot be reflected as that of the other end.
        return hmac.digest(self._token, b"lookup-buffer " + what + b" " + self._hellos, "sha256")

    def macs(self, mine: bytes, theirs: bytes) -> Macs:
        return Macs(Mac(self.derive(mine + b" key")), Mac(self.derive(theirs + b" key")))


def _heard(message: object) -> list[Any]:
    if not isinstance(message, list) or not message:
        raise ProtocolError("not a handshake message")
    match message:
        case ["refused"]:
            raise NodeRefused(f"refused: {_TOKENS}")
        case ["refused", [int(oldest), int(newest)]]:
            raise NodeRefused(f"refused: {_other_version(oldest, newest)}")
        case ["refused", int(version)]:
            raise NodeRefused(f"refused: {_other_version(version, version)}")
        case ["refused", str(reason)]:
            plain = "".join(char for char in reason if char.isprintable())
            raise NodeRefused(f"refused: {plain[:_REASON_CHARACTERS]}")
    return message


def _common_version(hello: list[Any]) -> int:
    """The newest version that both ends speak, whatever else the hello of a later one says."""
    match hello:
        case ["hello", [int(oldest), int(newest)], *_] if oldest <= newest:
            refused: Any = [OLDEST_VERSION, PROTOCOL_VERSION]
        case ["hello", int(version), *_] if type(version) is int:  # before version 4
            oldest = newest = version
            refused = PROTOCOL_VERSION
        case _:
            raise ProtocolError("not a hello")
    common = min(newest, PROTOCOL_VERSION)
    if common < max(oldest, OLDEST_VERSION):
        raise Refusal(_other_version(oldest, newest), ["refused", refused])
    return common


def _other_version(oldest: int, newest: int) -> str:
    theirs = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
    return (
        f"the remote end has protocol version {theirs}, this one {OLDEST_VERSION} to "
        f"{PROTOCOL_VERSION}; run the same version on both"
    )


def _check_purpose(purpose: Purpose, accepts: Accepts) -> None:
    if reason := accepts(purpose):
        raise Refusal(reason, ["refused", reason[:_REASON_CHARACTERS]])


def _check_proof(message: list[Any], expected: bytes) -> None:
    match message:
        case ["proof", bytes(proof)]:
            if not hmac.compare_digest(proof, expected):
                raise NodeRefused(f"refused: {_TOKENS}")
            return
    raise ProtocolError("not a proof")
