"""What inserts and staging areas may occupy of a node: counted, bounded, and given back."""

import asyncio
import os
import threading

import pytest

from lookup_buffer.errors import BufferFull
from lookup_buffer.node.insert import COPIERS, FAILED, UNMAPPING_MAX
from lookup_buffer.node.staging import SEARCH_INLINE_BYTES, StagingAreas
from lookup_buffer.shm.memory import Mapping
from test_insert import STAGED_BYTES, Client, Node


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


def test_an_area_of_a_connection_that_has_ended_is_not_searched_and_counts_meanwhile() -> None:
    """Searches for one connection after the other had 4,600 descriptors within 8 s."""

    async def test() -> None:
        node = Node(16 << 20)
        over = await busy_copiers(node)
        clients = [Client(number, SEARCH_INLINE_BYTES * 2) for number in range(5)]
        for number, client in enumerate(clients):
            node.insert(client, [f"k{number}"], [1], [0], 0.0)
            node.inserts.unstage(client.connection)
        assert node.inserts.left == 5
        over.set()
        for client in clients:
            async with asyncio.timeout(10.0):
                assert await client.results() == [FAILED]
            assert client.area is not None
            assert client.area.filled_bytes == 0
            client.staging.close()
        assert node.inserts.left == 0
        node.at_rest()
        node.inserts.close()
        node.arena.close()

    asyncio.run(test())


async def all_unmapped(node: Node) -> None:
    async with asyncio.timeout(10.0):
        while node.inserts._unmapping:
            await asyncio.sleep(0.001)


def test_areas_that_wait_to_be_unmapped_have_a_bound() -> None:
    async def test() -> None:
        node, client = Node(16 << 20), Client(1, STAGED_BYTES)
        before = len(os.listdir("/proc/self/fd"))
        over = await busy_copiers(node)
        for _ in range(UNMAPPING_MAX + 1):
            client.passed = os.dup(client.staging.fd)
            assert node.inserts.stage(client.connection) == {}
        client.passed = os.dup(client.staging.fd)
        with pytest.raises(BufferFull, match="still to be unmapped"):
            node.inserts.stage(client.connection)
        area = node.inserts.stagings.of(client.connection)
        assert area is not None
        area.mapping, mapping = None, area.mapping  # as if it had been unmapped meanwhile
        client.area = area
        node.insert(client, ["none"], [0], [0], 0.0)  # it needs no area
        assert (await client.results())[0]["outcome"] == "stored"
        client.sent.clear()
        node.insert(client, ["some"], [1], [0], 0.0)
        assert "still to be unmapped" in (await client.results())[0]["message"]
        area.mapping = mapping
        over.set()
        await all_unmapped(node)
        client.passed = os.dup(client.staging.fd)
        assert node.inserts.stage(client.connection) == {}
        node.inserts.unstage(client.connection)
        await all_unmapped(node)  # its end drops what still waits
        assert len(os.listdir("/proc/self/fd")) <= before
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


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


def test_a_large_area_counts_while_an_insert_uses_it() -> None:
    """For its page tables: 342 MiB of 350 areas that were read at one byte of each 2 MiB."""

    async def test() -> None:
        node, client = Node(64 << 20), Client(1, 64 << 20)
        over = await busy_copiers(node)
        node.insert(client, ["k"], [1 << 20], [0], 0.0)
        assert client.session.waits._held == {client.session.id: 8}
        over.set()
        async with asyncio.timeout(10.0):
            assert (await client.results())[0]["outcome"] == "stored"
        assert not client.session.waits._held
        node.inserts.unstage(client.connection)
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


def test_the_last_close_of_an_area_is_on_a_thread() -> None:
    """It gives back its pages: 1 GiB took 0.25 s of the loop."""
    for is_mapped in (True, False):
        closed: list[Mapping | int] = []
        client = Client(1, STAGED_BYTES)
        areas = StagingAreas(STAGED_BYTES * (2 if is_mapped else 1), closed.append)
        areas.open(client.connection, os.dup(client.staging.fd))
        areas.close(client.connection)
        last = closed.pop()
        assert isinstance(last, Mapping if is_mapped else int)
        os.fstat(last) if isinstance(last, int) else last.close()
        for each in [*closed, last]:
            os.close(each) if isinstance(each, int) else each.close()
        client.staging.close()
