"""A node that ends with claims held: over a slow store, and beside requests that wait."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from claiming import claim_in
from lookup_buffer.errors import LookupBufferError
from nodes import StartNode, key, wait_until
from proxies import Relay
from servers import StartServer
from store import EmbeddedServer


def test_a_node_ends_in_time_with_releases_pending(
    start_server: StartServer, start_node: StartNode
) -> None:
    relay = Relay()
    relay.connect_to(str(start_server().directory / "server.sock"))
    node = start_node(store_url=f"redis://127.0.0.1:{relay.port}", store_timeout_seconds=2.0)
    wait_until(lambda: node.stats()["store_up"], 5.0)
    with ExitStack() as stack:
        for _ in range(100):
            assert stack.enter_context(node.client()).claim(key(), lease_seconds=60.0).granted
        relay.delay(0.4)
        started = time.monotonic()
        assert node.terminate() == 0
        print(f"ended after {time.monotonic() - started:.2f} s")
        # One round trip for each session would take 40 s; the registrar leaves within a few.
        assert time.monotonic() - started < 30.0
    relay.close()


@pytest.mark.parametrize("mirror", [True, False])
def test_a_node_that_ends_releases_the_claims_of_sessions_that_wait(
    valkey_server: EmbeddedServer, start_node: StartNode, mirror: bool
) -> None:
    node = start_node(mirror=mirror)
    wait_until(lambda: node.stats()["store_up"], 5.0)
    name = key()
    with node.client() as client, node.client() as other, ThreadPoolExecutor() as pool:
        assert client.claim(name, lease_seconds=60.0).granted
        waiting: list[Future[Any]] = [
            pool.submit(client.select, key(), timeout=30.0),
            pool.submit(other.claim, name, lease_seconds=60.0, timeout=30.0),
        ]
        wait_until(lambda: all(one.running() for one in waiting), 5.0)
        time.sleep(0.3)
        assert claim_in(valkey_server, name) != b"$-1"
        assert node.terminate() == 0
        for one in waiting:
            if error := one.exception():
                assert isinstance(error, LookupBufferError)
    assert claim_in(valkey_server, name) == b"$-1"
