"""The attacker is another user of the host who may also read the store.

He connects to a node's port at 127.0.0.1, and asks for what the store says is there. Nodes of one
user to which no token is given share one that this user alone can read.
"""

import os
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from lookup_buffer import access
from lookup_buffer.access import user_token
from lookup_buffer.errors import ConfigError, NodeRefused
from lookup_buffer.protocol.stream import FramedSocket
from nodes import MIB, NodeProcess, StartNode, key, tensor_of, wait_until
from store import EmbeddedServer, Record, open_store
from test_node import NAMESPACE, reader_of

STRANGER = 12345
"""A user id."""


@pytest.fixture(scope="module")
def node(module_nodes: StartNode) -> NodeProcess:
    """With the settings that it has by itself."""
    return module_nodes()


def asked(link: FramedSocket, server: EmbeddedServer, name: str) -> bytes:
    """The tensor that the store says is there, as another node gets it."""
    with open_store(server.url, call_timeout_seconds=5.0) as store:
        found: list[Record] = []

        def published() -> bool:
            found[:] = [record for record in store.scan() if record.key == name]
            return bool(found)

        wait_until(published, 10.0, "it is published")
    (location,) = found[0].locations
    item = [NAMESPACE, name, location.boot, location.generation]
    link.send({"op": "get", "items": [item]}, timeout=5.0)
    nbytes = link.recv_header(timeout=5.0).payload_nbytes
    memory = bytearray(nbytes)
    link.recv_into(memoryview(memory), timeout=5.0)
    return bytes(memory)


@pytest.mark.parametrize("token", [None, "guessed-by-a-stranger"])
def test_a_stranger_reads_no_tensor(
    node: NodeProcess, valkey_server: EmbeddedServer, token: str | None
) -> None:
    secret, name = tensor_of("secret", MIB), key()
    with node.client() as client:
        client.insert(name, secret)
        with pytest.raises(NodeRefused), reader_of(node, valkey_server, token) as link:
            assert asked(link, valkey_server, name.text) != secret.numpy().tobytes()


def test_a_process_of_the_user_reads_it(node: NodeProcess, valkey_server: EmbeddedServer) -> None:
    """The control of the test before."""
    tensor, name = tensor_of("own", MIB), key()
    with node.client() as client:
        client.insert(name, tensor)
        with reader_of(node, valkey_server, user_token()) as link:
            assert asked(link, valkey_server, name.text) == tensor.numpy().tobytes()


def test_nodes_of_one_user_share_a_tensor(node: NodeProcess, start_node: StartNode) -> None:
    """They have directories of their own."""
    other, tensor, name = start_node(), tensor_of("shared", MIB), key()
    with node.client() as here, other.client() as there:
        here.insert(name, tensor)
        found = there.select(name, timeout=10.0)
        assert found is not None
        assert found.equal(tensor)


def test_a_node_with_a_token_of_its_own_is_apart(
    node: NodeProcess, start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    guarded = start_node(token="of-this-node-and-no-other")
    with pytest.raises(NodeRefused):
        reader_of(guarded, valkey_server, user_token())


# -- the file


@contextmanager
def default_directory(path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "_default_directory", lambda: path)
        yield


def test_it_is_the_users_alone(tmp_path: Path) -> None:
    with default_directory(tmp_path / "d"):
        token = user_token()
        assert token == user_token()
    file = tmp_path / "d" / "token"
    assert len(token) >= 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [one.name for one in file.parent.iterdir()] == ["token"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_cannot_read_it(node: NodeProcess) -> None:
    user_token()
    file = access._default_directory() / "token"
    done = subprocess.run(
        ["cat", file], user=STRANGER, group=STRANGER, extra_groups=[], cwd="/", capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert user_token() not in done.stdout
    assert "Permission denied" in done.stderr


def test_of_many_that_make_it_at_once_all_have_the_same(tmp_path: Path) -> None:
    with default_directory(tmp_path / "d"), ThreadPoolExecutor(16) as threads:
        found = {future.result() for future in [threads.submit(user_token) for _ in range(64)]}
    assert len(found) == 1


def test_a_file_that_is_empty_is_refused(tmp_path: Path) -> None:
    with default_directory(tmp_path / "d"):
        user_token()
        (tmp_path / "d" / "token").write_text("")
        with pytest.raises(ConfigError, match="token_file"):
            user_token()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the owner of a directory")
def test_a_directory_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    """In /tmp he can make it before this user does."""
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    (path / "token").write_text("known-to-the-stranger-too")
    os.chown(path, STRANGER, STRANGER)
    with default_directory(path), pytest.raises(ConfigError, match=f"'token_file'.*{STRANGER}"):
        user_token()
