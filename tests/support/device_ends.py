"""Processes that have a pool, each a client of a node of its own, as if on several hosts.

`do(source)` evaluates an expression in the process, where `buffer` is its DeviceBuffer and `lane`
its DeviceLane. What it raises is raised here, if it is one of our errors.

`ToldPool` is a stand-in: it sends its node what the test gives it.
"""

import json
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lookup_buffer import errors
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.session import next_request_id
from lookup_buffer.codec import contiguous_bytes
from lookup_buffer.config import BufferConfig
from lookup_buffer.device.buffer import DeviceBuffer
from lookup_buffer.device.lane import DeviceLane
from lookup_buffer.device.memory import HostPoolMemory
from lookup_buffer.device.protocol import ProtocolVersion
from lookup_buffer.errors import BufferFull
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Offer, OpenPool, Received, Request, SeenPool
from lookup_buffer.runtime import to_json
from nodes import MIB, NodeProcess, StartNode, tensor_of, wait_until, with_store
from patience import scaled
from store import BlockingStore, open_store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


ANSWER_SECONDS = scaled(60.0)
POOL_BYTES = 64 * MIB
LARGE = 2 * MIB
"""More than what comes with its offer, so that it takes the communicator."""


class DeviceEnd:
    """One process."""

    def __init__(self, node: NodeProcess, namespace: str, **options: Any) -> None:
        self.node = node
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "torch", "lookup_buffer.client.buffer"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, to_json(node.config), namespace, options)
        )
        self._process.start()
        theirs.close()
        self._hear()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def do(self, source: str) -> Any:
        self.begin(source)
        return self._hear()

    def begin(self, source: str) -> None:
        """Begin with it; its end is received later."""
        self._pipe.send(source)

    def counted(self, name: str) -> int:
        """Of its node's counters."""
        return self.node.stats().get(name, 0)

    def receive(self) -> Any:
        """What came of what was begun."""
        return self._hear()

    def has_sent(self) -> bool:
        """Whether `receive` has something, or the process has ended."""
        return bool(self._pipe.poll(0))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10.0)

    def end(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(15.0)
            if self._process.is_alive():
                self.kill()
                pytest.fail("a process with a pool does not end")
        self._pipe.close()
        self._process.close()

    def _hear(self) -> Any:
        if not self._pipe.poll(ANSWER_SECONDS):
            pytest.fail(f"the process said nothing for {ANSWER_SECONDS} s")
        kind, value = self._pipe.recv()
        if kind == "raised":
            raise getattr(errors, value[0])(value[1])
        return value


def _run(
    pipe: "Connection[Any, Any]", config: str, namespace: str, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    settings = BufferConfig.of(json.loads(config))
    version = options.pop("version", None)
    dialect = ProtocolVersion("gloo", version) if version else None
    place = PLACES[options.pop("device", "")]()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lookup_buffer").addHandler(handler)
    threading.excepthook = lambda died: logged.append(f"a thread died: {died.exc_value!r}")
    options = {"pool_bytes": POOL_BYTES, "memory": place, **options}
    known = {**globals(), "config": settings, "logged": logged, "place": place}

    def join() -> None:
        """A new pool, and a new client with it."""
        lane = DeviceLane("gloo", version=dialect, **options)
        buffer = DeviceBuffer(lane, settings, Namespace.named(namespace))
        known.update(buffer=buffer, lane=lane, insert=buffer.insert, leave=buffer.close)
        known["read"] = lambda key, **how: read(buffer, key, **how)

    known["join"] = join
    join()
    with closing(known["buffer"]):
        pipe.send(("is", None))
        while (source := pipe.recv()) is not None:
            try:
                pipe.send(("is", eval(source, known)))
            except errors.LookupBufferError as error:
                pipe.send(("raised", (type(error).__name__, str(error))))


def read(buffer: DeviceBuffer, key: TensorKey, **how: Any) -> Any:
    """What tells two tensors apart: dtype, shape and bytes."""
    return facts(buffer.select(key, **how))


def facts(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    owner, _, _ = contiguous_bytes(tensor)
    raw = bytes(owner.reshape(-1).view(torch.uint8).numpy())
    return str(tensor.dtype), tuple(tensor.shape), raw


class FullDevice(HostPoolMemory):
    """One that has no memory left to receive to."""

    def empty(self, header: TensorHeader) -> torch.Tensor:
        raise BufferFull("the device has no memory for the pool")


class LostDevice(HostPoolMemory):
    """One that is gone: torch says so by a RuntimeError, wherever it is asked for something."""

    def empty(self, header: TensorHeader) -> torch.Tensor:
        raise RuntimeError("CUDA error: unknown error")


class DyingDevice(HostPoolMemory):
    """One that is there at first, and has gone when others want what is on it."""

    is_gone = False

    def wait(self, ready: Any) -> None:
        if self.is_gone:
            raise RuntimeError("CUDA error: device-side assert triggered")


class WatchedDevice(HostPoolMemory):
    """One that sees how far what is received has come, and strikes a process meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._target: tuple[int, int] | None = None
        self._last = torch.empty(0)

    def strike(self, pid: int, number: int) -> None:
        """Send that signal to that process in the middle of the next that is received."""
        self._target = (pid, number)

    def came_bytes(self) -> int:
        """Of that one, in steps of `STEP_BYTES`, by now."""
        steps = self._last.reshape(-1, STEP_BYTES)
        return int((steps != UNTOUCHED).any(dim=1).sum()) * STEP_BYTES

    def empty(self, header: TensorHeader) -> torch.Tensor:
        tensor = super().empty(header)
        target, self._target = self._target, None
        if target is not None:
            self._last = tensor.view(torch.uint8).reshape(-1).fill_(UNTOUCHED)
            threading.Thread(target=self._watch, args=target, daemon=True).start()
        return tensor

    def _watch(self, pid: int, number: int) -> None:
        begins = self._last[:STEP_BYTES]
        while bool((begins == UNTOUCHED).all()):
            pass
        os.kill(pid, number)


STEP_BYTES, UNTOUCHED = 64 << 10, 0xA5
PLACES = {
    "": HostPoolMemory, "full": FullDevice, "lost": LostDevice, "dying": DyingDevice,
    "watched": WatchedDevice,
}  # fmt: skip


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name[:3] == "lb-")


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


StartEnd = Callable[..., DeviceEnd]


@pytest.fixture
def start_end(start_node: StartNode, request: pytest.FixtureRequest) -> Iterator[StartEnd]:
    """start_end(node=None, **options): a process with a pool on a node of its own, or on that."""
    with ExitStack() as ends:

        def start(node: NodeProcess | None = None, **options: Any) -> DeviceEnd:
            node = node or start_node()
            with_store(node)
            end = DeviceEnd(node, request.node.name[:80], **options)
            ends.callback(end.end)
            return end

        yield start


def put(end: DeviceEnd, key: str, value: str, **how: Any) -> None:
    """Insert what `value` evaluates to, and wait until Redis names the device. Who asks only then,
    for the first time, is told of it."""
    end.do(f"insert(TensorKey({key!r}), {value}, **{how!r})")
    with open_store(end.node.config.store_url, call_timeout_seconds=2.0) as store:
        wait_until(lambda: _on_device(store, key), 10.0, f"{key} is offered")


def _on_device(store: BlockingStore, key: str) -> bool:
    return any(record.devices for record in store.scan() if record.key == key)


def warm(first: DeviceEnd, second: DeviceEnd) -> None:
    """Until the second receives from the first's pool; also where it has to find that again, or has
    left it alone for a while."""

    def comes() -> bool:
        before = second.counted("lane_received_gloo")
        key = f"warm-{first.pid}-{second.pid}-{time.monotonic_ns()}"
        put(first, key, f"torch.zeros({LARGE}, dtype=torch.uint8)")
        with suppress(errors.MissingTensor):  # a node that was just restarted counts as dead
            second.do(f"read(TensorKey({key!r}))")
        return second.counted("lane_received_gloo") > before

    wait_until(comes, 40.0, f"a lane: {second.node.stats()}")


__all__ = ["TensorKey", "tensor_of"]


FINGERPRINT = Namespace.named("tests").fingerprint
POOL, LIBRARY, PORT, MARK = "ab" * 6, "cd" * 4, 4321, 17
NBYTES = 100_000
TOLD_POOL_BYTES = 10 * NBYTES


class Told:
    """A pool that keeps what it is told, and says nothing by itself but what it is.

    What it receives of other pools comes with their nodes' beats, in between, and is apart."""

    def __init__(
        self,
        client: LookupBuffer,
        *,
        name: str = POOL,
        pool_bytes: int = TOLD_POOL_BYTES,
        receives: bool = True,
        offers: bool = True,
    ) -> None:
        self.name, self.opening = name, (pool_bytes, receives, offers)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.sees: dict[str, SeenPool] = {}
        """The pools of others that are there, as it was told."""
        self.lost_sight: list[str] = []
        self.send: Callable[[Request], None] = lambda _request: None
        client.join_lane(self)

    def attached(self, to_node: Callable[[Request], None]) -> None:
        self.send = to_node
        to_node(OpenPool(next_request_id(), "nccl", LIBRARY, PORT, self.name, *self.opening))

    def lost(self) -> None:
        pass

    def on_event(self, message: dict[str, Any]) -> None:
        if message["event"] != "pools":
            self.events.put(message)
            return
        self.sees |= {at.pool: at for at in (SeenPool(*fields) for fields in message["there"])}
        for pool in message["gone"]:
            del self.sees[pool]
            self.lost_sight.append(pool)

    def tensor(self, ticket: int) -> torch.Tensor:
        raise AssertionError("nobody loads here")

    def wait_for(self, event: str) -> dict[str, Any]:
        message = self.events.get(timeout=10.0)
        assert message["event"] == event, message
        return message

    def offers(self, one: TensorKey, checksum: int) -> None:
        self.send(Offer(next_request_id(), FINGERPRINT, one.text, MARK, checksum))

    def answers(self, ticket: int, reason: str = "", source: int = 1) -> None:
        self.send(Received(next_request_id(), ticket, reason, source))
