"""Large items from a node that is far: in parts, over several connections; plain and by TLS."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

import peer_servers
from lookup_buffer.errors import MissReason, PipeBroken
from lookup_buffer.node import holders, peers, receive, transfer
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.holders import LINKS_MAX, PARTS_ANSWER_SECONDS, Holder
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import Located
from lookup_buffer.node.storage import Breaker
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher, Wanted
from lookup_buffer.protocol.auth import VERSION_OF_PARTS
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket
from node_certificates import Files
from patience import scaled
from peer_servers import MIB, NAMESPACE, TOKEN, Bench
from store import Location, Record

NBYTES = 30 * MIB + 7
Part = Callable[[FramedSocket, memoryview], Any]


class Far:
    """A node that finds its answers slow, and the node that it reads from, in one process."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.arena = Arena(64 * MIB, lambda _address, _reason: None)
        self.fetcher = Fetcher(bench.loop, self.arena, Counters(), bench.credentials)
        self.parts_of: Counter[FramedSocket] = Counter()
        """How many came, or were to come, on each connection; in the order of their first ones."""
        self._part = self.fetcher._receiver.part
        self.fetcher._receiver.part = self._count  # type: ignore[method-assign]
        self.before: Part = _nothing

    async def _count(self, link: FramedSocket, memory: memoryview) -> None:
        self.parts_of[link] += 1
        await self.before(link, memory)
        await self._part(link, memory)

    @property
    def links(self) -> list[FramedSocket]:
        return list(self.parts_of)

    def wanted(
        self, key: str, generation: int, nbytes: int
    ) -> tuple[Wanted, "asyncio.Future[Fetched]"]:
        source = (Location(self.bench.location.node, "boot", generation, 1), self.bench.endpoint)
        record = Record(NAMESPACE, key, "uint8", (nbytes,), nbytes, "tensor", 1.0)
        fetched: asyncio.Future[Fetched] = self.bench.loop.create_future()
        located = Located(record, (source,))
        return Wanted((NAMESPACE, key), located, fetched.set_result), fetched

    def start(self, key: str, generation: int, nbytes: int) -> "asyncio.Future[Fetched]":
        one, fetched = self.wanted(key, generation, nbytes)
        self.fetcher.fetch([one])
        return fetched

    async def fetch(self, key: str, generation: int, nbytes: int) -> Fetched:
        return await asyncio.wait_for(self.start(key, generation, nbytes), scaled(20.0))

    async def meet(self) -> None:
        """The first connection tells the version. On a busy machine it may be made too late."""
        async with asyncio.timeout(scaled(30.0)):
            while (await self.fetch("absent", 1, 10)).reason != MissReason.STALE:
                await asyncio.sleep(0.1)

    def close(self) -> None:
        self.fetcher.close()


async def _nothing(*_: object) -> None: ...


Runs = Callable[[Callable[[Far], Any]], None]


@pytest.fixture(params=["tcp", "tls"])
def far(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """far(test): run `test` with a `Far` that has fetched something before; then all is free."""
    monkeypatch.setattr(holders, "PARTS_ANSWER_SECONDS", 0.0)
    tls = None
    if request.param == "tls":
        tls = Files(tmp_path_factory.mktemp("tls") / "files").tls("node-b")

    async def run(test: Callable[[Far], Any], bench: Bench) -> None:
        one = Far(bench)
        try:
            await one.meet()
            await test(one)
            gauges = one.arena.gauges()
            assert (gauges.reserved_bytes, gauges.pins) == (0, 0)
            await bench.until(lambda: bench.pins() == 0)
            await bench.until(lambda: not one.fetcher._fetches)
        finally:
            one.close()
            await asyncio.sleep(0)
            one.arena.close()

    return lambda test: peer_servers.on_a_loop(partial(run, test), Credentials(TOKEN, tls))


def inserted(bench: Bench, key: str = "large", nbytes: int = NBYTES) -> tuple[str, int, int]:
    """An item of the holder, each byte of which says where it is: key, generation, bytes."""
    header = TensorHeader.for_tensor("uint8", (nbytes,))
    item = bench.arena.reserve((NAMESPACE, key), header, origin="local", ttl_seconds=None)
    assert item is not None
    memory = bench.arena.bytes_of(item)
    memory[:] = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    held = bench.arena.commit(item, xxh3_64_intdigest(memory), owner=1)
    bench.arena.release([held.ticket], 1)
    return key, item.generation, nbytes


def test_a_large_item_comes_over_several_connections(far: Runs) -> None:
    async def test(one: Far) -> None:
        for _ in range(2):
            fetched = await one.fetch(*inserted(one.bench))
            assert fetched.held is not None
            theirs = one.bench.arena.hold((NAMESPACE, "large"), 1)
            assert theirs is not None
            assert one.arena.bytes_of(fetched.held.item) == one.bench.arena.bytes_of(theirs.item)
            one.bench.arena.release([theirs.ticket], 1)
            one.bench.arena.remove(theirs.item, "test")
            one.arena.release([fetched.held.ticket], FETCH_OWNER)
            one.arena.remove(fetched.held.item, "test")
        assert 1 < len(one.links) < LINKS_MAX, "one is left to others"
        assert len(one.bench.server._readers) == LINKS_MAX - 1, "they are used again"

    far(test)


def test_what_another_connection_loses_comes_on_the_first(far: Runs) -> None:
    async def test(one: Far) -> None:
        async def lose(link: FramedSocket, _: memoryview) -> None:
            if link is not one.links[0]:
                raise PipeBroken("it was cut")

        one.before = lose
        fetched = await one.fetch(*inserted(one.bench))
        assert fetched.held is not None
        assert len(one.links) > 1
        one.arena.release([fetched.held.ticket], FETCH_OWNER)

    far(test)


def test_without_the_first_connection_it_has_failed(far: Runs) -> None:
    async def test(one: Far) -> None:
        async def lose(link: FramedSocket, _: memoryview) -> None:
            if link is one.links[0] and one.parts_of[link] > 1:
                raise PipeBroken("it was cut")

        one.before = lose
        fetched = await one.fetch(*inserted(one.bench))
        assert (fetched.held is None, fetched.reason) == (True, MissReason.PEER_FAILED)

    far(test)


def test_a_kept_connection_that_has_died_is_replaced(far: Runs) -> None:
    async def test(one: Far) -> None:
        async def lose(link: FramedSocket, _: memoryview) -> None:
            if link is one.links[0]:
                raise PipeBroken("it had died silently")

        one.before = lose
        fetched = await one.fetch(*inserted(one.bench))
        assert fetched.held is not None
        one.arena.release([fetched.held.ticket], FETCH_OWNER)

    far(test)


def test_an_item_that_goes_in_the_middle_is_stale(far: Runs) -> None:
    async def test(one: Far) -> None:
        large = inserted(one.bench)

        async def drop(*_: object) -> None:
            if one.parts_of.total() == 4:
                held = one.bench.arena.hold((NAMESPACE, "large"), 1)
                assert held is not None
                one.bench.arena.remove(held.item, "test")
                one.bench.arena.release([held.ticket], 1)

        one.before = drop
        assert await one.fetch(*large) == Fetched(None, MissReason.STALE)

    far(test)


def test_the_checksum_covers_all_parts(far: Runs) -> None:
    async def test(one: Far) -> None:
        key, generation, nbytes = inserted(one.bench)
        held = one.bench.arena.hold((NAMESPACE, key), 1)
        assert held is not None
        memory = one.bench.arena.bytes_of(held.item)
        memory[nbytes - 1] ^= 1
        one.bench.arena.release([held.ticket], 1)
        assert await one.fetch(key, generation, nbytes) == Fetched(None, MissReason.CHECKSUM)

    far(test)


@pytest.mark.parametrize("error", [-1, 1, 1 << 39])
def test_an_item_whose_record_has_another_size_comes_whole(far: Runs, error: int) -> None:
    """Redis is a hint: what its holder says decides, as for a small item."""

    async def test(one: Far) -> None:
        key, generation, nbytes = inserted(one.bench)
        fetched = await one.fetch(key, generation, nbytes + error)
        assert fetched.held is not None
        held = one.bench.arena.hold((NAMESPACE, key), 1)
        assert held is not None
        assert one.arena.bytes_of(fetched.held.item) == one.bench.arena.bytes_of(held.item)
        one.bench.arena.release([held.ticket], 1)
        one.arena.release([fetched.held.ticket], FETCH_OWNER)

    far(test)


def test_connections_that_do_not_come_about_are_not_waited_for(
    far: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(one: Far) -> None:
        monkeypatch.setattr(transfer, "dial", lambda *_: asyncio.sleep(3600.0))
        fetched = await one.fetch(*inserted(one.bench))
        assert fetched.held is not None
        assert len(one.links) == 1
        one.arena.release([fetched.held.ticket], FETCH_OWNER)

    far(test)


def test_further_connections_give_way_to_what_waits(far: Runs) -> None:
    async def test(one: Far) -> None:
        async def slow(*_: object) -> None:
            await asyncio.sleep(0.2)

        one.before = slow
        large = one.start(*inserted(one.bench))
        await one.bench.until(lambda: len(one.links) == LINKS_MAX - 1)
        (holder,) = one.fetcher._holders.values()
        holder.users += 1
        assert holder.places.ask().done()  # the last one is in use
        assert (await one.fetch("absent", 1, 10)).reason == MissReason.STALE
        holder.places.release()
        assert not large.done()
        holder.users -= 1
        fetched = await large
        assert fetched.held is not None
        one.arena.release([fetched.held.ticket], FETCH_OWNER)

    far(test)


def test_a_holder_that_stops_for_a_moment_in_the_middle_has_not_failed(
    far: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "PEER_ANSWER_SECONDS", 1.0)
    answer = peers.Reader._answer
    answers = 0

    async def stop(reader: peers.Reader, lists: Any) -> bool:
        nonlocal answers
        answers += 1
        if answers > 12:
            await asyncio.sleep(2.0 if answers == 13 else 0.0)
        return await answer(reader, lists)

    async def test(one: Far) -> None:
        monkeypatch.setattr(peers.Reader, "_answer", stop)
        fetched = await one.fetch(*inserted(one.bench))
        assert fetched.held is not None
        one.arena.release([fetched.held.ticket], FETCH_OWNER)

    far(test)


def test_nor_has_one_that_stops_in_the_middle_of_a_batch(
    far: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "PEER_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(peers, "TOGETHER_BYTES", 1)  # each is sent by itself
    answer = peers.Reader._answer
    answers = 0

    async def stop(reader: peers.Reader, lists: Any) -> bool:
        nonlocal answers
        answers += 1
        await asyncio.sleep(2.0 if answers == 2 else 0.0)
        return await answer(reader, lists)

    async def test(one: Far) -> None:
        batch = [one.wanted(*inserted(one.bench, f"k{n}", MIB)) for n in range(3)]
        monkeypatch.setattr(peers.Reader, "_answer", stop)
        one.fetcher.fetch([wanted for wanted, _ in batch])
        for _, coming in batch:
            fetched = await asyncio.wait_for(coming, scaled(20.0))
            assert fetched.held is not None, fetched.reason
            one.arena.release([fetched.held.ticket], FETCH_OWNER)
        assert answers == 4, "each was asked for once, and then for the end"

    far(test)


def test_a_node_that_stops_waits_for_no_part(far: Runs) -> None:
    async def test(one: Far) -> None:
        begun = asyncio.Event()

        async def hang(*_: object) -> None:
            begun.set()
            await asyncio.sleep(scaled(20.0))

        one.before = hang
        one.start(*inserted(one.bench))
        await asyncio.wait_for(begun.wait(), scaled(5.0))
        one.fetcher.close()
        await one.bench.until(lambda: not one.fetcher._fetches)

    far(test)


@pytest.mark.parametrize(
    ("nbytes", "answer", "version", "users", "streams"),
    [
        (64 * MIB, PARTS_ANSWER_SECONDS, VERSION_OF_PARTS, 1, LINKS_MAX - 1),
        (64 * MIB, PARTS_ANSWER_SECONDS, VERSION_OF_PARTS, LINKS_MAX - 1, 1),
        (64 * MIB, PARTS_ANSWER_SECONDS, VERSION_OF_PARTS, 9, 1),
        (64 * MIB, PARTS_ANSWER_SECONDS / 2, VERSION_OF_PARTS, 1, 1),
        (64 * MIB, PARTS_ANSWER_SECONDS, VERSION_OF_PARTS - 1, 1, 1),
        (4 * MIB, PARTS_ANSWER_SECONDS, VERSION_OF_PARTS, 1, 1),
    ],
)
def test_only_what_is_large_and_far_comes_in_parts(
    nbytes: int, answer: float, version: int, users: int, streams: int
) -> None:
    now = 5.0
    holder = Holder(Breaker(lambda: now), Breaker(lambda: now), now, users=users, version=version)
    holder.pace.answered(answer, now)
    assert holder.streams_for(nbytes, now) == streams


def test_a_part_that_is_given_up_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a holder lies, those on its other connections are. asyncio wrote each to the log."""

    async def test() -> None:
        loop, reported, ends = asyncio.get_running_loop(), list[Any](), threading.Event()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        receiver = receive.Receiver(loop)

        def move() -> None:
            ends.wait()
            raise PipeBroken("it was aborted")

        moving = loop.create_task(receiver._on_thread(move, ends.set))
        await asyncio.sleep(0.1)
        moving.cancel()
        await asyncio.wait([moving])
        assert moving.cancelled()
        del moving
        await asyncio.sleep(0.3)  # a timer keeps the result, and the pool
        receiver.tick()
        gc.collect()
        receiver.close()
        assert not reported

    monkeypatch.setattr(receive, "PEER_PROGRESS_SECONDS", 0.2)
    asyncio.run(test())
