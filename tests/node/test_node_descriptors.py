"""A node without a free descriptor for a new connection: it waits for one, and does not spin."""

import itertools
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

from nodes import StartNode, key, wait_until
from patience import scaled

NO_DESCRIPTOR_LEFT = """
import asyncio, resource, socket, time
from lookup_buffer.config import parse_tcp
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.handoffs import Askers
from lookup_buffer.node.peers import PeerServer
from lookup_buffer.node.reachability import Reachability
from lookup_buffer.node.arena import Arena
from lookup_buffer.protocol.auth import Purpose, connect

async def main():
    loop = asyncio.get_running_loop()
    arena = Arena(1 << 20, lambda address, reason: None)
    askers = Askers(loop, Handoffs(loop, arena, Counters(), 1.0), Counters())
    server = PeerServer(loop, arena, Counters(), Credentials(), lambda _: None, askers)
    endpoint = server.listen("tcp://127.0.0.1:0")
    identity, directory = Identity("node", "boot", endpoint), Directory("node")
    reachability = Reachability(loop, identity, directory, Credentials(), Counters())
    server.start(identity, directory, reachability)
    address = parse_tcp(endpoint)
    first = socket.socket()  # for who connects; none is left for who accepts
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first.fileno() + 1, most))
    first.connect(address)
    began = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - began < 0.25, "it tries again and again without a pause"
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    first.close()
    purpose = Purpose("tensors", endpoint, "node")
    link = await asyncio.to_thread(
        connect, *address, token=None, timeout=20.0, purpose=purpose
    )
    link.close()
    server.close()

asyncio.run(main())
"""


def test_for_another_node() -> None:
    command = [sys.executable, "-c", NO_DESCRIPTOR_LEFT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert run.returncode == 0, run.stderr


def test_for_a_client(start_node: StartNode) -> None:
    node = start_node()
    wait_until(lambda: node.stats()["store_up"], 10.0)
    with node.client() as client:
        assert client.has_caches([key()], timeout=1.0) == [False]  # so it has opened what it needs
    _, most = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    taken = {int(number) for number in os.listdir(f"/proc/{node.pid}/fd")}
    first_free = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (first_free, most))
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(node.socket_path))
            began = processor_seconds(node.pid)
            time.sleep(0.5)
            assert processor_seconds(node.pid) - began < 0.25, "it tries again without a pause"
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (most, most))
    with node.client() as client:
        assert client.has_caches([key()], timeout=1.0) == [False]


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_counters_are_answered_without_a_free_descriptor(start_node: StartNode) -> None:
    node = start_node()
    with node.client() as client:
        assert client.stats()["open_files"] > 3
        _, most = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, most))
        assert client.stats()["open_files"] == 3
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (most, most))
    assert "Traceback" not in node.log_text()
