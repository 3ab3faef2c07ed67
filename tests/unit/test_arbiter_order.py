"""Claims at a store without a mirror: the order of calls; servers that hang, fail or are slow."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from lookup_buffer.node.claims import CALLS_MAX, CLOSE_SECONDS, Answer, Arbiter
from lookup_buffer.node.storage import FAILURES_TO_OPEN
from lookup_buffer.protocol.messages import ClaimOutcome
from store import ClaimAnswer, Claiming, ClaimState, Releasing, StoreUnavailable
from virtual_loop import VirtualLoop


class Store:
    """Each server, named by the first letter of a key, takes `seconds` for a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.error: dict[str, Exception] = {}
        self.done: list[str] = []
        self.claimed: set[str] = set()
        self.records: dict[str, Any] = {}
        self.calls = 0

    async def claim(self, namespace: str, key: str, **fields: Any) -> ClaimAnswer:
        await self._call(key)
        self.claimed.add(key)
        return ClaimAnswer(True, fields["holder"], fields["state"], 1.0, self.records.get(key))

    async def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        for one in releasings:
            await self._call(one.key)
            self.claimed.discard(one.key)
        return [True] * len(releasings)

    async def _call(self, key: str) -> None:
        self.calls += 1
        await asyncio.sleep(self.seconds.get(key[0], 0.0))
        if key[0] in self.error:
            raise self.error[key[0]]
        self.done.append(key)


class Node:
    """The locator of a node without a mirror, and its arena."""

    claims = None

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.here = Store()
        parts: Any = self
        self.arbiter = Arbiter(self.loop, parts, parts)
        self.decided: list[Answer | None] = []
        self.held: set[str] = set()
        self.forgotten: list[str] = []
        self.meeting_seconds = 0.0
        self.directory = self
        self.tasks: list[asyncio.Task[None]] = []
        self.moved: dict[str, str] = {}

    async def store(self) -> Any:
        return self.here

    def place_of(self, address: tuple[str, str]) -> str:
        return self.moved.get(address[1], address[1][0])

    def knows(self, record: str | None) -> bool:
        return record is None

    async def meet(self, records: Sequence[str]) -> None:
        await asyncio.sleep(self.meeting_seconds)

    def sources(self, record: str) -> list[str]:
        return [record]

    def forget(self, address: tuple[str, str]) -> None:
        self.forgotten.append(address[1])

    def holds(self, address: tuple[str, str]) -> bool:
        return address[1] in self.held

    def claim(self, key: str) -> None:
        claiming = Claiming("ns", key, "holder", "token", ClaimState.INTENT, 1.0)

        async def claim() -> None:
            self.decided.append(await self.arbiter.claim(claiming))

        self.tasks.append(self.loop.create_task(claim()))

    def release(self, key: str) -> None:
        async def release() -> None:
            self.arbiter.release([Releasing("ns", key, "token")])

        self.tasks.append(self.loop.create_task(release()))

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> None:
        task = self.loop.create_task(coroutine)
        self.loop.run(seconds)
        assert task.done()


def test_calls_for_a_key_keep_their_order_and_wait_for_no_other_server() -> None:
    node = Node()
    node.here.seconds = {"s": 0.09, "f": 0.01}
    for n in range(5):
        node.claim(f"s{n}")
        node.release(f"s{n}")
        node.release(f"s{n}")
        node.claim(f"s{n}")
        node.claim(f"f{n}")
    node.release("s0")
    node.loop.run(0.05)
    assert sorted(node.here.done) == [f"f{n}" for n in range(5)]
    node.loop.run(100.0)
    assert len(node.here.done) == 26
    assert node.here.claimed == {f"{server}{n}" for server in "fs" for n in range(5)} - {"s0"}


def test_calls_for_a_key_that_moves_to_another_server_keep_their_order() -> None:
    node = Node()
    node.here.seconds = {"k": 0.3}
    node.claim("k")
    node.claim("k")
    node.loop.run(0.1)
    node.moved["k"] = "other"
    node.here.seconds = {}
    node.release("k")
    node.claim("o")
    node.loop.run(0.1)
    assert node.here.done == ["o"]
    node.loop.run(10.0)
    assert node.here.done == ["o", "k", "k", "k"]
    assert node.here.claimed == {"o"}


def test_a_claim_that_is_granted_after_its_key_was_inserted_here_is_released() -> None:
    node = Node()
    node.here.seconds = {"k": 1.0}
    node.claim("k")
    node.claim("k")
    node.loop.run(0.1)
    node.tasks[1].cancel()
    node.loop.run(0.5)
    assert node.decided == [None], "it was not decided in time"
    node.held.add("k")
    node.loop.run(10.0)
    assert node.here.calls == 2, "the one that was given up is not sent"
    assert not node.here.claimed


def test_claims_at_once_are_all_decided_by_a_server_that_is_far_away() -> None:
    node = Node()
    node.here.seconds = {"k": 0.05}
    for n in range(12):
        node.claim(f"k{n}")
    node.loop.run(0.4)
    assert [answer and answer.outcome for answer in node.decided] == [ClaimOutcome.GRANTED] * 12


def test_calls_of_one_server_are_bounded_and_none_is_made_for_a_claim_that_is_given_up() -> None:
    node = Node()
    node.here.seconds = {"h": 5.0}
    for n in range(3 * CALLS_MAX):
        node.claim(f"h{n}")
    node.loop.run(1.0)
    assert node.decided == [None] * 3 * CALLS_MAX
    assert node.here.calls == CALLS_MAX
    node.release(f"h{2 * CALLS_MAX}")
    node.loop.run(20.0)
    assert node.here.calls == CALLS_MAX + 1


def test_a_key_that_another_node_stored_meanwhile_is_not_claimed() -> None:
    node = Node()
    node.here.records["k"] = "record"
    node.claim("k")
    node.loop.run(0.1)
    assert [answer and answer.outcome for answer in node.decided] == [ClaimOutcome.STORED]
    assert node.forgotten == ["k"], "the mirror may not know it"
    assert (node.here.done, node.here.claimed) == (["k", "k"], set())


def test_a_claim_does_not_wait_long_for_news_of_the_nodes_that_a_record_names() -> None:
    node = Node()
    node.here.records["k"] = "record"
    node.meeting_seconds = 1.0
    node.claim("k")
    node.loop.run(0.5)
    assert node.decided == [None]


def test_a_server_that_fails_is_not_called_for_a_while_and_others_are() -> None:
    node = Node()
    node.here.error["d"] = StoreUnavailable("down")
    for n in range(2 * CALLS_MAX):
        node.claim(f"d{n}")
    node.claim("l")
    node.loop.run(0.01)
    assert node.here.calls <= CALLS_MAX + FAILURES_TO_OPEN + 1
    assert node.decided.count(None) == 2 * CALLS_MAX
    before = node.here.calls
    node.claim("d")
    node.loop.run(0.01)
    assert node.here.calls == before
    assert node.here.done == ["l"]


def test_an_error_of_one_call_does_not_stop_the_others() -> None:
    node, told = Node(), 0
    node.here.error["k"] = ZeroDivisionError()
    node.claim("k")
    node.claim("k")
    while len(node.decided) < 2:
        try:
            node.loop.run(0.001)
        except ZeroDivisionError:
            told += 1
    assert told, "the loop's owner is told"
    assert node.decided == [None, None], "answered: the claim is granted without the store"
    del node.here.error["k"]
    node.claim("k")
    with suppress(ZeroDivisionError):
        node.loop.run(0.001)
    node.loop.run(0.001)
    assert node.here.done == ["k"]


def test_the_end_waits_for_pending_calls_and_not_for_a_server_that_hangs() -> None:
    node = Node()
    node.here.seconds = {"h": 1e6, "k": 0.5}
    for key in ("h", "h", "k"):
        node.release(key)
    node.run(node.arbiter.close(), CLOSE_SECONDS)
    assert node.here.done == ["k"]
