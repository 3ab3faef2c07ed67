"""docs/operations.md, "Upgrade": nodes are restarted one by one while clients use both."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from deployment import Service, Stack, client_config, running_stack, why_not_contained
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupTimeout, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import tensor_of, wait_until
from patience import scaled

ITEMS = 16
ITEM_BYTES = 256 << 10
PAUSE_SECONDS = 0.01
PATIENCE_SECONDS = scaled(120.0)


@pytest.fixture
def stack() -> Iterator[Stack]:
    yield from running_stack("valkey", "node-a", "node-b")


@dataclass
class Reader:
    """An engine's way with the buffer, again and again: take it, or make it and put it there."""

    buffer: LookupBuffer
    ending: threading.Event
    rounds: int = 0
    missed: list[str] = field(default_factory=list)
    """Since `missed` was cleared last."""
    failures: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        tensors = {f"item-{number}": tensor_of(str(number), ITEM_BYTES) for number in range(ITEMS)}
        try:
            while not self.ending.wait(PAUSE_SECONDS):
                for name, tensor in tensors.items():
                    self._read(name, tensor)
                self.rounds += 1
        except BaseException as error:
            self.failures.append(error)

    def _read(self, name: str, tensor: object) -> None:
        key = TensorKey(name)
        try:
            got = self.buffer.select(key)
        except (MissingTensor, LookupTimeout, NodeUnavailable):
            self.missed.append(name)
            try:
                self.buffer.insert(key, tensor)  # type: ignore[arg-type]
            except NodeUnavailable:
                pass  # its node is away: as an engine it keeps what it has encoded to itself
        else:
            assert got is not None
            assert got.equal(tensor)  # type: ignore[arg-type]

    def after_rounds(self, count: int) -> None:
        due = self.rounds + count
        wait_until(lambda: bool(self.failures) or self.rounds >= due, PATIENCE_SECONDS)
        assert not self.failures, self.failures


@pytest.mark.processes
def test_nodes_restarted_one_by_one_cost_little_and_fail_no_request(stack: Stack) -> None:
    ending = threading.Event()
    namespace = Namespace.named("rolling")
    readers = {
        name: Reader(LookupBuffer(client_config(stack, Service(name)), namespace), ending)
        for name in ("node-a", "node-b")
    }
    threads = [threading.Thread(target=reader.run) for reader in readers.values()]
    for thread in threads:
        thread.start()
    try:
        for reader in readers.values():
            reader.after_rounds(3)
        for name, other in (("node-a", "node-b"), ("node-b", "node-a")):
            _restart(stack, name, readers[name], readers[other])
    finally:
        ending.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        for reader in readers.values():
            reader.buffer.close()


def _restart(stack: Stack, name: str, here: Reader, there: Reader) -> None:
    """What the reader of the restarted node misses while it is away is its own affair."""
    there.after_rounds(2)  # it holds all of it by now
    there.missed.clear()
    assert stack.stop(name) == 0
    stack.start(name, contained=why_not_contained() is None)
    stack.wait_healthy(name)
    wait_until(lambda: here.buffer.attached, PATIENCE_SECONDS, "its client attaches again")

    def quiet() -> bool:
        here.missed.clear()
        here.after_rounds(3)
        return not here.missed

    wait_until(quiet, PATIENCE_SECONDS, "it has all of it again")
    there.after_rounds(3)
    assert len(there.missed) <= ITEMS, "the other host misses each item once at most"
