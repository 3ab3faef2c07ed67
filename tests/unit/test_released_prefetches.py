"""Prefetches whose handles are released before they have settled, at the node and at the client."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from lookup_buffer.client.handles import PrefetchHandle, PrefetchState
from lookup_buffer.client.load import Loads
from lookup_buffer.client.pending import PendingPrefetches
from lookup_buffer.errors import NodeUnavailable
from lookup_buffer.key import QualifiedKey, TensorKey
from lookup_buffer.node.connection import Session
from lookup_buffer.node.locate import Located
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import EndPrefetch, Prefetch, Release, Request
from test_reads import LONG_SECONDS, NAMESPACE, at, nowhere
from test_request_ends import Prefetching

# -- the node


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def waiting(node: Prefetching) -> int:
    """What it counts of requests that wait."""
    return node.session.waits._used


def end(node: Prefetching, *indexes: int, prefetch: int = 1) -> None:
    node.prefetches.end(node.session, EndPrefetch(2, prefetch, list(indexes)))


def run(
    test: Callable[[Prefetching], Coroutine[Any, Any, None]],
    found: Callable[[QualifiedKey], Located],
) -> None:
    async def whole() -> None:
        node = Prefetching(found)
        await test(node)
        await node.close()
        await node.rest()

    asyncio.run(whole())


def test_a_key_is_no_longer_waited_for_once_all_its_handles_are_released() -> None:
    async def test(node: Prefetching) -> None:
        node.prefetch("a", "b", "a", wait_seconds=LONG_SECONDS)
        await turns()
        assert (waiting(node), len(node.locator.watches)) == (3, 2)
        end(node, 0)
        await turns()
        assert (waiting(node), len(node.locator.watches)) == (3, 2), "it has another handle"
        end(node, 2)
        await turns()
        assert (waiting(node), len(node.locator.watches)) == (2, 1)
        for key in ("a", "b"):
            node.insert((NAMESPACE, key))
        await turns()
        (entry,) = node.entries()
        assert entry["state"] == "resident"
        assert node.arena.gauges().pins == 1
        assert waiting(node) == 0
        node.arena.release([entry["ticket"]], node.session.id)

    run(test, nowhere)


@pytest.mark.parametrize("after", range(20))
def test_a_release_in_any_turn_leaves_neither_wait_nor_pin(after: int) -> None:
    """Found or not: what is found comes nevertheless, and without an event."""

    async def test(node: Prefetching) -> None:
        node.prefetch("there", "absent", wait_seconds=LONG_SECONDS)
        for _ in range(after):
            await asyncio.sleep(0)
        sent = node.entries()
        end(node, 0, 1)
        await turns()
        assert node.entries() == []
        assert waiting(node) == 0
        assert node.arena.holds((NAMESPACE, "there"))
        assert node.arena.gauges().pins == len(sent)
        node.arena.release([entry["ticket"] for entry in sent], node.session.id)

    run(test, lambda address: at(address) if address[1] == "there" else nowhere(address))


def test_a_failure_of_the_node_itself_answers_all_handles() -> None:
    class Fails:
        async def find(self, session: Session, addresses: Iterable[QualifiedKey]) -> None:
            raise AssertionError("a bug")

    async def test(node: Prefetching) -> None:
        lanes: Any = Fails()
        node.prefetches.lanes = lanes
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, one: failures.append(one))
        node.prefetch("a", "b", "a", wait_seconds=LONG_SECONDS)
        await turns()
        assert [entry["reason"] for entry in node.entries()] == ["store_down"] * 3
        assert waiting(node) == 0

    run(test, nowhere)


def test_who_ends_what_is_over_or_what_never_was_ends_nothing() -> None:
    async def test(node: Prefetching) -> None:
        node.insert((NAMESPACE, "here"))
        node.prefetch("here", "absent", wait_seconds=LONG_SECONDS)
        (entry,) = node.entries()
        end(node, 0, 0, 2, 1 << 40)
        end(node, 1, prefetch=3)
        await turns()
        assert waiting(node) == 2
        assert node.arena.gauges().pins == 1, "he releases it himself"
        node.arena.release([entry["ticket"]], node.session.id)

    run(test, nowhere)


def test_what_a_lane_receives_for_a_released_handle_is_dropped() -> None:
    dropped: list[int] = []

    class Receives:
        """All is received by a lane, a few turns later."""

        async def find(
            self, session: Session, addresses: Iterable[QualifiedKey]
        ) -> dict[QualifiedKey, Located]:
            return {address: at(address) for address in addresses}

        async def receive(self, session: Session, address: QualifiedKey, _: Located) -> Any:
            await turns()
            return {"state": "resident", "ticket": int(address[1])}

        def release(self, tickets: list[int], session: Session) -> None:
            dropped.extend(tickets)

    async def test(node: Prefetching) -> None:
        lanes: Any = Receives()
        node.prefetches.lanes = lanes
        node.prefetch("1", "2", wait_seconds=LONG_SECONDS)
        await asyncio.sleep(0)
        end(node, 0)
        await turns()
        await turns()
        assert dropped == [1]
        assert [entry["ticket"] for entry in node.entries()] == [2]

    run(test, at)


# -- the client


class Node:
    """The session of a client, as far as prefetches use it."""

    namespace, boot = NAMESPACE, "boot"

    def __init__(self) -> None:
        node: Any = self
        pool: Any = None
        self.is_lost = False
        self.posted: list[Request] = []
        self.prefetches = PendingPrefetches(node, Loads(node, pool))

    def post(self, request: Request) -> None:
        if self.is_lost:
            raise NodeUnavailable("it is lost")
        self.posted.append(request)

    def start(self, *keys: str) -> tuple[int, list[PrefetchHandle]]:
        """The id of the request, and its handles."""
        handles = self.prefetches.start([TensorKey(key) for key in keys], 0.0)
        request = self.posted.pop()
        assert isinstance(request, Prefetch)
        return request.id, handles

    def settle(self, request_id: int, *indexes: int) -> None:
        """A pin for each of these; its ticket is the index."""
        entry = {
            "state": "resident", "boot": "boot", "offset": 0, "generation": 1,
            "header": TensorHeader("uint8", (1,), 1).to_fields(),
        }  # fmt: skip
        entries = [[index, entry | {"ticket": index}] for index in indexes]
        self.prefetches.on_event({"event": "settled", "id": request_id, "entries": entries})

    def release(self, *handles: PrefetchHandle) -> None:
        """As `LookupBuffer.release`."""
        self.prefetches._loads.release(*self.prefetches.end(handles))

    def told(self) -> list[tuple[type[Request], Any]]:
        """What was posted since the last call."""
        posted, self.posted = self.posted, []
        told: list[tuple[type[Request], Any]] = []
        for request in posted:
            if isinstance(request, EndPrefetch):
                told.append((EndPrefetch, (request.prefetch, request.indexes)))
            else:
                assert isinstance(request, Release)
                told.append((Release, request.tickets))
        return told


def test_the_node_is_told_once_of_what_is_released_before_it_settles() -> None:
    node = Node()
    one, (a, b, c) = node.start("a", "b", "c")
    two, (d,) = node.start("d")
    node.settle(one, 1)
    node.release(a, b, d)
    assert node.told() == [(EndPrefetch, (one, [0])), (EndPrefetch, (two, [0])), (Release, [1])]
    node.release(a, b, d)
    assert node.told() == []
    node.settle(one, 2)
    assert (a.state, c.state) == (PrefetchState.PENDING, PrefetchState.RESIDENT)
    node.release(a, b, c, d)
    assert node.told() == [(Release, [2])]


def test_a_pin_that_was_sent_before_the_node_was_told_is_released_once() -> None:
    node = Node()
    one, (a, b) = node.start("a", "b")
    node.release(a, b)
    assert node.told() == [(EndPrefetch, (one, [0, 1]))]
    node.settle(one, 0, 1)
    assert node.told() == [(Release, [0]), (Release, [1])]
    node.release(a, b)
    assert node.told() == []


def test_the_end_of_the_session_fails_only_what_is_not_released() -> None:
    node = Node()
    _, (a, b) = node.start("a", "b")
    node.is_lost = True
    node.release(a)
    node.prefetches.on_lost()
    node.release(b)
    assert (a.state, b.state) == (PrefetchState.PENDING, PrefetchState.FAILED)
    assert not [*node.prefetches._pending]
    assert node.told() == []
