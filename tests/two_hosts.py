"""Two hosts for real engines: a Valkey and two nodes, each of which plays the node of one host."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, wait_until
from patience import scaled
from ports import free_port
from relay import Relay
from servers import valkey_executable
from store import EmbeddedServer, MetadataStore, open_store

OUTCOME_SECONDS = 10.0
STORE_SECONDS = 5.0
"""Where a store is not heard in time, engines encode again what is stored, as they should; and a
machine that is short of processors or memory may well stop for a second."""


class TwoHosts:
    """A Valkey and two nodes at fixed places, so that they can be ended and started again.

    Whatever node b fetches from node a goes through `relay`.
    """

    def __init__(self, store_seconds: float) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lbe-"))
        self._store_seconds = store_seconds
        self.relay = Relay()
        self.server = self._server()
        port = free_port()
        self.relay.connect_to(port)
        advertised = f"tcp://127.0.0.1:{self.relay.port}"
        self.a = self._node("host-a", listen=f"tcp://127.0.0.1:{port}", advertise=advertised)
        self.b = self._node("host-b")
        self.store = self._open_store()
        self._close_server()

    @property
    def nodes(self) -> tuple[NodeProcess, NodeProcess]:
        return self.a, self.b

    def start(self) -> None:
        """Both nodes see each other when this returns."""
        self.restart_server()
        for node in self.nodes:
            node.start()
        wait_until(lambda: len(self.store.beats()) == 2, OUTCOME_SECONDS, "both nodes beat")

    def restart_server(self) -> None:
        """After its end by any means: a new one, empty, at the same address."""
        self._close_server()
        self.server = self._server()
        self.store = self._open_store()

    def stop(self) -> None:
        self.relay.let_go()
        for node in self.nodes:
            node.end()
            assert "Traceback" not in node.log_text(), node.log_text()
        self._close_server()

    def remove(self) -> None:
        self.relay.close()
        shutil.rmtree(self.directory)

    def holders(self, identifier: str) -> set[str]:
        """The nodes that Redis names for an image."""
        records = [record for record in self.store.scan() if record.key == identifier]
        return {location.node for record in records for location in record.locations}

    def wait_for_holder(self, identifier: str, node: NodeProcess) -> None:
        """What an engine encodes is stored and published in the background."""
        wait_until(
            lambda: node.node_id in self.holders(identifier),
            OUTCOME_SECONDS,
            f"{node.node_id} publishes {identifier}",
        )

    def wait_until_attached(self) -> None:
        """Until scheduler and worker of one engine on each node have come (back) to it."""
        for node in self.nodes:
            with node.client("stats") as client:  # a session of its own, the third
                wait_until(
                    lambda: client.stats()["sessions_opened"] >= 3,
                    OUTCOME_SECONDS,
                    f"the engine attaches to {node.node_id}",
                )

    def wait_for_beats(self, node: NodeProcess, count: int) -> None:
        """So many from now on."""
        first = self.store.beats()[node.node_id].sequence
        due = first + count
        wait_until(lambda: self.store.beats()[node.node_id].sequence >= due, OUTCOME_SECONDS)

    def sees(self, node: NodeProcess, identifier: str) -> bool:
        """Whether this node knows of a living one that holds the image."""
        (record,) = [record for record in self.store.scan() if record.key == identifier]
        namespace = Namespace(self.store.namespaces()[record.namespace])
        with LookupBuffer(node.config, namespace) as client:
            return client.has_caches([TensorKey(identifier)], timeout=STORE_SECONDS) == [True]

    def _server(self) -> EmbeddedServer:
        return EmbeddedServer.start(
            self.directory / "valkey", timeout_seconds=scaled(10.0), executable=valkey_executable()
        )

    def _open_store(self) -> MetadataStore:
        return open_store(self.server.url, call_timeout_seconds=STORE_SECONDS)

    def _close_server(self) -> None:
        self.store.close()
        self.server.close()

    def _node(self, name: str, **settings: Any) -> NodeProcess:
        return NodeProcess(
            self.directory / name,
            node_id=name,
            store_url=self.server.url,
            store_timeout_seconds=self._store_seconds,
            **settings,
        )


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    """Where the module's hosts are; nothing runs there yet. A module that stops the store says by
    `STORE_SECONDS` how long its nodes wait for it."""
    hosts = TwoHosts(getattr(request.module, "STORE_SECONDS", STORE_SECONDS))
    yield hosts
    hosts.remove()
