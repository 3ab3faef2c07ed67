"""A node as a process: its start and end, and its port for other nodes."""

import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import MissingTensor, NodeRefused, PipeError, ProtocolError
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.header import PayloadHeader
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.runtime import to_json
from nodes import MIB, ROOT, NodeProcess, StartNode, at_rest, key, tensor_of, wait_until
from patience import scaled
from store import EmbeddedServer, open_store

NAMESPACE = Namespace.named("tests").fingerprint
Pair = tuple[NodeProcess, NodeProcess]
TOKEN = "correct horse battery staple"


def endpoint(node: NodeProcess, server: EmbeddedServer) -> tuple[str, int]:
    """The node's address for other nodes, from the store."""
    with open_store(server.url, call_timeout_seconds=2.0) as store:
        wait_until(lambda: node.node_id in store.node_infos([node.node_id]), 5.0)
        return parse_tcp(store.node_infos([node.node_id])[node.node_id].endpoint)


def reader_of(
    node: NodeProcess, server: EmbeddedServer, token: str | None = TOKEN, timeout: float = 2.0
) -> FramedSocket:
    """A connection such as that of another node that reads tensors."""
    host, port = endpoint(node, server)
    purpose = Purpose("tensors", f"tcp://{host}:{port}", node.node_id)
    return connect(host, port, token=token, timeout=timeout, purpose=purpose)


# -- start and end


def test_it_needs_no_torch(start_node: StartNode) -> None:
    node = start_node()
    with open(f"/proc/{node.pid}/maps") as maps:
        assert "torch" not in maps.read()


def test_its_socket_is_its_users_alone(start_node: StartNode) -> None:
    node = start_node()
    assert stat.S_IMODE(node.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(node.socket_path.parent.stat().st_mode) == 0o700


def test_no_secret_is_on_its_command_line_or_in_its_log(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    node = start_node(token=TOKEN)
    with pytest.raises(NodeRefused):
        reader_of(node, valkey_server, "another")
    with open(f"/proc/{node.pid}/cmdline") as line, open(f"/proc/{node.pid}/environ") as environ:
        shown = line.read() + environ.read() + node.log_text()
    assert TOKEN not in shown


def test_sigterm_ends_it_in_order(start_node: StartNode, valkey_server: EmbeddedServer) -> None:
    node = start_node()
    with node.client() as client:
        client.insert(key(), torch.ones(3))
        wait_until(lambda: client.stats()["unpublished"] == 0, 5.0)
        assert node.terminate() == 0
        assert not node.socket_path.exists()
        wait_until(lambda: not client.attached, 2.0)
    with open_store(valkey_server.url, call_timeout_seconds=2.0) as store:
        assert node.node_id not in store.beats()
        assert node.node_id not in store.node_infos([node.node_id])


def test_a_part_that_does_not_stop_ends_the_node_with_the_stacks(start_node: StartNode) -> None:
    prelude = """
import threading
from lookup_buffer.node import main, registrar
def close(self): threading.Event().wait()
main.END_SECONDS, registrar.Registrar.close = 1.0, close"""
    node = start_node(prelude=prelude)
    assert node.terminate() == 1
    assert "in close" in node.log_text()


def test_a_machine_that_reorders_stores_has_no_index_and_says_so(start_node: StartNode) -> None:
    node = start_node(prelude="import platform\nplatform.machine = lambda: 'aarch64'")
    assert node.log_text().count("on aarch64 the local and the remote index are off") == 1
    image = key()
    with node.client() as client:
        client.insert(image, torch.arange(6))
        assert client.has_caches([image], timeout=0.0) == [False]
        assert client.has_caches([image], timeout=scaled(5.0)) == [True]
        found = client.select(image)
        assert found is not None
        assert torch.equal(found, torch.arange(6))
        assert client.stats()["hits_local"] == 1


def test_a_second_node_in_a_directory_gives_up(start_node: StartNode) -> None:
    node = start_node()
    program = "from lookup_buffer.node.main import main; main()"
    with node.client() as client:
        second = subprocess.run(
            [sys.executable, "-c", program],
            input=to_json(node.settings).encode(),
            stderr=subprocess.PIPE,
            cwd=ROOT,
            timeout=scaled(20.0),
            check=False,
        )
        assert second.returncode != 0
        assert b"node.lock" in second.stderr
        assert client.stats()["store_up"] in (0, 1)
        assert node.socket_path.exists()


@pytest.mark.parametrize("text", ["{}x", '{"capacity_bytes": -1}', '{"capacity": 1}', "[]", ""])
def test_a_wrong_configuration_ends_it_with_one_line(text: str) -> None:
    program = "from lookup_buffer.node.main import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=text.encode(),
        stderr=subprocess.PIPE,
        cwd=ROOT,
        timeout=scaled(20.0),
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr.count(b"\n") == 1
    assert found.stderr.startswith(b"lookup-buffer: ")


def test_hits_and_records_reach_the_store(node_pair: Pair, valkey_server: EmbeddedServer) -> None:
    name = key("hits")
    with node_pair[0].client() as client, node_pair[1].client() as other:
        client.insert(name, torch.ones(2, 5, dtype=torch.bfloat16), ttl_seconds=500.0)
        for _ in range(3):
            client.select(name)
        other.select(name, timeout=5.0)
        with open_store(valkey_server.url, call_timeout_seconds=2.0) as store:
            wait_until(lambda: store.hits(NAMESPACE, [name.text]) == [4], 5.0)
            wait_until(lambda: len(store.locate(NAMESPACE, [name.text])[0].locations) == 2, 5.0)  # type: ignore[union-attr]
            record = store.locate(NAMESPACE, [name.text])[0]
            assert record is not None
            assert (record.dtype, record.shape, record.nbytes) == ("bfloat16", (2, 5), 20)
            assert {location.node for location in record.locations} == {
                node.node_id for node in node_pair
            }
            assert store.namespaces()[NAMESPACE] == {"name": "tests"}


def test_an_evicted_tensor_is_withdrawn(start_node: StartNode) -> None:
    node, other = start_node(capacity_bytes=2 * MIB), start_node()
    first = key("first")
    with node.client() as client, other.client() as reader:
        client.insert(first, tensor_of("first", MIB))
        wait_until(lambda: reader.has_caches([first], timeout=1.0)[0], 5.0)
        for number in range(3):
            client.insert(key(), tensor_of(str(number), MIB))
        wait_until(lambda: not reader.has_caches([first], timeout=1.0)[0], 5.0)
        assert client.stats()["evicted"] == 2


# -- the port for other nodes


@pytest.fixture(scope="module")
def guarded_node(module_nodes: StartNode) -> NodeProcess:
    return module_nodes(token=TOKEN)


@pytest.fixture
def guarded(guarded_node: NodeProcess, valkey_server: EmbeddedServer) -> Iterator[NodeProcess]:
    """A node with a token, which serves others and is at rest as before when the test is over."""
    files = guarded_node.open_files()
    yield guarded_node
    link = reader_of(guarded_node, valkey_server)
    link.close()
    at_rest(guarded_node, open_files=files, seconds=6.0)


def protocol_errors(node: NodeProcess) -> int:
    return node.stats().get("protocol_errors", 0)


def frame(header: bytes, nbytes: int | None = None, payload: int = 0) -> bytes:
    return (
        struct.pack(">4sIQ", b"LB01", len(header) if nbytes is None else nbytes, payload) + header
    )


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(1000),
        frame(b"", nbytes=(1 << 32) - 1),
        frame(b"", nbytes=1100),
        frame(b"\x91\xa5hello", payload=1 << 50),
        frame(b"\x80"),
        frame(b"\x95\xa5hello\x92\x04\x04\xc4\x01x\xc3\x90"),
    ],
)
def test_garbage_from_a_peer_is_counted_and_ends_its_connection(
    guarded: NodeProcess, valkey_server: EmbeddedServer, said: bytes
) -> None:
    before = protocol_errors(guarded)
    with socket.create_connection(endpoint(guarded, valkey_server), 5.0) as hostile:
        hostile.sendall(said)
        assert ended(hostile, 3.0)
    wait_until(lambda: protocol_errors(guarded) == before + 1, 2.0)


def ended(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_silent_or_slow_peer_is_disconnected(
    guarded: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    address = endpoint(guarded, valkey_server)
    with socket.create_connection(address, 5.0) as silent:
        assert ended(silent, scaled(3.5))
    with socket.create_connection(address, 5.0) as slow:
        started = time.monotonic()
        try:
            for byte in frame(b"\x94\xa5hello" + b"x" * 900):
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        except ConnectionError:
            pass
        assert time.monotonic() - started < 45.0, "drip by drip it stays for ever"


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + " "])
def test_without_the_token_a_peer_gets_no_information(
    guarded: NodeProcess, valkey_server: EmbeddedServer, token: str | None
) -> None:
    with pytest.raises(NodeRefused) as caught:
        reader_of(guarded, valkey_server, token, timeout=3.0)
    assert TOKEN not in str(caught.value)


def test_a_node_with_another_token_gets_nothing(
    guarded: NodeProcess, start_node: StartNode
) -> None:
    outsider = start_node(token="that of another fleet")
    insider, name = start_node(token=TOKEN), key()
    with guarded.client() as holder, outsider.client() as reader, insider.client() as friend:
        holder.insert(name, torch.ones(3))
        found = friend.select(name, timeout=5.0)
        assert found is not None
        wait_until(lambda: reader.has_caches([name], timeout=1.0)[0], 5.0)
        with pytest.raises(MissingTensor, match="peer_failed"):
            reader.select(name)
    insider.kill()  # and the link that it keeps with it


def test_many_silent_connections_do_not_keep_out_others(
    guarded: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    address = endpoint(guarded, valkey_server)
    crowd = [socket.create_connection(address, 5.0) for _ in range(200)]
    try:
        link = reader_of(guarded, valkey_server, timeout=8.0)
        link.close()
    finally:
        for one in crowd:
            one.close()


def generation_of(server: EmbeddedServer, name: TensorKey) -> int:
    with open_store(server.url, call_timeout_seconds=2.0) as store:
        wait_until(lambda: store.locate(NAMESPACE, [name.text])[0], 5.0)
        (record,) = store.locate(NAMESPACE, [name.text])
    assert record is not None
    return record.locations[0].generation


def ask(
    link: FramedSocket,
    key: object,
    boot: object,
    generation: object,
    *,
    namespace: object = NAMESPACE,
    **fields: object,
) -> tuple[object, int]:
    items = [[namespace, key, boot, generation]]
    link.send({"op": "get", "items": items, **fields}, timeout=2.0)
    answer, nbytes = link.recv_header(timeout=2.0)
    return answer, nbytes


WRONG: list[dict[str, Any]] = [
    {"op": "put"},
    {"namespace": 7},
    {"key": None},
    {"key": ["a"]},
    {"boot": 7},
    {"generation": "1"},
    {"items": []},
    {"items": None},
    {"items": [["f" * 64, "k", "boot"]]},
    {"items": [["f" * 64, "k", "boot", 1]] * 257},
]


def test_requests_that_a_peer_may_send(guarded: NodeProcess, valkey_server: EmbeddedServer) -> None:
    name, before = key(), protocol_errors(guarded)
    with guarded.client() as client:
        client.insert(name, tensor_of("x", 1000))
        boot = client.boot
        generation = generation_of(valkey_server, name)
        link = reader_of(guarded, valkey_server)
        stale = ({"status": "stale"}, 0)
        assert ask(link, key=name.text, boot="another", generation=generation) == stale
        assert ask(link, key=name.text, boot=boot, generation=99) == stale
        assert ask(link, key="absent", boot=boot, generation=generation) == stale
        answer, nbytes = ask(link, key=name.text, boot=boot, generation=generation)
        assert nbytes == 1000
        assert isinstance(answer, dict)
        assert PayloadHeader.from_fields(answer["payload"]).key == name.text
        received = bytearray(nbytes)
        link.recv_into(memoryview(received), timeout=2.0)
        assert bytes(received) == bytes(tensor_of("x", 1000).numpy())
        # One that leaves in the middle of its answer leaves no pin.
        ask(link, key=name.text, boot=boot, generation=generation)
        link.abort()
        for wrong in WRONG:
            link = reader_of(guarded, valkey_server)
            with pytest.raises((PipeError, ProtocolError)):
                ask(link, **{"key": name.text, "boot": boot, "generation": generation, **wrong})
            link.abort()
        wait_until(lambda: protocol_errors(guarded) == before + len(WRONG), 2.0)


def test_a_peer_that_does_not_read_lets_go_in_time(
    guarded: NodeProcess, valkey_server: EmbeddedServer
) -> None:
    """The bound: two seconds and its bytes at 16 MB/s."""
    name, nbytes = key(), 16 * MIB
    with guarded.client() as client:
        client.insert(name, tensor_of("x", nbytes))
        link = reader_of(guarded, valkey_server)
        ask(link, key=name.text, boot=client.boot, generation=generation_of(valkey_server, name))
        assert client.stats()["pins"] == 1
        wait_until(lambda: client.stats()["pins"] == 0, 2.0 + nbytes / 16e6 + 1.5)
        link.abort()
