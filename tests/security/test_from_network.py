"""Who can connect to a node's port from the network, and has no token; and what idle nodes cost."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from lookup_buffer.config import parse_tcp
from lookup_buffer.node import links
from lookup_buffer.node.links import host_of
from lookup_buffer.node.peers import HALF_OPEN_MAX
from lookup_buffer.pipes import open_pipe
from lookup_buffer.protocol import framing
from lookup_buffer.protocol.auth import Purpose, client_dialogue, connect
from lookup_buffer.protocol.framing import Frame, FrameDecoder, decode_header, encode_frame
from lookup_buffer.protocol.stream import FramedSocket
from nodes import NodeProcess, StartNode, key, tensor_of, wait_until, with_store
from patience import scaled
from peer_servers import TOKEN, Bench, on_a_loop
from store import NodeInfo, open_store

FEW_PLACES = """
from lookup_buffer.node import peers
peers.LINKS_MIN, peers.LINKS_PER_NODE = 16, 0
"""
"""A node of a fleet that has as many idle neighbours as it has places."""


def info_of(node: NodeProcess) -> NodeInfo:
    with open_store(node.settings.store_url) as store:
        wait_until(lambda: store.node_infos([node.node_id]), 10.0)
        return store.node_infos([node.node_id])[node.node_id]


def neighbour_of(info: NodeInfo) -> FramedSocket:
    """A connection after its handshake, as of another node that reads tensors."""
    purpose = Purpose("tensors", info.endpoint, info.node)
    address = parse_tcp(info.endpoint)
    return connect(*address, token=TOKEN, timeout=scaled(5.0), purpose=purpose)


@contextmanager
def strangers(info: NodeInfo) -> Iterator[list[socket.socket]]:
    """200 silent connections, and 64 more each second: each would keep a place for two seconds."""
    crowd: list[socket.socket] = []
    over = threading.Event()

    def come(count: int) -> None:
        for _ in range(count):
            crowd.append(socket.create_connection(parse_tcp(info.endpoint), scaled(5.0)))

    def keep_coming() -> None:
        with suppress(OSError):
            while not over.wait(0.25):
                come(16)

    come(200)
    coming = threading.Thread(target=keep_coming)
    coming.start()
    try:
        yield crowd
    finally:
        over.set()
        coming.join()
        for one in crowd:
            one.close()


def test_silent_strangers_keep_no_node_out(start_node: StartNode) -> None:
    a, b = start_node(token=TOKEN), start_node(token=TOKEN)
    with_store(a, b)
    info = info_of(a)
    with strangers(info) as crowd:
        for _ in range(20):
            began = time.monotonic()
            neighbour_of(info).close()
            assert time.monotonic() - began < scaled(1.0)
            time.sleep(0.05)
        with a.client() as here, b.client() as there:
            here.insert(name := key(), tensor_of("s", 1000))
            tensor = there.select(name, timeout=10.0)
            assert tensor is not None
            assert torch.equal(tensor, tensor_of("s", 1000))
        assert len(crowd) > 200, "more came meanwhile"


def stranger(port: int, address: str) -> socket.socket:
    """A silent connection from that address of this host."""
    one = socket.socket()
    one.bind((address, 0))
    one.connect(("127.0.0.1", port))
    return one


def test_a_crowd_from_three_addresses_ends_no_slow_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_SECONDS", 60.0)

    async def crowded(bench: Bench) -> None:
        port = parse_tcp(bench.endpoint)[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        purpose = Purpose("tensors", bench.endpoint, bench.location.node)
        dialogue, frames = client_dialogue(TOKEN, purpose), FrameDecoder()

        async def exchange(message: list[Any] | None) -> Any:
            """Send it; returns the other end's next message."""
            assert message is not None
            writer.write(encode_frame(message))
            received: list[Frame] = []
            while not received:
                data = await asyncio.wait_for(reader.read(65536), scaled(5.0))
                assert data, "the node has closed it"
                received = frames.feed(data)
            return received[0].header

        proof = dialogue.send(await exchange(next(dialogue, None)))
        with ExitStack() as crowd:
            for number in range(2 * HALF_OPEN_MAX):
                crowd.enter_context(stranger(port, f"127.0.0.{2 + number % 3}"))
                if number % 16 == 0:
                    await asyncio.sleep(0)
            await bench.until(lambda: len(bench.server._greetings) == HALF_OPEN_MAX)
            with pytest.raises(StopIteration):
                dialogue.send(await exchange(proof))
        writer.close()

    on_a_loop(crowded)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1:ffff::7", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::8", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_network_counts_as_one_host(address: str, host: str) -> None:
    assert host_of(address) == host


def test_idle_neighbours_fill_no_node(start_node: StartNode) -> None:
    a, b = start_node(token=TOKEN, prelude=FEW_PLACES), start_node(token=TOKEN)
    with_store(a, b)
    info = info_of(a)
    idle = [neighbour_of(info) for _ in range(32)]
    try:
        with a.client() as here, b.client() as there:
            here.insert(name := key(), tensor_of("i", 1000))
            tensor = there.select(name, timeout=10.0)
            assert tensor is not None
            assert torch.equal(tensor, tensor_of("i", 1000))
        wait_until(lambda: sum(one.wait_readable(0.0) for one in idle) >= 32 - 15, 10.0)
        assert not idle[-1].wait_readable(0.0), "the longest idle ones are closed"
    finally:
        for one in idle:
            one.abort()


def test_strangers_that_use_up_the_threads_end_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of a device lane has the same `Acceptor`."""
    start = threading.Thread.start
    with open_pipe("tcp://127.0.0.1:0", listen=True, token=TOKEN) as pipe:
        address, without_thread = parse_tcp(pipe.uri), list[threading.Thread]()

        def granted(thread: threading.Thread) -> None:
            if thread.name == "lb-pipe-handshake":
                without_thread.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", granted)
            for _ in range(2):
                with socket.create_connection(address, scaled(5.0)) as one:
                    assert one.recv(1) == b""
        assert len(without_thread) == 2
        with open_pipe(pipe.uri, token=TOKEN, timeout=scaled(5.0)) as other:
            other.send_tensor(None)
            assert pipe.recv_tensor(timeout=scaled(5.0)) is None


def test_of_many_messages_at_once_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a proof, on the loop: 127 connections with 3,855 messages each held it for 1.6 s."""
    decoded = 0

    def counted(*arguments: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode_header(*arguments)

    async def test(bench: Bench) -> None:
        nonlocal decoded
        monkeypatch.setattr(framing, "decode_header", counted)
        reader, writer = await asyncio.open_connection(*parse_tcp(bench.endpoint))
        writer.write(encode_frame([]) * 3000)
        with suppress(ConnectionError):
            async with asyncio.timeout(scaled(10.0)):
                await reader.read()
        writer.close()
        assert decoded == 1

    on_a_loop(test)
