"""The places of a node for others, and attacks on the handshake between nodes."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import NodeRefused, PipeError
from lookup_buffer.node import peers
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Askers, Handoffs
from lookup_buffer.node.links import HANDOFFS, TENSORS, Credentials, dial
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.peers import PeerServer
from lookup_buffer.node.reachability import Reachability
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.framing import encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
from patience import scaled
from store import Location

TOKEN = "correct horse battery staple"
NAMESPACE = "f" * 64
MIB = 1 << 20
Test = Callable[["Bench"], Awaitable[None]]


class Bench:
    """A peer server and its arena, on the loop of the test."""

    def __init__(self, node: str = "node-b") -> None:
        self.loop = asyncio.get_running_loop()
        self.arena = Arena(64 * MIB, lambda _address, _reason: None)
        self.counters = Counters()
        handoffs = Handoffs(self.loop, self.arena, self.counters, lease_seconds=30.0)
        self.askers = Askers(self.loop, handoffs, self.counters)
        self.server = PeerServer(
            self.loop, self.arena, self.counters, Credentials(TOKEN), lambda _: None, self.askers
        )
        self.endpoint = self.server.listen("tcp://127.0.0.1:0")
        self.location = Location(node, "boot", 1, 1)
        identity, directory = Identity(node, "boot", self.endpoint), Directory(node)
        self.reachability = Reachability(
            self.loop, identity, directory, Credentials(TOKEN), self.counters
        )
        self.server.start(identity, directory, self.reachability)

    def insert(self, key: str, nbytes: int) -> int:
        """Returns its generation."""
        header = TensorHeader.for_tensor("uint8", (nbytes,))
        item = self.arena.reserve((NAMESPACE, key), header, origin="local", ttl_seconds=None)
        assert item is not None
        self.arena.release([self.arena.commit(item, 0, owner=1).ticket], 1)
        return item.generation

    async def reader(self) -> FramedSocket:
        return (
            await dial(self.loop, self.location, self.endpoint, TENSORS, Credentials(TOKEN))
        ).framed()

    def pins(self) -> int:
        return self.arena.gauges().pins

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(scaled(20.0)):
            while not condition():
                await asyncio.sleep(0.01)


def on_a_loop(test: Test) -> None:
    async def run() -> None:
        bench = Bench()
        try:
            await test(bench)
        finally:
            bench.server.close()
            bench.askers.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
            bench.server._senders.close()
            bench.arena.close()

    asyncio.run(run())


async def answered(link: FramedSocket, *items: list[object]) -> list[Any]:
    """The headers of the answers, after their payload is received."""

    def ask() -> list[Any]:
        link.send({"op": "get", "items": list(items)}, timeout=5.0)
        headers = []
        for _ in items:
            header, nbytes = link.recv_header(timeout=5.0)
            link.recv_into(memoryview(bytearray(nbytes)), timeout=5.0)
            headers.append(header)
        return headers

    return await asyncio.to_thread(ask)


# -- places


def test_small_and_large_items_come_in_the_order_of_the_request() -> None:
    async def test(bench: Bench) -> None:
        sizes = {"small": 1000, "large": 9 * MIB, "medium": 200_000, "empty": 0}
        items = [[NAMESPACE, key, "boot", bench.insert(key, n)] for key, n in sizes.items()]
        absent = [NAMESPACE, "absent", "boot", 1]
        link = await bench.reader()
        for _ in range(3):
            *found, last = await answered(link, *items, absent)
            assert [header["payload"]["key"] for header in found] == list(sizes)
            assert last == {"status": "stale"}
        await bench.until(lambda: bench.pins() == 0)
        link.close()

    on_a_loop(test)


def test_a_reader_that_leaves_or_does_not_read_leaves_no_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "PEER_PROGRESS_SECONDS", 0.2)

    async def test(bench: Bench) -> None:
        items = [[NAMESPACE, "k", "boot", bench.insert("k", 16 * MIB)]]
        for leaves in (True, False):
            link = await bench.reader()
            link.send({"op": "get", "items": items}, timeout=5.0)
            await bench.until(lambda: bench.pins() == 1)
            if leaves:
                link.abort()
            await bench.until(lambda: bench.pins() == 0)
            await bench.until(lambda: not bench.server._readers)
            link.abort()

    on_a_loop(test)


def test_readers_that_do_not_read_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        large = [NAMESPACE, "large", "boot", bench.insert("large", 16 * MIB)]
        slow = [await bench.reader() for _ in range(20)]
        for link in slow:
            link.send({"op": "get", "items": [large]}, timeout=5.0)
        await bench.until(lambda: bench.pins() == len(slow))
        small = [NAMESPACE, "small", "boot", bench.insert("small", MIB)]
        link = await bench.reader()
        began = time.monotonic()
        assert (await answered(link, small))[0]["status"] == "ok"
        assert time.monotonic() - began < scaled(1.0)
        for one in [link, *slow]:
            one.abort()
        await bench.until(lambda: bench.pins() == 0)

    on_a_loop(test)


def test_the_longest_idle_connection_gives_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LINKS_MIN", 4)
    monkeypatch.setattr(peers, "LINKS_PER_NODE", 0)

    async def test(bench: Bench) -> None:
        item = [NAMESPACE, "k", "boot", bench.insert("k", 16 * MIB)]
        links = [await bench.reader() for _ in range(4)]
        await bench.until(lambda: len(bench.server._readers) == 4)
        links[0].send({"op": "get", "items": [item]}, timeout=5.0)  # busy: it does not read
        await bench.until(lambda: bench.pins() == 1)
        await answered(links[1], [NAMESPACE, "absent", "boot", 1])
        links.append(await bench.reader())
        await bench.until(lambda: links[2].wait_readable(0.0))  # it has ended
        assert not links[1].wait_readable(0.0)
        assert not links[3].wait_readable(0.0)
        assert (await answered(links[4], [NAMESPACE, "absent", "boot", 1]))[0]["status"] == "stale"
        for link in links:
            link.abort()
        await bench.until(lambda: bench.pins() == 0)

    on_a_loop(test)


def test_silent_strangers_keep_no_node_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 silent connections a second; each would keep a place for two seconds."""

    async def test(bench: Bench) -> None:
        address = parse_tcp(bench.endpoint)
        strangers: list[socket.socket] = []

        async def crowd() -> None:
            while True:
                for _ in range(16):
                    strangers.append(stream := socket.socket())
                    stream.setblocking(False)
                    await bench.loop.sock_connect(stream, address)
                await asyncio.sleep(0.25)

        coming = asyncio.create_task(crowd())
        for _ in range(200):  # and as many at once as there are places
            strangers.append(stream := socket.socket())
            stream.setblocking(False)
            await bench.loop.sock_connect(stream, address)
        for _ in range(20):
            began = time.monotonic()
            (await bench.reader()).close()
            assert time.monotonic() - began < scaled(1.0)
            await asyncio.sleep(0.05)
        assert len(bench.server._greetings) <= peers.HALF_OPEN_PER_HOST_MAX
        coming.cancel()
        await bench.until(lambda: not bench.server._greetings)
        for stream in strangers:
            stream.close()

    on_a_loop(test)


def test_a_connection_without_requests_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEER_IDLE_SECONDS", 0.1)

    async def test(bench: Bench) -> None:
        link = await bench.reader()
        await bench.until(lambda: bool(bench.server._readers))
        bench.server.tick()
        assert not link.wait_readable(0.0)
        await asyncio.sleep(0.15)
        bench.server.tick()
        await bench.until(lambda: link.wait_readable(0.0))
        link.abort()

    on_a_loop(test)


# -- attacks


@asynccontextmanager
async def relay(endpoint: str, forged: list[bytes]) -> AsyncIterator[str]:
    """An attacker who passes all bytes on, and then adds `forged` ones to those of the client."""
    loop, host_port = asyncio.get_running_loop(), parse_tcp(endpoint)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*host_port)
        back = loop.create_task(pump(far_reader, writer))
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                far_writer.write(data)
                for one in forged[:] if b"items" in data else []:
                    far_writer.write(one)
        back.cancel()
        writer.close()
        far_writer.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"tcp://127.0.0.1:{port}"


def test_a_handshake_that_is_passed_on_is_refused() -> None:
    """Who can write Redis makes a node dial him; he cannot use its proof for another node."""

    async def test(bench: Bench) -> None:
        async with relay(bench.endpoint, []) as forged_location:
            for role in (TENSORS, HANDOFFS):
                with pytest.raises(NodeRefused, match="node node-b listens here"):
                    await dial(
                        bench.loop, bench.location, forged_location, role, Credentials(TOKEN)
                    )
        assert not bench.server._readers
        assert not bench.askers

    on_a_loop(test)


@pytest.mark.parametrize(
    ("purpose", "reason"),
    [
        (Purpose("tensors", "", "another-node"), "node node-b listens here"),
        (Purpose("handoffs", "", "node-b", "another boot"), "started again"),
        (Purpose("pipe", "", "node-b"), "a node listens here"),
    ],
)
def test_who_expects_another_end_is_refused(purpose: Purpose, reason: str) -> None:
    async def test(bench: Bench) -> None:
        meant = purpose._replace(endpoint=bench.endpoint)
        with pytest.raises(NodeRefused, match=reason):
            await asyncio.to_thread(
                connect, *parse_tcp(bench.endpoint), token=TOKEN, timeout=5.0, purpose=meant
            )

    on_a_loop(test)


def test_a_request_that_is_injected_ends_the_connection() -> None:
    """An attacker on the path passes the handshake on unchanged, since the address is the right
    one, and then asks for tensors himself."""

    async def test(bench: Bench) -> None:
        item = [NAMESPACE, "k", "boot", bench.insert("k", 100)]
        own = encode_frame({"op": "get", "items": [item]})
        async with relay(bench.endpoint, [own]) as address:
            purpose = Purpose("tensors", bench.endpoint, "node-b")
            link = await asyncio.to_thread(
                connect, *parse_tcp(address), token=TOKEN, timeout=5.0, purpose=purpose
            )
            with suppress(PipeError):
                await answered(link, item, item)
            await bench.until(lambda: bench.counters.totals().get("protocol_errors") == 1)
            await bench.until(lambda: not bench.server._readers and bench.pins() == 0)
            link.abort()

    on_a_loop(test)
