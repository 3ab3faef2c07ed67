"""The attacker runs code in an engine, which processes what strangers send.

He has what the engine has: the node's socket and this host's tensors. The fleet's token would give
him those of all hosts, and let him pose as a node, so no engine has it.
"""

import os
import signal
import stat
from pathlib import Path

import pytest

from connectors.settings import parse_settings
from lookup_buffer.access import user_token
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import NodeRefused, NodeUnavailable
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.auth import Purpose, connect
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.runtime import to_json
from nodes import MIB, StartNode, key, node_pids, tensor_of, wait_until
from store import EmbeddedServer, open_store

TOKEN = "correct horse battery staple"
NODE = "started-by-an-engine"
SPACE = Namespace.named("tests")


def connected(server: EmbeddedServer, token: str) -> FramedSocket:
    """As another node, to the one that an engine has started."""
    with open_store(server.url, call_timeout_seconds=5.0) as store:
        wait_until(lambda: store.node_infos([NODE]), 10.0, "it is there")
        address = store.node_infos([NODE])[NODE].endpoint
    purpose = Purpose("tensors", address, NODE)
    return connect(*parse_tcp(address), token=token, timeout=5.0, purpose=purpose)


def test_an_engine_needs_no_file_of_its_nodes_token(start_node: StartNode, tmp_path: Path) -> None:
    """It is in another container, for example, which has no such file."""
    node = start_node(token=TOKEN)
    settings = {
        "node_socket": str(node.socket_path),
        "store_url": node.config.store_url,
        "capacity_bytes": node.config.capacity_bytes,
        "listen": "tcp://0.0.0.0:7730",
        "advertise": "tcp://192.0.2.1:7730",
        "token_file": str(tmp_path / "nowhere"),
    }
    for given in (settings, {**settings, "token_file": None, "listen": "tcp://127.0.0.1:0"}):
        config = parse_settings(given).buffer_config()
        with LookupBuffer(config, SPACE) as engine:
            name, tensor = key(), tensor_of("t", MIB)
            engine.insert(name, tensor)
            found = engine.select(name, timeout=5.0)
            assert found is not None
            assert found.equal(tensor)


def test_the_node_that_an_engine_starts_reads_the_file(
    valkey_server: EmbeddedServer, tmp_path: Path
) -> None:
    """And nothing that the engine has or sends contains it."""
    file, directory = tmp_path / "token", tmp_path / "d"
    file.write_text(f"{TOKEN}\n")
    config = parse_settings(
        {
            "directory": str(directory),
            "store_url": valkey_server.url,
            "capacity_bytes": 64 * MIB,
            "token_file": str(file),
            "node_id": NODE,
        }
    ).buffer_config()
    assert config.token is None
    assert TOKEN not in to_json(config)
    try:
        with LookupBuffer(config, SPACE, required=True) as engine:
            assert node_pids(directory)
            with pytest.raises(NodeRefused):
                connected(valkey_server, user_token())
            connected(valkey_server, TOKEN).close()
            assert TOKEN not in repr(vars(engine))
    finally:
        for pid in node_pids(directory):  # once no client starts it again
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not node_pids(directory), 20.0, "it ends")


@pytest.mark.parametrize("text", ["", "short", "please-change-me-before-use"])
def test_a_node_that_an_engine_starts_says_what_is_wrong_with_the_file(
    valkey_server: EmbeddedServer, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    config = parse_settings(
        {
            "directory": str(tmp_path / "d"),
            "store_url": valkey_server.url,
            "capacity_bytes": 64 * MIB,
            "token_file": str(file),
        }
    ).buffer_config()
    with pytest.raises(NodeUnavailable, match="'token_file'") as caught:
        LookupBuffer(config, SPACE, required=True)
    assert text == "" or text not in str(caught.value)


def test_who_reads_its_folder_does_not_take_the_nodes_lock(start_node: StartNode) -> None:
    """As from a container that has the folder read-only: files can be opened for reading there, and
    who takes the lock of a node that has ended keeps it from starting again."""
    lock = start_node().config.runtime_directory() / "node.lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o200
