"""A node of the fleet, or who has its token, floods another with requests: what that costs it."""

import os
import time
from pathlib import Path

import pytest

from lookup_buffer.access import user_token
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.stream import FramedSocket
from nodes import MIB, NodeProcess, StartNode, wait_until, with_store
from patience import scaled
from servers import command
from store import open_store

NAMESPACE = Namespace.named("tests").fingerprint
ITEMS = 256
"""Of one request: as many as are allowed."""
REQUESTS = 240
WRITTEN_PER_SECOND_MAX = 200
"""Far fewer than the requests of a second, and more than a node writes for them."""


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    node = start_node()
    with_store(node)
    return node


def dialled(node: NodeProcess) -> FramedSocket:
    """A connection for tensors, after its handshake."""
    with open_store(node.settings.store_url, call_timeout_seconds=5.0) as store:
        wait_until(lambda: store.node_infos([node.node_id]), 5.0)
        endpoint = store.node_infos([node.node_id])[node.node_id].endpoint
    purpose = Purpose("tensors", endpoint, node.node_id)
    return connect(*parse_tcp(endpoint), token=user_token(), timeout=scaled(5.0), purpose=purpose)


def resident_bytes(node: NodeProcess) -> int:
    """Without what it shares with others, as the arena."""
    fields = Path(f"/proc/{node.pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def scripts_run(node: NodeProcess) -> int:
    """By the node's store, so far."""
    stats = str(command(node.settings.store_url, "INFO", "commandstats"))
    return sum(
        int(part.partition("calls=")[2].partition(",")[0])
        for part in stats.split("cmdstat_")
        if part.startswith(("evalsha", "eval:"))
    )


@pytest.mark.parametrize("length", [20, 2000], ids=["many keys", "long keys"])
def test_requests_for_what_a_node_never_had_cost_it_nothing(node: NodeProcess, length: int) -> None:
    """Each wrong boot is a correction of the store, which a node writes for a few a second only."""
    requests = REQUESTS if length < 100 else REQUESTS // 4
    scripts, memory, began = scripts_run(node), resident_bytes(node), time.monotonic()
    with dialled(node) as link:
        for number in range(requests):
            keys = [f"{number}-{item}-".ljust(length, "x") for item in range(ITEMS)]
            link.send(
                {"op": "get", "items": [[NAMESPACE, one, "wrong", 1] for one in keys]},
                timeout=scaled(5.0),
            )
            for _ in keys:
                assert link.recv_header(scaled(5.0)).header == {"status": "stale"}
    assert resident_bytes(node) - memory < 16 * MIB
    wait_until(lambda: node.stats()["unpublished"] == 0, 30.0)
    seconds = time.monotonic() - began
    assert scripts_run(node) - scripts < WRITTEN_PER_SECOND_MAX * (seconds + 2)


@pytest.mark.parametrize(
    "item",
    [
        [NAMESPACE, "k" * 4097, "wrong", 1],
        [NAMESPACE, "", "wrong", 1],
        [NAMESPACE, "a line\n2026-01-01 of its own", "wrong", 1],
        [NAMESPACE, "\x1b[2J", "wrong", 1],
        [NAMESPACE, "k", [["wrong"]], 1],
        [NAMESPACE, "k", "w" * 25, 1],
        [NAMESPACE, "k", "w\U0001f600", 1],
        [NAMESPACE, "k", "wrong", "1"],
        ["tests", "k", "wrong", 1],
    ],
)
def test_what_is_no_location_ends_the_connection(node: NodeProcess, item: list[object]) -> None:
    with dialled(node) as link:
        link.send({"op": "get", "items": [item]}, timeout=scaled(5.0))
        with pytest.raises(LookupBufferError):
            link.recv_header(scaled(5.0))
