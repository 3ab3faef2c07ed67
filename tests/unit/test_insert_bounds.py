"""What inserts and staging areas may occupy of a node: counted, bounded, and given back."""

import asyncio
import os
import threading

import pytest

from lookup_buffer.node import turns
from lookup_buffer.node.insert import COPIERS
from test_insert import NAMESPACE, STAGED_BYTES, Client, Node


async def busy_copiers(node: Node) -> threading.Event:
    """All threads that copy wait for it."""
    over, busy = threading.Event(), threading.Barrier(COPIERS + 1)

    def wait() -> None:
        busy.wait(10.0)
        over.wait(10.0)

    for _ in range(COPIERS):
        node.inserts._copiers.submit(wait)
    await asyncio.to_thread(busy.wait, 10.0)
    return over


def test_an_insert_counts_from_its_request_to_its_answer() -> None:
    """Hundreds of large ones, each begun in its turn, took 3.5 MiB each, without a bound."""

    async def test() -> None:
        node, client = Node(16 << 20), Client(1, STAGED_BYTES)
        waits = client.session.waits
        keys = [f"{number}-{'x' * 200}" for number in range(4096)]
        node.insert(client, keys, [0] * len(keys), [0] * len(keys), 0.0)
        counted = waits._held[client.session.id]
        assert counted > len(keys) * 1200 // (16 << 10)
        other = Client(1, STAGED_BYTES)
        other.session.waits = waits
        waits.add("another", waits.total - waits._used - 1)
        node.insert(other, keys, [0] * len(keys), [0] * len(keys), 0.0)
        refused = await other.results()
        assert len(refused) == len(keys)
        assert all("requests that wait" in one["message"] for one in refused)
        other.sent.clear()
        node.insert(other, ["one"], [1], [0], 0.0)  # what is small is not refused
        async with asyncio.timeout(10.0):
            await client.results()
            await other.results()
        assert client.session.id not in waits._held
        node.inserts.close()
        node.arena.close()
        client.staging.close()
        other.staging.close()

    asyncio.run(test())


class Closed:
    """Instead of `Closer`."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def close(self, descriptors: list[int]) -> None:
        self.descriptors += descriptors


def test_an_insert_whose_connection_has_ended_counts_and_keeps_its_area_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 60.0)  # each is begun before its connection ends

    async def test() -> None:
        node, closed = Node(16 << 20), Closed()
        node.inserts.closer = closed  # type: ignore[assignment]
        over = await busy_copiers(node)
        clients = [Client(number, 1 << 20) for number in range(5)]
        for number, client in enumerate(clients):
            client.staging.view[-1] = number
            node.insert(client, [f"k{number}"], [1 << 20], [0], 0.0)
            node.inserts.unstage(client.connection)
        assert node.inserts.left == 5
        assert not closed.descriptors
        over.set()
        for number, client in enumerate(clients):
            async with asyncio.timeout(10.0):
                assert (await client.results())[0]["outcome"] == "stored"
            item = node.arena.peek((NAMESPACE, f"k{number}"))
            assert item is not None
            assert node.arena.bytes_of(item)[-1] == number
            client.staging.close()
        assert node.inserts.left == 0
        assert len(closed.descriptors) == 5
        for descriptor in closed.descriptors:
            os.close(descriptor)
        node.at_rest()
        node.inserts.close()
        node.arena.close()

    asyncio.run(test())


def test_the_last_close_of_an_area_is_on_a_thread() -> None:
    """It gives back its pages: 1 GiB took 0.25 s of the loop."""

    async def test() -> None:
        node, client, closed = Node(16 << 20), Client(1, 1 << 20), Closed()
        node.inserts.closer = closed  # type: ignore[assignment]
        for number in range(3):
            client.passed = os.dup(client.staging.fd)
            assert node.inserts.stage(client.connection) == {}
            assert len(closed.descriptors) == number
        node.inserts.unstage(client.connection)
        for descriptor in closed.descriptors:
            os.close(descriptor)
        assert len(closed.descriptors) == 3
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())
