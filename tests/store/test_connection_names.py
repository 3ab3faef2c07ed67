"""Names in CLIENT LIST: whose connection it is, and what for."""

import secrets
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from clusters import Sentinels
from command_line import run
from lookup_buffer.pipes import open_pipe
from mirrors import Mirroring
from nodes import StartNode, key, tensor_of, with_store
from resp import RespConnection
from servers import StartServer, command, patient
from store import EmbeddedServer


def names(reply: bytes) -> set[str]:
    """Those in the reply to CLIENT LIST."""
    words = reply.decode().split()
    return {word.removeprefix("name=") for word in words if word.startswith("name=lookup-buffer")}


def listed(server: EmbeddedServer) -> set[str]:
    return names(command(server.url, "CLIENT", "LIST"))


@pytest.fixture
def server(start_server: StartServer) -> EmbeddedServer:
    return start_server()


def test_the_connections_of_a_node(server: EmbeddedServer, start_node: StartNode) -> None:
    node = start_node(store_url=server.url, node_id="gpu-7.rack_2")
    with_store(node)
    with node.client() as client:
        client.insert(key("a"), tensor_of("a", 4096))
        assert client.has_caches([key("b")]) == [False]
    assert listed(server) == {
        "lookup-buffer:gpu-7.rack_2:calls",
        "lookup-buffer:gpu-7.rack_2:mirror",
    }


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ls", "stats", "nodes", "why", "show", "doctor"])
def test_the_connections_of_commands(server: EmbeddedServer, name: str) -> None:
    words = [name, "key"] if name in ("why", "show") else [name]
    with RespConnection(unquote(server.url.removeprefix("unix://"))) as monitor:
        assert monitor("MONITOR") == b"OK"
        run(*words, "--store-url", server.url)
        command(server.url, "ECHO", "the-end")
        seen = list(_until(monitor, b"the-end"))
    named = {line.split(b'"')[5].decode() for line in seen if b'"SETNAME"' in line}
    named.discard("lookup-buffer:doctor:mirror")  # it checks whether tracking is allowed
    assert named == {f"lookup-buffer:{name}:calls"}


def _until(monitor: RespConnection, word: bytes) -> Iterator[bytes]:
    while word not in (line := monitor.read()):
        yield line


def test_the_connections_of_a_pipe(server: EmbeddedServer) -> None:
    name = secrets.token_hex(4)
    uri = f"{server.url}?pipe={name}&client_name=ours"
    with open_pipe(uri, listen=True) as here, open_pipe(uri) as there:
        there.send_tensor(None, "k")
        assert here.recv_tensor("k", timeout=5.0) is None
        text = command(server.url, "CLIENT", "LIST").decode()
    for purpose in ("listener", "reader", "writer"):
        assert f"name=ours:pipe:{name}:{purpose} " in text


def test_sentinels(own_sentinels: Sentinels, namespace: str) -> None:
    with patient(f"{own_sentinels.url}&client_name=x", name="a node") as store:
        store.locate(namespace, ["k"])
        found = [
            own_sentinels.ask(one, "CLIENT", "LIST").decode()
            for one in (own_sentinels.sentinels[0], own_sentinels.master())
        ]
    assert "name=x:a_node:sentinel " in found[0]
    assert "name=x:a_node:calls " in found[1]


@pytest.mark.parametrize("rule", ["-client|setname", "-client"])
def test_a_user_who_may_not_set_a_name(server: EmbeddedServer, namespace: str, rule: str) -> None:
    """`-client` forbids tracking, too, and so the mirror."""
    words = ("on", ">secret", "~*", "&*", "+@all", rule)
    assert command(server.url, "ACL", "SETUSER", "nameless", *words) == b"+OK"
    url = server.url.replace("unix://", "unix://nameless:secret@")
    with patient(url) as store:
        assert store.locate(namespace, ["k"]) == [None]
    if rule != "-client":
        with Mirroring(url) as mirroring:
            assert mirroring.has(namespace, "k") is False
    uri = f"{url}?pipe=p"
    with open_pipe(uri, listen=True) as here, open_pipe(uri) as there:
        there.send_tensor(None, "k")
        assert here.recv_tensor("k", timeout=5.0) is None
    assert not listed(server)
