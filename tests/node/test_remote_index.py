"""The remote index: the table itself, and what clients read from it during changes.

A stopped node does not answer: what a client still reads meanwhile came from the table.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from lookup_buffer.key import QualifiedKey, TensorKey
from lookup_buffer.shm.index import (
    BUCKET_ENTRIES,
    CURRENT_SECONDS,
    ENTRIES,
    IS_ORDERED,
    RemoteIndex,
    RemoteIndexReader,
    digest_of,
)
from nodes import MIB, NodeProcess, StartNode, key, wait_until
from patience import scaled
from servers import StartServer, flush

pytestmark = pytest.mark.skipif(not IS_ORDERED, reason="the table stays empty on this machine")
NAMESPACE = "0123456789abcdef" * 4
BUCKETS = ENTRIES // BUCKET_ENTRIES
CROWD_COUNT = BUCKET_ENTRIES + 2
SECOND = 1_000_000_000


@cache
def crowd() -> list[QualifiedKey]:
    """Addresses that all belong to one bucket; made when a test needs them, not at each import."""
    found: list[QualifiedKey] = []
    number = 0
    while len(found) < CROWD_COUNT:
        address = (NAMESPACE, f"key{number}")
        if int.from_bytes(digest_of(*address)[:8], "little") % BUCKETS == 7:
            found.append(address)
        number += 1
    return found


CHANGES = st.lists(
    st.one_of(
        st.none(), st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, CROWD_COUNT - 1))
    ),
    max_size=40,
)


@given(CHANGES)
@settings(max_examples=examples(60))
def test_it_lists_the_newest_keys_that_were_not_removed(
    changes: list[tuple[str, int] | None],
) -> None:
    table = RemoteIndex()
    reader = RemoteIndexReader(table.fd)
    listed: dict[QualifiedKey, None] = {}
    for change in changes:
        if change is None:
            table.clear()
            listed.clear()
        elif change[0] == "remove":
            table.remove(crowd()[change[1]])
            listed.pop(crowd()[change[1]], None)
        else:
            table.add(crowd()[change[1]])
            listed.pop(crowd()[change[1]], None)
            listed[crowd()[change[1]]] = None
            for oldest in list(listed)[:-BUCKET_ENTRIES]:
                del listed[oldest]
        seen = [address for address in crowd() if reader.contains(digest_of(*address))]
        assert set(seen) == set(listed)
    reader.close()
    table.close()


def test_keys_removed_all_at_once_can_be_listed_again() -> None:
    table = RemoteIndex()
    reader = RemoteIndexReader(table.fd)
    first, second = crowd()[:2]
    table.add(first)
    table.add(second)
    table.clear()
    assert not reader.contains(digest_of(*first))
    table.add(first)
    assert reader.contains(digest_of(*first))
    assert not reader.contains(digest_of(*second))
    reader.close()
    table.close()


def test_it_is_valid_for_a_second_after_a_confirmation() -> None:
    now = [0]
    table = RemoteIndex()
    reader = RemoteIndexReader(table.fd, lambda: now[0])
    now[0] = time.monotonic_ns()
    assert not reader.is_current(), "never confirmed"
    table.mark_current()
    now[0] = time.monotonic_ns()
    assert reader.is_current()
    now[0] += int(CURRENT_SECONDS * SECOND)
    assert not reader.is_current()
    now[0] -= 2 * int(CURRENT_SECONDS * SECOND)
    assert not reader.is_current(), "confirmed in the future: not the same clock"
    reader.close()
    table.close()


class Pair:
    """A node that holds items, and a node whose client looks them up; both in one namespace."""

    def __init__(self, start_node: StartNode, **settings: object) -> None:
        self.holder: NodeProcess = start_node(**settings)
        self.asked: NodeProcess = start_node(**settings)
        self.there, self.here = self.holder.client(), self.asked.client()

    def close(self) -> None:
        self.there.close()
        self.here.close()

    def hold(self, *names: TensorKey, nbytes: int = 3) -> None:
        """The first node holds them, and the second one's client has it from the table."""
        for name in names:
            self.there.insert(name, torch.zeros(nbytes, dtype=torch.uint8))
        wait_until(lambda: self.by_table(names), 10.0, "the table lists them")

    def by_table(self, names: tuple[TensorKey, ...]) -> bool:
        """Whether all are found without a request to the node."""
        asked = self.here.has_caches(list(names))  # makes the node read unknown keys
        return all(asked) and self.listed(names)

    def listed(self, names: tuple[TensorKey, ...]) -> bool:
        return all(self.here._local_reads.listed(list(names), remote=True))

    def sees(self, name: TensorKey) -> bool:
        return self.here.has_caches([name]) == [True]


@pytest.fixture
def start_pair(start_node: StartNode) -> Iterator[Callable[..., Pair]]:
    """start_pair(capacity_bytes=...): two nodes and their clients, closed with the test."""
    pairs: list[Pair] = []

    def start(**settings: object) -> Pair:
        pairs.append(Pair(start_node, **settings))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(start_pair: Callable[..., Pair]) -> Pair:
    return start_pair()


def test_the_index_of_a_stopped_node_is_soon_ignored(pair: Pair) -> None:
    names = tuple(key() for _ in range(32))
    pair.hold(*names)
    with pair.asked.frozen():
        assert pair.here.has_caches(list(names)) == [True] * 32, "only the table can have answered"
        assert pair.here.has_caches(list(names), timeout=0.0) == [False] * 32, "not on this host"
        wait_until(lambda: not pair.listed(names), CURRENT_SECONDS + 0.5)
        assert pair.here.has_caches(list(names)) == [False] * 32, "in doubt, no"
    wait_until(lambda: pair.by_table(names), 5.0)


def test_an_item_evicted_on_its_node_is_no_longer_listed(start_pair: Callable[..., Pair]) -> None:
    pair = start_pair(capacity_bytes=2 * MIB)
    name = key()
    pair.hold(name, nbytes=MIB // 8)
    for _ in range(30):
        pair.there.insert(key(), torch.zeros(MIB // 8, dtype=torch.uint8))
    assert pair.there.stats()["evicted"] > 0
    wait_until(lambda: not pair.sees(name), 2.0)


def test_items_of_a_dead_node_are_no_longer_listed(pair: Pair) -> None:
    name = key()
    pair.hold(name)
    pair.holder.kill()
    wait_until(lambda: not pair.sees(name), 6.0, "it is noticed")
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        assert not pair.sees(name)
    pair.holder.start()
    pair.there.close()
    pair.there = pair.holder.client()
    assert not pair.sees(name), "what came back holds nothing"
    pair.hold(name)


def test_items_of_a_node_that_leaves_are_no_longer_listed(pair: Pair) -> None:
    name = key()
    pair.hold(name)
    pair.there.close()
    pair.holder.terminate()
    wait_until(lambda: not pair.sees(name), 3.0)
    pair.holder.start()


def test_after_the_store_lost_its_data_nothing_is_listed(
    start_server: StartServer, start_pair: Callable[..., Pair]
) -> None:
    server = start_server()
    pair = start_pair(store_url=server.url)
    names = tuple(key() for _ in range(4))
    pair.hold(*names)
    pair.holder.kill()  # no node will publish them again
    flush(server.url)
    wait_until(lambda: not pair.listed(names), 1.0)


def test_a_lost_connection_to_the_store_empties_the_index(
    start_server: StartServer, start_pair: Callable[..., Pair]
) -> None:
    server = start_server()
    pair = start_pair(store_url=server.url)
    names = tuple(key() for _ in range(4))
    pair.hold(*names)
    server.close()
    wait_until(lambda: not pair.listed(names), 3.0)
    assert pair.here.has_caches(list(names)) == [False] * 4


def test_without_a_mirror_nothing_is_listed(start_pair: Callable[..., Pair]) -> None:
    pair = start_pair(mirror=False)
    name = key()
    pair.there.insert(name, torch.ones(3))
    wait_until(lambda: pair.sees(name), 5.0)
    for _ in range(20):
        assert pair.here.has_caches([name], timeout=scaled(5.0)) == [True], "each asks the store"
        assert not pair.listed((name,))
        time.sleep(0.05)
