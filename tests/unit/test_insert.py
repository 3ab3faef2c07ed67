"""Inserts of many parts: results, order, and clients that leave at any moment."""

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import Executor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.node import arena, insert, turns
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.insert import Inserts
from lookup_buffer.node.items import Item
from lookup_buffer.node.locate import Waiting
from lookup_buffer.node.staging import fill
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Insert, InsertOutcome
from lookup_buffer.shm.memory import Staging
from lookup_buffer.times import TURN_SECONDS

NAMESPACE = "f" * 64
STAGED_BYTES = 2 << 20


class Announced:
    """The confirmation of a hand-off, which takes a while and has any outcome."""

    def __init__(self, chance: random.Random | None) -> None:
        self.chance = chance

    async def confirm(self, item: Item, until: float) -> InsertOutcome:
        if self.chance is None:
            return InsertOutcome.STORED
        for _ in range(self.chance.randint(0, 5)):
            await asyncio.sleep(self.chance.choice([0, 0.001]))
        if self.chance.random() < 0.1:
            raise NodeUnavailable("the other owner does not answer")
        return self.chance.choice([InsertOutcome.STORED, InsertOutcome.EXISTS])


class Nothing:
    """What is not looked at: the locator and the claims."""

    def watch(self, *_: Any) -> Any:
        return lambda: None

    def inserted(self, *_: Any) -> None: ...


class Client:
    """A connection with a staging area."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.sent: list[dict[str, Any]] = []
        connection: Any = self
        self.connection: Any = connection
        self.session = Session(number, connection, None)
        self.staging = Staging(nbytes)
        self.staging.view[:] = bytes(nbytes)
        self.passed = -1

    def take_descriptor(self) -> int:
        return self.passed

    def discard(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    def end(self, error: Exception | None) -> None: ...

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def results(self) -> list[dict[str, Any]]:
        while not self.sent:
            await asyncio.sleep(0.001)
        (reply,) = self.sent
        results: list[dict[str, Any]] = reply["results"]
        return results


class Node:
    def __init__(self, capacity_bytes: int, chance: random.Random | None = None) -> None:
        loop = asyncio.get_running_loop()
        nothing: Any = Nothing()
        announced: Any = Announced(chance)
        arrivals: Any
        self.arena = Arena(capacity_bytes, lambda _address, _reason: None)
        self.handoffs = Handoffs(loop, self.arena, Counters(), 10.0)
        self.waiting = arrivals = Waiting(loop, nothing)
        self.inserts = Inserts(
            loop, self.arena, Counters(), self.waiting, self.handoffs, nothing, announced,
            arrivals,
        )  # fmt: skip

    def insert(
        self,
        client: Client,
        keys: list[str],
        sizes: list[int],
        offsets: list[int],
        wait_seconds: float,
    ) -> None:
        headers = [TensorHeader("uint8", (nbytes,), nbytes).to_fields() for nbytes in sizes]
        request = Insert(1, NAMESPACE, keys, headers, offsets, 60.0, wait_seconds)
        if client.passed == -1:
            client.passed = os.dup(client.staging.fd)
            self.inserts.stage(client.connection)
        self.inserts.insert(client.connection, client.session, request)

    def at_rest(self) -> None:
        gauges = self.arena.gauges()
        assert (gauges.pins, gauges.reserved_bytes) == (0, 0)
        assert not self.inserts._inserting
        assert not self.handoffs._offers
        assert not self.waiting._waiters


def test_the_last_of_two_hand_offs_of_one_key_stays() -> None:
    """Also if the first one takes longer to copy."""

    async def test() -> None:
        node = Node(64 << 20)
        for _ in range(5):
            client = Client(1, 16 << 20)
            client.staging.view[0], client.staging.view[8 << 20] = 1, 2
            node.insert(client, ["k@r"] * 2, [7 << 20, 600 << 10], [0, 8 << 20], 1.0)
            assert [one["outcome"] for one in await client.results()] == ["stored"] * 2
            item = node.arena.peek((NAMESPACE, "k@r"))
            assert item is not None
            assert node.arena.bytes_of(item)[0] == 2
            node.arena.remove(item, "test")
            node.inserts.unstage(client.connection)
            client.staging.close()
        node.at_rest()
        node.inserts.close()

    asyncio.run(test())


def descriptors_of(clients: list[Client]) -> set[int]:
    """Of their areas."""
    inodes, found = {os.fstat(client.staging.fd).st_ino for client in clients}, set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was that of the list
            if os.fstat(int(name)).st_ino in inodes:
                found.add(int(name))
    return found


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the loop has time for one part."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 1e-9)
    monkeypatch.setattr(insert, "STEP_SECONDS", -1.0)


@pytest.fixture(params=["all at once", "one by one"])
def begun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In how many turns of the loop the parts of a request are begun."""
    one_by_one(monkeypatch)
    if request.param == "all at once":
        monkeypatch.setattr(turns, "TURN_SECONDS", 60.0)
        monkeypatch.setattr(insert, "STEP_SECONDS", 60.0)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("seed", range(8))
def test_clients_that_leave_at_any_moment_leave_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    clients: list[Client] = []
    own: set[int] = set()

    async def act(node: Node, number: int) -> None:
        for turn in range(8):
            client = Client(1000 * number + turn + 1, STAGED_BYTES)
            clients.append(client)
            own.update(descriptors_of([client]))
            names = ["a", "b", "c", "d@1", "e@1", f"u{chance.random()}", f"v{chance.random()}@2"]
            keys = chance.choices(names, k=chance.randint(1, 12))
            sizes = [chance.choice([0, 1, 1000, 100_000, 600_000]) for _ in keys]
            offsets = [chance.randint(0, STAGED_BYTES - nbytes) for nbytes in sizes]
            node.insert(client, keys, sizes, offsets, chance.choice([0.0, 0.02]))
            if chance.random() < 0.5:
                for _ in range(chance.randint(0, 6)):
                    await asyncio.sleep(chance.choice([0, 0.0005]))
            else:
                assert len(await client.results()) == len(keys)
            node.inserts.unstage(client.connection)
            for address in list(node.arena.addresses()):
                if chance.random() < 0.5 and "@" in address[1]:
                    lease = node.handoffs.take(address, "a taker")
                    if lease is not None:
                        node.handoffs.acknowledge(lease.token)

    async def test() -> None:
        node = Node(4 << 20, chance)

        def fill_from_area(target: memoryview, source: int, offset: int, pool: Executor) -> int:
            assert not target or source in descriptors_of(clients) - own
            return fill(target, source, offset, pool)

        monkeypatch.setattr(insert, "fill", fill_from_area)
        await asyncio.gather(*(act(node, number) for number in range(4)))
        async with asyncio.timeout(30.0):
            while node.inserts._inserting:
                await asyncio.sleep(0.002)
        node.at_rest()
        async with asyncio.timeout(30.0):  # threads close them
            while descriptors_of(clients) - own:
                await asyncio.sleep(0.002)
        node.inserts.close()

    asyncio.run(test())
    for client in clients:
        client.staging.close()


def test_others_have_their_turn_between_the_parts_of_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_by_one(monkeypatch)
    parts = 20

    async def test() -> None:
        node, client, items = Node(1 << 20), Client(1, STAGED_BYTES), [0]
        node.insert(client, [f"k{n}" for n in range(parts)], [100] * parts, [0] * parts, 0.0)
        while not client.sent:
            items.append(node.arena.gauges().items)
            await asyncio.sleep(0)
        assert [one["outcome"] for one in await client.results()] == ["stored"] * parts
        assert all(after - before <= 1 for before, after in pairwise(items))
        node.insert(client, [f"m{n}" for n in range(parts)], [100] * parts, [0] * parts, 0.0)
        await asyncio.sleep(0)
        node.inserts.unstage(client.connection)  # its connection has ended
        while node.inserts._inserting:
            await asyncio.sleep(0)
        assert parts < node.arena.gauges().items < parts + 5
        node.at_rest()
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


def test_others_have_their_turn_between_the_hand_offs_of_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To find that there is no room for one may take 40 ms."""
    one_by_one(monkeypatch)
    parts = 20

    async def test() -> None:
        node, client, tried = Node(1 << 20), Client(1, STAGED_BYTES), [0]
        reserve = node.arena.reserve_handoff

        def counted(*what: Any, **how: Any) -> Item:
            tried[-1] += 1
            return reserve(*what, **how)

        node.insert(client, ["full@r"], [500_000], [0], 0.0)
        await client.results()
        client.sent.clear()
        node.arena.reserve_handoff = counted  # type: ignore[method-assign]
        keys = [f"{n}@r" for n in range(parts)]
        node.insert(client, keys, [100_000] * parts, [0] * parts, 0.05)
        while not client.sent:
            tried.append(0)
            await asyncio.sleep(0)
        assert ["BufferFull"] * parts == [one["error"] for one in await client.results()]
        assert sum(tried) == parts
        assert max(tried) == 1
        taken = node.handoffs.take((NAMESPACE, "full@r"), "a taker")
        assert taken is not None
        node.handoffs.acknowledge(taken.token)
        node.at_rest()
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


@pytest.mark.parametrize("key", ["large", "large@r"])
def test_an_insert_waits_until_what_is_in_its_way_is_evicted(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "EVICTED_MAX", 8)
    count, nbytes = 64, 1 << 14

    async def test() -> None:
        node, client = Node(count * nbytes), Client(1, STAGED_BYTES)
        for n in range(count):
            node.insert(client, [f"k{n}"], [nbytes], [0], 0.0)
            assert [one["outcome"] for one in await client.results()] == ["stored"]
            client.sent.clear()
        node.insert(client, [key], [20 * nbytes], [0], 0.0)
        assert [one["outcome"] for one in await client.results()] == ["stored"]
        assert node.arena.gauges().items == count - 20 + 1
        node.at_rest()
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


def test_an_insert_of_a_key_that_a_long_transfer_writes_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(insert, "WRITING_SECONDS_MAX", 0.1)

    async def test() -> None:
        node, client = Node(1 << 20), Client(1, STAGED_BYTES)
        header = TensorHeader("uint8", (100,), 100)
        fetched = node.arena.reserve(
            (NAMESPACE, "slow"), header, origin="another", ttl_seconds=None
        )
        assert fetched is not None
        node.insert(client, ["slow", "other"], [100, 100], [0, 100], 0.0)
        async with asyncio.timeout(10.0):
            refused, stored = await client.results()
        assert "being written" in refused["message"]
        assert stored["outcome"] == InsertOutcome.STORED.value
        node.arena.abandon(fetched)
        node.at_rest()
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


def test_all_inserts_together_have_the_time_of_one_in_each_turn_of_the_loop() -> None:
    """Also those for which room is being made."""
    count, parts, vain = 8, 3, 2

    async def test() -> None:
        node, clients, tried = Node(1 << 20), [Client(n, 1000) for n in range(count)], [0]
        reserve, attempts = node.arena.reserve, Counter[Any]()

        def search(address: Any, *what: Any, **how: Any) -> Item | None:
            tried[-1] += 1
            attempts[address] += 1
            time.sleep(TURN_SECONDS)
            if attempts[address] <= vain:
                raise arena.Evicting("in parts")
            return reserve(address, *what, **how)

        node.arena.reserve = search  # type: ignore[method-assign]
        for number, client in enumerate(clients):
            keys = [f"{number}-{n}" for n in range(parts)]
            node.insert(client, keys, [100] * parts, [0] * parts, 0.0)
        while not all(client.sent for client in clients):
            tried.append(0)
            await asyncio.sleep(0)
        for client in clients:
            assert [one["outcome"] for one in await client.results()] == ["stored"] * parts
            client.staging.close()
        assert sum(tried) == count * parts * (vain + 1)
        assert max(tried) <= 2, "one, and one of the turn before"
        node.at_rest()
        node.inserts.close()
        node.arena.close()

    asyncio.run(test())


def refuse(_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("key", ["large", "large@r"])
def test_an_insert_needs_no_new_thread(key: str) -> None:
    """The system may refuse it, and the key and its memory must not stay reserved then."""

    async def test() -> None:
        node, client = Node(16 << 20), Client(1, STAGED_BYTES)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            node.insert(client, [key], [STAGED_BYTES], [0], 0.0)
            async with asyncio.timeout(10.0):
                (stored,) = await client.results()
        assert stored["outcome"] == "stored"
        node.at_rest()
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


@pytest.mark.parametrize("granted", [0, 1])
def test_without_threads_for_its_copies_a_node_does_not_start(granted: int) -> None:
    start, names = threading.Thread.start, list[str]()

    def some(thread: threading.Thread) -> None:
        if len(names) >= granted:
            refuse(thread)
        names.append(thread.name)
        start(thread)

    async def test() -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", some)
            with pytest.raises(RuntimeError, match="new thread"):
                Node(1 << 20)
        async with asyncio.timeout(10.0):
            while {thread.name for thread in threading.enumerate()} & set(names):
                await asyncio.sleep(0.001)

    asyncio.run(test())


@pytest.mark.parametrize("nbytes", [100, STAGED_BYTES])
@pytest.mark.parametrize("key", ["k", "k@r"])
def test_a_copy_that_fails_leaves_nothing_and_is_answered(
    key: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        node, client, reported = Node(16 << 20), Client(1, STAGED_BYTES), []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        is_broken = True

        def fill_or_fail(target: memoryview, source: int, offset: int, pool: Executor) -> int:
            if is_broken:
                raise MemoryError
            return fill(target, source, offset, pool)

        monkeypatch.setattr(insert, "fill", fill_or_fail)
        for is_broken in (True, False):
            node.insert(client, [key], [nbytes], [0], 0.0)
            async with asyncio.timeout(10.0):
                (result,) = await client.results()
            assert ("error" in result) == is_broken
            assert (node.arena.gauges().used_bytes == 0) == is_broken
            node.at_rest()
            client.sent.clear()
        gc.collect()  # what asyncio reports of a task, it reports at its end
        assert isinstance(reported[0]["exception"], MemoryError)
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())


@pytest.mark.parametrize("key", ["k", "k@r"])
def test_memory_is_not_released_while_a_thread_writes_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        node, client = Node(16 << 20), Client(1, STAGED_BYTES)
        writes, goes_on = threading.Event(), threading.Event()

        def wait(target: memoryview, source: int, offset: int, pool: Executor) -> int:
            writes.set()
            goes_on.wait(10.0)
            return fill(target, source, offset, pool)

        monkeypatch.setattr(insert, "fill", wait)
        node.insert(client, [key], [STAGED_BYTES], [0], 0.0)
        while not writes.is_set():
            await asyncio.sleep(0.001)
        (inserting,) = node.inserts._inserting.values()
        inserting.tasks.cancel()  # the node ends
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert node.arena.gauges().used_bytes
        goes_on.set()
        async with asyncio.timeout(10.0):
            await client.results()
        assert not node.arena.gauges().used_bytes
        node.at_rest()
        node.inserts.close()
        node.arena.close()
        client.staging.close()

    asyncio.run(test())
