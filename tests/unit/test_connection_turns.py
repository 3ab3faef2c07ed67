"""What remote ends have sent is handled in many turns of the node's loop, in its order."""

import array
import asyncio
import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.closer import Closer
from lookup_buffer.node.connection import READ_BYTES, Connection, new_pending
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Askers, Handoffs
from lookup_buffer.node.links import Link
from lookup_buffer.node.turns import Turns
from lookup_buffer.protocol.auth import PROTOCOL_VERSION, Purpose
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import Holds
from lookup_buffer.times import TURN_SECONDS

STEP_SECONDS = 0.51 * TURN_SECONDS
"""What a message takes: two of them are handled in one turn at most."""


class Selector(selectors.DefaultSelector):
    turn = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turn += 1
        return super().select(timeout)


class Loop(asyncio.SelectorEventLoop):
    """It counts its turns. Its time is that of the work that a test does."""

    now = 0.0

    def __init__(self) -> None:
        self.selector = Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.now

    @property
    def turn(self) -> int:
        return self.selector.turn

    def run(self, turns: int) -> None:
        """As many turns as that, without waiting."""
        for _ in range(turns):
            self.call_soon(self.stop)
            self.run_forever()


class Bench:
    """A node's end of connections, and who was heard in which turn."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.turns = Turns(self.loop)
        self.pending = new_pending()
        self.heard: list[tuple[int, Connection, Any]] = []
        self.ended: dict[Connection, LookupBufferError | None] = {}
        self.clients: list[socket.socket] = []
        self.closer = Closer()

    def connect(self) -> tuple[socket.socket, Connection]:
        client, node = socket.socketpair()
        client.setblocking(False)
        self.clients.append(client)
        connection = Connection(
            self.loop, node, self, closer=self.closer, pending=self.pending,
            turns=self.turns,
        )  # fmt: skip
        return client, connection

    def message_received(self, connection: Connection, message: Any) -> None:
        self.loop.now += STEP_SECONDS
        self.heard.append((self.loop.turn, connection, message))

    def connection_lost(self, connection: Connection, error: LookupBufferError | None) -> None:
        self.ended[connection] = error

    def messages(self, of: Connection) -> list[Any]:
        return [message for _, connection, message in self.heard if connection is of]

    def in_one_turn(self) -> int:
        """The most messages of one turn."""
        turns = [turn for turn, *_ in self.heard]
        return max(map(turns.count, turns))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for client in bench.clients:
        client.close()
    bench.loop.run(100)
    assert not bench.pending._held
    bench.loop.close()


def frames(count: int) -> bytes:
    return b"".join(encode_frame(["message", n]) for n in range(count))


def numbered(count: int) -> list[Any]:
    return [["message", n] for n in range(count)]


def test_a_message_is_answered_in_the_turn_in_which_it_is_read(bench: Bench) -> None:
    client, _ = bench.connect()
    for n in range(5):
        client.send(frames(1))
        bench.loop.run(1)
        assert len(bench.heard) == n + 1
        bench.loop.run(1)


def test_what_one_sends_at_once_is_handled_in_many_turns(bench: Bench) -> None:
    client, connection = bench.connect()
    client.send(frames(100))
    bench.loop.run(200)
    assert bench.messages(connection) == numbered(100)
    assert bench.in_one_turn() <= 2


def test_what_many_send_at_once_is_handled_in_many_turns(bench: Bench) -> None:
    connections = []
    for _ in range(20):
        client, connection = bench.connect()
        client.send(frames(10))
        connections.append(connection)
    bench.loop.run(300)
    assert all(bench.messages(connection) == numbered(10) for connection in connections)
    assert bench.in_one_turn() <= 2


def test_one_with_little_to_say_is_heard_soon(bench: Bench) -> None:
    for _ in range(5):
        client, _ = bench.connect()
        client.send(frames(1000))
    bench.loop.run(3)
    client, connection = bench.connect()
    client.send(frames(1))
    begun = len(bench.heard)
    bench.loop.run(20)
    assert bench.messages(connection) == numbered(1)
    place = [each for _, each, _ in bench.heard].index(connection)
    assert place - begun <= 8
    bench.loop.run(3000)
    assert len(bench.heard) == 5001


def test_more_is_read_only_when_all_that_was_read_is_handled(bench: Bench) -> None:
    client, connection = bench.connect()
    expected = [["message", n, b"x" * 4000] for n in range(200)]
    unsent = b"".join(map(encode_frame, expected))
    while len(bench.heard) < len(expected):
        with suppress(BlockingIOError):
            unsent = unsent[client.send(unsent) :]
        bench.loop.run(1)
        assert bench.pending._held.get(connection, 0) <= READ_BYTES + 5000
    assert bench.messages(connection) == expected
    assert bench.in_one_turn() <= 2


def test_descriptors_stay_with_their_messages(bench: Bench) -> None:
    taken: list[tuple[Any, int]] = []

    def hear(connection: Connection, message: Any) -> None:
        bench.loop.now += STEP_SECONDS
        if message[0] == "stage":
            descriptor = connection.take_descriptor()
            taken.append((message[1], os.fstat(descriptor).st_ino))
            os.close(descriptor)

    bench.message_received = hear  # type: ignore[method-assign]
    client, _ = bench.connect()
    inodes = []
    for n in range(6):
        client.send(frames(10))
        file = os.memfd_create("x")
        inodes.append(os.fstat(file).st_ino)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        client.sendmsg([encode_frame(["stage", n]) + frames(10)], rights)
        os.close(file)
    bench.loop.run(300)
    assert taken == list(enumerate(inodes))


def test_what_was_sent_before_the_end_is_handled(bench: Bench) -> None:
    client, connection = bench.connect()
    client.send(frames(50))
    client.close()
    bench.loop.run(20)
    assert connection.open
    bench.loop.run(50)
    assert bench.messages(connection) == numbered(50)
    assert bench.ended == {connection: None}


def test_after_the_end_nothing_more_is_handled(bench: Bench) -> None:
    client, connection = bench.connect()
    client.send(frames(50))
    bench.loop.run(5)
    handled = len(bench.heard)
    assert 0 < handled <= 10
    connection.end(None)
    bench.loop.run(50)
    assert len(bench.heard) == handled


def test_messages_before_one_that_is_garbled_are_handled(bench: Bench) -> None:
    client, connection = bench.connect()
    client.send(frames(20) + b"GET / HTTP/1.1\r\n\r\n" + frames(20))
    bench.loop.run(50)
    assert bench.messages(connection) == numbered(20)
    assert isinstance(bench.ended[connection], ProtocolError)


def test_a_message_that_is_not_handled_stops_no_other(bench: Bench) -> None:
    errors: list[Any] = []
    bench.loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def hear(connection: Connection, message: Any) -> None:
        Bench.message_received(bench, connection, message)
        if message[1] % 10 == 3:
            raise ValueError(message[1])

    bench.message_received = hear  # type: ignore[method-assign]
    client, connection = bench.connect()
    client.send(frames(30))
    bench.loop.run(50)
    assert bench.messages(connection) == numbered(30)
    assert [error.args[0] for error in errors] == [3, 13, 23]


def test_other_nodes_share_the_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, node = Loop(), Arena(1 << 20, lambda *_: None)
    askers = Askers(loop, Handoffs(loop, node, Counters(), 10.0), Counters())
    replied = 0
    reply = Connection.send

    def send(connection: Connection, message: Any) -> None:
        nonlocal replied
        loop.now += STEP_SECONDS
        replied += 1
        reply(connection, message)

    monkeypatch.setattr(Connection, "send", send)
    asked = b"".join(encode_frame(Holds(n, "f" * 64, "k@r").to_wire()) for n in range(20))
    others = []
    for _ in range(10):
        ours, other = socket.socketpair()
        askers.admit(Link(ours, Purpose("handoffs", "", "node", "boot"), None, PROTOCOL_VERSION))
        other.send(asked)
        others.append(other)
    most = 0
    while replied < 200:
        before = replied
        loop.run(1)
        most = max(most, replied - before)
    assert most <= 2
    for other in others:
        told = [header["id"] for header, _ in FrameDecoder().feed(other.recv(1 << 16))]
        assert told == list(range(20))
        other.close()
    loop.run(2)
    askers.close()
    node.close()
    loop.close()


@pytest.mark.parametrize(
    ("share", "read"), [(0.1, [True, True]), (0.2, [True, False]), (0.3, [False, False])]
)
def test_while_descriptors_are_to_be_closed_sessions_are_read_longer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, share: float, read: list[bool]
) -> None:
    """Else a crowd of connections without a session keeps all who have one waiting."""
    (client, session), (other, stranger) = bench.connect(), bench.connect()
    session.begin_session()
    monkeypatch.setattr(bench.closer, "exceeds", lambda most: share > most)
    client.send(frames(1))
    other.send(frames(1))
    bench.loop.run(5)
    assert [bool(bench.messages(one)) for one in (session, stranger)] == read
    share = 0.0
    bench.loop.now += 1.0  # the pause is over
    bench.loop.run(5)
    assert bench.messages(session) == bench.messages(stranger) == numbered(1)
