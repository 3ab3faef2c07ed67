"""A node of this commit beside one of the commit before, as in a fleet that is being upgraded."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lookup_buffer.protocol.auth import OLDEST_VERSION, PROTOCOL_VERSION
from nodes import ROOT
from patience import scaled
from store import EmbeddedServer

BEFORE = "HEAD~1"
PROGRAM = """
import json, sys, torch
from lookup_buffer import BufferConfig, LookupBuffer, Namespace, TensorKey
with LookupBuffer(BufferConfig(**json.loads(sys.argv[1])), Namespace.named("upgrade")) as buffer:
    print("null", flush=True)
    for line in sys.stdin:
        try:
            done = eval(line)
        except Exception as error:
            done = str(error)
        print(json.dumps(done), flush=True)
"""


class Client:
    """A client and its node, of a tree of the source."""

    def __init__(self, tree: Path, directory: Path, node: str, store_url: str) -> None:
        settings: dict[str, Any] = {
            "directory": str(directory), "node_id": node, "store_url": store_url,
            "capacity_bytes": 64 << 20, "token": "of-both-versions-1", "idle_exit_seconds": 1.0,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(settings)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def do(self, expression: str) -> Any:
        assert self._process.stdin is not None
        print(expression, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        with self._process:  # closes its pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(scaled(20.0))


@pytest.fixture
def tree_before(tmp_path: Path) -> Path:
    """The source of the commit before."""
    git = ["git", "-C", str(ROOT)]
    archive = subprocess.run([*git, "archive", BEFORE], capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"no {BEFORE} here: a shallow clone, or no clone")
    tree = tmp_path / "before"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree


@pytest.fixture
def clients(
    tree_before: Path, tmp_path: Path, valkey_server: EmbeddedServer
) -> Iterator[tuple[Client, Client]]:
    with ExitStack() as stack:
        both = []
        for name, tree in (("before", tree_before), ("now", ROOT)):
            client = Client(tree, tmp_path / name[0], f"{name}-{os.getpid()}", valkey_server.url)
            stack.callback(client.end)
            both.append(client)
        yield both[0], both[1]


def versions_of(tree: Path) -> tuple[int, int]:
    source = (tree / "lookup_buffer/protocol/auth.py").read_text(encoding="utf-8")
    newest = re.search(r"PROTOCOL_VERSION: Final = (\d+)", source)
    oldest = re.search(r"OLDEST_VERSION: Final = (\d+)", source) or newest
    assert newest is not None
    assert oldest is not None
    return int(oldest[1]), int(newest[1])


def test_nodes_share_tensors_if_their_versions_meet(
    clients: tuple[Client, Client], tree_before: Path
) -> None:
    oldest, newest = versions_of(tree_before)
    they_meet = max(oldest, OLDEST_VERSION) <= min(newest, PROTOCOL_VERSION)
    for number, (one, other) in enumerate((clients, clients[::-1])):
        key = f'TensorKey("k{number}")'
        assert one.do(f"buffer.insert({key}, torch.arange(100_000)).value") == "stored"
        found = other.do(f"buffer.select({key}, timeout=10.0).sum().item()")
        if they_meet:
            assert found == sum(range(100_000))
        else:
            assert "peer_failed" in str(found)
    handoff = 'TensorKey("k", request_id="r")'
    one, other = clients
    if they_meet:
        assert one.do(f"buffer.insert({handoff}, torch.ones(7)).value") == "stored"
        assert other.do(f"buffer.drop_select({handoff}, timeout=10.0).sum().item()") == 7.0
