"""Nodes for tests: each a process of its own with a directory of its own, all sharing one Valkey.

`start_node` starts them for one test, and `module_nodes` for all tests of a module; `node_pair` is
two of the latter. Clients made by `NodeProcess.client` never start a node by themselves, so a node
that was killed stays dead until the test restarts it.
"""

import json
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fork_server
import node_program
from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.client.session import NodeConnection, next_request_id
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Stats
from lookup_buffer.runtime import to_json
from lookup_buffer.times import CALL_SECONDS
from patience import scaled
from payloads import block
from store import EmbeddedServer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
START_SECONDS = 20.0
STORE_CONNECTIONS = 2
"""Three threads of a node use the store: its pool grows when they do so at once."""
GAUGES_AT_REST = ("pinned_bytes", "reserved_bytes", "pins", "lane_tickets")

STORE_SECONDS = 5.0
"""Of nodes in tests that are not about a store that hangs: it answers others' tests as well."""
StartNode = Callable[..., "NodeProcess"]


class NodeProcess:
    """One node. `start` again after `kill` is a restart: same id, same directory, new boot.

    `prelude` is Python that its process runs first: a test that has to see the end of a long time,
    which is no setting, shortens it there.
    """

    def __init__(self, directory: Path, *, prelude: str = "", **settings: Any) -> None:
        self._prelude = prelude
        settings = {"capacity_bytes": 64 * MIB, "store_timeout_seconds": STORE_SECONDS, **settings}
        self.settings = BufferConfig.of({"directory": directory, **settings})
        self.config = BufferConfig.of(
            {"directory": directory, "node_socket": directory / "node.sock", **settings}
        )
        self.node_id = self.settings.node_id or ""
        self.socket_path = self.config.socket_path()
        self.log = self.config.runtime_directory() / "node.log"
        self._process: subprocess.Popen[bytes] | fork_server.Forked | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "NodeProcess":
        self._process = fork_server.launch(
            "node_program",
            [to_json(self.settings), self._prelude],
            log=self.log,
            environment=fork_server.own_environment(),
            preloaded=node_program.PRELOADED,
            forked=not self._prelude,  # which comes before all imports
            appends=True,
        )
        wait_until(self._answers, START_SECONDS, f"node {self.node_id} starts: {self.log_text()}")
        return self

    def client(
        self, namespace: str = "tests", *, engine: EngineRank | None = None, required: bool = True
    ) -> LookupBuffer:
        return LookupBuffer(
            self.config, Namespace.named(namespace), engine=engine, required=required
        )

    def stats(self) -> dict[str, int]:
        """What a client that comes only to ask is told; it is gone when this returns.

        Asked again on a machine that is so busy that a living node needs more than a call's second.
        """
        deadline = time.monotonic() + scaled(CALL_SECONDS)
        while True:
            try:
                return self._ask_for_stats()
            except NodeUnavailable:
                if not self.alive() or time.monotonic() > deadline:
                    raise

    def _ask_for_stats(self) -> dict[str, int]:
        """By a session that maps nothing: a `LookupBuffer` maps the whole arena, which takes ten
        times as long, and many tests poll."""
        deadline = time.monotonic() + CALL_SECONDS
        with closing(NodeConnection(self.socket_path, CALL_SECONDS)) as connection:
            expects = self.config.expectations()
            connection.send(Hello(next_request_id(), VERSION, None, expects), deadline=deadline)
            _, descriptors = connection.receive_with_descriptors(deadline)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = connection.call(Stats(next_request_id()), deadline - time.monotonic())
            connection.send_now(Goodbye(next_request_id()))
        return dict(answer["stats"])

    def open_files(self) -> int:
        """Its open files at rest: with its connections to the store, and one client that asks."""
        wait_until(lambda: self.stats()["store_up"], 5.0)
        with self.client() as client, pytest.raises(MissingTensor):
            client.select(key())
        return self.stats()["open_files"]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(scaled(10.0))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self) -> None:
        if self._process is None:
            return
        if self.alive():
            os.kill(self.pid, signal.SIGCONT)
            self._process.terminate()
        try:
            self._process.wait(scaled(10.0))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # its log then has the stack of each thread
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(scaled(5.0))
            self.kill()
            pytest.fail(f"node {self.node_id} does not end on SIGTERM: {self.log_text()}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the node ended: {self.log_text()}"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket_path)) == 0


class Nodes:
    """Starts nodes in short directories (a unix socket's path is bounded) and ends them all."""

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url
        self._base = Path(tempfile.mkdtemp(prefix="lbt-"))
        self._nodes: list[NodeProcess] = []

    def __call__(self, **settings: Any) -> NodeProcess:
        directory = self._base / str(len(self._nodes))
        settings.setdefault("store_url", self._store_url)
        settings.setdefault("node_id", f"node{len(self._nodes)}-{secrets.token_hex(3)}")
        node = NodeProcess(directory, **settings)
        self._nodes.append(node)
        return node.start()

    def end(self) -> None:
        try:
            for node in self._nodes:
                node.end()
            for node in self._nodes:
                assert "Traceback" not in node.log_text(), node.log_text()
        finally:
            shutil.rmtree(self._base)


@pytest.fixture
def start_node(valkey_server: EmbeddedServer) -> Iterator[StartNode]:
    """start_node(capacity_bytes=..., store_url=...): nodes that end with the test."""
    nodes = Nodes(valkey_server.url)
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def module_nodes(valkey_server: EmbeddedServer) -> Iterator[StartNode]:
    """The same, for nodes that end with the module."""
    nodes = Nodes(valkey_server.url)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture(scope="module")
def node_pair(module_nodes: StartNode) -> tuple[NodeProcess, NodeProcess]:
    """Two nodes for all tests of a module, as if on two hosts."""
    return module_nodes(), module_nodes()


def node_pids(directory: Path) -> list[int]:
    """The processes that hold the node's lock in `directory`: found by what they have open."""
    lock = str(directory / "node.lock")
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return sorted(pid for pid in pids if _has_open(pid, lock))


def _has_open(pid: int, path: str) -> bool:
    files = Path(f"/proc/{pid}/fd")
    try:
        return any(_is(files / number, path) for number in os.listdir(files))
    except OSError:
        return False  # it has ended meanwhile


def _is(link: Path, target: str) -> bool:
    try:
        return str(link.readlink()) == target
    except OSError:
        return False  # closed meanwhile


def with_store(*nodes: NodeProcess) -> None:
    """Wait until they have opened the store: before, they grant every claim unasked."""
    for node in nodes:
        wait_until(lambda node=node: node.stats()["store_up"], 15.0)  # type: ignore[misc]


def wait_until(condition: Callable[[], object], seconds: float, what: str = "") -> float:
    """Poll until `condition()`, which on an idle machine holds within `seconds`; the answer is the
    seconds it took, to a fiftieth. Fails when it still does not after what this machine may need.
    """
    started = time.monotonic()
    deadline_seconds = scaled(seconds)
    while not condition():
        took = time.monotonic() - started
        if took > deadline_seconds:
            pytest.fail(f"not within {deadline_seconds:.0f} s: {what or condition}")
        time.sleep(max(0.01, 0.02 * took))
    return time.monotonic() - started


def holds_within(condition: Callable[[], object], seconds: float) -> bool:
    """Whether `condition()` comes true within exactly `seconds`: for what must not come."""
    deadline = time.monotonic() + seconds
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def at_rest(node: NodeProcess, *, open_files: int | None = None, seconds: float = 5.0) -> None:
    """Wait until nothing is pinned or reserved (and no more files are open than before)."""
    last: dict[str, int] = {}

    def rests() -> bool:
        last.update(node.stats())
        calm = all(last[name] == 0 for name in GAUGES_AT_REST)
        if open_files is not None and last["open_files"] > open_files + STORE_CONNECTIONS:
            return False
        return calm

    try:
        wait_until(rests, seconds)
    except pytest.fail.Exception:
        shown = {name: last[name] for name in (*GAUGES_AT_REST, "open_files", "items")}
        pytest.fail(f"{node.node_id} does not come to rest: {shown}, files before: {open_files}")


def key(name: str | None = None) -> TensorKey:
    """A key that no other test uses."""
    return TensorKey(f"{name or 'k'}-{secrets.token_hex(8)}")


def handoff(name: str | None = None) -> TensorKey:
    """A hand-off's key that no other test uses."""
    return TensorKey(name or "h", request_id=secrets.token_hex(8))


def tensor_of(seed: str, nbytes: int) -> torch.Tensor:
    """Bytes that follow from the seed alone, in any process."""
    return block(nbytes, int.from_bytes(seed.encode()[-7:], "big"))


class ClientProcess:
    """A client in a process of its own: `source` finds `buffer` opened, and `send` and `receive`.

    `send(value)` and `receive()` exchange values with the test. The processes are forked from one
    that has torch imported, which else costs seconds each.
    """

    def __init__(
        self,
        config: BufferConfig,
        source: str,
        *,
        namespace: str = "tests",
        seat: tuple[str, int | None, int] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "torch", "lookup_buffer.client.buffer"])
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_client, args=(theirs, to_json(config), source, namespace, seat)
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, value: Any) -> None:
        self.pipe.send(value)

    def receive(self, timeout: float = 30.0) -> Any:
        """The next value, which on an idle machine comes within `timeout`."""
        if not self.pipe.poll(scaled(timeout)):
            pytest.fail(f"the client process said nothing for {scaled(timeout):.0f} s")
        try:
            return self.pipe.recv()
        except EOFError:
            pytest.fail(f"the client process ended with {self.wait()}")

    def wait(self) -> int | None:
        self._process.join(scaled(10.0))
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        if self._process.is_alive():
            self.kill()
        self._process.close()


def _run_client(
    pipe: "Connection[Any, Any]",
    config: str,
    source: str,
    namespace: str,
    seat: tuple[str, int | None, int] | None,
) -> None:
    torch.set_num_threads(1)
    settings = BufferConfig.of(json.loads(config))
    engine = EngineRank(*seat) if seat else None
    buffer = LookupBuffer(settings, Namespace.named(namespace), engine=engine)
    exec(source, {**globals(), "buffer": buffer, "send": pipe.send, "receive": pipe.recv})
