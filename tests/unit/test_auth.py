"""The handshake: without the token there is no connection and no information."""

import contextlib
import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from lookup_buffer.errors import LookupBufferError, NodeRefused, PipeError, ProtocolError
from lookup_buffer.protocol import auth
from lookup_buffer.protocol.auth import (
    OLDEST_VERSION,
    PIPE,
    PROTOCOL_VERSION,
    Accepts,
    Purpose,
    accept_handshake,
    connect,
    only_pipes,
)
from lookup_buffer.protocol.framing import FrameDecoder, pack
from lookup_buffer.protocol.stream import FramedSocket
from patience import scaled

TOKEN = "correct horse battery staple"
TIMEOUT = 10.0


class Server:
    """Accepts one connection and keeps the outcome."""

    def __init__(
        self, token: str | None, timeout: float = TIMEOUT, accepts: Accepts = only_pipes
    ) -> None:
        self._accepts = accepts
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.pool = ThreadPoolExecutor(1)
        self.outcome: Future[FramedSocket] = self.pool.submit(self._accept, token, timeout)

    def _accept(self, token: str | None, timeout: float) -> FramedSocket:
        self.listener.settimeout(TIMEOUT)
        stream, _ = self.listener.accept()
        return accept_handshake(stream, token=token, timeout=timeout, accepts=self._accepts)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        self.pool.shutdown()
        if self.outcome.exception() is None:
            self.outcome.result().abort()


@pytest.fixture
def raw_client() -> Iterator[tuple[FramedSocket, Server]]:
    """A hand-made client of a server with a token."""
    with (
        Server(TOKEN) as server,
        FramedSocket(socket.create_connection(("127.0.0.1", server.port))) as link,
    ):
        yield link, server


def hello(nonce: bytes | None = None, **changes: Any) -> list[Any]:
    """Of a client."""
    fields = {
        "word": "hello",
        "versions": [OLDEST_VERSION, PROTOCOL_VERSION],
        "nonce": nonce or os.urandom(32),
        "has_token": True,
        "purpose": list(PIPE),
    }
    return list((fields | changes).values())


def welcome(**changes: Any) -> list[Any]:
    """The hello of a server."""
    fields = {"word": "hello", "version": PROTOCOL_VERSION, "nonce": os.urandom(32)}
    return list((fields | {"has_token": True} | changes).values())


def proof_of(role: bytes, client_hello: list[Any], server_hello: list[Any]) -> list[Any]:
    hellos = hashlib.sha256(pack([client_hello, server_hello])).digest()
    said = b"lookup-buffer " + role + b" proof " + hellos
    return ["proof", hmac.digest(TOKEN.encode(), said, "sha256")]


@pytest.mark.parametrize("token", [None, TOKEN, "", "é\ud800"])
def test_the_same_token_makes_a_connection(token: str | None) -> None:
    with Server(token) as server:
        link = connect("127.0.0.1", server.port, token=token, timeout=TIMEOUT)
        with link:
            other = server.outcome.result(TIMEOUT)
            link.send({"op": "get"}, timeout=TIMEOUT)
            assert other.recv_header(TIMEOUT) == ({"op": "get"}, 0)
            other.send({"x": "y" * 2000}, memoryview(bytes(100_000)), timeout=TIMEOUT)
            assert link.recv_header(TIMEOUT) == ({"x": "y" * 2000}, 100_000)


@pytest.mark.parametrize(
    ("client", "server_token"),
    [(None, TOKEN), (TOKEN, None), ("wrong", TOKEN), (TOKEN + " ", TOKEN), ("", TOKEN)],
)
def test_another_token_is_refused_on_both_sides(
    client: str | None, server_token: str | None
) -> None:
    with Server(server_token) as server:
        with pytest.raises(NodeRefused) as caught:
            connect("127.0.0.1", server.port, token=client, timeout=TIMEOUT)
        with pytest.raises(NodeRefused) as refused:
            server.outcome.result(TIMEOUT)
        assert str(caught.value) == str(refused.value), "the error tells nothing apart"
        for token in filter(None, (client, server_token)):
            assert token not in str(caught.value)


def test_the_token_never_travels_and_no_proof_comes_twice() -> None:
    captured = []
    for _ in range(2):
        with Server(TOKEN) as server, socket.create_server(("127.0.0.1", 0)) as relay_listener:
            seen = bytearray()

            def relay(listener: socket.socket, port: int, seen: bytearray) -> None:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))

                def pump(source: socket.socket, target: socket.socket) -> None:
                    with contextlib.suppress(OSError):  # either end may leave first
                        while data := source.recv(4096):
                            seen.extend(data)
                            target.sendall(data)
                        target.shutdown(socket.SHUT_WR)

                back = threading.Thread(target=pump, args=(far, near))
                back.start()
                pump(near, far)
                back.join(TIMEOUT)
                near.close()
                far.close()

            thread = threading.Thread(target=relay, args=(relay_listener, server.port, seen))
            thread.start()
            port = relay_listener.getsockname()[1]
            with connect("127.0.0.1", port, token=TOKEN, timeout=TIMEOUT):
                server.outcome.result(TIMEOUT).close()
            thread.join(TIMEOUT)
            captured.append(bytes(seen))
    secrets = []
    for stream in captured:  # the two ends take turns, so their frames do not interleave
        assert TOKEN.encode() not in stream
        said = [header for header, _ in FrameDecoder().feed(stream)]
        assert [message[0] for message in said] == ["hello", "hello", "proof", "proof"]
        secrets += [item for message in said for item in message if isinstance(item, bytes)]
    assert len(secrets) == len(set(secrets)) == 8, "nonces and proofs are fresh each time"


def test_without_the_token_a_client_gets_only_that_one_is_required(
    raw_client: tuple[FramedSocket, Server],
) -> None:
    link, server = raw_client
    link.send(hello(has_token=False), timeout=TIMEOUT)
    assert link.recv_header(TIMEOUT) == (["refused"], 0)
    with pytest.raises(PipeError):
        link.recv_header(TIMEOUT)
    with pytest.raises(NodeRefused):
        server.outcome.result(TIMEOUT)


def test_the_server_proves_nothing_before_the_client_has(
    raw_client: tuple[FramedSocket, Server],
) -> None:
    link, _ = raw_client
    link.send(hello(), timeout=TIMEOUT)
    word, _, _, has_token = link.recv_header(TIMEOUT).header
    assert (word, has_token) == ("hello", True)
    assert not link.wait_readable(0.2)
    link.send(["proof", bytes(32)], timeout=TIMEOUT)
    assert link.recv_header(TIMEOUT) == (["refused"], 0)


@pytest.mark.parametrize("role", [b"client", b"server"])
def test_a_proof_is_bound_to_its_role(raw_client: tuple[FramedSocket, Server], role: bytes) -> None:
    link, _ = raw_client
    mine = hello()
    link.send(mine, timeout=TIMEOUT)
    link.send(proof_of(role, mine, link.recv_header(TIMEOUT).header), timeout=TIMEOUT)
    answer = link.recv_header(TIMEOUT).header
    assert answer[0] == ("proof" if role == b"client" else "refused")


def test_a_client_refuses_its_own_proof_reflected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def mirror() -> None:
            with FramedSocket(listener.accept()[0]) as link:
                theirs = link.recv_header(TIMEOUT).header
                link.send(welcome(nonce=theirs[2]), timeout=TIMEOUT)
                link.send(link.recv_header(TIMEOUT).header, timeout=TIMEOUT)

        mirroring = pool.submit(mirror)
        with pytest.raises(NodeRefused):
            connect("127.0.0.1", listener.getsockname()[1], token=TOKEN, timeout=TIMEOUT)
        mirroring.result(TIMEOUT)


def test_an_impostor_without_the_token_is_refused_by_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def impostor() -> None:
            with FramedSocket(listener.accept()[0]) as link:
                link.recv_header(TIMEOUT)
                link.send(welcome(), timeout=TIMEOUT)
                link.recv_header(TIMEOUT)
                link.send(["proof", os.urandom(32)], timeout=TIMEOUT)

        pretending = pool.submit(impostor)
        with pytest.raises(NodeRefused):
            connect("127.0.0.1", listener.getsockname()[1], token=TOKEN, timeout=TIMEOUT)
        pretending.result(TIMEOUT)


OURS = f"this one {OLDEST_VERSION} to {PROTOCOL_VERSION}"
BOTH_VERSIONS = f"version {PROTOCOL_VERSION + 1}, {OURS}"


@pytest.mark.parametrize(
    ("versions", "refused"),
    [
        ([PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1], [OLDEST_VERSION, PROTOCOL_VERSION]),
        (3, PROTOCOL_VERSION),  # as a node of that version says and understands it
    ],
)
def test_another_version_is_refused_and_both_are_named(
    raw_client: tuple[FramedSocket, Server], versions: object, refused: object
) -> None:
    link, server = raw_client
    said = hello(versions=versions)
    link.send(said if isinstance(versions, list) else said[:4], timeout=TIMEOUT)
    assert link.recv_header(TIMEOUT) == (["refused", refused], 0)
    theirs = versions[0] if isinstance(versions, list) else versions
    with pytest.raises(NodeRefused, match=f"version {theirs}, {OURS}"):
        server.outcome.result(TIMEOUT)


@pytest.mark.parametrize(
    ("theirs", "ours", "common"),
    [((4, 4), (4, 5), 4), ((4, 5), (5, 6), 5), ((4, 9), (4, 5), 5), ((4, 4), (5, 6), None)],
)
def test_the_newest_common_version_is_spoken(
    monkeypatch: pytest.MonkeyPatch,
    theirs: tuple[int, int],
    ours: tuple[int, int],
    common: int | None,
) -> None:
    """A fleet is upgraded node by node: each version speaks the one before."""

    def speak(versions: tuple[int, int]) -> None:
        monkeypatch.setattr(auth, "OLDEST_VERSION", versions[0])
        monkeypatch.setattr(auth, "PROTOCOL_VERSION", versions[1])

    client, server = auth.client_dialogue(None, PIPE), auth.server_dialogue(None, only_pipes)
    speak(theirs)
    said = next(client)
    assert said is not None
    speak(ours)
    next(server)
    if common is None:
        with pytest.raises(NodeRefused, match="version 4, this one 5 to 6"):
            server.send(said)
        return
    with pytest.raises(StopIteration) as accepted:
        server.send(said)
    assert accepted.value.value.version == common
    speak(theirs)
    with pytest.raises(StopIteration) as connected:
        client.send(accepted.value.value.last)
    assert connected.value.value.version == common


NODE = Purpose("tensors", "tcp://10.0.0.1:7000", "node-b")


@pytest.mark.parametrize(
    ("client", "offered", "fields"),
    [("", [OLDEST_VERSION, PROTOCOL_VERSION], 4), ("node-a", [6, PROTOCOL_VERSION], 5)],
)
def test_only_a_hello_over_tls_names_the_client(
    client: str, offered: list[int], fields: int
) -> None:
    """A node of version 5 understands no hello with a name, and is sent none."""
    purpose = NODE._replace(client=client)
    said = next(auth.client_dialogue(None, purpose))
    assert said is not None
    assert (said[1], said[4]) == (offered, list(purpose[:fields]))
    server = auth.server_dialogue(None, lambda _: "")
    next(server)
    with pytest.raises(StopIteration) as agreed:
        server.send(said)
    assert agreed.value.value.purpose == purpose


def test_a_proof_is_for_one_purpose(raw_client: tuple[FramedSocket, Server]) -> None:
    """An attacker who passes a client's proof on to another node has to change its hello."""
    link, _ = raw_client
    said, passed_on = hello(purpose=list(NODE)), hello()
    passed_on[2] = said[2]
    link.send(passed_on, timeout=TIMEOUT)
    link.send(proof_of(b"client", said, link.recv_header(TIMEOUT).header), timeout=TIMEOUT)
    assert link.recv_header(TIMEOUT).header == ["refused"]


def test_a_purpose_is_refused_with_a_reason_after_the_proof() -> None:
    with Server(TOKEN) as server:
        with pytest.raises(NodeRefused, match="refused: a pipe listens here"):
            connect("127.0.0.1", server.port, token=TOKEN, timeout=TIMEOUT, purpose=NODE)
        with pytest.raises(NodeRefused, match="a pipe listens here"):
            server.outcome.result(TIMEOUT)
    with Server(TOKEN) as server, pytest.raises(NodeRefused, match="one end has no token"):
        connect("127.0.0.1", server.port, token="wrong", timeout=TIMEOUT, purpose=NODE)


def test_between_nodes_each_header_has_a_mac() -> None:
    with Server(TOKEN, accepts=lambda _: "") as server:
        link = connect("127.0.0.1", server.port, token=TOKEN, timeout=TIMEOUT, purpose=NODE)
        with link, server.outcome.result(TIMEOUT) as other:
            for _ in range(3):
                link.send({"op": "get"}, timeout=TIMEOUT)
                assert other.recv_header(TIMEOUT) == ({"op": "get"}, 0)
                other.send({"x": "y" * 5000}, memoryview(b"12345"), timeout=TIMEOUT)
                assert link.recv_header(TIMEOUT) == ({"x": "y" * 5000}, 5)
                link.recv_into(memoryview(bytearray(5)), timeout=TIMEOUT)
            assert link.macs is not None
            link.macs.sends.next()  # as if one had been left out
            link.send({"op": "get"}, timeout=TIMEOUT)
            with pytest.raises(ProtocolError, match="without the MAC"):
                other.recv_header(TIMEOUT)


@pytest.mark.parametrize(
    "answer",
    [
        ["refused", [PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1]],
        ["refused", PROTOCOL_VERSION + 1],
        welcome(version=PROTOCOL_VERSION + 1),
    ],
)
def test_a_version_mismatch_names_both_versions(answer: list[object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def newer() -> None:
            with FramedSocket(listener.accept()[0]) as link:
                link.recv_header(TIMEOUT)
                link.send(answer, timeout=TIMEOUT)

        answering = pool.submit(newer)
        with pytest.raises(NodeRefused, match=BOTH_VERSIONS):
            connect("127.0.0.1", listener.getsockname()[1], token=TOKEN, timeout=TIMEOUT)
        answering.result(TIMEOUT)


OTHER_WORDS: dict[str, Any] = {
    "nothing": [],
    "half a refusal": ["refuse"],
    "a map": {"hello": 1},
    "a version in words": hello(versions="1"),
    "versions in words": hello(versions=["1", "2"]),
    "no versions": hello(versions=[5, 4]),
    "half a purpose": hello(purpose=["pipe"]),
    "a purpose of numbers": hello(purpose=["pipe", "", "", 1]),
    "a short nonce": hello(nonce=b"short"),
    "a long nonce": hello(nonce=bytes(33)),
    "a token of one": hello(has_token=1),
    "a proof like a hello": hello(word="proof"),
    "more": [*hello(), "more"],
    "a proof": ["proof", bytes(32)],
}


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_invalid_handshake_messages_are_a_protocol_error(
    raw_client: tuple[FramedSocket, Server], name: str
) -> None:
    link, server = raw_client
    link.send(OTHER_WORDS[name], timeout=TIMEOUT)
    with pytest.raises(ProtocolError):
        server.outcome.result(TIMEOUT)


def test_a_silent_client_is_dropped_in_time() -> None:
    with Server(TOKEN, timeout=0.2) as server:
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as silent:
            with pytest.raises(PipeError):
                server.outcome.result(TIMEOUT)
            assert time.monotonic() - started < scaled(0.3)
            with pytest.raises(ConnectionResetError):
                silent.recv(1)


def test_a_client_that_trickles_is_dropped_in_time() -> None:
    with Server(TOKEN, timeout=0.3) as server:
        started = time.monotonic()
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
        with slow, pytest.raises(ConnectionError):
            for byte in b"LB01" + bytes(20_000):
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - started < scaled(0.3)
        with pytest.raises(LookupBufferError):
            server.outcome.result(TIMEOUT)


def test_an_unauthenticated_client_cannot_make_the_server_read_much() -> None:
    with Server(TOKEN) as server:
        loud = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
        with loud, pytest.raises(ProtocolError):
            loud.sendall(b"LB01" + (1025).to_bytes(4, "big") + bytes(8))
            server.outcome.result(TIMEOUT)


def test_a_silent_server_costs_the_client_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        with pytest.raises(PipeError):
            connect("127.0.0.1", listener.getsockname()[1], token=None, timeout=0.2)
        assert time.monotonic() - started < scaled(0.3)


def test_no_server_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PipeError, match=str(port)):
        connect("127.0.0.1", port, token=TOKEN, timeout=1)
    with pytest.raises(PipeError):
        connect("no-such-host.invalid", 1, token=None, timeout=1)
