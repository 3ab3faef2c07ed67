"""Connections between nodes over which nothing passes for a while, by the kernel's own timers.

A filter on a socket (`SO_ATTACH_FILTER`) drops what arrives there: for the other end it is lost.
"""

import asyncio
import ctypes
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lookup_buffer.node import connection, links
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.links import HANDOFFS, Credentials, dial
from lookup_buffer.protocol import sockets
from lookup_buffer.protocol.messages import Holds
from lookup_buffer.protocol.stream import FramedSocket
from node_certificates import Files
from peer_servers import NAMESPACE, TOKEN, Bench, answered, on_a_loop

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
IDLE_SECONDS, PROBE_SECONDS, PROBES = 1, 1, 7
IN_USE_SECONDS = 0.5
ABSENT = [NAMESPACE, "absent", "boot", 1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "IDLE_SECONDS", IDLE_SECONDS)
    monkeypatch.setattr(sockets, "PROBE_SECONDS", PROBE_SECONDS)
    monkeypatch.setattr(sockets, "PROBES", PROBES)
    monkeypatch.setattr(connection, "PEER_PROGRESS_SECONDS", IN_USE_SECONDS)


@contextmanager
def nothing_arrives(*streams: socket.socket) -> Iterator[None]:
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    for stream in streams:
        stream.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    try:
        yield
    finally:
        for stream in streams:
            if stream.fileno() >= 0:
                stream.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


class Taker:
    """Both ends of a connection for hand-offs."""

    def __init__(self, bench: Bench, link: links.Link) -> None:
        (self.owner,) = bench.askers._takes
        self.replies: list[Any] = []
        self.has_ended = False
        self.connection = Connection(bench.loop, link.stream, self, link.macs)
        self.sockets = link.stream, self.owner._socket

    @property
    def is_open(self) -> bool:
        return self.connection.open and self.owner.open

    def ask(self) -> None:
        self.connection.send(Holds(1, NAMESPACE, "k@r").to_wire())

    def message_received(self, _: Connection, reply: Any) -> None:
        self.replies.append(reply)

    def connection_lost(self, *_: object) -> None:
        self.has_ended = True


async def idle_connections(bench: Bench) -> tuple[Taker, FramedSocket, list[socket.socket]]:
    """One for hand-offs and one for tensors, which were used a moment ago; and their sockets."""
    link = await dial(bench.loop, bench.location, bench.endpoint, HANDOFFS, bench.credentials)
    await bench.until(lambda: len(bench.askers) == 1)
    taker, reader = Taker(bench, link), await bench.reader()
    taker.ask()
    await bench.until(lambda: len(taker.replies) == 1)
    await answered(reader, ABSENT)
    (served,) = bench.server._readers
    await asyncio.sleep(2 * IN_USE_SECONDS)  # everything is acknowledged by then
    return taker, reader, [*taker.sockets, reader._socket, served.connection._socket]


def test_an_idle_connection_survives_lost_probes() -> None:
    async def test(bench: Bench) -> None:
        taker, reader, all_sockets = await idle_connections(bench)
        with nothing_arrives(*all_sockets):
            await asyncio.sleep(IDLE_SECONDS + 2.5 * PROBE_SECONDS)
        await asyncio.sleep(2.5 * PROBE_SECONDS)
        assert taker.is_open
        assert not reader.wait_readable(0.0), "it did not end"
        taker.ask()
        await bench.until(lambda: len(taker.replies) == 2)
        assert (await answered(reader, ABSENT))[0]["status"] == "stale"
        taker.connection.end(None)
        reader.close()

    on_a_loop(test)


def test_an_idle_connection_to_a_host_that_is_gone_ends() -> None:
    async def test(bench: Bench) -> None:
        taker, reader, all_sockets = await idle_connections(bench)
        began = time.monotonic()
        with nothing_arrives(*all_sockets):
            await bench.until(lambda: taker.has_ended and not taker.owner.open)
            await bench.until(lambda: reader.wait_readable(0.0) and not bench.server._readers)
        assert time.monotonic() - began > IDLE_SECONDS + 2 * PROBE_SECONDS
        reader.abort()

    on_a_loop(test)


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_connection_whose_bytes_are_not_acknowledged_ends_much_sooner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    monkeypatch.setattr(sockets, "PROBES", 3600)
    tls = Files(tmp_path / "files").tls("node-b") if scheme == "tls" else None

    async def test(bench: Bench) -> None:
        taker, reader, _ = await idle_connections(bench)
        with nothing_arrives(*taker.sockets):
            taker.ask()
            await bench.until(lambda: taker.has_ended)
        taker.owner.end(None)
        reader.close()

    on_a_loop(test, Credentials(TOKEN, tls))
