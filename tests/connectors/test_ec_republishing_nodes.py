"""Lost items are stored again from vLLM's own cache: vLLM's own scheduler on a real node.

test_republish runs the same over HTTP with real engines.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from command_line import run
from connectors.ec import seat as ec_seat
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupBufferError, MissingTensor
from lookup_buffer.key import TensorKey
from nodes import NodeProcess, StartNode, wait_until
from scheduler_drive import DrivenEngine, Room, content, namespace_of, output_of

MIB = 1 << 20
WIDTH = 64
OUTCOME_SECONDS = 60.0
TTL_SECONDS = 15.0
ROLES = ["ec_producer", "ec_both"]


class Host:
    """An engine on a node, and another client of its namespace."""

    def __init__(self, node: NodeProcess, role: str, stack: ExitStack, **settings: Any) -> None:
        self.node = node
        self.engine = DrivenEngine(
            Room(cache_items=4),
            role=role,
            width=WIDTH,
            store_url=node.config.store_url,
            node_socket=str(node.config.socket_path()),
            capacity_bytes=node.config.capacity_bytes,
            weights_version="made up",
            **settings,
        )
        stack.callback(self.engine.close)
        unused: Any = None  # the engine has remembered its identity in the config
        self.namespace = namespace_of(ec_seat.identity(self.engine.config, unused))
        self.buffer = LookupBuffer(node.config, self.namespace)
        stack.callback(self.buffer.close)

    def serve(self, request: str, *names: str) -> None:
        self.engine.add(request, *names, max_tokens=1)
        until = time.monotonic() + OUTCOME_SECONDS
        while self.engine.unfinished:
            assert time.monotonic() < until, "the request does not end"
            self.engine.step()
        while self.engine.scheduler.has_requests():
            self.engine.step()

    def _has(self, name: str) -> bool | None:
        """None where the node did not answer."""
        try:
            stored = self.buffer.select(TensorKey(content(name)))
        except MissingTensor:
            return False
        except LookupBufferError:
            return None
        assert stored is not None
        return torch.equal(stored, output_of(content(name), WIDTH))

    def wait_until_stored(self, *names: str) -> None:
        wait_until(lambda: all(map(self._has, names)), OUTCOME_SECONDS, f"{names} are stored")

    def wait_until_lost(self, name: str) -> None:
        wait_until(lambda: self._has(name) is False, OUTCOME_SECONDS, f"{name} is lost")


def replace(host: Host) -> None:
    host.node.terminate()
    host.node.start()


def kill(host: Host) -> None:
    host.node.kill()
    host.node.start()


def let_expire(host: Host) -> None:
    """The time to live ends soon."""


def invalidate(host: Host) -> None:
    done = run("invalidate", host.namespace.fingerprint, "--store-url", host.node.config.store_url)
    assert done.returncode in (0, 1), done.stderr  # 1: a slow node drops them later


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("lose", [replace, kill, let_expire, invalidate])
@pytest.mark.parametrize("role", ROLES)
def test_an_item_in_vllms_cache_is_stored_again(
    role: str, lose: Callable[[Host], None], start_node: StartNode, stack: ExitStack
) -> None:
    settings = {"ttl_seconds": TTL_SECONDS} if lose is let_expire else {}
    host = Host(start_node(capacity_bytes=4 * MIB), role, stack, **settings)
    name = secrets.token_hex(8)  # the tests share a store
    host.serve("first", name)
    host.wait_until_stored(name)
    lose(host)
    host.wait_until_lost(name)
    host.serve("again", name)
    host.wait_until_stored(name)
    assert host.engine.encoded == [content(name)], "it was not encoded again"


def test_an_item_that_a_producer_skipped_is_encoded_when_it_is_lost(
    start_node: StartNode, stack: ExitStack
) -> None:
    host = Host(start_node(capacity_bytes=4 * MIB), "ec_producer", stack)
    skipped, encoded = secrets.token_hex(8), secrets.token_hex(8)
    host.buffer.insert(TensorKey(content(skipped)), output_of(content(skipped), WIDTH))
    host.serve("first", skipped, encoded)
    assert host.engine.encoded == [content(encoded)]
    host.wait_until_stored(skipped, encoded)
    replace(host)
    host.wait_until_lost(skipped)
    host.serve("again", skipped, encoded)
    host.wait_until_stored(skipped, encoded)
    assert host.engine.encoded == [content(encoded), content(skipped)]
