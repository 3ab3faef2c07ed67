"""A node that ends with many claims held, over a slow store."""

import time
from contextlib import ExitStack

from nodes import StartNode, key, wait_until
from proxies import Relay
from servers import StartServer


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
