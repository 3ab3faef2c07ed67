"""Readers of a key that a client of this node is writing, while another node has it: they get what
is written here, if they have time to wait for it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from lookup_buffer.errors import MissReason
from lookup_buffer.protocol.header import TensorHeader
from test_reads import LONG_SECONDS, SHARED, Node, at, reserve, run
from test_request_ends import Prefetching
from test_transfer import NAMESPACE, NBYTES, Fetching

T = TypeVar("T")


async def soon(condition: Callable[[], T]) -> T:
    """What it returns once that is true, within a few turns of the loop."""
    for _ in range(1000):
        if found := condition():
            return found
        await asyncio.sleep(0)
    pytest.fail("not within 1000 turns")


@pytest.mark.parametrize("turns", [1, 10])
def test_who_has_time_to_read_it_waits(turns: int) -> None:
    async def test(node: Node) -> None:
        node.locator.found, node.locator.turns = at, turns
        node.transfers.reason = MissReason.BUSY
        item = reserve(node.arena, SHARED)
        reading = asyncio.ensure_future(node.bring(SHARED, LONG_SECONDS))
        await soon(lambda: node.locator.watches)
        node.inserted(item)
        await soon(reading.done)
        node.release(reading.result())
        assert node.transfers.asked == []

    run(test)


def test_who_has_no_time_gets_a_miss() -> None:
    async def test(node: Node) -> None:
        node.locator.found, node.transfers.reason = at, MissReason.BUSY
        item = reserve(node.arena, SHARED)
        assert await node.bring(SHARED) is MissReason.BUSY
        node.inserted(item)
        node.release(await node.bring(SHARED))
        assert node.transfers.asked == []

    run(test)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prefetch_that_may_wait_is_pending_until_it_is_written(is_known: bool) -> None:
    """Whether it is known before the transfer, or found out when its bytes come."""

    async def test() -> None:
        node = Prefetching(at)
        item = reserve(node.arena, SHARED) if is_known else None
        node.transfers.reason = MissReason.BUSY
        node.prefetch(SHARED[1], wait_seconds=LONG_SECONDS)
        await soon(lambda: node.locator.watches)
        assert node.entries() == []
        node.inserted(item or reserve(node.arena, SHARED))
        assert [entry["state"] for entry in await soon(node.entries)] == ["resident"]
        assert bool(node.transfers.asked) is not is_known
        await node.close()

    asyncio.run(test())


@pytest.mark.parametrize("written", [0, 5, 9])
def test_a_transfer_that_finds_it_is_busy_and_the_others_of_its_batch_come(
    monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Not `no_room`: for that nobody waits, and operators are alerted."""

    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        key, header = f"k{written}", TensorHeader("uint8", (NBYTES,), NBYTES)
        fetching.arena.reserve((NAMESPACE, key), header, origin="local", ttl_seconds=None)
        failed = await fetching.fetch({f"k{n}": 2 for n in range(10)})
        fetching.fetcher.close()
        assert failed == [key]
        assert fetching.settled[key].reason is MissReason.BUSY

    asyncio.run(test())
