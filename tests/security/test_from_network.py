"""Who can connect to a node's port from the network, and has no token; and what idle nodes cost."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from lookup_buffer.config import parse_tcp
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.stream import FramedSocket
from nodes import NodeProcess, StartNode, key, tensor_of, wait_until, with_store
from patience import scaled
from store import NodeInfo, open_store

TOKEN = "correct horse battery staple"
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
