"""The pin protocol under vLLM's own scheduler, on a real node whose arena is always overwritten.

What must hold in every step, `DrivenEngine` asserts: with real bytes, a pin that was given back too
early shows as other bytes. With a ledger of pins, and more cases: test_vllm_scheduler.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from connectors.ec import seat as ec_seat
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.key import TensorKey
from nodes import NodeProcess, StartNode, at_rest, wait_until
from patience import scaled
from scheduler_drive import HOOKS, DrivenEngine, Room, content, namespace_of, output_of

MIB = 1 << 20
WIDTH = 8192
"""An item has 128 KiB: the arena holds 16."""
NAMES = "ABCDEF"
TURNS = 150
REST_SECONDS = scaled(20.0)


class Host:
    """An engine on a node, and a second client whose inserts evict all other items."""

    def __init__(self, node: NodeProcess, room: Room, stack: ExitStack) -> None:
        self.node = node
        self.before_hook: Callable[[str], None] = lambda name: None
        self.engine = DrivenEngine(
            room,
            width=WIDTH,
            is_held=self._drive_out,
            before_hook=lambda name: self.before_hook(name),
            store_url=node.config.store_url,
            node_socket=str(node.config.socket_path()),
            capacity_bytes=node.config.capacity_bytes,
            fetch_wait_seconds=0.2,
            metadata_wait_seconds=0.2,
            first_sight_seconds=1.0,
            weights_version="tests",
        )
        stack.callback(self.engine.close)
        settings: Any = None  # the engine has left its namespace there
        self.buffer = LookupBuffer(
            node.config, namespace_of(ec_seat.identity(self.engine.config, settings))
        )
        stack.callback(self.buffer.close)
        self._junk = (TensorKey(f"junk-{number}") for number in itertools.count())
        wait_until(lambda: node.stats()["store_up"], 15.0)

    def keep(self, name: str) -> None:
        identifier = content(name)
        self.buffer.insert(TensorKey(identifier), output_of(identifier, WIDTH))

    def _drive_out(self, _: Any) -> bool:
        """Before a worker reads: overwrite all items without a pin."""
        for _ in range(20):
            try:
                self.buffer.insert(next(self._junk), torch.zeros(4, WIDTH))
            except LookupBufferError:
                break  # the node was killed, so nothing is overwritten
        return True

    def finish(self) -> None:
        deadline = time.monotonic() + REST_SECONDS
        while self.engine.unfinished:
            assert time.monotonic() < deadline, f"stuck: {self.engine.unfinished}"
            self.engine.step()
        self.engine.come_to_rest()

    def lose_node(self) -> None:
        self.node.kill()
        wait_until(lambda: not any(client.boot for client in self._clients()), 5.0)

    def find_node(self) -> None:
        self.node.start()
        wait_until(lambda: all(client.boot for client in self._clients()), 10.0)

    def _clients(self) -> list[LookupBuffer]:
        scheduler, worker = self.engine.connector.scheduler, self.engine.worker.worker
        assert scheduler is not None
        assert worker is not None
        assert worker._buffer is not None
        return [scheduler._buffer, worker._buffer, self.buffer]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
def test_promised_bytes_are_not_overwritten(
    is_async: bool, start_node: StartNode, stack: ExitStack
) -> None:
    node = start_node(capacity_bytes=2 * MIB)
    room = Room(is_async=is_async, cache_items=1, blocks=10, whole_prompts=False)
    host = Host(node, room, stack)
    engine, chance = host.engine, random.Random(7)
    for turn in range(TURNS):
        if len(engine.unfinished) < 4 and turn % 2:
            names = chance.choices(NAMES, k=chance.randint(1, 2))
            bare = chance.random() < 0.2
            engine.add(f"r{turn}", *names, metadata_only=bare, max_tokens=chance.randint(1, 6))
        if engine.unfinished and chance.random() < 0.05:
            engine.abort(chance.choice(engine.unfinished))
        host.keep(chance.choice(NAMES))
        engine.step()
    host.finish()
    assert min(len(engine.loaded), len(engine.encoded)) > 10
    at_rest(node)


def test_node_killed_before_each_of_the_schedulers_calls(
    start_node: StartNode, stack: ExitStack
) -> None:
    """It comes back each time, and so do engine and hits. The requests have metadata alone."""
    host = Host(start_node(capacity_bytes=2 * MIB), Room(is_async=True), stack)
    engine = host.engine
    for fatal in HOOKS:
        left = [fatal]

        def before_hook(name: str, left: list[str] = left) -> None:
            if name in left:
                left.clear()
                host.lose_node()

        host.before_hook = before_hook
        host.keep(fatal)
        engine.add(fatal, fatal, metadata_only=True, max_tokens=2)
        host.finish()
        assert not left
        was_promised = fatal != HOOKS[0]
        assert engine.reasons[fatal] == ("length" if was_promised else "error")
        assert (content(fatal) in engine.loaded) is was_promised
        host.find_node()
    host.before_hook = lambda name: None
    host.keep("last")
    engine.add("last", "last")
    host.finish()
    assert engine.loaded[-1] == content("last")
    at_rest(host.node)
