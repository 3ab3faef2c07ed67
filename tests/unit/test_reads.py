"""Reads alone: single flight, waits, look-ups that are repeated, and cancellation at each wait.

The arena is real. The locator and the transfer are stand-ins, which answer when the test says so.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from cancelling import cancel_at_each_wait
from lookup_buffer.errors import BufferFull, MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node import read
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.items import Item, Pin
from lookup_buffer.node.locate import Located, Waiting
from lookup_buffer.node.read import Reads
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Wanted
from lookup_buffer.protocol.header import TensorHeader
from store import Location, Record

NAMESPACE = "f" * 64
SHARED, HANDOFF = (NAMESPACE, "k"), (NAMESPACE, "k@r")
NBYTES = 100
SHORT_SECONDS, LONG_SECONDS = 0.05, 600.0
LOCAL = 7
"""The owner of the pin of an insert on this node."""


def at(address: QualifiedKey) -> Located:
    record = Record(*address, "uint8", (NBYTES,), NBYTES, "tensor", 1.0)
    return Located(record, ((Location("node", "boot", 1, 1), "tcp://127.0.0.1:1"),))


def nowhere(_: QualifiedKey) -> Located:
    return Located(None, (), MissReason.ABSENT)


class Locator:
    """Answers by `found`, after one turn of the loop for each of `turns`."""

    def __init__(self) -> None:
        self.found: Callable[[QualifiedKey], Located] = nowhere
        self.turns = 1
        self.looks = 0
        self.forgotten: list[QualifiedKey] = []
        self.watches: list[Callable[[], None]] = []

    async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
        self.looks += 1
        found = [self.found(address) for address in addresses]
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return found

    def cached(self, address: QualifiedKey) -> None:
        return None

    def forget(self, address: QualifiedKey) -> None:
        self.forgotten.append(address)

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        self.watches.append(notify)
        return partial(self.watches.remove, notify)


class Transfers:
    """Lands an item after `turns` turns of the loop, or fails for `reason`."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.turns = 3
        self.reason: MissReason | None = None
        self.asked: list[QualifiedKey] = []
        self.is_crowded = False
        self._waiting: list[Wanted] = []

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """If it is crowded, all but the first wait until `go_on`."""
        self.asked += [one.address for one in wanted]
        waiting = wanted[1:] if self.is_crowded else ()
        for one in waiting:
            one.waits(True)
        self._waiting += waiting
        for one in wanted[: len(wanted) - len(waiting)]:
            asyncio.get_running_loop().call_soon(self._land, one, self.turns)

    def withdraw(self, one: Wanted) -> bool:
        if is_waiting := one in self._waiting:
            self._waiting.remove(one)
        return is_waiting

    def go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.waits(False)
            asyncio.get_running_loop().call_soon(self._land, one, self.turns)

    def _land(self, one: Wanted, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._land, one, turns - 1)
        elif self.reason is not None:
            one.done(Fetched(None, self.reason))
        else:
            item = reserve(self.arena, one.address, loan=one.loan)
            one.done(Fetched(self.arena.commit(item, 1, FETCH_OWNER)))


def reserve(arena: Arena, address: QualifiedKey, *, loan: bool = False) -> Any:
    header = TensorHeader("uint8", (NBYTES,), NBYTES)
    return arena.reserve(address, header, origin="node", ttl_seconds=None, loan=loan)


class Node:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        parts: Any = (Locator(), Arena(1 << 20, lambda _address, _reason: None))
        self.locator, self.arena = parts
        transfers: Any = Transfers(self.arena)
        self.transfers: Transfers = transfers
        self.waiting = Waiting(loop, self.locator)
        self.counters = Counters()
        self.reads = Reads(
            loop, self.arena, self.locator, transfers, self.waiting, self.counters, "boot"
        )
        anchor: Any = None
        self.session = Session(1, anchor, None)

    def bring(
        self, address: QualifiedKey, wait_seconds: float = 0.0
    ) -> Coroutine[Any, Any, Pin | MissReason]:
        hold = partial(self.reads.hold, self.session, address)
        return self.reads.bring(address, wait_seconds, hold)

    def insert(self, address: QualifiedKey) -> None:
        """As `Inserts`."""
        self.inserted(reserve(self.arena, address))

    def inserted(self, item: Item) -> None:
        """It is written. The item is pinned while its readers are told."""
        pin = self.arena.commit(item, 1, LOCAL)
        self.reads.arrived(item.address)
        self.arena.release([pin.ticket], LOCAL)

    async def rest(self) -> None:
        """What no request awaits comes to its end. Then nothing is held."""
        for _ in range(20):
            await asyncio.sleep(0)
        gauges = self.arena.gauges()
        assert (gauges.pins, gauges.reserved_bytes) == (0, 0)
        assert not self.reads._fetches
        assert not self.waiting._waiters
        assert not self.locator.watches
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def release(self, *held: Pin | MissReason) -> None:
        for one in held:
            assert isinstance(one, Pin)
            self.arena.release([one.ticket], self.session.id)


def run(test: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        node = Node()
        await test(node)
        await node.rest()

    asyncio.run(whole())


def test_all_readers_of_a_shared_key_share_one_transfer() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at
        held = await asyncio.gather(*(node.bring(SHARED) for _ in range(5)))
        assert (node.transfers.asked, node.locator.looks) == ([SHARED], 1)
        assert len({one.item.offset for one in held if isinstance(one, Pin)}) == 1
        node.release(*held)
        assert node.arena.holds(SHARED), "it stays, for later readers"

    run(test)


def test_each_reader_of_a_hand_off_gets_a_copy_of_its_own() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at
        held = await asyncio.gather(*(node.bring(HANDOFF) for _ in range(5)))
        assert node.transfers.asked == [HANDOFF] * 5
        assert len({one.item.offset for one in held if isinstance(one, Pin)}) == 5
        node.release(*held)
        assert node.arena.gauges().used_bytes == 0, "no copy stays"

    run(test)


def test_an_insert_of_this_node_ends_a_look_up() -> None:
    async def test(node: Node) -> None:
        node.locator.turns = 10
        reading = asyncio.ensure_future(node.bring(SHARED))
        await asyncio.sleep(0)
        node.insert(SHARED)
        node.release(await reading)

    run(test)


@pytest.mark.parametrize("inserted", [True, False])
def test_a_waiting_read_ends_with_an_insert_or_a_publication(inserted: bool) -> None:
    async def test(node: Node) -> None:
        reading = asyncio.ensure_future(node.bring(SHARED, wait_seconds=60.0))
        while not node.locator.watches:
            await asyncio.sleep(0)
        if inserted:
            node.insert(SHARED)
        else:
            node.locator.found = at
            node.locator.watches[0]()
        node.release(await reading)

    run(test)


@pytest.mark.parametrize("found", [at, nowhere])
def test_a_key_published_during_its_look_up_is_looked_up_again(
    found: Callable[[QualifiedKey], Located],
) -> None:
    async def test(node: Node) -> None:
        node.locator.turns = 5
        readings = [asyncio.ensure_future(node.bring(SHARED)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        node.reads.published(SHARED)
        node.locator.found = found
        results = await asyncio.gather(*readings)
        assert node.locator.looks == 2
        if found is at:
            node.release(*results)
        else:
            assert results == [MissReason.ABSENT] * 2

    run(test)


def test_a_stale_location_is_read_again_at_the_next_request() -> None:
    async def test(node: Node) -> None:
        node.locator.found, node.transfers.reason = at, MissReason.STALE
        assert await node.bring(SHARED) is MissReason.STALE
        assert node.locator.forgotten == [SHARED]

    run(test)


def test_a_store_that_hangs_is_a_miss_soon_after_the_deadline() -> None:
    async def test(node: Node) -> None:
        node.locator.turns = 1 << 30
        began = asyncio.get_running_loop().time()
        assert await node.bring(SHARED) is MissReason.STORE_DOWN
        assert asyncio.get_running_loop().time() - began < 10.0
        for task in node.reads._tasks:
            task.cancel()

    run(test)


def test_an_error_of_a_pin_is_the_readers_alone() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at

        def full(_: Fetched) -> None:
            raise BufferFull("no room")

        refused = asyncio.ensure_future(node.reads.bring(SHARED, 0.0, full))
        node.release(await node.bring(SHARED))
        with pytest.raises(BufferFull):
            await refused

    run(test)


def test_many_keys_are_settled_as_they_come_and_held_no_longer() -> None:
    async def test(node: Node) -> None:
        addresses = [(NAMESPACE, f"k{n}") for n in range(10)]
        node.locator.found = lambda each: at(each) if each[1] != "k3" else nowhere(each)
        came: list[tuple[QualifiedKey, str]] = []

        async for settled in node.reads.bring_each(addresses, math.inf):
            came.extend((address, fetched.reason) for address, fetched in settled)
        assert (node.locator.looks, len(came)) == (1, 10)
        assert came[0] == (addresses[3], "absent"), "the miss does not wait for the transfers"
        assert {reason for _, reason in came[1:]} == {""}

    run(test)


def test_each_waits_for_the_turn_of_a_transfer_for_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one for TURN_SECONDS. The transfer goes on for others, if there are any."""
    monkeypatch.setattr(read, "TURN_SECONDS", SHORT_SECONDS)

    async def test(node: Node) -> None:
        node.locator.found = at
        node.transfers.is_crowded = True
        first, second, third = [(NAMESPACE, f"k{n}") for n in range(3)]
        until = node.reads.loop.time() + SHORT_SECONDS
        reasons: dict[QualifiedKey, str] = {}
        async for came in node.reads.bring_each([first, second, third], until):
            reasons |= {address: fetched.reason for address, fetched in came}
            if first in reasons and second not in reasons:
                patient = asyncio.ensure_future(node.bring(second, LONG_SECONDS))
        assert reasons == {first: "", second: "busy", third: "busy"}
        assert await node.bring(second) is MissReason.BUSY
        assert await node.bring(second, SHORT_SECONDS) is MissReason.BUSY
        assert not patient.done()
        node.transfers.go_on()
        node.release(await patient)
        assert not node.arena.holds(third), "nobody waited for it any more"
        assert node.transfers.asked == [first, second, third], "each once"

    run(test)


def test_an_insert_in_the_turn_of_the_loop_in_which_the_time_of_its_reader_ends() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at
        node.transfers.is_crowded, node.transfers.turns = True, 100_000
        slow, loop = (NAMESPACE, "slow"), node.reads.loop
        until = loop.time() + 0.01
        loop.call_at(until - 0.001, time.sleep, 0.01)  # so both come due in one turn
        loop.call_at(until + 0.001, node.insert, SHARED)
        came = []
        async for each in node.reads.bring_each([slow, SHARED], until):
            came += [address for address, _ in each]
        assert came == [SHARED, slow]

    run(test)


@pytest.mark.parametrize("address", [SHARED, HANDOFF])
def test_nothing_is_fetched_if_its_reader_left_during_the_look_up(address: QualifiedKey) -> None:
    async def test(node: Node) -> None:
        node.locator.found, node.locator.turns = at, 10
        reading = asyncio.ensure_future(node.bring(address))
        await asyncio.sleep(0)
        reading.cancel()
        await node.rest()
        assert (node.locator.looks, node.transfers.asked) == (1, [])
        node.release(await node.bring(address))

    run(test)


def test_a_transfer_that_waits_for_its_turn_ends_with_an_insert_of_this_node() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at
        node.transfers.is_crowded = True
        other = (NAMESPACE, "other")
        reading = asyncio.ensure_future(anext(node.reads.bring_each([other, SHARED], math.inf)))
        for _ in range(node.locator.turns + 2):
            await asyncio.sleep(0)
        assert node.transfers._waiting
        node.insert(SHARED)
        assert not node.transfers._waiting
        await reading

    run(test)


def test_who_retries_at_a_busy_holder_for_nobody_leaves() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at
        node.transfers.turns = 10
        reading = asyncio.ensure_future(node.bring(SHARED))
        for _ in range(node.locator.turns + 2):
            await asyncio.sleep(0)
        (fetch,) = node.reads._fetches.values()
        assert fetch.wanted is not None
        reading.cancel()
        await asyncio.wait([reading])
        assert node.reads._fetches, "its bytes are on the way"
        node.transfers._waiting.append(fetch.wanted)
        fetch.wanted.waits(True)
        assert not node.transfers._waiting
        assert not node.reads._fetches

    run(test)


@pytest.mark.parametrize("address", [SHARED, HANDOFF])
@pytest.mark.parametrize("found", [at, nowhere])
@pytest.mark.parametrize("wait_seconds", [0.0, 0.2])
def test_a_read_that_is_cancelled_at_any_wait_leaves_nothing(
    address: QualifiedKey, found: Callable[[QualifiedKey], Located], wait_seconds: float
) -> None:
    async def test(node: Node) -> None:
        node.locator.found = found

        async def read() -> None:
            held = await node.bring(address, wait_seconds)
            if isinstance(held, Pin):
                node.release(held)

        async def check() -> None:
            await node.rest()
            for item in node.arena.items_of({NAMESPACE}):
                node.arena.remove(item, "test")

        waits = await cancel_at_each_wait(read, check)
        assert waits >= (2 if found is nowhere and wait_seconds else 1)

    run(test)


def test_a_read_of_many_that_is_cancelled_at_any_wait_leaves_nothing() -> None:
    async def test(node: Node) -> None:
        node.locator.found = lambda each: at(each) if each[1] != "k1@r" else nowhere(each)
        addresses = [(NAMESPACE, f"k{n}@r") for n in range(3)]

        async def read() -> None:
            async for _ in node.reads.bring_each(addresses, math.inf):
                pass

        async def check() -> None:
            await node.rest()

        assert await cancel_at_each_wait(read, check) >= 2

    run(test)


def test_what_is_located_has_readers_for_half_of_it_or_ends() -> None:
    """A client that asked for much and left, again and again, had 300 MB located for nobody, and
    others waited behind it for 16 s."""

    async def test(node: Node) -> None:
        located: list[list[QualifiedKey]] = []
        locator: Any = node.locator
        locate = locator.locate

        async def record(addresses: Sequence[QualifiedKey]) -> list[Located]:
            located.append(list(addresses))
            found: list[Located] = await locate(addresses)
            return found

        locator.locate = record
        node.locator.found, node.locator.turns = at, 10
        addresses = [(NAMESPACE, f"k{n}") for n in range(100)]

        async def read(keys: Sequence[QualifiedKey]) -> list[QualifiedKey]:
            return [
                address
                async for some in node.reads.bring_each(keys, math.inf)
                for address, fetched in some
                if not fetched.reason
            ]

        whole = asyncio.ensure_future(read(addresses))
        await asyncio.sleep(0)
        part = asyncio.ensure_future(read(addresses[:3]))
        for _ in range(3):
            await asyncio.sleep(0)
        whole.cancel()
        assert sorted(await part) == addresses[:3]
        assert located[0] == addresses
        assert located[-1] == addresses[:3], "anew, without those of who left"
        assert set(node.transfers.asked) == set(addresses[:3])

    run(test)


@pytest.mark.parametrize("seed", range(20))
def test_readers_that_come_and_leave_take_nothing_from_others(seed: int) -> None:
    async def test(node: Node) -> None:
        chance = random.Random(seed)
        addresses = [(NAMESPACE, f"k{n}") for n in range(12)]
        absent = addresses[1:3]
        node.locator.found = lambda each: nowhere(each) if each in absent else at(each)
        node.locator.turns = chance.randint(1, 12)

        async def read(keys: Sequence[QualifiedKey]) -> None:
            came: dict[QualifiedKey, MaybeMissed] = {}
            async for some in node.reads.bring_each(keys, math.inf):
                came |= {address: fetched.reason for address, fetched in some}
            assert came.keys() == set(keys)
            for one, reason in came.items():  # busy: another one's transfer has come meanwhile
                assert reason in ([MissReason.ABSENT] if one in absent else ["", MissReason.BUSY])

        reading: list[asyncio.Future[None]] = []
        for _ in range(120):
            wanted = [one for one in addresses if not node.arena.holds(one)]
            keys = chance.sample(wanted, chance.randint(0, len(wanted)))
            if keys:
                reading.append(asyncio.ensure_future(read(keys)))
            if chance.random() < 0.6 and reading:
                chance.choice(reading).cancel()
            for _ in range(chance.randint(0, 4)):
                await asyncio.sleep(0)
            for address in addresses:
                item = node.arena.peek(address)
                if item is not None and not item.pins and chance.random() < 0.1:
                    node.arena.remove(item, "test")
        for one in await asyncio.gather(*reading, return_exceptions=True):
            assert one is None or isinstance(one, asyncio.CancelledError), one

    run(test)


def test_a_bug_while_transfers_begin_is_a_miss_of_all() -> None:
    async def test(node: Node) -> None:
        node.locator.found = at

        def fail(_: Sequence[Wanted]) -> None:
            raise MemoryError

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        transfers: Any = node.transfers
        fetch, transfers.fetch = transfers.fetch, fail
        with suppress(MemoryError):
            async with asyncio.timeout(5.0):
                assert await node.bring(SHARED) is MissReason.STORE_DOWN
        transfers.fetch = fetch

    run(test)
