"""A peer server and its arena in the test's process, and readers of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Askers, Handoffs
from lookup_buffer.node.links import TENSORS, Credentials, dial
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.peers import PeerServer
from lookup_buffer.node.reachability import Reachability
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
from patience import scaled
from store import Location

TOKEN = "correct horse battery staple"
NAMESPACE = "f" * 64
MIB = 1 << 20
WITH_TOKEN = Credentials(TOKEN)
Test = Callable[["Bench"], Awaitable[None]]


class Bench:
    """A peer server and its arena, on the loop of the test."""

    def __init__(self, credentials: Credentials, node: str = "node-b") -> None:
        self.credentials = credentials
        self.loop = asyncio.get_running_loop()
        self.arena = Arena(64 * MIB, lambda _address, _reason: None)
        self.counters = Counters()
        handoffs = Handoffs(self.loop, self.arena, self.counters, lease_seconds=30.0)
        self.askers = Askers(self.loop, handoffs, self.counters)
        self.server = PeerServer(
            self.loop, self.arena, self.counters, credentials, lambda _: None, self.askers
        )
        scheme = "tls" if credentials.tls else "tcp"
        self.endpoint = self.server.listen(f"{scheme}://127.0.0.1:0")
        self.location = Location(node, "boot", 1, 1)
        identity, directory = Identity(node, "boot", self.endpoint), Directory(node)
        self.reachability = Reachability(self.loop, identity, directory, credentials, self.counters)
        self.server.start(identity, directory, self.reachability)

    def insert(self, key: str, nbytes: int) -> int:
        """Returns its generation."""
        header = TensorHeader.for_tensor("uint8", (nbytes,))
        item = self.arena.reserve((NAMESPACE, key), header, origin="local", ttl_seconds=None)
        assert item is not None
        self.arena.release([self.arena.commit(item, 0, owner=1).ticket], 1)
        return item.generation

    def fill(self, key: str, byte: int) -> None:
        held = self.arena.hold((NAMESPACE, key), 1)
        assert held is not None
        self.arena.bytes_of(held.item)[:] = bytes([byte]) * held.item.nbytes
        self.arena.release([held.ticket], 1)

    async def reader(self) -> FramedSocket:
        return (
            await dial(self.loop, self.location, self.endpoint, TENSORS, self.credentials)
        ).framed()

    def pins(self) -> int:
        return self.arena.gauges().pins

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(scaled(20.0)):
            while not condition():
                await asyncio.sleep(0.01)


def on_a_loop(test: Test, credentials: Credentials = WITH_TOKEN) -> None:
    async def run() -> None:
        bench = Bench(credentials)
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
