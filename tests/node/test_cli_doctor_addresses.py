"""`doctor`: nodes dial each other at the addresses that they advertise; and what a node refuses."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from command_line import beating, boot_of, run_json
from lookup_buffer.access import user_token
from lookup_buffer.cli import check_addresses
from lookup_buffer.cli.check import Verdict
from lookup_buffer.errors import PipeError
from lookup_buffer.node.reachability import LINKS_MAX
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.fields import EXCHANGED_BYTES
from lookup_buffer.protocol.stream import FramedSocket
from nodes import NodeProcess, StartNode, key, wait_until
from patience import scaled
from servers import StartServer, free_port
from store import BlockingStore, NodeInfo, open_store

BEFORE = """
from lookup_buffer.protocol import auth
auth.PROTOCOL_VERSION = 4
from lookup_buffer.node import links
links.ROLES = (links.TENSORS, links.HANDOFFS)
"""
"""As a node that knows only version 4 answers."""
OWN_ADDRESS = "127.0.0.2"
"""Where connections are counted: at 127.0.0.1 nodes of other tests may dial a port that was free
again."""


@pytest.fixture
def fleet_url(start_server: StartServer) -> str:
    return start_server().url


@pytest.fixture
def fleet(fleet_url: str) -> Iterator[BlockingStore]:
    with open_store(fleet_url) as store:
        yield store


def examine(node: NodeProcess, *, code: int, alive: int) -> list[dict[str, Any]]:
    """The findings about addresses of `doctor` on the host of `node`, once it sees all others."""
    wait_until(lambda: node.stats()["nodes_alive"] == alive, 10.0, f"{alive} nodes are alive")
    settings = {
        "LOOKUP_BUFFER_DIRECTORY": str(node.settings.directory),
        "LOOKUP_BUFFER_STORE_URL": node.settings.store_url,
        "LOOKUP_BUFFER_CAPACITY_BYTES": str(node.settings.capacity_bytes),
    }
    checks = run_json("doctor", code=code, **settings)["checks"]
    return [one for one in checks if one["name"].startswith("address")]


def fails(checks: list[dict[str, Any]]) -> list[str]:
    return [one["found"] for one in checks if one["verdict"] == "fail"]


def test_three_nodes_reach_each_other(start_node: StartNode, fleet_url: str) -> None:
    a, *_ = [start_node(node_id=name, store_url=fleet_url) for name in "abc"]
    (check,) = examine(a, code=0, alive=3)
    assert check["verdict"] == "ok"
    assert "3 of 3 (connections: 6)" in check["found"]


def test_a_wrong_port(start_node: StartNode, fleet_url: str) -> None:
    wrong = f"tcp://127.0.0.1:{free_port()}"
    a = start_node(node_id="a", store_url=fleet_url)
    b = start_node(node_id="b", store_url=fleet_url, advertise=wrong)
    start_node(node_id="c", store_url=fleet_url)
    expected = f"b at {wrong}: nothing listens there, dialled by "
    (found,) = fails(examine(a, code=1, alive=3))
    assert found == f"{expected}a"
    checks = examine(b, code=1, alive=3)  # there the others are asked to dial it back
    assert fails(checks) == [f"{expected}a, c"]
    assert "`advertise` of b" in checks[0]["advice"]


def test_another_node_at_the_address(start_node: StartNode, fleet_url: str) -> None:
    a = start_node(node_id="a", store_url=fleet_url, listen=f"tcp://127.0.0.1:{free_port()}")
    b = start_node(node_id="b", store_url=fleet_url, advertise=a.settings.listen)
    for node in (a, b):
        # Upon the request of b, a dials itself.
        checks = examine(node, code=1, alive=2)
        (found,) = fails(checks)
        assert found.startswith(f"b at {a.settings.listen}: another node answers there")
        assert f"node a listens here, at {a.settings.listen}" in found


def test_another_program_at_the_address(start_node: StartNode, fleet_url: str) -> None:
    a = start_node(node_id="a", store_url=fleet_url)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        start_node(node_id="b", store_url=fleet_url, advertise=endpoint)
        (found,) = fails(examine(a, code=1, alive=2))
    assert found == f"b at {endpoint}: no answer there in time, dialled by a"


def test_a_node_that_restarts_meanwhile_is_dialled_again(
    start_node: StartNode, fleet_url: str, fleet: BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start_node(node_id="a", store_url=fleet_url)
    b = start_node(node_id="b", store_url=fleet_url, listen=f"tcp://127.0.0.1:{free_port()}")
    wait_until(lambda: a.stats()["nodes_alive"] == 2, 10.0)
    infos = list(fleet.node_infos(["a", "b"]).values())

    def restart() -> None:
        b.start()
        with b.client() as there, a.client() as here:
            there.insert(name := key(), torch.ones(1))
            wait_until(lambda: here.has_caches([name])[0], 10.0, "a knows the new b")

    monkeypatch.setattr(check_addresses, "_pause", restart)
    b.kill()
    (check,) = check_addresses.address_checks(a.config, infos)
    assert check.verdict is Verdict.OK
    assert "2 of 2 (connections: 2)" in check.found


def test_a_node_of_the_version_before_is_not_checked(start_node: StartNode, fleet_url: str) -> None:
    a = start_node(node_id="a", store_url=fleet_url)
    start_node(node_id="b", store_url=fleet_url, prelude=BEFORE)
    (check,) = examine(a, code=0, alive=2)
    assert check["verdict"] == "warn"
    assert check["found"] == "not checked, of 2 connections: 2: b speaks protocol 4"


# -- what other nodes may ask of a node


@contextmanager
def a_link(node: NodeProcess, store: BlockingStore) -> Iterator[FramedSocket]:
    """A connection as of another node that wants to be dialled back."""
    wait_until(lambda: node.node_id in store.node_infos([node.node_id]), 10.0)
    info = store.node_infos([node.node_id])[node.node_id]
    host, _, port = info.endpoint.removeprefix("tcp://").rpartition(":")
    purpose = Purpose("reachability", info.endpoint, info.node, info.boot)
    link = connect(host, int(port), token=user_token(), timeout=scaled(5.0), purpose=purpose)
    with link:
        yield link


def asked(link: FramedSocket, **request: object) -> dict[str, Any]:
    link.send({"id": 1, **request}, timeout=5.0)
    header: dict[str, Any] = link.recv_header(scaled(20.0)).header
    return header


def test_only_members_are_dialled(
    start_node: StartNode, fleet_url: str, fleet: BlockingStore
) -> None:
    node = start_node(node_id="a", store_url=fleet_url)
    with a_link(node, fleet) as link:
        for request in (
            {"op": "dial_back", "node": "nobody", "boot": "0" * 16},
            {"op": "dial_back", "node": "a", "boot": "0" * 16},
            {"op": "ask_dial_back", "dialler": "nobody"},
        ):
            assert asked(link, **request)["outcome"] == "unknown"


@pytest.mark.parametrize(
    "request_fields",
    [
        {"op": "dial_back", "node": "b", "boot": "b", "endpoint": "tcp://127.0.0.1:22"},
        {"op": "exchange", "data": bytes(EXCHANGED_BYTES + 1)},
        {"op": "reach", "dialler": "a", "node": "b"},
        {"op": "stats"},
    ],
)
def test_other_requests_end_the_connection(
    start_node: StartNode, fleet_url: str, fleet: BlockingStore, request_fields: dict[str, Any]
) -> None:
    node = start_node(node_id="a", store_url=fleet_url)
    with a_link(node, fleet) as link:
        data = bytes(EXCHANGED_BYTES)
        assert asked(link, op="exchange", data=data) == {"id": 1}
        assert link.recv_header(5.0).header == {"id": 1, "data": data}
        with pytest.raises(PipeError):
            asked(link, **request_fields)


def test_one_request_and_a_few_connections_at_a_time(
    start_node: StartNode, fleet_url: str, fleet: BlockingStore
) -> None:
    node = start_node(node_id="a", store_url=fleet_url)
    with a_link(node, fleet) as link:
        link.send({"id": 1, "op": "ask_dial_back", "dialler": "nobody"}, timeout=5.0)
        with pytest.raises(PipeError):
            asked(link, op="exchange", data=b"")
    links = [a_link(node, fleet) for _ in range(LINKS_MAX + 1)]
    *opened, last = [each.__enter__() for each in links]
    try:
        with pytest.raises(PipeError):
            asked(last, op="exchange", data=b"")
        assert asked(opened[0], op="exchange", data=b"") == {"id": 1}
    finally:
        for each in links:
            each.__exit__(None, None, None)


def test_one_node_is_dialled_back_at_a_time(
    start_node: StartNode, fleet_url: str, fleet: BlockingStore
) -> None:
    """Of five requests that come at once; what they dial says nothing."""
    node = start_node(node_id="a", store_url=fleet_url)
    with socket.create_server((OWN_ADDRESS, 0)) as silent, a_watch(silent) as most:
        endpoint = f"tcp://{OWN_ADDRESS}:{silent.getsockname()[1]}"
        fleet.describe_node(NodeInfo("b", boot_of("b"), endpoint, "b", "0.1", 1, 1, 1))
        with beating(fleet, "b"):
            wait_until(lambda: node.stats()["nodes_alive"] == 2, 10.0)
            links = [a_link(node, fleet) for _ in range(5)]
            opened = [each.__enter__() for each in links]
            try:
                for link in opened:
                    request = {"id": 1, "op": "dial_back", "node": "b", "boot": boot_of("b")}
                    link.send(request, timeout=5.0)
                for link in opened:
                    assert link.recv_header(scaled(20.0)).header["outcome"] == "timed_out"
            finally:
                for each in links:
                    each.__exit__(None, None, None)
    assert most == [5, 1]


@contextmanager
def a_watch(listener: socket.socket) -> Iterator[list[int]]:
    """How many connections were accepted, and how many of them were open at a time at most."""
    counts, over = [0, 0], threading.Event()
    listener.settimeout(0.02)

    def watch() -> None:
        opened: list[socket.socket] = []
        while not over.is_set():
            try:
                opened.append(listener.accept()[0])
                opened[-1].settimeout(0.0)
                counts[0] += 1
            except TimeoutError:
                pass
            opened = [one for one in opened if not _has_ended(one)]
            counts[1] = max(counts[1], len(opened))
        for one in opened:
            one.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        time.sleep(0.1)
        over.set()
        thread.join()


def _has_ended(stream: socket.socket) -> bool:
    try:
        while stream.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    stream.close()
    return True
