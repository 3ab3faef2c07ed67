"""The node's socket with any bytes from any client: other clients are served, nothing is kept."""

import array
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.memory import Staging
from nodes import MIB, NodeProcess, at_rest, key, wait_until
from patience import scaled
from raw_clients import Raw, raw
from raw_ends import hostile

if TYPE_CHECKING:
    from lookup_buffer.protocol.messages import Request

NAMESPACE = Namespace.named("tests").fingerprint
Pair = tuple[NodeProcess, NodeProcess]


@pytest.fixture
def node(node_pair: Pair) -> Iterator[NodeProcess]:
    """The node, which serves others and is at rest as before when the test is over."""
    node = node_pair[0]
    files = node.open_files()
    yield node
    with node.client() as client:
        name = key()
        client.insert(name, torch.ones(3))
        assert client.select(name) is not None
    at_rest(node, open_files=files)


STATS = encode_frame(messages.Stats(5).to_wire())
GARBAGE = hostile("frames", "node") | {"noise": secrets.token_bytes(4096)}


@pytest.mark.parametrize("session", [False, True])
def test_garbage_ends_that_connection_only(node: NodeProcess, session: bool) -> None:
    with node.client() as bystander:
        for name, garbage in GARBAGE.items():
            before = bystander.stats().get("protocol_errors", 0)
            with raw(node, session=session) as hostile:
                hostile.socket.sendall(garbage)
                assert hostile.ended(), name
            assert bystander.stats()["protocol_errors"] == before + 1, name


def test_a_truncated_frame_costs_nothing(node: NodeProcess) -> None:
    for cut in (1, 8, 16, 20, len(STATS) - 1):
        with raw(node) as hostile:
            hostile.socket.sendall(STATS[:cut])
            time.sleep(0.02)


def test_a_frame_in_single_bytes_is_a_frame(node: NodeProcess) -> None:
    with raw(node) as slow:
        for byte in STATS:
            slow.socket.sendall(bytes([byte]))
        assert "stats" in slow._one(slow.socket.recv(65536))


def test_an_announced_size_is_not_allocated(node: NodeProcess) -> None:
    """A hundred clients that announce 4 MiB each and send nothing."""

    def resident_bytes() -> int:
        pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    hostile = [Raw(node) for _ in range(100)]
    for one in hostile:
        one.socket.sendall(struct.pack(">4sIQ", b"LB01", 4 << 20, 0))
    node.stats()
    assert resident_bytes() - before < 50 * MIB
    for one in hostile:
        one.socket.close()


def test_no_reply_is_sent_before_hello(node: NodeProcess) -> None:
    for request in (
        messages.Stats(1),
        messages.Select(1, NAMESPACE, "k", 0.0),
        messages.Stage(1),
        messages.Goodbye(1),
    ):
        with raw(node, session=False) as hostile:
            hostile.send(request)
            assert hostile.ended(), request


def test_what_comes_together_with_a_hello_is_of_its_session(node: NodeProcess) -> None:
    hello = messages.Hello(1, messages.VERSION, None, node.config.expectations())
    before = node.stats()["sessions"]
    together = encode_frame(hello.to_wire())
    for request in (hello, messages.Stage(2), messages.Goodbye(2)):
        for _ in range(5):
            with raw(node, session=False) as hostile:
                hostile.socket.sendall(together + encode_frame(request.to_wire()))
                assert hostile.ended(), request
    with raw(node, session=False) as hostile:
        hostile.socket.sendall(together + b"\xff" * 20)
        assert hostile.ended()
    with raw(node, session=False) as client:
        client.socket.sendall(together + encode_frame(messages.Stats(2).to_wire()))
        decoder = FrameDecoder()
        answers: list[Any] = []
        while len(answers) < 2:
            data = client.socket.recv(65536)
            assert data, "the node ended the connection"
            answers += [frame.header for frame in decoder.feed(data)]
        assert [answer["id"] for answer in answers] == [1, 2]
        assert answers[1]["stats"]["sessions"] == before, "one, as when `before` was asked for"
    wait_until(lambda: node.stats()["sessions"] == before, 5.0)


def insert(headers: list[dict[str, Any]]) -> messages.Insert:
    return messages.Insert(2, NAMESPACE, ["k"], headers, [0] * len(headers), None, 0.0)


def test_requests_that_do_not_fit_the_moment(node: NodeProcess) -> None:
    header = TensorHeader("uint8", (10,), 10).to_fields()
    large = TensorHeader("uint8", (100,), 100).to_fields()
    wrong: list[Request] = [
        messages.Hello(2, messages.VERSION, None, {}),
        messages.Join(2, 5),
        messages.Stage(2),  # no descriptor
        insert([header]),  # no staging area
        insert([{**header, "nbytes": 9}]),
        insert([{"dtype": "uint8"}]),
        insert([large]),
        insert([]),
        insert([header, header]),  # one key
        messages.Insert(2, NAMESPACE, ["k"], [header], [], None, 0.0),
    ]
    for request in wrong:
        with raw(node) as hostile:
            hostile.send(request)
            assert hostile.ended(), request


def test_another_version_or_configuration_is_refused_by_name(node: NodeProcess) -> None:
    expected = node.config.expectations()
    for changes, said in (
        ({"version": 999}, ["999", str(messages.VERSION)]),
        ({"expects": {**expected, "capacity_bytes": 1}}, ["capacity_bytes", "1", str(64 * MIB)]),
        ({"expects": {"new_setting": "x"}}, ["new_setting", "'x'", "None"]),
    ):
        with raw(node, session=False) as client:
            answer = client.hello(**changes)
            assert answer["error"] == "NodeRefused"
            assert all(text in answer["message"] for text in said)
            assert client.hello()["node"] == node.node_id  # the control


@pytest.mark.parametrize("version", [messages.VERSION - 1, messages.VERSION + 1])
def test_an_engine_of_another_version_gets_an_error_that_names_it(
    node: NodeProcess, version: int
) -> None:
    """Whatever its version puts into a hello."""
    before = node.stats().get("protocol_errors", 0)
    hello = {"op": "hello", "id": 3, "version": version, "seat": ["engine", 0, 1], "more": "yes"}
    with raw(node, session=False) as client:
        client.socket.sendall(encode_frame(hello))
        answer = client._one(client.socket.recv(65536))
        assert (answer["id"], answer["error"]) == (3, "NodeRefused")
        assert f"version {messages.VERSION}, the client {version}" in answer["message"]
        assert client.hello()["node"] == node.node_id  # the control
    assert node.stats().get("protocol_errors", 0) == before


def test_joining_a_session_that_is_not_there(node: NodeProcess) -> None:
    with raw(node, session=False) as hostile:
        assert hostile.ask(messages.Join(3, 12345))["error"] == "NodeRefused"


def test_silent_clients_are_disconnected(node: NodeProcess) -> None:
    with raw(node, session=False) as silent:
        assert silent.ended(7.0)


def test_descriptor_bombs(node: NodeProcess) -> None:
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
    staging = Staging(4096)
    try:
        before = node.stats()["open_files"]
        for session in (False, True):
            with raw(node, session=session) as hostile:
                hostile.send(messages.Stats(1), files)
                assert hostile.ended()
            with raw(node, session=session) as hostile:
                for _ in range(8):  # a few at a time, all of them unrequested
                    try:
                        hostile.socket.sendmsg(
                            [STATS[:1]],
                            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files[:3]))],
                        )
                    except BrokenPipeError:
                        break
                assert hostile.ended()
        for _ in range(5):
            with raw(node) as hostile:
                hostile.send(messages.Stage(2), [files[0]])  # no memfd
                assert hostile.ended()
        with raw(node) as client:
            for number in range(50):  # each replaces the one before
                assert client.ask(messages.Stage(number), [staging.fd]) == {"id": number}
            most = before + 4  # its socket, process, staging area
            wait_until(lambda: node.stats()["open_files"] <= most, 5.0, "the others are closed")
    finally:
        staging.close()
        for file in files:
            os.close(file)


def test_a_client_that_never_reads_is_disconnected(node: NodeProcess) -> None:
    with raw(node) as deaf:
        deaf.socket.setblocking(False)
        flood, deadline = STATS * 200, time.monotonic() + scaled(20.0)
        while time.monotonic() < deadline:
            try:
                deaf.socket.send(flood)
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                break
        else:
            pytest.fail("the node goes on answering")


def test_a_session_cannot_release_the_pins_of_another(node: NodeProcess) -> None:
    with node.client() as owner, raw(node) as thief:
        name = key()
        owner.insert(name, torch.ones(3))
        with owner.view(name):
            ticket = max(1, owner.stats()["pins"])
            for number in range(0, 200_000, 4096):
                thief.send(messages.Release(1, list(range(number, number + 4096))))
            thief.ask(messages.Stats(2))
            assert owner.stats()["pins"] == ticket == 1


def test_three_hundred_connections_at_once(node: NodeProcess) -> None:
    crowd = []
    for _ in range(300):
        client = Raw(node)
        assert client.hello()["node"] == node.node_id
        crowd.append(client)
    with node.client() as bystander:
        started = time.monotonic()
        bystander.stats()
        assert time.monotonic() - started < scaled(1.0)
        assert bystander.stats()["open_files"] > 300
        for client in crowd:
            client.socket.close()  # without a last message
        bystander.stats()


def test_a_cancelled_select_leaves_no_pin(node: NodeProcess) -> None:
    name = key()
    with raw(node) as anchor, node.client() as writer:
        with raw(node, session=False) as waits:
            waits.ask(messages.Join(2, anchor.session))
            waits.send(messages.Select(3, NAMESPACE, name.text, 60.0))
            time.sleep(0.1)
        writer.insert(name, torch.ones(5))
        with raw(node, session=False) as late:
            late.ask(messages.Join(2, anchor.session))
            with node.frozen():
                late.send(messages.Select(4, NAMESPACE, name.text, 0.0))
                late.socket.close()
        wait_until(lambda: writer.stats()["pins"] == 0, 2.0)
        # The control: a client that is there has its pin.
        answer = anchor.ask(messages.Select(5, NAMESPACE, name.text, 0.0))
        assert writer.stats()["pins"] == 1
        anchor.send(messages.Release(6, [answer["ticket"]]))
        anchor.send(messages.Goodbye(7))
        assert anchor.ended()
