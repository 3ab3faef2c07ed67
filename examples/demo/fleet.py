"""The demo's fleet without its engines: a Valkey, and two nodes that act as two hosts.

The nodes have their own names, directories and sockets, and reach each other over TCP only. All
processes end with this process, however it ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from connectors.plugin import CONNECTOR_NAME
from examples.demo.interpreter import python_command
from lookup_buffer.config import BufferConfig
from lookup_buffer.runtime import to_json
from store import BlockingStore, EmbeddedServer, open_store, run_with_owner

ARENA_BYTES = 256 << 20
_NODE_READY_SECONDS = 60.0
_NODE_END_SECONDS = 15.0
_POLL_SECONDS = 0.02
_STORE_SECONDS = 5.0
# An engine whose wait times out encodes by itself, and the demo reports a broken promise. So these
# limits are longer than the defaults, for a busy machine; an idle one never reaches them.
_ENGINE_WAITS = {"fetch_wait_seconds": 60.0, "claim_wait_seconds": 100.0}


class NodeFailure(Exception):
    """A node did not start; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class DemoNode:
    """A running node process."""

    config: BufferConfig
    process: "subprocess.Popen[bytes]"

    @property
    def name(self) -> str:
        return str(self.config.node_id)

    def ec_transfer_config(self) -> dict[str, Any]:
        """The value of `--ec-transfer-config` for a vLLM engine on this node's host."""
        return {
            "ec_connector": CONNECTOR_NAME,
            "ec_role": "ec_both",
            "ec_connector_extra_config": {
                "store_url": self.config.store_url,
                "node_socket": str(self.config.socket_path()),
                "capacity_bytes": self.config.capacity_bytes,
                "required": True,
                **_ENGINE_WAITS,
            },
        }

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_NODE_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_NODE_END_SECONDS)


def start_node(name: str, directory: Path, store_url: str, log_path: Path) -> DemoNode:
    """Start a node called `name`; it answers before this returns, and ends with this process.

    `directory` must be short: it holds Unix sockets.

    Raises:
        NodeFailure: the node did not start.
    """
    config = BufferConfig(
        node_id=name,
        directory=directory,
        store_url=store_url,
        capacity_bytes=ARENA_BYTES,
        listen="tcp://127.0.0.1:0",
        store_timeout_seconds=_STORE_SECONDS,
    )
    directory.mkdir(mode=0o700)
    command = [
        *(sys.executable, "-I", "-S", str(run_with_owner.__file__), str(os.getpid())),
        *python_command("lookup_buffer.node.main"),
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    node = DemoNode(config, process)
    try:
        # On standard input, not in the arguments, since a configuration may hold secrets.
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(to_json(config).encode())
        _wait_until_ready(node, log_path)
    except BaseException:
        node.close()
        raise
    return node


def _wait_until_ready(node: DemoNode, log_path: Path) -> None:
    deadline = time.monotonic() + _NODE_READY_SECONDS
    while not node.config.socket_path().exists():
        if node.process.poll() is not None or time.monotonic() > deadline:
            raise NodeFailure(
                f"node {node.name} did not start; {log_path}:\n{log_path.read_text()[-2000:]}"
            )
        time.sleep(_POLL_SECONDS)


class Fleet:
    """A store and the nodes as a context: entering starts them, leaving ends them."""

    def __init__(self, node_names: tuple[str, ...], log_directory: Path) -> None:
        self._node_names = node_names
        self._log_directory = log_directory
        self._stack = contextlib.ExitStack()
        self.nodes: dict[str, DemoNode] = {}
        self.store_url = ""

    @property
    def store(self) -> BlockingStore:
        return self._store

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # A short path: a Unix socket allows 107 bytes, and the path of a checkout may be long.
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="lb-demo-"))
            server = EmbeddedServer.start(
                Path(root) / "valkey", timeout_seconds=_NODE_READY_SECONDS
            )
            stack.callback(server.close)
            self.store_url = server.url
            self._store = stack.enter_context(
                open_store(server.url, call_timeout_seconds=_STORE_SECONDS)
            )
            for name in self._node_names:
                log_path = self._log_directory / f"{name}.log"
                node = start_node(name, Path(root) / name, server.url, log_path)
                stack.callback(node.close)
                self.nodes[name] = node
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave processes running.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._stack.close()
        finally:
            signal.signal(signal.SIGINT, previous)
