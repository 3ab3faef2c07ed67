"""Batches of fetches from peers that misbehave: each item is settled once, nothing is leaked."""

import asyncio
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from lookup_buffer.errors import MissReason, PipeBroken, PipeTimeout
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node import receive, transfer
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.holders import (
    BATCH_BYTES,
    LINKS_MAX,
    PACE_SECONDS,
    PAUSE_SECONDS_MIN,
    TIMEOUTS_MAX,
    Holder,
    soonest,
)
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import Located, Waiting
from lookup_buffer.node.read import Reads
from lookup_buffer.node.receive import AT_ONCE_BYTES
from lookup_buffer.node.storage import Breaker
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher, Wanted
from lookup_buffer.node.turns import Places
from lookup_buffer.protocol.auth import PROTOCOL_VERSION
from lookup_buffer.protocol.header import PayloadHeader, TensorHeader
from lookup_buffer.protocol.tls import Trust
from store import Location, Record

NAMESPACE = "f" * 64
NBYTES = 100
FATES = ("stale", "broken", "timeout", "garbled", "another", "flipped", "cut", "bug", "huge")
Fate = Callable[[str], str]


def bytes_of(key: str) -> bytes:
    return key.encode().ljust(NBYTES, b".")


class Link:
    """A connection to a holder, which answers each key as `fate` says."""

    closed = False

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.asked: list[Any] = []
        self.ended = False

    def send_nowait(self, header: Any) -> None:
        if self.ended:
            raise PipeBroken("the peer has closed it")
        self.asked = list(header["items"])

    def peek(self) -> bool:
        return True

    def recv_available(self, buffer: memoryview, hasher: Any) -> int:
        if random.random() < 0.5:
            return 0  # a thread receives it
        self.recv_into(buffer, timeout=0.0, hasher=hasher)
        return len(buffer)

    def recv_header(self, timeout: float) -> tuple[Any, int]:
        namespace, self.key, _, generation = self.asked.pop(0)
        self.now = self.fate(self.key)
        errors = {"broken": PipeBroken("x"), "timeout": PipeTimeout("x"), "bug": RuntimeError("x")}
        if self.now in errors:
            raise errors[self.now]
        if self.now == "stale":
            return {"status": "stale"}, 0
        if self.now == "garbled":
            return {"status": "ok", "payload": {}}, NBYTES
        nbytes = 1 << 30 if self.now == "huge" else NBYTES
        header = PayloadHeader(
            namespace,
            "another" if self.now == "another" else self.key,
            generation,
            xxh3_64_intdigest(bytes_of(self.key)),
            None,
            TensorHeader("uint8", (nbytes,), nbytes),
        )
        return {"status": "ok", "payload": header.to_fields()}, nbytes

    def recv_into(self, buffer: memoryview, *, timeout: float, hasher: Any) -> None:
        if self.now == "cut":
            raise PipeBroken("in the payload")
        data = bytes_of(self.key)
        buffer[:] = b"!" + data[1:] if self.now == "flipped" else data
        hasher.update(buffer)

    def abort(self) -> None:
        self.closed = True

    close = abort

    def wait_readable(self, timeout: float) -> bool:
        return False


class Dialled:
    version = PROTOCOL_VERSION
    trust = Trust()

    def __init__(self, link: Link) -> None:
        self._link = link

    def framed(self) -> Link:
        return self._link


def wanted(
    key: str, done: Callable[[Fetched], None], holders: int = 1, nbytes: int = NBYTES
) -> Wanted:
    """`nbytes`: as the record says."""
    address = (NAMESPACE, key)
    record = Record(*address, "uint8", (nbytes,), nbytes, "tensor", 1.0)
    sources = tuple((Location(f"n{n}", "b", 1, 1), f"tcp://h{n}:1") for n in range(holders))
    return Wanted(address, Located(record, sources), done)


class Fetching:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, fate: Fate) -> None:
        self.links: list[Link] = []
        self.arena = Arena(1 << 20, lambda _address, _reason: None)
        self.fetcher = Fetcher(asyncio.get_running_loop(), self.arena, Counters(), Credentials())
        self.settled: dict[str, Fetched] = {}

        async def dial(*_: Any) -> Dialled:
            await asyncio.sleep(0)
            self.links.append(Link(fate))
            return Dialled(self.links[-1])

        monkeypatch.setattr(transfer, "dial", dial)

    def done(self, key: str, fetched: Fetched) -> None:
        assert key not in self.settled
        self.settled[key] = fetched
        if fetched.held is not None:
            assert bytes(self.arena.bytes_of(fetched.held.item)) == bytes_of(key)
            self.arena.release([fetched.held.ticket], FETCH_OWNER)

    async def fetch(self, holders: dict[str, int]) -> list[str]:
        """The keys that were not fetched."""
        self.settled.clear()
        reserved_bytes = self.arena.gauges().reserved_bytes
        self.fetcher.fetch(
            [
                wanted(key, lambda fetched, key=key: self.done(key, fetched), count)  # type: ignore[misc]
                for key, count in holders.items()
            ]
        )
        async with asyncio.timeout(60.0):
            while len(self.settled) < len(holders):
                await asyncio.sleep(0.005)
        gauges = self.arena.gauges()
        assert (gauges.pins, gauges.reserved_bytes) == (0, reserved_bytes)
        return [key for key, fetched in self.settled.items() if fetched.held is None]


@pytest.mark.parametrize("seed", range(6))
def test_each_item_is_settled_once_whatever_its_holders_do(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    fates: dict[tuple[str, bool], str] = {}

    def fate(key: str) -> str:
        now = (key, chance.random() < 0.5)
        return fates.setdefault(now, chance.choice(("ok",) * 10 + FATES))

    monkeypatch.setattr(transfer, "TIMEOUTS_MAX", 1000)  # else most others fail with two of them

    async def test() -> None:
        fetching = Fetching(monkeypatch, fate)
        failed = await fetching.fetch({f"k{n}": chance.randint(1, 3) for n in range(200)})
        assert 0 < len(failed) < 150
        fetching.fetcher.close()

    asyncio.run(test())


@pytest.mark.parametrize("fate", ["garbled", "huge", "flipped", "cut"])
@pytest.mark.parametrize("bad", [0, 5, 9])
def test_a_bad_item_fails_only_itself(monkeypatch: pytest.MonkeyPatch, fate: str, bad: int) -> None:
    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda key: fate if key == f"k{bad}" else "ok")
        failed = await fetching.fetch({f"k{n}": 1 for n in range(10)})
        delivers_nothing = (fate, bad) == ("cut", 0)
        assert failed == [f"k{n}" for n in range(10) if n == bad or delivers_nothing]
        fetching.fetcher.close()

    asyncio.run(test())


def test_a_hand_off_is_not_behind_shared_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, handoff = wanted("s", print), wanted("h", print)
    handoff.loan = True

    async def test() -> None:
        fetcher = Fetching(monkeypatch, lambda _: "ok").fetcher
        assert fetcher._choose(shared) is not fetcher._choose(handoff)
        fetcher.close()

    asyncio.run(test())


def test_a_kept_connection_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        assert await fetching.fetch({"a": 1}) == []
        fetching.links[0].ended = True
        assert await fetching.fetch({f"k{n}": 1 for n in range(10)}) == []
        assert len(fetching.links) == 2
        fetching.fetcher.close()

    asyncio.run(test())


def test_a_silent_holder_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda key: "timeout" if key == "silent" else "ok")
        for asked in range(1, TIMEOUTS_MAX + 1):
            assert await fetching.fetch({"silent": 1}) == ["silent"]
            assert len(fetching.links) == asked
            fetching.fetcher.tick()
        assert await fetching.fetch({"k": 1}) == ["k"]
        assert len(fetching.links) == TIMEOUTS_MAX, "it was not asked"
        assert await fetching.fetch({"k": 2}) == [], "the other holder delivers"
        await asyncio.sleep(PAUSE_SECONDS_MIN)
        assert await fetching.fetch({"k2": 1}) == []
        fetching.fetcher.close()

    asyncio.run(test())


def test_a_holder_that_is_not_asked_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("PAUSE_SECONDS_MIN", "PAUSE_SECONDS_MAX"):
        monkeypatch.setattr(transfer, bound, 600.0)

    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda key: "timeout" if key == "silent" else "ok")
        for _ in range(TIMEOUTS_MAX):
            assert await fetching.fetch({"silent": 1}) == ["silent"]
        (silent,) = fetching.fetcher._holders.values()
        assert silent.doubts.failures == TIMEOUTS_MAX
        for _ in range(3):
            assert await fetching.fetch({"k": 1}) == ["k"]
        assert len(fetching.links) == TIMEOUTS_MAX, "it was not asked"
        assert silent.doubts.failures == TIMEOUTS_MAX
        fetching.fetcher.close()

    asyncio.run(test())


async def crowded(fetching: Fetching, one: Wanted) -> Holder:
    """The first holder of `one`, from which as many batches are transferred as may be."""
    crowd = fetching.fetcher._holder_of(one, one.located.sources[0])
    for _ in range(LINKS_MAX):
        crowd.places.ask()
    return crowd


async def fetched(fetching: Fetching, one: Wanted, came: "asyncio.Future[Fetched]") -> str:
    """The reason of the miss."""
    fetching.fetcher.fetch([one])
    async with asyncio.timeout(20.0):
        result = await came
    if result.held is not None:
        fetching.arena.release([result.held.ticket], FETCH_OWNER)
    return result.reason


@pytest.mark.parametrize("bounded_by", ["who asks", "the default"])
def test_the_wait_for_a_turn_is_bounded(monkeypatch: pytest.MonkeyPatch, bounded_by: str) -> None:
    """What waits is told, as often as that changes; the holder has not failed."""
    if bounded_by == "the default":
        monkeypatch.setattr(transfer, "TURN_SECONDS", 0.05)

    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        waits: list[bool] = []

        def want(key: str, seconds: float) -> tuple[Wanted, "asyncio.Future[Fetched]"]:
            came: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
            one = wanted(key, came.set_result)
            one.waits, one.until = waits.append, fetching.fetcher.loop.time() + seconds
            return one, came

        one, came = want("k", 600.0 if bounded_by == "the default" else 0.05)
        crowd = await crowded(fetching, one)
        assert await fetched(fetching, one, came) == "busy"
        assert (waits, fetching.links) == ([True], [])
        assert (crowd.doubts.failures, crowd.breaker.failures, crowd.users) == (0, 0, 0)
        crowd.places.release()
        assert await fetched(fetching, *want("in time", -1.0)) == ""
        assert waits == [True, False]
        fetching.fetcher.close()

    asyncio.run(test())


def test_who_gets_no_turn_is_served_by_another_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TURN_SECONDS", 0.05)

    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        came: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        one = wanted("k", came.set_result, 2)
        await crowded(fetching, one)
        _, other = (fetching.fetcher._holder_of(one, source) for source in one.located.sources)
        other.doubts.failed()  # so it is asked last
        assert await fetched(fetching, one, came) == ""
        assert [location.node for location, _ in one.tried] == ["n0", "n1"]
        fetching.fetcher.close()

    asyncio.run(test())


async def turns() -> None:
    """What waits for nothing comes to its end."""
    for _ in range(20):
        await asyncio.sleep(0)


class Knows:
    """A locator that knows where everything is: on one holder, each item for a batch of its own."""

    def cached(self, address: QualifiedKey) -> Located:
        return wanted(address[1], print, nbytes=BATCH_BYTES).located

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize("key", ["k", "k@r"])
def test_readers_that_leave_deny_no_turn_to_others(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A client may send thousands of requests, end its connection, and repeat that."""

    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        loop, fetcher, locator = asyncio.get_running_loop(), fetching.fetcher, Knows()
        parts: Any = locator
        waiting = Waiting(loop, parts)
        reads = Reads(loop, fetching.arena, parts, fetcher, waiting, Counters(), "boot")
        held: list[Fetched] = []

        def hold(fetched: Fetched) -> bool | None:
            held.append(fetched)
            return fetched.held is not None or None

        async def bring(key: str) -> object:
            return await reads.bring((NAMESPACE, key), 0.0, hold)

        some = wanted("some@r", print)
        some.loan = key == "k@r"
        crowd = await crowded(fetching, some)
        async with asyncio.timeout(60.0):
            for _ in range(3):
                leaving = [asyncio.ensure_future(bring(key)) for _ in range(100)]
                await turns()
                assert crowd.users == (100 if some.loan else 1)
                for reader in leaving:
                    reader.cancel()
                await asyncio.wait(leaving)
                await turns()
                assert (crowd.users, len(crowd.places._waiting)) == (0, 0)
                assert not fetcher._fetches
                assert not reads._fetches
            stays = asyncio.ensure_future(bring("stays" + key))
            await turns()
            crowd.places.release()
            assert await stays is True
        assert (len(held), len(fetching.links)) == (1, 1), "nothing else was fetched"
        gauges = fetching.arena.gauges()
        assert (gauges.pins, gauges.reserved_bytes) == (0, 0)
        fetcher.close()

    asyncio.run(test())


def test_what_is_withdrawn_leaves_its_batch_and_the_last_one_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        fetcher = fetching.fetcher
        all_wanted = {key: wanted(key, partial(fetching.done, key)) for key in "abcd"}
        crowd = await crowded(fetching, all_wanted["a"])
        fetcher.fetch([all_wanted[key] for key in "ab"])
        fetcher.fetch([all_wanted[key] for key in "cd"])
        assert all(fetcher.withdraw(all_wanted[key]) for key in "ab"), "before its task begins"
        await turns()
        assert (crowd.users, len(crowd.places._waiting)) == (1, 1)
        assert fetcher.withdraw(all_wanted["c"])
        crowd.places.release()
        assert not fetcher.withdraw(all_wanted["d"]), "it has its turn"
        async with asyncio.timeout(60.0):
            while "d" not in fetching.settled:
                await asyncio.sleep(0.005)
        assert not fetcher.withdraw(all_wanted["d"]), "it has come"
        assert list(fetching.settled) == ["d"]
        await turns()
        assert crowd.users == 0
        assert crowd.places.ask().done(), "its place is free again"
        assert crowd.places.locked()
        fetcher.close()

    asyncio.run(test())


def test_a_place_goes_to_the_next_one_that_has_not_left() -> None:
    async def test() -> None:
        places = Places(1)
        places.ask()
        first, second = places.ask(), places.ask()
        first.cancel()
        places.release()
        assert second.done()
        assert places.locked()
        places.release()
        await asyncio.sleep(0)
        assert not places.locked()
        assert not places._waiting

    asyncio.run(test())


def holder(answer_seconds: float = 0.0, bytes_per_second: float = 0.0, users: int = 0) -> Holder:
    """One that was measured once, or never."""
    breaker, doubts = (Breaker(lambda: 0.0, 1, 1.0, 1.0) for _ in range(2))
    made = Holder(breaker, doubts, used_at=0.0, users=users)
    if answer_seconds:
        measure(made, answer_seconds, bytes_per_second, 0.0)
    return made


def measure(one: Holder, answer_seconds: float, bytes_per_second: float, now: float) -> None:
    one.pace.answered(answer_seconds, now)
    if bytes_per_second:
        one.pace.received(2 * AT_ONCE_BYTES, 2 * AT_ONCE_BYTES / bytes_per_second, now)


def chosen(nbytes: int, *holders: Holder, now: float = 0.0) -> set[int]:
    return {soonest(holders, nbytes, now) for _ in range(100)}


def test_a_fast_holder_is_asked_for_much_and_a_near_one_for_little() -> None:
    far, near = holder(0.050, 1e9), holder(0.001, 1e6)
    assert chosen(100 << 20, far, near) == {0}
    assert chosen(1000, far, near) == {1}


def test_holders_that_are_equally_fast_are_asked_by_turns() -> None:
    three = holder(0.001, 1e9), holder(0.004, 0.7e9), holder(0.002, 1e8)
    assert chosen(50 << 20, *three) == {0, 1}
    busy = holder(0.001, 1e9, users=1)
    assert chosen(50 << 20, busy, three[1]) == {1}


def test_a_holder_that_was_never_asked_is_asked_before_slow_ones() -> None:
    assert chosen(50 << 20, holder(0.001, 1e8), holder()) == {1}


def test_who_waits_for_a_fast_holder_may_be_served_by_a_slower_one() -> None:
    fast, slow = holder(0.001, 1e9, users=4 * LINKS_MAX), holder(0.001, 0.3e9)
    assert chosen(50 << 20, fast, slow) == {1}


BATCH = 64
UNKNOWN = 0.0


@pytest.mark.parametrize(
    ("bytes_per_second", "busy", "least", "most"),
    [
        pytest.param([1e9, 1e9, 1e9], 0, [21, 21, 21], [22, 22, 22], id="equal"),
        pytest.param([1e9, 0.8e9, 0.6e9], 0, [21, 21, 21], [22, 22, 22], id="equally fast"),
        pytest.param([1e9, 1e9], 1, [31, 32], [32, 33], id="one is in use"),
        pytest.param([1e9, 0.3e9], 0, [48, 10], [54, 16], id="a slower one relieves it"),
        pytest.param([1e9, 0.05e9], 0, [64, 0], [64, 0], id="much slower"),
        pytest.param([UNKNOWN, 1e9, 1e9], 0, [1, 30, 30], [2, 32, 32], id="one is not measured"),
        pytest.param([UNKNOWN, UNKNOWN], 0, [32, 32], [32, 32], id="none is measured"),
    ],
)
@pytest.mark.parametrize("nbytes", [8 << 20, 100 << 20])
def test_large_items_of_one_call_are_spread(
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_second: list[float],
    busy: int,
    least: list[int],
    most: list[int],
    nbytes: int,
) -> None:
    """`busy`: batches that the first holder is asked for already."""

    async def test() -> None:
        fetcher = Fetching(monkeypatch, lambda _: "ok").fetcher
        count = len(bytes_per_second)
        batch = [wanted(f"k{n}", print, count, nbytes) for n in range(BATCH)]
        now = fetcher.loop.time()
        holders = [fetcher._holder_of(batch[0], source) for source in batch[0].untried]
        for one, speed in zip(holders, bytes_per_second, strict=True):
            if speed != UNKNOWN:
                measure(one, 0.001, speed, now)
        holders[0].users = busy
        fetcher.fetch(batch)
        assigned = [sum(one.source[0].node == f"n{n}" for one in batch) for n in range(count)]
        bounds = zip(least, assigned, most, strict=True)
        assert all(low <= items <= high for low, items, high in bounds), assigned
        fetcher.close()

    asyncio.run(test())


def test_a_holder_that_answers_is_asked_for_what_it_was_not_measured_with() -> None:
    """Small items say nothing of how fast large ones come."""
    slow, fast = holder(0.001), holder(0.001, 1e9)
    assert chosen(50 << 20, slow, fast) == {0}
    slow.users = 1
    assert chosen(50 << 20, slow, fast) == {1}
    assert chosen(1000, slow, fast) == {1}
    fast.users = 2
    assert chosen(1000, slow, fast) == {0}


@pytest.mark.parametrize("of", ["breaker", "doubts"])
def test_a_holder_that_failed_comes_last(of: str) -> None:
    fast, slow = holder(0.001, 1e9), holder(0.001, 1e6)
    getattr(fast, of).failed()
    assert chosen(50 << 20, fast, slow) == {1}
    unknown = holder()
    getattr(unknown, of).failed()
    assert chosen(50 << 20, unknown, slow) == {1}


def test_what_was_measured_long_ago_is_measured_again() -> None:
    slow, fast = holder(0.001, 1e6), holder(0.001, 1e9)
    fast.pace.received(2 * AT_ONCE_BYTES, 1e-3, PACE_SECONDS)
    fast.pace.answered(0.001, PACE_SECONDS)
    slow.pace.answered(0.001, PACE_SECONDS)  # by small items, which say nothing of its bytes
    assert chosen(50 << 20, slow, fast, now=PACE_SECONDS - 1) == {1}
    assert chosen(50 << 20, slow, fast, now=PACE_SECONDS + 1) == {0}


def test_a_transfer_for_which_no_thread_is_free_fails_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive, "THREADS", 1)
    monkeypatch.setattr(receive, "PEER_PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(Link, "recv_available", lambda *_: 0)
    goes_on = threading.Event()

    def recv_into(link: Link, buffer: memoryview, *, timeout: float, hasher: Any) -> None:
        if link.key == "slow":
            goes_on.wait(20.0)
        buffer[:] = bytes_of(link.key)
        hasher.update(buffer)

    monkeypatch.setattr(Link, "recv_into", recv_into)

    async def test() -> None:
        fetching = Fetching(monkeypatch, lambda _: "ok")
        slow = asyncio.create_task(fetching.fetch({"slow": 1}))
        await asyncio.sleep(0.05)
        others: dict[str, Fetched] = {}
        done = partial(others.__setitem__, "k")
        fetching.fetcher.fetch([wanted("k", done)])
        async with asyncio.timeout(10.0):
            while not others:
                await asyncio.sleep(0.005)
        assert others["k"] == Fetched(None, MissReason.BUSY)
        assert not any(one.doubts.failures for one in fetching.fetcher._holders.values())
        assert not slow.done()
        goes_on.set()
        async with asyncio.timeout(10.0):
            while "slow" not in fetching.settled:
                await asyncio.sleep(0.005)
        assert await slow == []
        fetching.fetcher.close()

    asyncio.run(test())
