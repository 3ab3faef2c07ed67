"""Who has the password of readers: what he may do in Redis, and what a node of his can without."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import run
from lookup_buffer.config import BufferConfig
from nodes import MIB, StartNode, key, tensor_of
from servers import (
    QUIET,
    ServerProcess,
    StartServer,
    command,
    free_ports,
    user_rule,
    valkey_executable,
)
from store import open_store

PASSWORD = "of-the-reader"
USER = "lookup-buffer-reader"
SPACE = "a" * 64


@pytest.fixture
def server_url(start_server: StartServer) -> str:
    """Of the server's administrator."""
    url = start_server().url
    assert command(url, "ACL", "SETUSER", USER, *user_rule(PASSWORD, USER)) == b"+OK"
    return url


@pytest.mark.parametrize(
    "words",
    ["CLIENT TRACKING ON", "ZUNION 2 lb:hits:a lb:hits:a", "ZRANDMEMBER lb:hits:a -1000000"],
)
def test_he_may_not_track_keys_or_have_the_server_work_for_seconds(
    server_url: str, words: str
) -> None:
    """Of tracked keys a server bounds the number, and not on how many connections each is tracked:
    its memory stayed full after the reader had left. A union of sets is one step of the server."""
    refused = command(server_url, "ACL", "DRYRUN", USER, *words.split())
    assert b"has no permissions to run" in refused


@pytest.mark.parametrize("shown", ["ls", "nodes", "stats", "top"])
def test_he_sees_what_is_there(server_url: str, shown: str) -> None:
    with open_store(server_url) as store:
        store.describe_namespace(SPACE, {"model": "m"})
        store.add_hits(SPACE, {"k": 1})
    url = f"unix://{USER}:{PASSWORD}@{server_url.removeprefix('unix://')}"
    done = run(shown, LOOKUP_BUFFER_STORE_URL=url)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_has_no_mirror_unless_it_is_trusted() -> None:
    settings: dict[str, Any] = {"store_url": "redis://127.0.0.1:1"}
    assert BufferConfig(**settings).mirrored
    assert not BufferConfig(**settings, read_only=True).mirrored
    assert BufferConfig(**settings, read_only=True, mirror=True).mirrored


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URLs of a server and of its replica."""
    ports = free_ports(2)
    with ExitStack() as stack:
        for port, more in zip(ports, ([], ["--replicaof", f"127.0.0.1 {ports[0]}"]), strict=True):
            options = ["--port", str(port), "--bind", "127.0.0.1", *more, *QUIET]
            server = ServerProcess(valkey_executable(), tmp_path / str(port), port, options)
            stack.callback(server.kill)
        first, second = (f"redis://127.0.0.1:{port}" for port in ports)
        yield first, second


@pytest.mark.parametrize("mirror", [False, True])
def test_a_reader_reads_from_a_replica(
    replicated: tuple[str, str], start_node: StartNode, mirror: bool
) -> None:
    """Which it may fill or stop: nothing flows back from there."""
    first, replica = replicated
    writer = start_node(store_url=first)
    reader = start_node(store_url=replica, read_only=True, mirror=mirror)
    name, tensor = key(), tensor_of("stored", MIB)
    with writer.client() as client:
        client.insert(name, tensor)
    with reader.client() as client:
        found = client.select(name, timeout=20.0)
        assert found is not None
        assert torch.equal(found, tensor)
        assert client.has_caches([name, key()]) == [True, False]
