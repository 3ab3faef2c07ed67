"""Requests that wait, at the end of their session, in each turn of the loop; and late timers.

A task that is cancelled by its parent is cancelled a turn later: what it pins or keeps in between
is given back, too. The session and its connection are real; the store and the locator are not.
"""

import asyncio
import gc
import random
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lookup_buffer.errors import MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.connection import Connection, Seat, Session, Tasks
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.locate import NOT_REACHED, Located, Locator
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.prefetch import Prefetches
from lookup_buffer.node.read import Reads
from lookup_buffer.node.shares import Shares
from lookup_buffer.node.transfer import Wanted
from lookup_buffer.protocol.framing import FrameDecoder
from lookup_buffer.protocol.messages import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    Contains,
    Encoding,
    Prefetch,
    Unclaim,
)
from lookup_buffer.shm.index import RemoteIndex
from store import ClaimAnswer, ClaimState, Location, Record, StoreUnavailable
from test_reads import NAMESPACE, Node, at, nowhere
from virtual_loop import VirtualLoop
from virtual_nodes import Store, VirtualNode

WAIT_SECONDS = 5.0


class Lanes:
    """All transfers fail, and the bytes come over the hosts."""

    def __init__(self, *, fail: bool) -> None:
        self.fail = fail

    async def find(
        self, session: Session, addresses: Sequence[QualifiedKey]
    ) -> dict[QualifiedKey, Located]:
        return {address: at(address) for address in addresses} if self.fail else {}

    async def receive(self, session: Session, address: QualifiedKey, located: Located) -> None:
        return None


class Silent:
    """Who owns a connection on which nothing comes."""

    def message_received(self, *_: object) -> None: ...

    def connection_lost(self, *_: object) -> None: ...


class Prefetching(Node):
    """A node with one session, which prefetches."""

    def __init__(self, found: Callable[[QualifiedKey], Located], *, by_lane: bool = False) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.locator.found = found
        none: Any = None
        connection = Connection(loop, ours, Silent())
        self.session = Session(5, connection, None)
        lanes: Any = Lanes(fail=by_lane)
        self.prefetches = Prefetches(self.reads, lanes, none, self.counters, {5: self.session})
        self.serving = loop.create_task(self._serve())

    async def _serve(self) -> None:
        """As the server does it."""
        try:
            await self.session.run()
        finally:
            self.arena.release_all(self.session.id)

    def prefetch(self, *keys: str, wait_seconds: float = 0.0) -> None:
        request = Prefetch(1, NAMESPACE, list(keys), 0, wait_seconds)
        self.prefetches.prefetch(self.session, request)

    def goodbye(self) -> None:
        self.session.end(says_goodbye=True)

    def entries(self) -> list[dict[str, Any]]:
        try:
            data = self.theirs.recv(1 << 20)
        except BlockingIOError:
            return []
        return [
            entry for message, _ in FrameDecoder().feed(data) for _, entry in message["entries"]
        ]

    async def close(self) -> None:
        self.goodbye()
        await self.serving
        self.theirs.close()


def after_turns(turns: int, act: Callable[..., object], *arguments: object) -> None:
    """Act after some turns of the running loop, as an event of a socket."""
    loop = asyncio.get_event_loop()
    if turns:
        loop.call_soon(after_turns, turns - 1, act, *arguments)
    else:
        act(*arguments)


@pytest.mark.parametrize("key", ["k", "k@r"])
@pytest.mark.parametrize("wait_seconds", [0.0, WAIT_SECONDS])
@pytest.mark.parametrize("by_lane", [False, True])
def test_a_goodbye_in_any_turn_of_a_prefetch_leaves_no_pin(
    key: str, wait_seconds: float, by_lane: bool
) -> None:
    async def pins_after(turns: int) -> int:
        node = Prefetching(at, by_lane=by_lane)
        node.prefetch(key, wait_seconds=wait_seconds)
        after_turns(turns, node.goodbye)
        for _ in range(50):
            await asyncio.sleep(0)
        await node.close()
        pins: int = node.arena.gauges().pins
        return pins

    assert [asyncio.run(pins_after(turns)) for turns in range(30)] == [0] * 30


@pytest.mark.parametrize("wait_seconds", [0.0, WAIT_SECONDS])
@pytest.mark.parametrize("key", ["k", "k@r"])
def test_each_handle_of_a_key_has_a_pin_of_its_own(key: str, wait_seconds: float) -> None:
    async def test() -> None:
        node = Prefetching(at)
        node.prefetch(key, key, wait_seconds=wait_seconds)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len({entry["ticket"] for entry in node.entries()}) == 2
        await node.close()

    asyncio.run(test())


def test_the_keys_that_a_session_waits_for_are_bounded() -> None:
    async def test() -> None:
        node = Prefetching(nowhere)
        waits = node.session.waits = Shares("requests that wait", total=400, own=16)
        one = node.session.id
        for n in range(3):
            keys = (f"{n}-{index}" for index in range(100))
            node.prefetch(*keys, wait_seconds=600.0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waits.fits(one, 10)
        assert waits.fits("another", 200)
        assert {entry["state"] for entry in node.entries()} == {"missing"}
        await node.close()
        for _ in range(50):
            await asyncio.sleep(0)
        assert waits.fits(one, 400)

    asyncio.run(test())


def test_ranks_that_are_missing_do_not_end_a_wait() -> None:
    async def test() -> None:
        node = Prefetching(nowhere)
        node.prefetch("k", wait_seconds=WAIT_SECONDS)
        while not node.locator.watches:
            await asyncio.sleep(0)
        node.session.seat = Seat("engine", None, 1, encodes=False, device="")  # a worker restarts
        node.locator.watches[0]()
        for _ in range(50):
            await asyncio.sleep(0)
        assert node.entries() == []
        await node.close()

    asyncio.run(test())


# -- claims


Answer = Callable[[ClaimAnswer], None]


class Claiming:
    """A node whose store answers when the test says so."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.store = Store(self.loop)
        self.node = VirtualNode("a", self.store, random.Random(1))
        self.session: Any = self.node.session

    def answer(self, reply: Callable[[Answer, ClaimAnswer], None]) -> None:
        """`reply` gets the store's answer, and to whom it goes."""

        def claim(claiming: Any, answer: Answer) -> None:
            reply(answer, self.store.claim(self.node, claiming))

        def release(releasing: Any, _: object) -> None:
            self.store.release(self.node, releasing.key)

        node: Any = self.node
        node.claim, node.release = claim, release

    def after_turns(self, turns: int, act: Callable[..., object], *arguments: object) -> None:
        if turns:
            self.loop.call_soon(self.after_turns, turns - 1, act, *arguments)
        else:
            act(*arguments)

    @property
    def is_free(self) -> bool:
        return len(self.node.claims.held) == 0 and self.store.holder("k") is None


def test_a_claim_granted_in_the_turns_of_its_sessions_end_is_given_back() -> None:
    def is_free_after(reply_turns: int, end_turns: int) -> bool:
        one = Claiming()
        one.answer(lambda answer, found: one.after_turns(reply_turns, answer, found))
        one.after_turns(end_turns, one.node.end)
        one.node.handle(Encoding(1, NAMESPACE, ["k"], 60.0), lambda _: None)
        one.loop.run(0.3)
        return one.is_free

    assert all(is_free_after(reply, end) for reply in range(6) for end in range(14))


def test_no_claim_is_granted_without_the_store_to_a_session_that_is_over() -> None:
    def is_free_after(turns: int) -> bool:
        one = Claiming()
        one.answer(lambda answer, found: one.loop.call_later(0.6, answer, found))  # type: ignore[arg-type]
        one.node.handle(Encoding(1, NAMESPACE, ["k"], 60.0), lambda _: None)
        one.loop.run(0.399)
        one.loop.now = 0.4  # in one turn: the timer, then the event of the socket
        one.after_turns(turns, one.node.end)
        one.loop.run(1.0)
        return one.is_free

    assert all(map(is_free_after, range(8)))


def test_an_answer_that_comes_in_time_counts_though_its_timer_is_due() -> None:
    one = Claiming()
    held = ClaimAnswer(False, "other", ClaimState.ENCODING, 30.0)
    one.answer(lambda answer, _: one.loop.call_later(0.39, answer, held))  # type: ignore[arg-type]
    claim = Claim(1, NAMESPACE, "k", 30.0, "encoding", 0.0)
    task = one.loop.create_task(one.node.claims.claim(one.session, claim))
    one.loop.run(0.38)
    one.loop.now = 0.41  # the loop was busy
    one.loop.run(0.1)
    assert task.result()["outcome"] is ClaimOutcome.HELD


def test_what_is_located_in_time_counts_though_its_timer_is_due() -> None:
    loop = VirtualLoop()

    class Slow:
        async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
            answer: asyncio.Future[list[Located]] = loop.create_future()
            loop.call_later(0.045, answer.set_result, [at(each) for each in addresses])
            return await answer

        def known(self, _: str, keys: Sequence[str]) -> list[bool | None]:
            return [None] * len(keys)

    class Nothing:
        def holds(self, address: QualifiedKey) -> bool:
            return False

    none: Any = None
    slow: Any = Slow()
    nothing: Any = Nothing()
    reads = Reads(loop, nothing, slow, none, none, Counters(), "boot")
    request = Contains(1, NAMESPACE, ["k"], 0.05)
    answer: Any = reads.contains(none, request)
    task = loop.create_task(answer)
    loop.run(0.04)
    loop.now = 0.06
    loop.run(0.1)
    assert task.result() == {"present": [True]}


def test_a_set_that_is_given_up_before_it_begins_holds_up_no_other() -> None:
    one = Claiming()
    events: list[str] = []

    def tell(event: dict[str, Any]) -> None:
        events.append(event["outcome"])

    one.node.handle(ClaimAll(1, NAMESPACE, ["k"], WAIT_SECONDS), tell)
    one.node.handle(Unclaim(2, NAMESPACE, ["k"], 1), tell)
    one.node.handle(ClaimAll(3, NAMESPACE, ["k"], WAIT_SECONDS), tell)
    assert not one.node.claims.is_idle(one.session), "its place is taken at once"
    one.loop.run(1.0)
    assert events == [ClaimOutcome.GRANTED]
    assert one.node.claims.is_idle(one.session)


def test_the_end_of_a_session_keeps_the_claim_that_its_engine_uses_in_another() -> None:
    """An engine attached again while a set of its previous session waits for the store."""
    one = Claiming()
    node: Any = one.node

    def claim(claiming: Any, answer: Answer) -> None:
        found = one.store.claim(one.node, claiming)
        if claiming.key == "k":  # "m" is not answered
            one.loop.call_soon(answer, found)

    one.answer(lambda *_: None)
    node.claim = claim
    one.node.handle(ClaimAll(1, NAMESPACE, ["k", "m"], WAIT_SECONDS), lambda _: None)
    one.loop.run(0.1)
    later = type(one.session)(one.loop)
    request = Claim(2, NAMESPACE, "k", 30.0, "encoding", 0.0)
    again = one.loop.create_task(one.node.claims.claim(later, request))
    one.loop.run(0.1)
    assert again.result()["outcome"] is ClaimOutcome.GRANTED
    one.node.end()
    one.loop.run(0.1)
    assert one.store.holder("k") is one.node
    assert one.node.claims.held.lasting(later, (NAMESPACE, "k"))


def test_a_session_that_ends_while_its_wait_is_given_up_leaves_nothing() -> None:
    one = Claiming()
    other = VirtualNode("b", one.store, random.Random(1))
    other.handle(ClaimAll(1, NAMESPACE, ["k"], WAIT_SECONDS), lambda _: None)
    one.loop.run(0.2)
    claim_all = ClaimAll(1, NAMESPACE, ["k"], WAIT_SECONDS)
    one.node.claims.claim_all(one.session, claim_all, lambda _: None)
    one.loop.run(0.2)
    one.node.claims.unclaim(one.session, Unclaim(2, NAMESPACE, ["k"], 1))
    one.node.end()
    one.loop.run(20.0)
    assert not one.node.claims._sessions


# -- the locator


def test_an_unexpected_error_at_the_opening_of_the_store_is_a_miss() -> None:
    class Broken:
        tried = 0

        async def store(self) -> None:
            self.tried += 1
            raise RuntimeError("can't start new thread")

    async def test() -> None:
        broken: Any = Broken()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # it is reported there
        locator = Locator(loop, broken, Directory("us"), RemoteIndex(), mirrored=True)
        locator.start()
        for _ in range(5):
            assert await locator.locate([(NAMESPACE, "k")]) == [NOT_REACHED]
        assert broken.tried == 1, "it is not tried again so soon"
        locator.close()

    asyncio.run(test())


def test_all_who_meet_an_unknown_node_share_a_reading_of_the_membership() -> None:
    class Behind:
        """A store whose membership cannot be read."""

        readings = 0

        async def look_up(self, items: Sequence[tuple[str, str]]) -> list[Record]:
            new = Location("new", "boot", 1, 1)
            return [
                Record(*item, "uint8", (1,), 1, "tensor", 1.0, locations=(new,)) for item in items
            ]

        async def beats(self) -> None:
            self.readings += 1
            raise StoreUnavailable("no answer in time")

        def place_of(self, namespace: str, key: str) -> str:
            return ""

    async def test() -> None:
        behind: Any = Behind()

        class Storage:
            async def store(self) -> Any:
                return behind

        storage: Any = Storage()
        loop = asyncio.get_running_loop()
        locator = Locator(loop, storage, Directory("us"), RemoteIndex(), mirrored=False)
        locator.start()
        looks = [locator.locate([(NAMESPACE, f"k{n}")]) for n in range(30)]
        assert {found.reason for (found,) in await asyncio.gather(*looks)} == {"owner_dead"}
        assert behind.readings <= 2
        locator.close()

    asyncio.run(test())


# -- prefetches that wait


@pytest.mark.parametrize("wait_seconds", [0.0, WAIT_SECONDS])
def test_what_other_nodes_have_is_brought_together_also_by_who_would_wait(
    wait_seconds: float,
) -> None:
    async def test() -> None:
        node = Prefetching(at)
        batches: list[int] = []
        fetch = node.transfers.fetch

        def counted(wanted: Sequence[Wanted]) -> None:
            batches.append(len(wanted))
            fetch(wanted)

        node.transfers.fetch = counted  # type: ignore[method-assign]
        node.prefetch(*(f"k{n}" for n in range(64)), wait_seconds=wait_seconds)
        for _ in range(50):
            await asyncio.sleep(0)
        assert [batch for batch in batches if batch] == [64]
        assert node.locator.looks == 1
        await node.close()

    asyncio.run(test())


def test_a_prefetch_that_finds_no_room_does_not_wait_for_it() -> None:
    """Its session may hold the pins that fill the arena."""

    async def test() -> None:
        node = Prefetching(at)
        node.transfers.reason = MissReason.NO_ROOM
        node.prefetch("k", wait_seconds=WAIT_SECONDS)
        for _ in range(50):
            await asyncio.sleep(0)
        assert [entry["reason"] for entry in node.entries()] == [MissReason.NO_ROOM]
        await node.close()

    asyncio.run(test())


def test_a_prefetch_does_not_wait_anew_for_what_got_no_turn_in_its_time() -> None:
    async def test() -> None:
        node = Prefetching(at)
        node.transfers.is_crowded = True
        began = node.reads.loop.time()
        node.prefetch("first", "crowded", wait_seconds=0.1)
        entries: list[dict[str, Any]] = []
        while len(entries) < 2:
            await asyncio.sleep(0.01)
            entries += node.entries()
        assert [entry.get("reason") for entry in entries] == [None, "busy"]
        assert node.reads.loop.time() - began >= 0.1
        node.transfers.go_on()
        await node.close()

    asyncio.run(test())


def test_what_a_cancelled_request_held_is_freed_at_once() -> None:
    """Without a full garbage collection, which comes rarely."""

    class Held: ...

    async def request(held: Held) -> None:
        async with asyncio.timeout(600.0) as bound:  # it refers to the task
            await asyncio.sleep(60.0)
            bound.reschedule(None)

    async def test() -> None:
        tasks, held = Tasks(), Held()
        freed = weakref.ref(held)
        tasks.own(asyncio.ensure_future(request(held)))
        del held
        await asyncio.sleep(0)
        tasks.cancel()
        while tasks:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert freed() is None

    gc.disable()
    try:
        asyncio.run(test())
    finally:
        gc.enable()
