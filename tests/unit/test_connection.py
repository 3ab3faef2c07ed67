"""The node's end of a client's socket, with a client that disconnects during a request."""

import asyncio
import socket
from typing import Any

import pytest

from lookup_buffer.errors import LookupBufferError
from lookup_buffer.node import connection
from lookup_buffer.node.connection import Connection
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame

SECONDS = 5.0
WORDS = [["release", 1], ["goodbye", 2]]


class Met:
    """A connection of the node, the messages it received, and the client's end of it."""

    def __init__(self, *, answers: int) -> None:
        self.told: list[Any] = []
        self.open: list[bool] = []
        self.ended: asyncio.Future[LookupBufferError | None] = asyncio.Future()
        self._answers = answers
        self.client, node = socket.socketpair()
        self.connection = Connection(asyncio.get_running_loop(), node, self)

    def message_received(self, connection: Connection, message: Any) -> None:
        self.told.append(message)
        for _ in range(self._answers):
            connection.send(["answer"])
        self.open.append(connection.open)

    def connection_lost(self, _: Connection, error: LookupBufferError | None) -> None:
        self.ended.set_result(error)


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_messages_sent_before_a_close_are_received_though_replies_fail(answers: int) -> None:
    """Else its last message is lost if the node is sending an event at that moment: its pins would
    stay as long as those of a lost client, which may be in the middle of a copy."""

    async def meet() -> Met:
        met = Met(answers=answers)
        met.client.sendall(b"".join(map(encode_frame, WORDS)))
        met.client.close()
        met.connection.send(["an event"])
        assert not met.connection.open
        assert await asyncio.wait_for(met.ended, SECONDS) is None
        return met

    met = asyncio.run(meet())
    assert met.told == WORDS
    assert met.open == [False, False]


def test_a_client_that_closes_while_much_waits_for_it_ends_the_connection() -> None:
    async def meet() -> None:
        met = Met(answers=0)
        for _ in range(100):
            met.connection.send(["event", b"x" * 50_000])
        assert met.connection.open
        await asyncio.sleep(0)
        met.client.close()
        assert await asyncio.wait_for(met.ended, SECONDS) is None
        assert not met.connection.open

    asyncio.run(meet())


def test_a_transfer_is_announced_again_and_again_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "TRANSFER_TOLD_SECONDS", 0.01)

    async def meet() -> None:
        met, decoder = Met(answers=0), FrameDecoder()
        met.client.setblocking(False)
        told: list[Any] = []
        with met.connection.fetching(7) as fetching:
            fetching(100)
            async with asyncio.timeout(SECONDS):
                while len(told) < 3:
                    told += [frame.header for frame in decoder.feed(met.client.recv(4096))]
                    await asyncio.sleep(0.02)
        assert all(message == {"id": 7, "fetching": 100} for message in told)
        met.client.recv(4096)
        await asyncio.sleep(0.05)
        with pytest.raises(BlockingIOError):
            met.client.recv(4096)
        met.connection.end(None)
        met.client.close()

    asyncio.run(meet())
